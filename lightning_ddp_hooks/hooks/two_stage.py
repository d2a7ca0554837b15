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

from collections.abc import Generator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.hooks.carry_over import CarryOver
from lightning_ddp_hooks.hooks.chunks import Chunks
from lightning_ddp_hooks.hooks.contract import BindContext, BoundHook, Phases, Waitable
from lightning_ddp_hooks.hooks.error_memory import ErrorMemory
from lightning_ddp_hooks.hooks.kernels import BlockCodec, uniform_noise
from lightning_ddp_hooks.hooks.server_memory import ServerMemory
from lightning_ddp_hooks.hooks.stages import Residuals, StageBuffers, Stages, choose_stages
from lightning_ddp_hooks.hooks.state import tagged, untagged
from lightning_ddp_hooks.reducer.bucket import GradBucket


class TwoStageHook(BoundHook):
    """The bound form of the hooks that send blocks: all-to-all, sum, all-gather.

    Args:
        name: how messages and checkpoints call the hook.
        context: what is known at setup.
        codec: how blocks become bytes.
        block_size: elements with one scale, a multiple of 8.
        error_feedback: keep what was not sent.
        stochastic_rounding: round up with the probability of the remainder.
        seed: of the rounding.
        start_iter: until this step, the plain mean.
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
        self._codec = codec
        self._block_size = block_size
        self._feedback = error_feedback
        self._stochastic = stochastic_rounding
        self._seed = seed
        self._start_iter = start_iter
        self._step = context.step
        self._rank, self._world_size = context.rank, context.world_size
        self._control_group = context.control_group
        self._first_group = context.group
        self._second_group = context.new_group(context.group)

        # State.
        self._workers = ErrorMemory()
        self._servers = ServerMemory(self._rank, self._world_size)
        self._carry = CarryOver()
        self._stages: Stages = choose_stages(codec)
        self._buffers: dict[int, tuple[tuple[str, ...], StageBuffers]] = {}
        self._draw = (-1, 0)

    def reduce(self, bucket: GradBucket) -> Phases:
        """Run the two stages for one bucket."""
        buffer = bucket.buffer()
        numel = buffer.numel()
        if not numel:
            return None
        if self._world_size == 1 or self._step() < self._start_iter:
            buffer.div_(bucket.divisor)
            if self._world_size > 1:
                dense = comm.all_reduce(buffer, self._first_group)
                yield dense
                dense.wait()
            return None

        if not self._feedback:
            yield from self._run_stages(bucket, None)
            return None
        worker = self._workers.of(bucket)
        server = self._servers.of(bucket, self._buffers_of(bucket).chunks, worker)
        with self._workers.aside(bucket), self._servers.aside(bucket):
            yield from self._run_stages(bucket, Residuals(worker, server))
        return None

    def _run_stages(self, bucket: GradBucket, residuals: Residuals | None) -> Generator[Waitable, None, None]:
        buffer = bucket.buffer()
        buffers, stages = self._buffers_of(bucket), self._stages
        chunks = buffers.chunks
        draw = self._next_draw()
        with record_function("ldh::quantize"):
            stages.encode(buffers, buffer, residuals, self._noise(buffers, draw, 0, chunks.world_size))
        first = comm.start_all_to_all(buffers.received.bytes, buffers.sent.bytes, self._first_group)
        yield first
        first.wait()

        with record_function("ldh::sum_and_quantize"):
            stages.add_up(buffers, self._rank, residuals, self._noise(buffers, draw, 1, 1))
        second = comm.start_all_gather(buffers.received.bytes, buffers.answer.bytes, self._second_group)
        yield second
        second.wait()

        with record_function("ldh::dequantize"):
            stages.finish(buffers, self._rank, buffer, 1.0 / bucket.divisor, residuals, self._carry)

    def _buffers_of(self, bucket: GradBucket) -> StageBuffers:
        """Return the buffers of a bucket, which are kept from step to step: fresh pages cost more than filling them."""
        buffer = bucket.buffer()
        known = self._buffers.get(bucket.index())
        if known is not None and known[0] == bucket.names and known[1].chunks.numel == buffer.numel():
            return known[1]
        chunks = Chunks.build(buffer.numel(), self._world_size, self._block_size)
        fresh = StageBuffers(chunks, self._codec, buffer.device)
        self._buffers[bucket.index()] = (bucket.names, fresh)
        return fresh

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
        return {"left_out": self._carry.left_out} if self._feedback else {}

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
                "left_out": self._carry.left_out,
            },
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the residuals, at any number of ranks and with any buckets."""
        if not self._feedback or not state:
            super().load_state_dict(state)
            return
        content = untagged(self.name, state)
        self._workers.load_state_dict(content["workers"])
        self._servers.load_state_dict(content["servers"])
        self._carry.left_out = content["left_out"]
