"""What compression did not send, kept until the next step: one residual for each parameter, by its name.

[Note: error feedback] A hook that sends less than the gradient keeps the rest and adds it to the next gradient, so that
nothing is lost, only sent later (Seide et al., "1-bit stochastic gradient descent", 2014; Karimireddy et al., "Error
feedback fixes SignSGD", 2019, https://arxiv.org/abs/1901.09847).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.hooks.contract import BindContext, BoundHook
from lightning_ddp_hooks.hooks.kernels import Chunks
from lightning_ddp_hooks.hooks.state import mean_over_ranks, tagged, untagged
from lightning_ddp_hooks.hooks.workspace import PerBucket
from lightning_ddp_hooks.reducer.bucket import GradBucket


class ErrorFeedback:
    """One residual per parameter, handed out bucket by bucket as one flat tensor.

    Within a step a hook asks for the residual of its bucket and writes the new one into the same tensor:

        >>> residual = feedback.of(bucket)             # (numel,), zeros at first; same order as bucket.buffer()
        >>> total = bucket.buffer() + residual
        >>> residual.copy_(total - what_was_sent)      # in place: the tensor is the memory

    The residuals are found by the names of parameters. When buckets are rebuilt, or parameters are frozen, each
    residual moves to the bucket in which its parameter lies now. Values are in the units of the bucket's gradients,
    that is, not divided by the number of ranks. float16 and bfloat16 gradients have float32 residuals. A complex
    parameter takes two real elements for each of its own, as in the bucket.
    """

    def __init__(self) -> None:
        self._flats = PerBucket(self._gather)
        # name -> its residual: a slice of a flat, or (loaded, not asked for yet) a tensor of its own
        self._residuals: dict[str, Tensor] = {}

    def of(self, bucket: GradBucket) -> Tensor:
        """Return the residual of the bucket, shape ``(numel,)``; what is written into it is kept."""
        return self._flats.of(bucket)

    def _gather(self, bucket: GradBucket) -> Tensor:
        """Move the residuals of a bucket's parameters into one flat tensor."""
        buffer = bucket.buffer()
        flat = torch.zeros(buffer.numel(), dtype=residual_dtype(buffer.dtype), device=buffer.device)
        for name, offset, numel in _slots_of(bucket):
            residual = flat[offset : offset + numel]
            before = self._residuals.get(name)
            if before is not None:
                _require_numel(name, numel, before)
                residual.copy_(before)
            self._residuals[name] = residual
        return flat

    def preserve_unused(self, bucket: GradBucket) -> AbstractContextManager[None]:
        """Keep the residuals of parameters that no rank has used, since what is reduced for them is thrown away."""
        if not bucket.unused:
            return nullcontext()
        self.of(bucket)
        return _preserve([self._residuals[name] for name in bucket.names if name in bucket.unused])

    def rescale(self, factor: float) -> None:
        """Multiply all residuals."""
        for residual in self._residuals.values():
            residual.mul_(factor)

    def clear(self) -> None:
        """Forget all residuals and free their memory."""
        self._flats.clear()
        self._residuals.clear()

    def residuals(self) -> dict[str, Tensor]:
        """Return this rank's residual for each parameter that has one, flat, not copied."""
        return dict(self._residuals)

    def state_dict(self, control_group: comm.ProcessGroup | None) -> dict[str, Any]:
        """Return the mean of each residual over the ranks of a CPU group, by name, flat, on the CPU; collective.

        Without a group this rank's own residuals.
        """
        return mean_over_ranks(self._residuals, control_group)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore residuals that `state_dict` returned, of the same sizes; what is not in ``state`` begins at zero."""
        for name, residual in self._residuals.items():
            if name in state:
                _require_numel(name, residual.numel(), state[name])
                residual.copy_(state[name].view(-1))
            else:
                residual.zero_()
        for name in state.keys() - self._residuals.keys():
            self._residuals[name] = state[name].detach().clone().view(-1)


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
    """Residuals of the second stage: what a rank did not send of the sums that it makes, by bucket."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._chunks: dict[int, _ChunkResidual] = {}
        # Pieces of parameters whose bucket is gone: name -> (length, [(where, piece)]). All ranks have the same names.
        self._retired: dict[str, tuple[int, list[tuple[int, Tensor]]]] = {}
        # Residuals from a checkpoint, whole and in the units of the mean, until their bucket asks for them.
        self._loaded: dict[str, Tensor] = {}

    def of(self, bucket: GradBucket, chunks: Chunks, worker_residual: Tensor) -> Tensor:
        """Return the residual of this rank's chunk; what is written into it is kept.

        ``worker_residual``, that of the bucket in the first stage, gets what is left of buckets that are gone.
        """
        known = self._chunks.get(bucket.index())
        if known is not None and known.names == bucket.names:
            return known.residual
        for index, chunk in list(self._chunks.items()):
            if index == bucket.index() or not set(bucket.names).isdisjoint(chunk.names):
                self._retire(self._chunks.pop(index))
        residual = torch.zeros(chunks.count(self._rank), dtype=torch.float32, device=worker_residual.device)
        fresh = _ChunkResidual(bucket.names, list(_slots_of(bucket)), chunks.start(self._rank), residual)
        for name, numel, where, piece in fresh.pieces():
            loaded = self._loaded.pop(name, None)
            if loaded is not None:
                _require_numel(name, numel, loaded)
                piece.copy_(loaded[where : where + piece.numel()]).mul_(self._world_size)
        for name, offset, _ in fresh.slots:
            for where, piece in self._retired.pop(name, (0, []))[1]:
                begin = offset + where
                worker_residual[begin : begin + piece.numel()].add_(piece)
        self._chunks[bucket.index()] = fresh
        return residual

    def preserve_unused(self, bucket: GradBucket) -> AbstractContextManager[None]:
        """Keep the residuals of parameters that no rank has used; see `ErrorFeedback.preserve_unused`. After `of`."""
        if not bucket.unused:
            return nullcontext()
        pieces = self._chunks[bucket.index()].pieces()
        return _preserve([piece for name, _, _, piece in pieces if name in bucket.unused])

    def rescale(self, factor: float) -> None:
        """Multiply all residuals."""
        retired = [piece for _, pieces in self._retired.values() for _, piece in pieces]
        for residual in (*(chunk.residual for chunk in self._chunks.values()), *retired, *self._loaded.values()):
            residual.mul_(factor)

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


class ResidualUpdate:
    """Updates residuals, and counts the buckets for which that was left out.

    [Note: non-finite gradients] An Inf or a NaN in a residual would come back in every later step. A residual is
    therefore updated only when the bucket's *reduced* result is finite. Every rank has that result, so all ranks decide
    alike and without a collective; the result itself stays non-finite, for a gradient scaler to see and skip the step.
    """

    def __init__(self) -> None:
        self._counts: dict[torch.device, Tensor | int] = {}

    @property
    def left_out(self) -> int:
        """Number of buckets that had a non-finite gradient so far; waits for the device."""
        return sum(int(count) for count in self._counts.values())

    @left_out.setter
    def left_out(self, value: Any) -> None:
        self._counts = {torch.device("cpu"): int(value)}

    def count(self, finite: Tensor) -> None:
        """Note whether a bucket's result was finite (one boolean on the bucket's device)."""
        self._counts[finite.device] = self._counts.get(finite.device, 0) + ~finite

    def apply(self, residual: Tensor, gradient: Tensor, sent: Tensor, finite: Tensor) -> None:
        """Set ``residual`` to ``residual + gradient - sent`` in place, if ``finite`` (one boolean on its device)."""
        if residual.is_cpu:
            if finite:
                residual.add_(gradient).sub_(sent)
        else:  # the host does not wait for the answer
            torch.where(finite, (residual + gradient).sub_(sent), residual, out=residual)


class FeedbackHook(BoundHook):
    """Base of hooks that keep what they did not send, if ``feedback``: residuals by their name in a checkpoint."""

    def __init__(
        self, name: str, context: BindContext, feedback: bool, residuals: Mapping[str, ErrorFeedback | ServerResiduals]
    ) -> None:
        self.name = name
        self.keeps_state = feedback
        self._control_group = context.control_group
        self._residuals = residuals
        self._update = ResidualUpdate()

    def error_memory(self) -> Mapping[str, Tensor]:
        """Return what this rank has not sent of its own gradients."""
        kept = [own for own in self._residuals.values() if isinstance(own, ErrorFeedback)]
        return kept[0].residuals() if kept and self.keeps_state else {}

    def stats(self) -> dict[str, Any]:
        """Return how often the residuals were left as they were; waits for the device."""
        return {"left_out": self._update.left_out} if self.keeps_state else {}

    def rescale(self, factor: float) -> None:
        """Multiply the residuals."""
        for residuals in self._residuals.values():
            residuals.rescale(factor)

    def state_dict(self) -> dict[str, Any]:
        """Return the mean residuals; collective."""
        if not self.keeps_state:
            return {}
        means = {name: residuals.state_dict(self._control_group) for name, residuals in self._residuals.items()}
        return tagged(self.name, {**means, "left_out": self._update.left_out})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the residuals, at any number of ranks and with any buckets."""
        if not self.keeps_state or not state:
            super().load_state_dict(state)
            return
        content = untagged(self.name, state)
        for name, residuals in self._residuals.items():
            residuals.load_state_dict(content[name])
        self._update.left_out = content["left_out"]


@contextmanager
def _preserve(residuals: Sequence[Tensor]) -> Iterator[None]:
    """Put zeros in the place of residuals, and the residuals back at the end."""
    kept = [residual.clone() for residual in residuals]
    for residual in residuals:
        residual.zero_()
    try:
        yield
    finally:
        for residual, before in zip(residuals, kept, strict=True):
            residual.copy_(before)


def residual_dtype(gradient: torch.dtype) -> torch.dtype:
    """Return the dtype in which a gradient's residual is kept: at least float32, since small values add up in it."""
    return gradient if gradient.itemsize >= 4 else torch.float32


def _slots_of(bucket: GradBucket) -> Iterator[tuple[str, int, int]]:
    """Yield name, offset in the buffer and length in real elements of each parameter."""
    offset = 0
    for name, param in zip(bucket.names, bucket.parameters(), strict=True):
        numel = param.numel() * (2 if param.is_complex() else 1)
        yield name, offset, numel
        offset += numel


def _require_numel(name: str, expected: int, found: Tensor) -> None:
    if found.numel() != expected:
        raise ValueError(
            f"Expected a residual of {expected} elements for parameter {name!r}, found {found.numel()} in the "
            "checkpoint."
        )
