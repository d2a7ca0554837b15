"""The verbs of a strategy that mean something else while replicas train for themselves between two averages.

Like `UnevenStrategy` below it, a class between Lightning's `DDPStrategy` and ours; without an averager each verb passes
straight through.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.averaging.averager import ModelAverager
from lightning_ddp_hooks.averaging.driver import STATE_KEY, Averaging
from lightning_ddp_hooks.checkpoint import require_trainer_checkpoint
from lightning_ddp_hooks.hooks.contract import CommHook
from lightning_ddp_hooks.reducer.reducer import Reducer
from lightning_ddp_hooks.strategy.uneven import UnevenStrategy


class AveragingStrategy(UnevenStrategy):
    """A `DDPStrategy` that can average the model every few steps."""

    _hook: CommHook | None = None
    _reducer: Reducer | None = None
    _failed: bool = False
    _broken: bool = False
    _averager: ModelAverager | None = None
    _averaging: Averaging | None = None
    _averaging_settings: Mapping[str, Any]
    _restored_averaging: dict[str, Any] | None = None
    _final_averaging: dict[str, Any] | None = None

    def use_averager(
        self, averager: ModelAverager, *, average_before_eval: bool = True, save_replicas: bool = True
    ) -> None:
        """Average the model; as if given to the constructor. Before the strategy is set up.

        Raises:
            TypeError: not an averager.
            ValueError: there is an averager already, or it does not go with another setting.
        """
        if not isinstance(averager, ModelAverager):
            raise TypeError(f"Expected a ModelAverager for `averager`, got {type(averager).__name__}.")
        if self._averager is not None:
            raise ValueError("Set `averager` of the strategy or the callback ModelAveraging, not both.")
        self._averager = averager
        self._averaging_settings = {"before_eval": average_before_eval, "save_replicas": save_replicas}

    @property
    def _may_communicate(self) -> bool:
        """Whether all ranks are where this one is; not while an exception is handled, nor in one that only launches."""
        if self._failed or not comm.is_initialized():
            return False
        module = self.lightning_module
        return module is None or not module.trainer.interrupted

    @property
    def _trains_alone(self) -> bool:
        """Whether gradients are not exchanged in this step: the averager has taken over."""
        return self._averaging is not None and not self._averaging.syncs_gradients()

    def _start_averaging(self, module: nn.Module) -> None:
        """Begin a fit; once the reducer is there."""
        self._final_averaging = None
        if self._averager is not None:
            self._averaging = Averaging(
                self._averager, module, lambda: self.optimizers, hook=self._hook, **self._averaging_settings
            )
            self._prepare_step()

    def _follow_hook(self, hook: CommHook) -> None:
        """Take account of a hook; one that was declared is known to the averager from the start."""
        if self._averaging is not None:
            self._averaging.follow(hook)
            self._prepare_step()

    def _prepare_step(self) -> None:
        """Have the coming step exchange gradients and buffers or not, as the averager's schedule says."""
        if self._averaging is not None:
            assert self._reducer is not None
            self._reducer.sync = self._averaging.syncs_gradients()
            self._reducer.buffers.each_keeps_its_own = not self._averaging.broadcasts_buffers()
            self._reducer.skip_step = False  # nobody says so while gradients are not exchanged

    def _average_after_step(self) -> None:
        if self._averaging is not None:
            if self._trains_alone:
                assert self._reducer is not None
                self._reducer.forget_use()
            self._averaging.after_step()
            self._prepare_step()

    @override
    def on_validation_start(self) -> None:
        if self._averaging is not None:
            self._averaging.before_eval()

    @override
    def on_validation_end(self) -> None:
        if self._averaging is not None:
            self._averaging.after_eval()

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        # For a checkpoint that is saved once the fit is over, when there are no groups any more.
        if self._averaging is not None:
            self._averaging.finish()
            self._final_averaging = self._averaging.state_dict(with_replicas=False)

    def _stop_averaging(self) -> None:
        """End a fit; before the reducer goes."""
        if self._averaging is not None and not self._broken:
            self._averaging.close(failed=self._failed)
        self._averaging = self._restored_averaging = None

    # ------------------------------------------------------------------ checkpoints

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        state = super().lightning_module_state_dict()
        if self._averaging is None or not self._may_communicate:
            return state
        return self._averaging.model_state(state)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._averaging is None or not self._may_communicate:
            return super().optimizer_state(optimizer)
        return self._averaging.optimizer_state(getattr(optimizer, "_optimizer", optimizer))

    def _add_averaging_state(self, checkpoint: dict[str, Any]) -> list[str]:
        """Put the averager's state into a checkpoint; return what could not be, after an error."""
        if self._averaging is not None and not self._may_communicate:
            return ["the averaged model and the averager's state"]
        state = self._final_averaging if self._averaging is None else self._averaging.state_dict()
        if state is not None:
            checkpoint[STATE_KEY] = state
        return []

    @override
    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        require_trainer_checkpoint(checkpoint, str(checkpoint_path))
        self._restored_averaging = checkpoint.get(STATE_KEY)
        return checkpoint

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if self._averaging is not None and self._restored_averaging is not None:
            self._averaging.load_state_dict(self._restored_averaging)
            self._prepare_step()
        self._restored_averaging = None
