"""The verbs of a strategy that mean something else while the optimizer is stepped in the hook, or shared among ranks.

Like its neighbours a class between Lightning's `DDPStrategy` and ours; without `OptimizerInHook` each verb passes
straight through.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ddp_hooks.optim.driver import OptimizerDriver
from lightning_ddp_hooks.optim.in_hook import OptimizerInHook
from lightning_ddp_hooks.reducer.reducer import Reducer
from lightning_ddp_hooks.strategy.averaging import AveragingStrategy

if TYPE_CHECKING:
    import lightning.pytorch as pl


class OptimizerStrategy(AveragingStrategy):
    """A `DDPStrategy` that can step the optimizer in the hook, and share its state among the ranks."""

    _optimizer_in_hook: OptimizerInHook | None = None
    _optimizers_driver: OptimizerDriver | None = None

    def _use_optimizer_in_hook(self, settings: OptimizerInHook) -> None:
        if not isinstance(settings, OptimizerInHook):
            raise TypeError(f"Expected an OptimizerInHook for `optimizer_in_hook`, got {type(settings).__name__}.")
        self._optimizer_in_hook = settings

    # ------------------------------------------------------------------ a fit

    def _start_optimizers(self, reducer: Reducer, module: LightningModule) -> None:
        """Begin a fit, once the reducer is there; the optimizers follow in `setup_optimizers`."""
        self._optimizers_driver = None
        if self._optimizer_in_hook is not None:
            if self._optimizer_in_hook.overlap:
                warn_of_what_comes_too_late(module)
            self._optimizers_driver = OptimizerDriver(self._optimizer_in_hook, reducer)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        if self._optimizers_driver is not None and trainer.state.fn == TrainerFn.FITTING:
            self._optimizers_driver.attach(self.optimizers)

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of this fit."""
        return super().optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        DDPStrategy.optimizers.fset(self, optimizers)  # type: ignore[attr-defined]
        if self._optimizers_driver is not None and self._optimizers_driver.attached:  # others take over in mid-fit
            self._optimizers_driver.attach(optimizers)

    def _stop_optimizers(self) -> None:
        """End a fit; before the reducer goes. A checkpoint can be saved even after that."""
        if self._optimizers_driver is not None:
            self._optimizers_driver.close()

    def _stepping(self) -> AbstractContextManager[None]:
        return nullcontext() if self._optimizers_driver is None else self._optimizers_driver.stepping()

    def _overlapping(self) -> AbstractContextManager[None]:
        return nullcontext() if self._optimizers_driver is None else self._optimizers_driver.overlapping()

    def _roll_back_step(self) -> None:
        if self._optimizers_driver is not None:
            self._optimizers_driver.rollback()

    # ------------------------------------------------------------------ checkpoints

    @property
    def _optimizers_sharded(self) -> bool:
        return self._optimizers_driver is not None and self._optimizers_driver.settings.shard

    def _missing_optimizer_state(self) -> list[str]:
        """Say what a checkpoint that is saved now lacks."""
        lacks = self._optimizers_sharded and not self._may_communicate
        return ["the other ranks' parts of the optimizer state"] if lacks else []

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if not self._optimizers_sharded or self._missing_optimizer_state():
            return super().optimizer_state(optimizer)
        assert self._optimizers_driver is not None
        return self._optimizers_driver.state_dict(getattr(optimizer, "_optimizer", optimizer))

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if not self._optimizers_sharded:
            super().load_optimizer_state_dict(checkpoint)
            return
        assert self._optimizers_driver is not None
        states = checkpoint["optimizer_states"]
        try:
            for optimizer, state in zip(self.optimizers, states, strict=False):
                self._optimizers_driver.load_state_dict(optimizer, state)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(
                f"The checkpoint's entry 'optimizer_states' is damaged: {type(error).__name__}: {error}."
            ) from error


def between_backward_and_step(module: LightningModule) -> str | None:
    """Say what wants to see or change gradients between the backward and the step; None if nothing does."""
    for name in ("configure_gradient_clipping", "optimizer_step", "on_before_optimizer_step"):
        owners: list[object] = [module] if is_overridden(name, module, LightningModule) else []
        if name == "on_before_optimizer_step":
            owners += [callback for callback in _callbacks(module) if is_overridden(name, callback, Callback)]
        if owners:
            return f"{type(owners[0]).__name__} overrides `{name}`"
    return None


def warn_of_what_comes_too_late(module: LightningModule) -> None:
    """Warn of code that may, but need not, want to change gradients when the step has been made already."""
    if is_overridden("backward", module, LightningModule):
        rank_zero_warn(
            f"{type(module).__name__} overrides `backward`, but `optimizer_in_hook` steps within the backward pass, so "
            "that what the override does to gradients after it comes too late. If it does so, use "
            "`OptimizerInHook(shard=True, overlap=False)`, or leave `optimizer_in_hook` out."
        )
    late: list[object] = [module] if is_overridden("on_after_backward", module, LightningModule) else []
    late += [callback for callback in _callbacks(module) if is_overridden("on_after_backward", callback, Callback)]
    if late:
        rank_zero_warn(
            f"{type(late[0]).__name__} overrides `on_after_backward`, which is called when `optimizer_in_hook` has "
            "stepped already: it may look at gradients, but what it does to them comes too late."
        )


def _callbacks(module: LightningModule) -> list[Callback]:
    callbacks: list[Callback] = module.trainer.callbacks  # type: ignore[attr-defined]
    return callbacks
