"""The averaged model in the place of the replica for a while, and the replica back afterwards, bit by bit."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_ddp_hooks.averaging.averager import BoundAverager


class ModelSwap:
    """Puts the averaged model into the module; collective at construction.

    Between construction and `undo` the replica's own values lie in copies, one model's worth of memory.

    Args:
        averager: at work.
    """

    @torch.no_grad()
    def __init__(self, averager: BoundAverager) -> None:
        self._tensors: list[Tensor] = averager.model_tensors()
        # `clone` keeps strides, so that writing back is a plain copy.
        self._own = [tensor.detach().clone() for tensor in self._tensors]
        averager.average_into(self._tensors)

    def own_value(self, tensor: Tensor) -> Tensor:
        """Return the replica's own value of a parameter or buffer."""
        for live, own in zip(self._tensors, self._own, strict=True):
            if live is tensor:
                return own
        return tensor

    @torch.no_grad()
    def undo(self) -> None:
        """Give the replica its own values back."""
        for live, own in zip(self._tensors, self._own, strict=True):
            live.copy_(own)
        self._tensors.clear()
        self._own.clear()
