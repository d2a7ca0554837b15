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

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.averaging.averager import ModelAverager
from lightning_ddp_hooks.optim.driver import OptimizerDriver
from lightning_ddp_hooks.optim.in_hook import OptimizerInHook
from lightning_ddp_hooks.reducer.reducer import Reducer
from lightning_ddp_hooks.strategy.averaging import AveragingStrategy

if TYPE_CHECKING:
    import lightning.pytorch as pl

_TWO_PHASES = "use `OptimizerInHook(shard=True, overlap=False)`, which steps when all gradients are there, or leave "
_TWO_PHASES += "`optimizer_in_hook` out."


class OptimizerStrategy(AveragingStrategy):
    """A `DDPStrategy` that can step the optimizer in the hook, and share its state among the ranks."""

    _optimizer_in_hook: OptimizerInHook | None = None
    _optimizers_driver: OptimizerDriver | None = None

    def _use_optimizer_in_hook(self, settings: OptimizerInHook, skip_missing_loss: str) -> None:
        if not isinstance(settings, OptimizerInHook):
            raise TypeError(f"Expected an OptimizerInHook for `optimizer_in_hook`, got {type(settings).__name__}.")
        if settings.overlap and skip_missing_loss == "all":
            raise ValueError(
                '`skip_missing_loss="all"` decides after the backward whether there is a step, but `optimizer_in_hook` '
                f"makes it while gradients come: {_TWO_PHASES}"
            )
        self._optimizer_in_hook = settings
        self._refuse_averager(self._averager)

    def _refuse_averager(self, averager: ModelAverager | None) -> None:
        if averager is not None and self._optimizer_in_hook is not None:
            raise ValueError(
                "`averager` lets each rank train for itself with an optimizer of its own, which `optimizer_in_hook` "
                "steps for all ranks: set one of them."
            )

    @override
    def use_averager(
        self, averager: ModelAverager, *, average_before_eval: bool = True, save_replicas: bool = True
    ) -> None:
        self._refuse_averager(averager)
        super().use_averager(averager, average_before_eval=average_before_eval, save_replicas=save_replicas)

    # ------------------------------------------------------------------ a fit

    def _check_optimizer_in_hook(self, module: LightningModule) -> None:
        """Raise for what cannot be combined; before anything is set up."""
        if self._optimizer_in_hook is not None and self._optimizer_in_hook.overlap:
            refuse_what_comes_too_late(module, module.trainer, self.precision_plugin)

    def _start_optimizers(self, reducer: Reducer) -> None:
        """Begin a fit, once the reducer is there; the optimizers follow in `setup_optimizers`."""
        self._optimizers_driver = None
        if self._optimizer_in_hook is not None:
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
            self._optimizers_driver.close(failed=self._failed)

    def _stepping(self) -> AbstractContextManager[None]:
        return nullcontext() if self._optimizers_driver is None else self._optimizers_driver.stepping()

    def _overlapping(self) -> AbstractContextManager[None]:
        return nullcontext() if self._optimizers_driver is None else self._optimizers_driver.overlapping()

    def _take_back_step(self) -> None:
        if self._optimizers_driver is not None:
            self._optimizers_driver.take_back()

    # ------------------------------------------------------------------ checkpoints

    @property
    def _optimizers_sharded(self) -> bool:
        return self._optimizers_driver is not None and self._optimizers_driver.settings.shard

    def _missing_optimizer_state(self) -> list[str]:
        """Say what a checkpoint that is saved now lacks."""
        lacks = self._optimizers_sharded and not (self._may_communicate and comm.is_initialized())
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
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            self._optimizers_driver.load_state_dict(optimizer, state)


def refuse_what_comes_too_late(module: LightningModule, trainer: pl.Trainer, precision: Any) -> None:
    """Make sure that nothing wants to see or change gradients between the backward and the step, which is no more.

    Raises:
        ValueError: something does; names it and the mode to use.
    """
    if not module.automatic_optimization:
        raise ValueError(
            "In manual optimisation the steps are yours to make, but `optimizer_in_hook` makes them while gradients "
            f"come: {_TWO_PHASES}"
        )
    if trainer.gradient_clip_val:
        raise ValueError(
            f"`gradient_clip_val={trainer.gradient_clip_val}` needs all gradients before the step, but "
            f"`optimizer_in_hook` steps while they come: {_TWO_PHASES}"
        )
    if getattr(precision, "scaler", None) is not None:
        raise ValueError(
            "A GradScaler (`precision='16-mixed'`) needs all gradients before it decides on the step, but "
            f"`optimizer_in_hook` steps while they come: {_TWO_PHASES}"
        )
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for name in ("configure_gradient_clipping", "optimizer_step", "on_before_optimizer_step"):
        owners: list[object] = [module] if is_overridden(name, module, LightningModule) else []
        if name == "on_before_optimizer_step":
            owners += [callback for callback in callbacks if is_overridden(name, callback, Callback)]
        if owners:
            raise ValueError(
                f"{type(owners[0]).__name__} overrides `{name}`, which is called after the backward, but "
                f"`optimizer_in_hook` steps while gradients come: {_TWO_PHASES}"
            )
    if is_overridden("backward", module, LightningModule):
        rank_zero_warn(
            f"{type(module).__name__} overrides `backward`, but `optimizer_in_hook` steps within the backward pass, so "
            f"that what the override does to gradients after it comes too late. If it does so, {_TWO_PHASES}"
        )
    late: list[object] = [module] if is_overridden("on_after_backward", module, LightningModule) else []
    late += [callback for callback in callbacks if is_overridden("on_after_backward", callback, Callback)]
    if late:
        rank_zero_warn(
            f"{type(late[0]).__name__} overrides `on_after_backward`, which is called when `optimizer_in_hook` has "
            "stepped already: it may look at gradients, but what it does to them comes too late."
        )
