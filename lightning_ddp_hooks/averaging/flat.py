"""The mean of tensors over ranks: flattened into few large buffers, written back in place.

Where tensors lie::

    tensors   [a][b][c][d][e]          any strides; they keep them, and nobody's ``.data`` is rebound
    chunks    [a b c]    [d e]         one dtype and device each
    buffers      A          B          two of each kind; the next chunk is filled while the last one is on its way
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from lightning_ddp_hooks import _compat, comm
from lightning_ddp_hooks.reducer.stream import CommStream, comm_stream

# Large enough for full bandwidth; also bounds the extra memory, to two of these for each dtype.
CHUNK_BYTES = 25 << 20
_IN_FLIGHT = 2


class _Chunk(NamedTuple):
    """Some of the tensors, and where they lie in the buffer that they share with other chunks."""

    positions: list[int]
    buffer: Tensor
    views: list[Tensor]
    stream: CommStream


class _Flight(NamedTuple):
    """A chunk on its way; its buffer is free again when it has been written back."""

    chunk: _Chunk
    work: comm.Work


class FlatMean:
    """Averages a fixed list of tensors over ranks, as often as asked.

    float16 and bfloat16 values travel and are summed as float32 and are rounded once, so that equal replicas stay as
    they are and nothing overflows. Values are summed and then divided, for the same reason.

    Args:
        tensors: the same shapes and dtypes in the same order on all ranks; floating point or complex.
        chunk_bytes: how much is sent at a time.
    """

    def __init__(self, tensors: Sequence[Tensor], chunk_bytes: int = CHUNK_BYTES) -> None:
        self._tensors = list(tensors)
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for position, tensor in enumerate(self._tensors):
            if tensor.numel():
                kinds.setdefault((wire_dtype(tensor.dtype), tensor.device), []).append(position)
        self._chunks: list[_Chunk] = []
        self._streams: dict[torch.device, CommStream] = {}
        for (dtype, device), positions in kinds.items():
            parts = _split(positions, [as_real(t).numel() * dtype.itemsize for t in self._tensors], chunk_bytes)
            self._chunks += self._lay_out(parts, dtype, device)

    def _lay_out(self, parts: Sequence[list[int]], dtype: torch.dtype, device: torch.device) -> list[_Chunk]:
        stream = self._streams.setdefault(device, comm_stream(device))
        sizes = [sum(as_real(self._tensors[p]).numel() for p in part) for part in parts]
        buffers = [torch.empty(max(sizes), dtype=dtype, device=device) for _ in range(min(_IN_FLIGHT, len(parts)))]
        chunks = []
        for number, (part, size) in enumerate(zip(parts, sizes, strict=True)):
            buffer = buffers[number % _IN_FLIGHT][:size]
            views, offset = [], 0
            for position in part:
                shape = as_real(self._tensors[position]).shape
                views.append(buffer[offset : offset + shape.numel()].view(shape))
                offset += shape.numel()
            chunks.append(_Chunk(part, buffer, views, stream))
        return chunks

    @torch.no_grad()
    def run(self, group: comm.ProcessGroup, into: Sequence[Tensor] | None = None) -> None:
        """Average over the ranks of ``group``; collective.

        Args:
            group: the ranks to average over.
            into: where the means go, shaped like the tensors; None writes them into the tensors themselves.
        """
        targets = self._tensors if into is None else list(into)
        flying: deque[_Flight] = deque()
        with record_function("ldh::average"), comm.counted_as("averaging"):
            for chunk in self._chunks:
                if len(flying) == _IN_FLIGHT:
                    self._land(flying.popleft(), targets, group)
                with chunk.stream.after_compute():
                    _compat.foreach_copy_(chunk.views, [as_real(self._tensors[p]) for p in chunk.positions])
                    flying.append(_Flight(chunk, comm.all_reduce(chunk.buffer, group)))
            while flying:
                self._land(flying.popleft(), targets, group)
            for stream in self._streams.values():
                stream.join()

    def _land(self, flight: _Flight, targets: Sequence[Tensor], group: comm.ProcessGroup) -> None:
        chunk = flight.chunk
        with chunk.stream.context():
            flight.work.wait()
            chunk.buffer.div_(comm.world_size(group))
            _compat.foreach_copy_([as_real(targets[p]) for p in chunk.positions], chunk.views)


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the real dtype in which values of ``dtype`` are averaged: at least float32."""
    real = dtype.to_real() if dtype.is_complex else dtype
    return real if real.itemsize >= 4 else torch.float32


def as_real(tensor: Tensor) -> Tensor:
    """Return the tensor without autograd; a complex one as pairs of reals."""
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()


def _split(positions: Sequence[int], nbytes: Sequence[int], limit: int) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    size = 0
    for position in positions:
        if parts[-1] and size + nbytes[position] > limit:
            parts.append([])
            size = 0
        parts[-1].append(position)
        size += nbytes[position]
    return parts
