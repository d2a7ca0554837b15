"""Memory that a hook uses again in each step: allocating large tensors anew costs more than filling them."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor


class Workspace:
    """Flat tensors by key, kept from step to step.

    A tensor is handed out again under its key, so a key may stand for one use in flight only; a bucket's index in the
    key sees to that.
    """

    def __init__(self) -> None:
        self._tensors: dict[Hashable, Tensor] = {}

    def get(self, key: Hashable, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor of shape ``(numel,)`` with whatever is in it."""
        tensor = self._tensors.get(key)
        if tensor is None or tensor.numel() != numel or tensor.dtype != dtype or tensor.device != device:
            tensor = torch.empty(numel, dtype=dtype, device=device)
            self._tensors[key] = tensor
        return tensor

    def clear(self) -> None:
        """Free all tensors."""
        self._tensors.clear()
