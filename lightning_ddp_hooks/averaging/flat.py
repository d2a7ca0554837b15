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

from lightning_ddp_hooks import _compat, comm, traffic
from lightning_ddp_hooks.reducer.real_values import as_real, write_real
from lightning_ddp_hooks.reducer.stream import CommStream, comm_stream

# Large enough for full bandwidth; also bounds the extra memory, to two of these for each dtype.
CHUNK_BYTES = 25 << 20
_IN_FLIGHT = 2


class _Chunk(NamedTuple):
    """Positions of some tensors, and their place in the buffer, which is free again once they are written back."""

    positions: list[int]
    buffer: Tensor
    views: list[Tensor]
    stream: CommStream


class FlatMean:
    """Averages a fixed list of tensors over ranks, as often as asked.

    float16 and bfloat16 values travel and are summed as float32 and are rounded once, so that equal replicas stay as
    they are and nothing overflows. Values are summed and then divided, for the same reason. The tensors, floating point
    or complex, have the same shapes and dtypes in the same order on all ranks.
    """

    def __init__(self, tensors: Sequence[Tensor], chunk_bytes: int = CHUNK_BYTES) -> None:
        self._tensors = list(tensors)
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for position, tensor in enumerate(self._tensors):
            if tensor.numel():
                kinds.setdefault((comm_dtype(tensor.dtype), tensor.device), []).append(position)
        self._chunks: list[_Chunk] = []
        self._streams = {device: comm_stream(device) for _, device in kinds}
        for (dtype, device), positions in kinds.items():
            parts: list[list[int]] = [[]]
            sizes = [0]
            for position in positions:
                numel = as_real(self._tensors[position]).numel()
                if parts[-1] and (sizes[-1] + numel) * dtype.itemsize > chunk_bytes:
                    parts.append([])
                    sizes.append(0)
                parts[-1].append(position)
                sizes[-1] += numel
            memory = [torch.empty(max(sizes), dtype=dtype, device=device) for _ in parts[:_IN_FLIGHT]]
            for number, (part, size) in enumerate(zip(parts, sizes, strict=True)):
                buffer = memory[number % _IN_FLIGHT][:size]
                views = _compat.unflatten(buffer, [as_real(self._tensors[position]) for position in part])
                self._chunks.append(_Chunk(part, buffer, views, self._streams[device]))

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        """Tell whether it averages just these tensors."""
        return len(tensors) == len(self._tensors) and all(a is b for a, b in zip(tensors, self._tensors, strict=True))

    @torch.no_grad()
    def run(self, group: comm.ProcessGroup, into: Sequence[Tensor] | None = None) -> None:
        """Average over the ranks of ``group``, in place or into other tensors of the same shapes; collective."""
        targets = self._tensors if into is None else into
        in_flight: deque[tuple[_Chunk, comm.Work]] = deque()

        def finish_oldest() -> None:
            chunk, work = in_flight.popleft()
            with chunk.stream.context():
                work.wait()
                chunk.buffer.div_(comm.world_size(group))
                write_real([targets[p] for p in chunk.positions], chunk.views)

        with record_function("ldh::average"), traffic.counted_as("averaging"):
            for chunk in self._chunks:
                if len(in_flight) == _IN_FLIGHT:
                    finish_oldest()
                with chunk.stream.after_compute():
                    _compat.foreach_copy_(chunk.views, [as_real(self._tensors[p]) for p in chunk.positions])
                    in_flight.append((chunk, comm.all_reduce(chunk.buffer, group)))
            while in_flight:
                finish_oldest()
            for stream in self._streams.values():
                stream.join()


def comm_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the real dtype in which values of ``dtype`` are averaged: at least float32."""
    real = dtype.to_real() if dtype.is_complex else dtype
    return real if real.itemsize >= 4 else torch.float32
