"""The memory that buckets lie in: one block for each dtype and device, which stays when the layout changes.

    first backward    [ one bucket of everything                            | room ]
    from then on      [ bucket 0 | bucket 1          | bucket 2    | status | room ]

So a rebuild allocates nothing: neither do two sets of buckets exist for a while, nor is memory left in pieces. Where
the ranks' backend moves some memory without a copy, the block lies there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.reducer.bucket import STATUS_NUMEL, Bucket
from lightning_ddp_hooks.reducer.layout import BucketLayout

# Buckets begin at multiples of this many bytes: what vector instructions and NCCL like best.
ALIGNMENT = 128
# For the gaps between the buckets of a later layout, in bytes.
ROOM = 64 * ALIGNMENT

_Key = tuple[torch.dtype, torch.device]


class GradBufferPool:
    """Lays buckets into memory, and keeps the memory for the next layout."""

    def __init__(self, group: comm.ProcessGroup | None = None) -> None:
        self._group = group
        self._blocks: dict[_Key, Tensor] = {}

    def place(self, layouts: Sequence[BucketLayout], params: Sequence[Tensor]) -> list[Bucket]:
        """Make the buckets, in order of reduction; the last one has a status slot.

        What lay in the memory before is overwritten sooner or later.
        """
        offsets, ends = _offsets(layouts)
        for key in [key for key in self._blocks if key not in ends or len(self._blocks[key]) < ends[key]]:
            del self._blocks[key]
        buckets = []
        for number, (layout, offset) in enumerate(zip(layouts, offsets, strict=True)):
            key = (layout.dtype, layout.device)
            if key not in self._blocks:
                room = ROOM // layout.dtype.itemsize
                self._blocks[key] = comm.zeros(ends[key] + room, layout.dtype, layout.device, self._group)
            last = number == len(layouts) - 1
            memory = self._blocks[key][offset : offset + layout.numel + STATUS_NUMEL * last]
            buckets.append(Bucket(layout, params, status=last, memory=memory))
        return buckets

    def holds(self, tensor: Tensor | None) -> bool:
        """Tell whether a tensor lies in this memory."""
        if tensor is None or tensor.layout is not torch.strided:
            return False
        memory = tensor.untyped_storage().data_ptr()
        return any(block.untyped_storage().data_ptr() == memory for block in self._blocks.values())

    def forget(self) -> None:
        """Leave the memory to those gradients that still lie in it."""
        self._blocks.clear()


def _offsets(layouts: Sequence[BucketLayout]) -> tuple[list[int], dict[_Key, int]]:
    """Return each bucket's offset in its block, and each block's length, in elements."""
    offsets: list[int] = []
    ends: dict[_Key, int] = {}
    for number, layout in enumerate(layouts):
        key = (layout.dtype, layout.device)
        unit = ALIGNMENT // layout.dtype.itemsize
        begin = -(-ends.get(key, 0) // unit) * unit
        offsets.append(begin)
        ends[key] = begin + layout.numel + STATUS_NUMEL * (number == len(layouts) - 1)
    return offsets, ends
