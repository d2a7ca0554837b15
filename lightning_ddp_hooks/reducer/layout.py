"""Which gradient lies in which bucket, and where: pure arithmetic, no storage and no communication.

A bucket is one flat buffer of one dtype on one device; each parameter of it has a slot:

    registration order      0        1   2        3   4        5
    assign_buckets      [ [0],     [1,  2],     [3,  4],     [5] ]     greedy: who passes the limit still goes in
    order of reduction  [5] | [3 4] | [1 2] | [0]                      reversed: the last layer's gradient comes first
    after the rebuild   [5 4] | [3 2] | [1 0]                          in the order in which gradients became ready
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from torch import Tensor

UNLIMITED = 1 << 62


@dataclass(frozen=True)
class Slot:
    """One parameter's place in a bucket, in elements of the bucket's real dtype; a complex number takes two."""

    index: int
    offset: int
    numel: int


@dataclass(frozen=True)
class BucketLayout:
    """The slots of one bucket.

    Attributes:
        slots: Places of the parameters, in the order in which they lie in the buffer.
        dtype: Dtype of the buffer; for complex parameters that of their real part.
        device: Device of the buffer.
        numel: Length of the buffer in elements of ``dtype``.
    """

    slots: tuple[Slot, ...]
    dtype: torch.dtype
    device: torch.device
    numel: int

    @classmethod
    def build(cls, indices: Sequence[int], params: Sequence[Tensor]) -> BucketLayout:
        """Lay the given parameters one behind the other."""
        slots, offset = [], 0
        for index in indices:
            numel = params[index].numel() * (2 if params[index].is_complex() else 1)
            slots.append(Slot(index, offset, numel))
            offset += numel
        first = params[indices[0]]
        return cls(tuple(slots), first.dtype.to_real(), first.device, offset)

    @property
    def indices(self) -> tuple[int, ...]:
        """The parameters' positions, in slot order."""
        return tuple(slot.index for slot in self.slots)

    @property
    def nbytes(self) -> int:
        """Length of the buffer in bytes."""
        return self.numel * self.dtype.itemsize


def assign_buckets(
    params: Sequence[Tensor],
    limits: Sequence[int],
    sparse: Sequence[bool] | None = None,
    *,
    groups: Sequence[Hashable] | None = None,
) -> list[list[int]]:
    """Group parameters into buckets by size.

    Greedy fill in the given order, one dtype and device per bucket; the parameter that reaches the limit still goes
    in. The first bucket of each dtype and device takes the first limit, the next one the second, all later ones the
    last. A sparse parameter has a bucket to itself.

    Example:
        >>> layers = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(3)))
        >>> assign_buckets(list(layers.parameters()), [1 << 20, 1 << 20])
        [[0], [1, 2], [3, 4], [5]]

    The rule is that of torch's DistributedDataParallel (Li et al., 2020, https://arxiv.org/abs/2006.15704).
    """
    if not limits or min(limits) < 1:
        raise ValueError(f"Expected one or more limits of at least 1 byte, got {list(limits)}.")
    for name, flags in (("sparse", sparse), ("groups", groups)):
        if flags is not None and len(flags) != len(params):
            raise ValueError(f"Expected {len(params)} entries in `{name}`, one for each parameter, got {len(flags)}.")

    open_buckets: dict[Hashable, tuple[list[int], int]] = {}
    closed: dict[Hashable, int] = {}
    buckets: list[list[int]] = []
    for index, param in enumerate(params):
        if sparse is not None and sparse[index]:
            buckets.append([index])
            continue
        key = (param.dtype, param.device, None if groups is None else groups[index])
        if key not in open_buckets:
            open_buckets[key] = ([], 0)
            buckets.append(open_buckets[key][0])
        bucket, size = open_buckets[key]
        bucket.append(index)
        size += param.numel() * param.element_size()
        open_buckets[key] = (bucket, size)
        done = closed.get(key, 0)
        if size >= limits[min(done, len(limits) - 1)]:
            del open_buckets[key]
            closed[key] = done + 1
    return buckets


def initial_layout(
    params: Sequence[Tensor],
    limits: Sequence[int],
    indices: Sequence[int] | None = None,
    groups: Sequence[Hashable] | None = None,
) -> list[BucketLayout]:
    """Lay out buckets before any order is known: in reverse order of registration."""
    placed = range(len(params)) if indices is None else indices
    keys = None if groups is None else [groups[index] for index in placed]
    buckets = assign_buckets([params[index] for index in placed], limits, groups=keys)
    return [BucketLayout.build([placed[position] for position in bucket], params) for bucket in reversed(buckets)]


def rebuilt_layout(
    params: Sequence[Tensor],
    order: Sequence[int],
    limits: Sequence[int],
    groups: Sequence[Hashable] | None = None,
    *,
    last: AbstractSet[int] = frozenset(),
) -> list[BucketLayout]:
    """Lay out buckets in the order in which gradients became ready.

    What is less than two first buckets in all becomes one: with so little to send, a further collective costs more than
    the overlap that it allows.
    """
    keys = None if groups is None else [groups[index] for index in order]
    if sum(params[index].numel() * params[index].element_size() for index in order) < 2 * min(limits):
        limits = [UNLIMITED]
    buckets = assign_buckets([params[index] for index in order], limits, groups=keys)
    buckets.sort(key=lambda positions: (any(order[place] in last for place in positions), positions[-1]))
    return [BucketLayout.build([order[position] for position in positions], params) for positions in buckets]
