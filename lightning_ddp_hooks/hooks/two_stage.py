"""Quantised mean in two stages, for any codec of blocks: the volume does not grow with the number of ranks.

    rank 0   [ chunk 0 | chunk 1 | chunk 2 ]  --encode--> --all-to-all-->  chunk 0 of all ranks: decode, sum in float32
    rank 1   [ chunk 0 | chunk 1 | chunk 2 ]                               chunk 1 of all ranks: decode, sum in float32
    rank 2   [ chunk 0 | chunk 1 | chunk 2 ]                               chunk 2 of all ranks: decode, sum in float32
                                                                                |
    every rank:  decode all chunks, divide  <--all-gather-- <--encode the sum---+

A message holds the scales and the codes of one chunk, so that each stage is one collective:

    | scale of block 0 | scale of block 1 | ... | codes of block 0 | codes of block 1 | ... | up to 7 bytes of padding |

[Note: two-sided error feedback] Each stage has a residual. A rank keeps of its own gradient what the first stage did
not send (by parameter), and of the sum of its chunk what the second stage did not send (by bucket). When buckets are
rebuilt, the latter goes to the former: added to one rank's gradient it enters the same sum again, and nothing is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from lightning_ddp_hooks.hooks.chunks import Chunks
from lightning_ddp_hooks.hooks.contract import BindContext, BoundHook, Phases
from lightning_ddp_hooks.hooks.error_feedback import ErrorFeedback, ResidualUpdate
from lightning_ddp_hooks.hooks.kernels import BlockCodec, uniform_noise
from lightning_ddp_hooks.hooks.server_residuals import ServerResiduals
from lightning_ddp_hooks.hooks.stages import Residuals, StageBuffers, choose_kernels
from lightning_ddp_hooks.hooks.state import tagged, untagged
from lightning_ddp_hooks.hooks.workspace import PerBucket
from lightning_ddp_hooks.reducer import requests
from lightning_ddp_hooks.reducer.bucket import GradBucket


class TwoStageHook(BoundHook):
    """The bound form of the hooks that send blocks: all-to-all, sum, all-gather.

    Args:
        name: Name in messages and checkpoints.
        context: What is known at setup.
        codec: How blocks become bytes.
        block_size: Number of elements with one scale, a multiple of 8.
        error_feedback: Keep what was not sent.
        stochastic_rounding: Round up with the probability of the remainder.
        seed: Seed of the rounding.
        start_iter: Step of the first compressed gradients; the plain mean before it.
    """

    def __init__(
        self,
        name: str,
        context: BindContext,
        codec: BlockCodec,
        *,
        block_size: int,
        error_feedback: bool,
        stochastic_rounding: bool = False,
        seed: int = 0,
        start_iter: int = 0,
    ) -> None:
        # Configuration.
        self.name = name
        self.keeps_state = error_feedback
        self._codec = codec
        self._block_size = block_size
        self._feedback = error_feedback
        self._stochastic = stochastic_rounding
        self._seed = seed
        self._start_iter = start_iter
        self._step = context.step
        self._rank, self._world_size = context.rank, context.world_size
        self._control_group = context.control_group
        self._kernels = choose_kernels(codec)

        # State.
        self._workers = ErrorFeedback()
        self._servers = ServerResiduals(self._rank, self._world_size)
        self._update = ResidualUpdate()
        self._draw = (-1, 0)
        self._buffers = PerBucket(self._make_buffers)

    def reduce(self, bucket: GradBucket) -> Phases:
        """Run the two stages for one bucket."""
        buffer = bucket.buffer()
        if not buffer.numel():
            return None
        if self._world_size == 1 or self._step() < self._start_iter:
            buffer.div_(bucket.divisor)
            if self._world_size > 1:
                yield requests.AllReduce(buffer)
            return None

        buffers = self._buffers.of(bucket)
        if not self._feedback:
            return (yield from self._run_stages(bucket, buffers, None))
        worker = self._workers.of(bucket)
        server = self._servers.of(bucket, buffers.chunks, worker)
        with self._workers.preserve_unused(bucket), self._servers.preserve_unused(bucket):
            return (yield from self._run_stages(bucket, buffers, Residuals(worker, server)))

    def _run_stages(self, bucket: GradBucket, buffers: StageBuffers, residuals: Residuals | None) -> Phases:
        buffer, kernels = bucket.buffer(), self._kernels
        draw = self._next_draw()
        with record_function("ldh::quantize"):
            kernels.encode(buffers, buffer, residuals, self._noise(buffers, draw, 0, buffers.chunks.world_size))
        yield requests.AllToAll(buffers.sent.bytes, buffers.received.bytes)

        with record_function("ldh::sum_and_quantize"):
            kernels.add_up(buffers, self._rank, residuals, self._noise(buffers, draw, 1, 1))
        yield requests.AllGather(buffers.answer.bytes, buffers.received.bytes)

        with record_function("ldh::dequantize"):
            kernels.finish(buffers, self._rank, buffer, 1.0 / bucket.divisor, residuals, self._update)
        return None

    def _make_buffers(self, bucket: GradBucket) -> StageBuffers:
        """Make the buffers of a bucket, kept from step to step: fresh pages cost more than filling them."""
        self._kernels.free_scratch()
        buffer = bucket.buffer()
        return StageBuffers(
            Chunks.build(buffer.numel(), self._world_size, self._block_size), self._codec, buffer.device
        )

    def _next_draw(self) -> tuple[int, int]:
        """Return the step and how many buckets came before this one in it."""
        step = self._step()
        self._draw = (step, self._draw[1] + 1 if self._draw[0] == step else 0)
        return self._draw

    def _noise(self, buffers: StageBuffers, draw: tuple[int, int], stage: int, chunks: int) -> Tensor | None:
        """Return noise for stochastic rounding; it follows from its arguments, so that a resumed run draws the same."""
        if not self._stochastic:
            return None
        seed = 0
        for part in (self._seed, self._rank, *draw, stage):
            seed = (seed * 6364136223846793005 + part + 1442695040888963407) % (1 << 63)
        device = buffers.sum.device
        generator = torch.Generator(device).manual_seed(seed)
        return uniform_noise(torch.Size([chunks, buffers.chunks.blocks, buffers.chunks.block]), generator, device)

    def stats(self) -> dict[str, Any]:
        """Return how often the residuals were left as they were; waits for the device."""
        return {"left_out": self._update.left_out} if self._feedback else {}

    def rescale(self, factor: float) -> None:
        """Multiply the residuals of both stages."""
        self._workers.rescale(factor)
        self._servers.rescale(factor)

    def state_dict(self) -> dict[str, Any]:
        """Return the mean residuals of both stages; collective."""
        if not self._feedback:
            return {}
        return tagged(
            self.name,
            {
                "workers": self._workers.state_dict(self._control_group),
                "servers": self._servers.state_dict(self._control_group),
                "left_out": self._update.left_out,
            },
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the residuals, at any number of ranks and with any buckets."""
        if not self._feedback or not state:
            super().load_state_dict(state)
            return
        content = untagged(self.name, state)
        self._workers.load_state_dict(content["workers"])
        self._servers.load_state_dict(content["servers"])
        self._update.left_out = content["left_out"]
