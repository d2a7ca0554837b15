"""The arithmetic of the two stages: what a rank does before, between and after the two collectives."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_ddp_hooks.hooks.error_feedback import ResidualUpdate
from lightning_ddp_hooks.hooks.kernels import BlockCodec, Chunks, Message
from lightning_ddp_hooks.reducer.native import build


class StageBuffers:
    """The messages of one bucket, and the sum that this rank makes; ``received`` serves both stages."""

    def __init__(self, chunks: Chunks, codec: BlockCodec, rank: int, device: torch.device) -> None:
        self.chunks = chunks
        self.count = chunks.count(rank)
        self.sent = Message(chunks, codec, chunks.world_size, device)
        self.received = Message(chunks, codec, chunks.world_size, device)
        self.answer = Message(chunks, codec, 1, device)
        self.sum = torch.empty(1, chunks.blocks, chunks.block, dtype=torch.float32, device=device)


class Residuals(NamedTuple):
    """What was not sent before: of this rank's bucket, and of the sum of its chunk without the padding."""

    worker: Tensor | None = None
    server: Tensor | None = None


class TwoStageKernels:
    """The three steps in torch operations: on any device, for any dtype, with or without noise.

    With the native module, float32 on the CPU without noise is done in C++, each step in one pass over memory. The bits
    are the same; only with one bit may scales differ in the last bit, since magnitudes are added in another order.
    """

    def __init__(self, codec: BlockCodec, native: ModuleType | None = None) -> None:
        self._codec = codec
        steps = () if native is None else ("encode", "add_up", "carry_over", "decode")
        self._native = {step: getattr(native, f"{step}_{codec.name}") for step in steps}
        self._scratch: dict[torch.device, Tensor] = {}

    def encode(self, buffers: StageBuffers, gradient: Tensor, residuals: Residuals, noise: Tensor | None) -> None:
        """Quantise gradient + residual into ``buffers.sent``."""
        chunks, sent = buffers.chunks, buffers.sent
        if noise is None and self._suits_native(gradient):
            self._native["encode"](gradient, residuals.worker, sent.bytes, chunks.blocks, chunks.block)
            return
        values = self._values(buffers)
        flat, numel = values.view(-1), chunks.numel
        if residuals.worker is None:
            flat[:numel].copy_(gradient)
        else:
            torch.add(gradient, residuals.worker, out=flat[:numel])
        flat[numel:].zero_()
        self._codec.encode_(values, sent.scales, sent.codes, noise=noise, numel=numel)

    def add_up(self, buffers: StageBuffers, residuals: Residuals, noise: Tensor | None) -> None:
        """Sum ``buffers.received`` in the order of ranks; quantise sum + residual into ``buffers.answer``."""
        chunks, received, answer, count = buffers.chunks, buffers.received, buffers.answer, buffers.count
        if noise is None and self._suits_native(buffers.sum):
            sizes = (chunks.blocks, chunks.block)
            self._native["add_up"](received.bytes, residuals.server, count, buffers.sum, answer.bytes, *sizes)
            return
        values = self._values(buffers)
        self._codec.decode(received.scales, received.codes, values)
        total = buffers.sum[0].copy_(values[0])
        for theirs in values[1:]:
            total.add_(theirs)
        owing = values[:1].copy_(buffers.sum)
        flat = owing.view(-1)
        if residuals.server is not None:
            flat[:count].add_(residuals.server)
        flat[count:].zero_()  # padding may have been decoded to anything: one bit knows no zero
        self._codec.encode_(owing, answer.scales, answer.codes, noise=noise, numel=count)

    def finish(
        self, buffers: StageBuffers, gradient: Tensor, factor: float, residuals: Residuals, update: ResidualUpdate
    ) -> None:
        """Update both residuals if all sums are finite; overwrite ``gradient`` with ``factor`` times all sums."""
        chunks, sent, received, answer = buffers.chunks, buffers.sent, buffers.received, buffers.answer
        finite = received.scales.isfinite().all()  # the same bytes, hence the same answer, on all ranks
        update.count(finite)
        own_sum = buffers.sum.view(-1)[: buffers.count]
        if self._suits_native(gradient):
            sizes = (chunks.blocks, chunks.block)
            if residuals.worker is not None and finite:
                self._native["carry_over"](answer.bytes, own_sum, residuals.server, *sizes)
                self._native["carry_over"](sent.bytes, gradient, residuals.worker, *sizes)
            self._native["decode"](received.bytes, factor, gradient, *sizes)
            return
        values = self._values(buffers)
        flat, numel = values.view(-1), chunks.numel
        if residuals.worker is not None and residuals.server is not None:
            self._codec.decode(answer.scales, answer.codes, values[:1])
            update.apply(residuals.server, own_sum, flat[: buffers.count], finite)
            self._codec.decode(sent.scales, sent.codes, values)
            update.apply(residuals.worker, gradient, flat[:numel], finite)
        self._codec.decode(received.scales, received.codes, values)
        torch.mul(flat[:numel], factor, out=gradient)

    def free_scratch(self) -> None:
        """Free the scratch memory, whose size was that of the largest bucket so far."""
        self._scratch.clear()

    def _suits_native(self, tensor: Tensor) -> bool:
        plain = tensor.is_cpu and tensor.dtype is torch.float32 and tensor.is_contiguous()
        return plain and bool(self._native)

    def _values(self, buffers: StageBuffers) -> Tensor:
        """Return float32 scratch for the values of a bucket; all buckets share it, so it does not outlive a step."""
        chunks, device = buffers.chunks, buffers.sum.device
        needed = chunks.world_size * chunks.chunk
        scratch = self._scratch.get(device)
        if scratch is None or scratch.numel() < needed:
            scratch = self._scratch[device] = torch.empty(needed, dtype=torch.float32, device=device)
        return scratch[:needed].view(chunks.world_size, chunks.blocks, chunks.block)


@cache
def native_module() -> ModuleType | None:
    """Return the native module if it is built; ranks need not have it alike."""
    try:
        return build.load() if build.is_built() else None
    except ImportError:  # the reducer, which needs it more, says so
        return None
