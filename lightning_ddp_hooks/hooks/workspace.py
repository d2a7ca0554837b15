"""Memory that hooks use again in each step: allocating large tensors anew costs more than filling them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from lightning_ddp_hooks.reducer.bucket import GradBucket
from lightning_ddp_hooks.weak import weakly

T = TypeVar("T")


class Workspace:
    """Flat tensors by key, kept from step to step; a key stands for one use in flight."""

    def __init__(self) -> None:
        self._tensors: dict[Hashable, Tensor] = {}

    def get(self, key: Hashable, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor of shape ``(numel,)`` with whatever is in it."""
        tensor = self._tensors.get(key)
        if tensor is None or (tensor.numel(), tensor.dtype, tensor.device) != (numel, dtype, device):
            tensor = self._tensors[key] = torch.empty(numel, dtype=dtype, device=device)
        return tensor

    def clear(self) -> None:
        """Free all tensors."""
        self._tensors.clear()


class SpareMemory:
    """Flat tensors that are borrowed for a while, so that there are only as many as are in use at the same time."""

    def __init__(self) -> None:
        self._spare: list[Tensor] = []

    def borrow(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor of at least ``numel`` elements with whatever is in it."""
        suitable = [i for i, t in enumerate(self._spare) if (t.dtype, t.device) == (dtype, device)]
        large = [i for i in suitable if len(self._spare[i]) >= numel]
        if large:
            return self._spare.pop(min(large, key=lambda i: len(self._spare[i])))
        if suitable:
            self._spare.pop(suitable[-1])  # a larger one takes its place
        return torch.empty(numel, dtype=dtype, device=device)

    def give_back(self, tensor: Tensor) -> None:
        """Take back what was borrowed."""
        self._spare.append(tensor)

    def clear(self) -> None:
        """Free what is not in use."""
        self._spare.clear()


class PerBucket(Generic[T]):
    """What a hook keeps for each bucket of the current layout.

    [Note: memory follows the layout] The first backward reduces one bucket of the whole model, and later ones many
    small buckets. What belongs to a bucket is freed as soon as one of its parameters lies in another bucket. After a
    change, buckets behind the last one, whose parameters may be frozen, are gone too.
    """

    def __init__(self, make: Callable[[GradBucket], T]) -> None:
        self._make = weakly(make)
        self._kept: dict[int, tuple[tuple[str, ...], T]] = {}
        self._changed = False
        self._seen: set[int] = set()  # since the change

    def of(self, bucket: GradBucket) -> T:
        """Return what belongs to the bucket, made anew if other parameters lie in it."""
        index, names = bucket.index(), bucket.names
        known = self._kept.get(index)
        if known is None or not (known[0] is names or known[0] == names):
            moved = set(names)
            self._kept.pop(index, None)
            self._kept = {i: kept for i, kept in self._kept.items() if moved.isdisjoint(kept[0])}
            known = self._kept[index] = (names, self._make(bucket))
            self._changed = True
        if self._changed:
            self._seen.add(index)
            if bucket.is_last():
                self._kept = {i: kept for i, kept in self._kept.items() if i <= index or i in self._seen}
                self._changed = False
                self._seen.clear()
        return known[1]

    def clear(self) -> None:
        """Free everything."""
        self._kept.clear()
