"""Bucket storage, and the bucket as a communication hook sees it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_ddp_hooks.reducer.layout import BucketLayout

# A status (status.py) takes so many elements behind the gradients of the last bucket.
STATUS_NUMEL = 2


class Bucket:
    """One flat gradient buffer and a view of it for each parameter.

    The memory is not cleared: what is not used takes no pages. Behind the gradients there may be a slot for a status,
    which travels along and which hooks do not see:

        comm_buffer   [ buffer: gradients of all parameters | status slot ]
    """

    def __init__(
        self, layout: BucketLayout, params: Sequence[Tensor], *, status: bool = False, memory: Tensor | None = None
    ) -> None:
        self.layout = layout
        if memory is None:
            numel = layout.numel + STATUS_NUMEL * status
            memory = torch.empty(numel, dtype=layout.dtype, device=layout.device)
        self.comm_buffer = memory
        self.buffer = memory[: layout.numel]
        self.status_slot = memory[layout.numel :].zero_() if status else None
        self.views = [_gradient_view(self.buffer, slot.offset, params[slot.index]) for slot in layout.slots]
        self.params = [params[slot.index] for slot in layout.slots]


def _gradient_view(buffer: Tensor, offset: int, param: Tensor) -> Tensor:
    """Make a tensor of the parameter's shape and strides that lies in the buffer.

    It is made by ``set_`` and not by slicing: a slice is tracked as a view, on which ``detach_()`` (used by
    ``zero_grad(set_to_none=False)``) raises.
    """
    stride = param.stride() if covers_its_memory(param) else torch.empty(param.shape, device="meta").stride()
    if param.is_complex():
        pairs = torch.view_as_complex(buffer.view(-1, 2))
        view = torch.empty(0, dtype=param.dtype, device=buffer.device)
        return view.set_(pairs.untyped_storage(), pairs.storage_offset() + offset // 2, param.shape, stride)
    view = torch.empty(0, dtype=buffer.dtype, device=buffer.device)
    return view.set_(buffer.untyped_storage(), buffer.storage_offset() + offset, param.shape, stride)


def covers_its_memory(tensor: Tensor) -> bool:
    """Tell whether the strides name each element of ``numel`` places once, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


class GradBucket:
    """What a communication hook is given: one full bucket of gradients.

    The interface is that of ``torch.distributed.GradBucket``. Gradients are *not* divided by the number of ranks.

    Args:
        bucket: Memory of the bucket.
        index: Position in the order of reduction.
        is_last: Whether it is the last one of the backward.
        names: Names of the parameters, in the order in which they lie in the buffer.
        divisor: What the sum over ranks is to be divided by.

    Attributes:
        unused: Names of those parameters that no rank has used: whatever is reduced for them is thrown away.
    """

    __slots__ = ("_bucket", "_index", "_is_last", "_replaced", "divisor", "names", "unused")

    def __init__(self, bucket: Bucket, index: int, is_last: bool, names: tuple[str, ...], divisor: float) -> None:
        self._bucket = bucket
        self._index = index
        self._is_last = is_last
        self._replaced: Tensor | None = None
        self.names = names
        self.divisor = divisor
        self.unused: frozenset[str] = frozenset()

    def buffer(self) -> Tensor:
        """Return the flat gradient buffer, shape ``(numel,)``; the one set by `set_buffer`, if any."""
        return self._bucket.buffer if self._replaced is None else self._replaced

    def gradients(self) -> list[Tensor]:
        """Return a view of `buffer` for each parameter, in its shape."""
        if self._replaced is None:
            return list(self._bucket.views)
        base = self._replaced.view(-1)
        return [
            base[slot.offset : slot.offset + slot.numel].view(param.shape)
            if not param.is_complex()
            else torch.view_as_complex(base[slot.offset : slot.offset + slot.numel].view(*param.shape, 2))
            for slot, param in zip(self._bucket.layout.slots, self._bucket.params, strict=True)
        ]

    def parameters(self) -> list[Tensor]:
        """Return the parameters whose gradients share the bucket."""
        return list(self._bucket.params)

    def index(self) -> int:
        """Return the bucket's position in the order of reduction."""
        return self._index

    def is_last(self) -> bool:
        """Tell whether this is the last bucket of the backward."""
        return self._is_last

    def set_buffer(self, tensor: Tensor) -> None:
        """Have the reducer copy back from ``tensor``, shape ``(numel,)``, instead of from the buffer."""
        if tensor.numel() != self._bucket.layout.numel:
            raise ValueError(
                f"Expected a buffer of {self._bucket.layout.numel} elements for bucket {self._index} "
                f"({', '.join(self.names)}), got {tensor.numel()}."
            )
        self._replaced = tensor
