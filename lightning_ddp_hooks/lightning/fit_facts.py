"""What Trainer and module say of a fit: for the rules of what goes together, and for what ranks must have alike."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, callbacks
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden

if TYPE_CHECKING:
    import lightning.pytorch as pl

_WEIGHT_AVERAGING: tuple[type[Callback], ...] = (
    callbacks.StochasticWeightAveraging,
    getattr(callbacks, "WeightAveraging", callbacks.StochasticWeightAveraging),  # not in older versions
)


def facts_of_fit(module: LightningModule) -> dict[str, Any]:
    """Return what Trainer and module add to the settings; see `FitSettings`."""
    trainer = module.trainer
    return {
        "manual": not module.automatic_optimization,
        "gradient_clip_val": trainer.gradient_clip_val,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "scaler": getattr(trainer.precision_plugin, "scaler", None) is not None,
        "late": _between_backward_and_step(module),
        "weight_averaging": next(iter(weight_averaging_callbacks(trainer)), None),
    }


def weight_averaging_callbacks(trainer: pl.Trainer) -> list[str]:
    """Name Lightning's callbacks that average weights over the steps of one process."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [type(callback).__name__ for callback in callbacks if isinstance(callback, _WEIGHT_AVERAGING)]


def steps_of_fit(module: LightningModule) -> float:
    """Return how many training steps a fit has; infinity where that is not known, as of a stream."""
    if not module.automatic_optimization:  # a step of the Trainer is not one of ours
        return math.inf
    steps = float(module.trainer.estimated_stepping_batches)
    return steps if steps >= 0 else math.inf


def to_agree_on_in_fit(trainer: pl.Trainer) -> dict[str, object]:
    """Return what of the Trainer must be the same on all ranks, by name."""
    own = f"{__name__.partition('.')[0]}."
    classes = [type(callback).__mro__ for callback in trainer.callbacks]  # type: ignore[attr-defined]
    ours = [[base.__name__ for base in bases if base.__module__.startswith(own)][:1] for bases in classes]
    return {
        # Those of this package communicate.
        "callbacks of lightning_ddp_hooks": ", ".join(sorted(name for names in ours for name in names)) or None,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "gradient_clip_val": trainer.gradient_clip_val,
        "gradient_clip_algorithm": None if trainer.gradient_clip_val is None else trainer.gradient_clip_algorithm,
        "precision": trainer.precision_plugin.precision,
        "max_steps": trainer.max_steps,
        "max_epochs": trainer.max_epochs,
    }


def _overriders(name: str, module: LightningModule, *, callbacks: bool) -> list[object]:
    """Return the module, and the callbacks, that override a method."""
    found: list[object] = [module] if is_overridden(name, module, LightningModule) else []
    others: list[Callback] = module.trainer.callbacks if callbacks else []  # type: ignore[attr-defined]
    return found + [callback for callback in others if is_overridden(name, callback, Callback)]


def _between_backward_and_step(module: LightningModule) -> str | None:
    """Say what wants to see or change gradients between the backward and the step; None if nothing does."""
    for name in ("configure_gradient_clipping", "optimizer_step", "on_before_optimizer_step"):
        if found := _overriders(name, module, callbacks=name == "on_before_optimizer_step"):
            return f"{type(found[0]).__name__} overrides `{name}`"
    return None


def warn_if_too_late(module: LightningModule) -> None:
    """Warn of code that may, but need not, want to change gradients when the step has been made already."""
    if _overriders("backward", module, callbacks=False):
        rank_zero_warn(
            f"{type(module).__name__} overrides `backward`, but `optimizer_in_hook` steps within the backward pass, so "
            "that what the override does to gradients after it comes too late. If it does so, use "
            "`OptimizerInHook(shard=True, overlap=False)`, or leave `optimizer_in_hook` out."
        )
    if late := _overriders("on_after_backward", module, callbacks=True):
        rank_zero_warn(
            f"{type(late[0]).__name__} overrides `on_after_backward`, which is called when `optimizer_in_hook` has "
            "stepped already: it may look at gradients (with `shard=True` they are the mean only of what this rank "
            "owns), but what it does to them comes too late."
        )
