"""The arithmetic of the two stages: what a rank does before, between and after the two collectives."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_ddp_hooks.hooks.chunks import Chunks, Message
from lightning_ddp_hooks.hooks.error_feedback import ResidualUpdate
from lightning_ddp_hooks.hooks.kernels import BlockCodec
from lightning_ddp_hooks.reducer.native import build


class StageBuffers:
    """The messages of one bucket, and the sum that this rank makes.

    ``received`` serves both stages: once the sum is made, what it was made of is not needed any more.
    """

    def __init__(self, chunks: Chunks, codec: BlockCodec, device: torch.device) -> None:
        self.chunks = chunks
        self.sent = Message(chunks, codec, chunks.world_size, device)
        self.received = Message(chunks, codec, chunks.world_size, device)
        self.answer = Message(chunks, codec, 1, device)
        self.sum = torch.empty(1, chunks.blocks, chunks.block, dtype=torch.float32, device=device)


class Residuals(NamedTuple):
    """What was not sent before: of this rank's bucket, and of the sum of its chunk without the padding."""

    worker: Tensor
    server: Tensor


class TwoStageKernels:
    """The three steps in torch operations: on any device, for any dtype, with or without noise."""

    def __init__(self, codec: BlockCodec) -> None:
        self._codec = codec
        self._scratch: dict[torch.device, Tensor] = {}

    def encode(
        self, buffers: StageBuffers, gradient: Tensor, residuals: Residuals | None, noise: Tensor | None
    ) -> None:
        """Quantise gradient + residual into ``buffers.sent``."""
        numel = buffers.chunks.numel
        values = self._values(buffers)
        flat = values.view(-1)
        if residuals is None:
            flat[:numel].copy_(gradient)
        else:
            torch.add(gradient, residuals.worker, out=flat[:numel])
        flat[numel:].zero_()
        self._codec.encode_(values, buffers.sent.scales, buffers.sent.codes, noise=noise, numel=numel)

    def add_up(self, buffers: StageBuffers, rank: int, residuals: Residuals | None, noise: Tensor | None) -> None:
        """Sum ``buffers.received`` in the order of ranks; quantise sum + residual into ``buffers.answer``."""
        count = buffers.chunks.count(rank)
        values = self._values(buffers)
        self._codec.decode(buffers.received.scales, buffers.received.codes, values)
        total = buffers.sum[0].copy_(values[0])
        for theirs in values[1:]:
            total.add_(theirs)
        owing = values[:1].copy_(buffers.sum)
        flat = owing.view(-1)
        if residuals is not None:
            flat[:count].add_(residuals.server)
        flat[count:].zero_()  # padding may have been decoded to anything: one bit knows no zero
        self._codec.encode_(owing, buffers.answer.scales, buffers.answer.codes, noise=noise, numel=count)

    def finish(
        self,
        buffers: StageBuffers,
        rank: int,
        gradient: Tensor,
        factor: float,
        residuals: Residuals | None,
        update: ResidualUpdate,
    ) -> None:
        """Update both residuals if all sums are finite; overwrite ``gradient`` with ``factor`` times all sums."""
        numel, count = buffers.chunks.numel, buffers.chunks.count(rank)
        finite = buffers.received.scales.isfinite().all()  # the same bytes, hence the same answer, on all ranks
        update.count(finite)
        values = self._values(buffers)
        flat = values.view(-1)
        if residuals is not None:
            self._codec.decode(buffers.answer.scales, buffers.answer.codes, values[:1])
            update.apply(residuals.server, buffers.sum.view(-1)[:count], flat[:count], finite)
            self._codec.decode(buffers.sent.scales, buffers.sent.codes, values)
            update.apply(residuals.worker, gradient, flat[:numel], finite)
        self._codec.decode(buffers.received.scales, buffers.received.codes, values)
        torch.mul(flat[:numel], factor, out=gradient)

    def free_scratch(self) -> None:
        """Free the scratch memory, whose size was that of the largest bucket so far."""
        self._scratch.clear()

    def _values(self, buffers: StageBuffers) -> Tensor:
        """Return float32 scratch for the values of a bucket; all buckets share it, so it does not outlive a step."""
        chunks, device = buffers.chunks, buffers.sum.device
        needed = chunks.world_size * chunks.chunk
        scratch = self._scratch.get(device)
        if scratch is None or scratch.numel() < needed:
            scratch = self._scratch[device] = torch.empty(needed, dtype=torch.float32, device=device)
        return scratch[:needed].view(chunks.world_size, chunks.blocks, chunks.block)


class NativeKernels(TwoStageKernels):
    """The steps in C++, each in one pass over memory; what is not float32 on the CPU without noise is left to torch.

    int8 and fp8 give the same bits; with one bit the scales may differ in the last bit, since the magnitudes are added
    in another order.
    """

    def __init__(self, codec: BlockCodec, native: ModuleType) -> None:
        super().__init__(codec)
        self._encode = getattr(native, f"encode_{codec.name}")
        self._add_up = getattr(native, f"add_up_{codec.name}")
        self._carry_over = getattr(native, f"carry_over_{codec.name}")
        self._decode = getattr(native, f"decode_{codec.name}")

    def encode(
        self, buffers: StageBuffers, gradient: Tensor, residuals: Residuals | None, noise: Tensor | None
    ) -> None:
        """Quantise gradient + residual."""
        if noise is not None or not _suits(gradient):
            super().encode(buffers, gradient, residuals, noise)
            return
        worker = None if residuals is None else residuals.worker
        self._encode(gradient, worker, buffers.sent.bytes, buffers.chunks.blocks, buffers.chunks.block)

    def add_up(self, buffers: StageBuffers, rank: int, residuals: Residuals | None, noise: Tensor | None) -> None:
        """Sum in the order of ranks; quantise sum + residual."""
        if noise is not None or not buffers.sum.is_cpu:
            super().add_up(buffers, rank, residuals, noise)
            return
        server = None if residuals is None else residuals.server
        chunks = buffers.chunks
        self._add_up(
            *(buffers.received.bytes, server, chunks.count(rank), buffers.sum, buffers.answer.bytes),
            *(chunks.blocks, chunks.block),
        )

    def finish(
        self,
        buffers: StageBuffers,
        rank: int,
        gradient: Tensor,
        factor: float,
        residuals: Residuals | None,
        update: ResidualUpdate,
    ) -> None:
        """Update both residuals if all sums are finite; decode."""
        if not _suits(gradient):
            super().finish(buffers, rank, gradient, factor, residuals, update)
            return
        finite = buffers.received.scales.isfinite().all()
        update.count(finite)
        blocks, block = buffers.chunks.blocks, buffers.chunks.block
        if residuals is not None and finite:
            own_sum = buffers.sum.view(-1)[: buffers.chunks.count(rank)]
            self._carry_over(buffers.answer.bytes, own_sum, residuals.server, blocks, block)
            self._carry_over(buffers.sent.bytes, gradient, residuals.worker, blocks, block)
        self._decode(buffers.received.bytes, factor, gradient, blocks, block)


def _suits(gradient: Tensor) -> bool:
    return gradient.is_cpu and gradient.dtype is torch.float32 and gradient.is_contiguous()


def choose_kernels(codec: BlockCodec) -> TwoStageKernels:
    """Return the steps in C++ if the native module is built, else those in torch. Ranks need not choose alike."""
    native = _native()
    return TwoStageKernels(codec) if native is None else NativeKernels(codec, native)


@cache
def _native() -> ModuleType | None:
    if not build.is_built():
        return None
    try:
        return build.load()
    except ImportError:  # the reducer, which needs it more, says so
        return None
