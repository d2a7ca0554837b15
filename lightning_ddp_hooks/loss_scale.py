"""Keeps a hook's memory of earlier gradients in the scale of the gradients that come, under a GradScaler."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_ddp_hooks import _compat
from lightning_ddp_hooks.hooks.contract import BoundHook
from lightning_ddp_hooks.reducer.stream import Readout, readout


class LossScale:
    """The scale of the loss that a hook's memory is in.

    [Note: when the memory is rescaled] The scaler changes its scale, if at all, at the end of a step, from what all
    ranks have found in their gradients alike. So it is the same on all ranks, and each rescales before the same
    backward: the first one whose gradients come in the new scale. The host begins to copy the scale behind the step,
    and looks at it when that backward begins. By then the whole forward is queued behind the copy, so that even where
    the host has to wait for it, the device does not run out of work.

    Args:
        scaler: The GradScaler; None for gradients that are not scaled.
        value: The scale of what the hook is going to take up from a checkpoint.

    Attributes:
        value: The scale of the memory now.
    """

    def __init__(self, scaler: Any, value: float = 1.0) -> None:
        self.value = value
        self._scaler = scaler
        self._coming: Readout | None = None

    def note(self, hook: BoundHook | None) -> None:
        """Begin to read the scale of the gradients to come; after each step, and at the start."""
        if hook is None or type(hook).rescale is BoundHook.rescale:  # keeps nothing
            return
        scale = 1.0 if self._scaler is None else _compat.loss_scale(self._scaler)
        if isinstance(scale, Tensor):
            self._coming = readout(scale)
        else:
            self._rescale(hook, scale)

    def follow(self, hook: BoundHook | None) -> None:
        """Rescale the memory, if the scale has changed; before the first gradient of a backward."""
        coming, self._coming = self._coming, None
        if coming is not None and hook is not None:
            self._rescale(hook, coming.value())

    def _rescale(self, hook: BoundHook, scale: float) -> None:
        if scale != self.value:
            hook.rescale(scale / self.value)
            self.value = scale
