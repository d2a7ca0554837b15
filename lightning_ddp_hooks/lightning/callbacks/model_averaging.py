"""Model averaging by a callback: for runs that use our strategy, and for those that keep ``strategy="ddp"``."""

from __future__ import annotations

from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_ddp_hooks import _compat, comm
from lightning_ddp_hooks.averaging.driver import STATE_KEY, Averaging
from lightning_ddp_hooks.averaging.loss_scale import SharedScale, scaler_text
from lightning_ddp_hooks.averaging.names import AveragerLike, resolve_averager
from lightning_ddp_hooks.config import Settings
from lightning_ddp_hooks.conflicts import raise_on_conflict
from lightning_ddp_hooks.lightning.fit_facts import facts_of_fit
from lightning_ddp_hooks.lightning.strategy import DDPHooksStrategy
from lightning_ddp_hooks.reducer.module_sync import check_same_on_all_ranks


class ModelAveraging(Callback):
    """Averages the model in a run that uses `DDPHooksStrategy` or Lightning's plain ``"ddp"``.

    With our strategy it is the same as ``DDPHooksStrategy(averager=...)``. With plain ``ddp`` the callback also stops
    the exchange of gradients after the averager's warm-up, puts the averaged model in place for validation and into
    checkpoints, and keeps the scale of a GradScaler the same on all ranks.

    Limits on plain ``ddp``, which our strategy does not have: automatic optimization only; a checkpoint with
    ``save_weights_only=True`` does not pass the callback and holds the model of rank 0.

    Args:
        averager: what averages, and when: a `ModelAverager`, or its short name.
        average_before_eval: put the averaged model in place for validation.
        save_replicas: save each rank's own model and optimizer state in checkpoints, to resume exactly in mid-period;
            ``"auto"`` does where that takes at most about 2 GiB for all ranks, which rank 0 gathers and writes.

    Raises:
        TypeError: ``averager`` is not a `ModelAverager`, or another argument not True or False.
        ValueError: at setup: another strategy, manual optimization on plain ``ddp``, or an averager set elsewhere too.

    Example:
        >>> Trainer(strategy="ddp", callbacks=[ModelAveraging(PeriodicModelAverager(period=8, warmup_steps=500))])
    """

    def __init__(
        self,
        averager: AveragerLike,
        *,
        average_before_eval: bool = True,
        save_replicas: bool | Literal["auto"] = "auto",
    ) -> None:
        if (resolved := resolve_averager(averager)) is None:
            raise TypeError("Expected a ModelAverager or its short name for `averager`, got None.")
        self._flags: dict[str, Any] = {"average_before_eval": average_before_eval, "save_replicas": save_replicas}
        Settings(average_before_eval=average_before_eval, save_replicas=save_replicas).check()
        self.averager = resolved
        self._averaging: Averaging | None = None
        self._scale: SharedScale | None = None
        self._final: dict[str, Any] | None = None
        self._loaded: dict[str, Any] | None = None
        self._loaded_step = 0
        self._steps_seen = 0
        self._handed_to: object | None = None
        self._failed = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._averaging, self._final, self._failed = None, None, False
        if sum(isinstance(callback, ModelAveraging) for callback in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise ValueError("Expected one ModelAveraging callback, got several.")
        strategy = trainer.strategy
        if isinstance(strategy, DDPHooksStrategy):
            if self._handed_to is not strategy:  # it keeps the averager for further fits
                strategy.use_averager(self.averager, **self._flags)
                self._handed_to = strategy
            return
        if type(strategy) is not DDPStrategy:
            raise ValueError(
                f"ModelAveraging needs strategy='ddp_hooks' or strategy='ddp', got {type(strategy).__name__}."
            )
        if not pl_module.automatic_optimization:
            raise ValueError(
                "With manual optimization ModelAveraging cannot see where a step of plain 'ddp' ends: use "
                "strategy='ddp_hooks'."
            )
        raise_on_conflict(Settings(averager=self.averager).in_fit(**facts_of_fit(pl_module)))
        if _compat.averages_by_itself(strategy):
            raise ValueError("Set `model_averaging_period` of the strategy or the callback ModelAveraging, not both.")
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.save_weights_only:
                rank_zero_warn(
                    "With plain 'ddp' a checkpoint with `save_weights_only=True` holds the model of rank 0 and not the "
                    "averaged one: use strategy='ddp_hooks', or save whole checkpoints."
                )

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if type(trainer.strategy) is DDPStrategy:
            # torch's DDP has made the replicas equal by now.
            self._averaging = Averaging(
                self.averager,
                pl_module,
                lambda: trainer.strategy.optimizers,
                before_eval=self._flags["average_before_eval"],
                save_replicas=self._flags["save_replicas"],
            )
            self._share_scale(getattr(trainer.precision_plugin, "scaler", None), self._averaging)

    def _share_scale(self, scaler: Any, averaging: Averaging) -> None:
        check_same_on_all_ranks([], {"precision's scaler": scaler_text(scaler)}, averaging.control_group)
        if scaler is not None:
            self._scale = SharedScale(scaler, averaging.bound.context.group)
            self._scale.watch(lambda: not averaging.syncs_gradients())

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # Optimizers and groups do not exist yet.
        self._loaded = checkpoint.get(STATE_KEY)
        self._loaded_step = int(checkpoint.get("global_step", 0))

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._averaging is not None:
            self._averaging.bound.step = self._loaded_step
            if self._loaded is not None:
                self._averaging.load_state_dict(self._loaded)
            self._steps_seen = trainer.global_step
        self._loaded, self._loaded_step = None, 0

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._averaging is not None:
            model = trainer.strategy.model
            assert isinstance(model, DistributedDataParallel)
            model.require_backward_grad_sync = self._averaging.syncs_gradients()
            if not self._averaging.broadcasts_buffers():
                model.require_forward_param_sync = False

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # The global step counts each window of accumulation once, also if a GradScaler skipped its step.
        if self._averaging is not None and trainer.global_step > self._steps_seen:
            self._steps_seen = trainer.global_step
            self._averaging.after_step()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._averaging is not None and trainer.state.fn == "fit":
            self._averaging.before_eval()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._averaging is not None and trainer.state.fn == "fit":
            self._averaging.after_eval()

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if type(trainer.strategy) is not DDPStrategy:
            return
        if self._failed:  # ranks may be anywhere: no collective is possible
            checkpoint[STATE_KEY] = None
            rank_zero_warn("The checkpoint holds the model of rank 0 and no averager state: the run has failed.")
        elif self._averaging is not None:
            checkpoint["state_dict"] = self._averaging.model_state(checkpoint["state_dict"])
            checkpoint["optimizer_states"] = [self._averaging.optimizer_state(o) for o in trainer.strategy.optimizers]
            checkpoint[STATE_KEY] = self._averaging.state_dict()
        elif self._final is not None:
            checkpoint[STATE_KEY] = self._final

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._averaging is not None:
            self._averaging.finish()
            self._final = self._averaging.state_dict(with_replicas=False)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._failed = True
        # Nobody calls `teardown` now. After an error of the connection what groups wait for is not known.
        if isinstance(exception, Exception) and not comm.is_collective_error(exception):
            self._close(failed=True)
        self._averaging = self._scale = None

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    def _close(self, *, failed: bool = False) -> None:
        for part in (self._scale, self._averaging):
            if part is not None:
                part.close(failed=failed)
        self._averaging = self._scale = None
