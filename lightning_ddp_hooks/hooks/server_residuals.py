"""What a rank did not send of the sums that it makes: the second residual of two-sided error feedback."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.hooks.chunks import Chunks
from lightning_ddp_hooks.hooks.error_feedback import preserve, require_numel, slots_of
from lightning_ddp_hooks.hooks.state import mean_over_ranks
from lightning_ddp_hooks.reducer.bucket import GradBucket


@dataclass
class _ChunkResidual:
    """What a rank has not sent of the sum of its chunk of one bucket."""

    names: tuple[str, ...]
    slots: list[tuple[str, int, int]]  # name, offset in the bucket, length
    start: int  # of the chunk in the bucket
    residual: Tensor

    def pieces(self) -> Iterator[tuple[str, int, int, Tensor]]:
        """Yield for each parameter its name, its length, where in it a piece of the residual belongs, and the piece."""
        for name, offset, numel in self.slots:
            first = max(offset, self.start)
            last = max(first, min(offset + numel, self.start + self.residual.numel()))
            yield name, numel, first - offset, self.residual[first - self.start : last - self.start]


class ServerResiduals:
    """Residuals of the second stage: for each bucket that of this rank's chunk, in the units of the sum."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._chunks: dict[int, _ChunkResidual] = {}
        # Pieces of parameters whose bucket is gone: name -> (length, [(where, piece)]). All ranks have the same names.
        self._retired: dict[str, tuple[int, list[tuple[int, Tensor]]]] = {}
        # Residuals from a checkpoint, whole and in the units of the mean, until their bucket asks for them.
        self._loaded: dict[str, Tensor] = {}

    def of(self, bucket: GradBucket, chunks: Chunks, worker_residual: Tensor) -> Tensor:
        """Return the residual of this rank's chunk; what is written into it is kept.

        Args:
            bucket: Bucket that the chunk is a part of.
            chunks: How the bucket is cut.
            worker_residual: Residual of the bucket in the first stage; gets what is left of buckets that are gone.
        """
        known = self._chunks.get(bucket.index())
        if known is not None and known.names == bucket.names:
            return known.residual
        gone = set(bucket.names)
        for index, chunk in list(self._chunks.items()):
            if index == bucket.index() or gone.intersection(chunk.names):
                self._retire(self._chunks.pop(index))
        fresh = _ChunkResidual(
            bucket.names,
            list(slots_of(bucket)),
            chunks.start(self._rank),
            torch.zeros(chunks.count(self._rank), dtype=torch.float32, device=worker_residual.device),
        )
        for name, numel, where, piece in fresh.pieces():
            loaded = self._loaded.pop(name, None)
            if loaded is not None:
                require_numel(name, numel, loaded)
                piece.copy_(loaded[where : where + piece.numel()]).mul_(self._world_size)
        for name, offset, _ in fresh.slots:
            for where, piece in self._retired.pop(name, (0, []))[1]:
                begin = offset + where
                worker_residual[begin : begin + piece.numel()].add_(piece)
        self._chunks[bucket.index()] = fresh
        return fresh.residual

    def preserve_unused(self, bucket: GradBucket) -> AbstractContextManager[None]:
        """Keep the residuals of parameters that no rank has used; see `ErrorFeedback.preserve_unused`. After `of`."""
        if not bucket.unused:
            return nullcontext()
        pieces = self._chunks[bucket.index()].pieces()
        return preserve([piece for name, _, _, piece in pieces if name in bucket.unused])

    def rescale(self, factor: float) -> None:
        """Multiply all residuals."""
        for chunk in self._chunks.values():
            chunk.residual.mul_(factor)
        for _, pieces in self._retired.values():
            for _, piece in pieces:
                piece.mul_(factor)
        for loaded in self._loaded.values():
            loaded.mul_(factor)

    def _retire(self, chunk: _ChunkResidual) -> None:
        for name, numel, where, piece in chunk.pieces():
            pieces = self._retired.setdefault(name, (numel, []))[1]
            if piece.numel():
                pieces.append((where, piece.clone()))  # not all of the old residual

    def state_dict(self, control_group: comm.ProcessGroup) -> dict[str, Any]:
        """Return the residuals of all ranks put together, by name, in the units of the mean; collective."""
        whole: dict[str, Tensor] = {}
        for chunk in self._chunks.values():
            for name, numel, where, piece in chunk.pieces():
                whole[name] = torch.zeros(numel, dtype=torch.float32)
                whole[name][where : where + piece.numel()] = piece
        for name, (numel, pieces) in self._retired.items():
            whole[name] = torch.zeros(numel, dtype=torch.float32)
            for where, piece in pieces:
                whole[name][where : where + piece.numel()] += piece.cpu()
        means = mean_over_ranks(whole, control_group)
        return {**{name: value.clone() for name, value in self._loaded.items()}, **means}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._chunks.clear()
        self._retired.clear()
        self._loaded = {name: value.detach().clone().view(-1) for name, value in state.items()}
