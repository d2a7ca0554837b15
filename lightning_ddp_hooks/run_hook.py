"""The hook of a training run: installed at set-up or later, with its state, and in the scale of the loss.

[Note: when the memory is rescaled] A hook may keep a part of earlier gradients. A GradScaler changes the scale of the
loss, if at all, at the end of a step, from what all ranks have found in their gradients alike. So the scale is the same
on all ranks, and each rescales before the same backward: the first one whose gradients come in the new scale. The host
begins to copy the scale behind the step, and looks at it when that backward begins. By then the whole forward is queued
behind the copy, so that even where the host has to wait for it, the device does not run out of work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lightning_ddp_hooks import _compat
from lightning_ddp_hooks.checkpoint import STATE_KEY
from lightning_ddp_hooks.hooks.contract import BoundHook, CommHook
from lightning_ddp_hooks.hooks.registry import install_hook
from lightning_ddp_hooks.hooks.state import require_sound
from lightning_ddp_hooks.optim.driver import OptimizerDriver
from lightning_ddp_hooks.reducer.reducer import Reducer
from lightning_ddp_hooks.reducer.stream import DeferredRead, start_read


class RunHook:
    """What reduces the gradients of a run; plain all-reduce until a hook is installed."""

    def __init__(
        self,
        reducer: Reducer,
        driver: OptimizerDriver | None,
        scaler: Any,
        restored: Mapping[str, Any] | None,
        step: Callable[[], int],
        warn: Callable[[str], object],
    ) -> None:
        self._reducer = reducer
        self._driver = driver
        self._scaler = scaler
        self._step = step
        self._warn = warn
        self._restored = restored
        self._coming_scale: DeferredRead | None = None
        self.declared: CommHook | None = None
        self.bound: BoundHook | None = None
        self.loss_scale = 1.0 if restored is None else float(restored.get("loss_scale", 1.0))

    def install(self, hook: CommHook) -> None:
        """Have a hook reduce the gradients, and go on with its state; collective."""
        self.declared = hook
        behind = hook if self._driver is None else self._driver.hook(hook) or hook
        self.bound = install_hook(self._reducer, behind, self._step)
        self._restore()

    def begin(self) -> None:
        """Take account of the hook that there is by now, or of none; collective, before the first step."""
        if self.bound is None:
            self._restore()
            if self._driver is not None and not self._driver.has_hook and (hook := self._driver.hook(None)) is not None:
                install_hook(self._reducer, hook, self._step)
        self.note_loss_scale()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with the state of a checkpoint, as `read_training_state` returns it."""
        self._restored = state
        self.loss_scale = float(state.get("loss_scale", 1.0))
        self._restore()

    def _restore(self) -> None:
        if self._restored is None:
            return
        saved = self._restored.get("hook")
        if missing := self._restored.get("missing"):
            self._warn(f"The checkpoint was written after an error and lacks: {', '.join(map(str, missing))}.")
        elif self.bound is None and saved:
            self._warn("The checkpoint holds the state of a communication hook, but this run has none.")
        elif self.bound is not None and saved is not None:
            require_sound(saved, f"{STATE_KEY}['hook']")
            try:
                self.bound.load_state_dict(saved)
            except (KeyError, IndexError, TypeError, AttributeError, RuntimeError) as error:
                raise ValueError(
                    f"The checkpoint's state of communication hook {self.bound.name} is damaged: "
                    f"{type(error).__name__}: {error}."
                ) from error

    def note_loss_scale(self) -> None:
        """Begin to read the scale of the gradients to come; after each step. See the note above."""
        if self.bound is None or type(self.bound).rescale is BoundHook.rescale:  # keeps nothing
            return
        scale = 1.0 if self._scaler is None else _compat.loss_scale(self._scaler)
        if isinstance(scale, Tensor):
            self._coming_scale = start_read(scale)
        else:
            self._rescale(scale)

    def follow_loss_scale(self) -> None:
        """Rescale the hook's memory if the scale has changed; before the first gradient of a backward."""
        coming, self._coming_scale = self._coming_scale, None
        if coming is not None:
            self._rescale(coming.values()[0])

    def _rescale(self, scale: float) -> None:
        if self.bound is not None and scale != self.loss_scale:
            self.bound.rescale(scale / self.loss_scale)
            self.loss_scale = scale
