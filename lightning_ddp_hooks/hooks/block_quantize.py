"""The mean in 8 bits or in one, with a scale for each block, in two stages: the volume does not grow with the ranks.

    rank 0   [ chunk 0 | chunk 1 | chunk 2 ]  --encode--> --all-to-all-->  chunk 0 of all ranks: decode, sum in float32
    rank 1   [ chunk 0 | chunk 1 | chunk 2 ]                               chunk 1 of all ranks: decode, sum in float32
    rank 2   [ chunk 0 | chunk 1 | chunk 2 ]                               chunk 2 of all ranks: decode, sum in float32
                                                                                |
    every rank:  decode all chunks, divide  <--all-gather-- <--encode the sum---+

[Note: two-sided error feedback] Each stage has a residual. A rank keeps of its own gradient what the first stage did
not send (by parameter), and of the sum of its chunk what the second stage did not send (by bucket). When buckets are
rebuilt, the latter goes to the former: added to one rank's gradient it enters the same sum again, and nothing is lost.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.profiler import record_function

from lightning_ddp_hooks.hooks.contract import BindContext, BoundHook, Phases, ReplicatingHook, require_types
from lightning_ddp_hooks.hooks.error_feedback import ErrorFeedback, FeedbackHook, ServerResiduals
from lightning_ddp_hooks.hooks.kernels import BlockCodec, Chunks, Float8Codec, Int8Codec, SignCodec, uniform_noise
from lightning_ddp_hooks.hooks.registry import SHORT_NAMES
from lightning_ddp_hooks.hooks.stages import Residuals, StageBuffers, TwoStageKernels, native_module
from lightning_ddp_hooks.hooks.workspace import PerBucket
from lightning_ddp_hooks.reducer import requests
from lightning_ddp_hooks.reducer.bucket import GradBucket
from lightning_ddp_hooks.short_names import add_short_name

BlockDtype = Literal["int8", "fp8"]

_MAX_BLOCK = 1 << 16


@dataclass(frozen=True, kw_only=True)
class BlockQuantize(ReplicatingHook):
    """Sends 8 bits per gradient and stage, with a float32 scale for each block, and sums in float32.

    Each rank quantises its bucket and sends each rank one chunk; that rank decodes and sums what it gets, quantises the
    sum and sends it to all. So a value is quantized twice, whatever the number of ranks, and the volume stays that of a
    ring all-reduce of 8 bit numbers: ``2 (1 + 4 / block_size)`` bytes per element times ``(world_size - 1) /
    world_size`` (2.03 times it with blocks of 256; 8 for float32 all-reduce).

    One shot is off by at most half a step at each stage, where a step of int8 is 1/127 of the largest magnitude of the
    block. With error feedback the sum over steps is off by no more than that of one step.

    Args:
        dtype: ``"int8"``, or ``"fp8"`` (e4m3), coarser for the large values of a block and finer for the small.
        block_size: Number of elements with one scale, a multiple of 8; the smaller, the more exact, with more scales.
        error_feedback: Add what was not sent to the next gradient, at both stages. Takes memory of
            ``1 + 1 / world_size`` float32 gradients.
        stochastic_rounding: Round up with the probability of the remainder, so that the mean of many roundings is the
            value itself; the rounding error of one is larger. Of use without error feedback.
        seed: Seed of stochastic rounding.

    Raises:
        TypeError: A setting of the wrong type.
        ValueError: A setting out of range, or a torch build without the dtype.

    Example:
        >>> DDPHooksStrategy(comm_hook=BlockQuantize(dtype="int8", block_size=256))

    Sources: Tang et al., "1-bit Adam", 2021, https://arxiv.org/abs/2102.02888; Dettmers et al., "8-bit optimizers via
    block-wise quantization", 2022, https://arxiv.org/abs/2110.02861; Wang et al., "ZeRO++", 2023,
    https://arxiv.org/abs/2306.10209.
    """

    dtype: BlockDtype = "int8"
    block_size: int = 256
    error_feedback: bool = True
    stochastic_rounding: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        require_types(self, whole=("block_size", "seed"), flags=("error_feedback", "stochastic_rounding"))
        if self.dtype not in get_args(BlockDtype):
            raise ValueError(f"Expected dtype 'int8' or 'fp8', got {self.dtype!r}.")
        _check_block_size(self.block_size)
        self._codec()

    def _codec(self) -> BlockCodec:
        return Int8Codec() if self.dtype == "int8" else Float8Codec()

    def bind(self, context: BindContext) -> BoundHook:
        """Bind the hook."""
        return _BoundTwoStage(self, context, self._codec(), noise_seed=self.seed if self.stochastic_rounding else None)


@dataclass(frozen=True, kw_only=True)
class OneBit(ReplicatingHook):
    """Sends the sign of each gradient and the mean magnitude of each block; what that misses is sent later.

    The compressed all-reduce of 1-bit Adam, in the two stages of `BlockQuantize`; both keep what they did not send.
    Bytes per element: ``2 (1/8 + 4 / block_size)`` times ``(world_size - 1) / world_size`` (0.27 times it with blocks
    of 512; 8 for float32 all-reduce).

    Differences from the paper: it is the gradient that is compressed, not the momentum, so that any optimizer can be
    used; and a scale, the mean magnitude, belongs to a block and not to the whole tensor. An Adam whose second moment
    has settled takes the noise of the signs better: let the compression begin after a few hundred steps.

    Args:
        start_iter: Training step until which gradients are reduced in full.
        block_size: Number of elements with one scale, a multiple of 8.
        error_feedback: Keep what was not sent. Signs alone do not converge in general (Karimireddy et al., 2019,
            https://arxiv.org/abs/1901.09847); turn it off for comparison only. Takes memory of ``1 + 1 / world_size``
            float32 gradients.

    Raises:
        TypeError: A setting of the wrong type.
        ValueError: A setting out of range.

    Example:
        >>> DDPHooksStrategy(comm_hook=OneBit(start_iter=500))

    Tang et al., "1-bit Adam: communication efficient large-scale training with Adam's convergence speed", 2021,
    https://arxiv.org/abs/2102.02888.
    """

    delayed_by = "start_iter"

    start_iter: int = 100
    block_size: int = 512
    error_feedback: bool = True

    def __post_init__(self) -> None:
        require_types(self, whole=("start_iter", "block_size"), flags=("error_feedback",))
        if self.start_iter < 0:
            raise ValueError(f"Expected start_iter of at least 0, got {self.start_iter}.")
        _check_block_size(self.block_size)

    def bind(self, context: BindContext) -> BoundHook:
        """Bind the hook."""
        return _BoundTwoStage(self, context, SignCodec(), start_iter=self.start_iter)


def _check_block_size(block_size: int) -> None:
    if not 8 <= block_size <= _MAX_BLOCK or block_size % 8:
        raise ValueError(f"Expected a block_size that is a multiple of 8 between 8 and {_MAX_BLOCK}, got {block_size}.")


class _BoundTwoStage(FeedbackHook):
    """All-to-all, sum, all-gather; with a seed for the noise, if rounding is stochastic."""

    def __init__(
        self,
        declared: BlockQuantize | OneBit,
        context: BindContext,
        codec: BlockCodec,
        *,
        start_iter: int = 0,
        noise_seed: int | None = None,
    ) -> None:
        self._rank, self._world_size = context.rank, context.world_size
        self._workers = ErrorFeedback()
        self._servers = ServerResiduals(self._rank, self._world_size)
        residuals: dict[str, ErrorFeedback | ServerResiduals] = {"workers": self._workers, "servers": self._servers}
        super().__init__(type(declared).__name__, context, declared.error_feedback, residuals)
        self._codec = codec
        self._block_size = declared.block_size
        self._noise_seed = noise_seed
        self._start_iter = start_iter
        self._step = context.step
        self._kernels = TwoStageKernels(codec, native_module())
        self._draw = (-1, 0)
        self._buffers = PerBucket(self._make_buffers)

    def reduce(self, bucket: GradBucket) -> Phases:
        buffer = bucket.buffer()
        if not buffer.numel():
            return None
        if self._world_size == 1 or self._step() < self._start_iter:
            buffer.div_(bucket.divisor)
            if self._world_size > 1:
                yield requests.AllReduce(buffer)
            return None
        buffers = self._buffers.of(bucket)
        if not self.keeps_state:
            return (yield from self._run_stages(bucket, buffers, Residuals()))
        worker = self._workers.of(bucket)
        server = self._servers.of(bucket, buffers.chunks, worker)
        with self._workers.preserve_unused(bucket), self._servers.preserve_unused(bucket):
            return (yield from self._run_stages(bucket, buffers, Residuals(worker, server)))

    def _run_stages(self, bucket: GradBucket, buffers: StageBuffers, residuals: Residuals) -> Phases:
        buffer, kernels, step = bucket.buffer(), self._kernels, self._step()
        # The step, and how many buckets came before this one in it.
        draw = self._draw = (step, self._draw[1] + 1 if self._draw[0] == step else 0)
        with record_function("ldh::quantize"):
            kernels.encode(buffers, buffer, residuals, self._noise(buffers, draw, 0, buffers.chunks.world_size))
        yield requests.AllToAll(buffers.sent.bytes, buffers.received.bytes)
        with record_function("ldh::sum_and_quantize"):
            kernels.add_up(buffers, residuals, self._noise(buffers, draw, 1, 1))
        yield requests.AllGather(buffers.answer.bytes, buffers.received.bytes)
        with record_function("ldh::dequantize"):
            kernels.finish(buffers, buffer, 1.0 / bucket.divisor, residuals, self._update)
        return None

    def _make_buffers(self, bucket: GradBucket) -> StageBuffers:
        self._kernels.free_scratch()
        buffer = bucket.buffer()
        chunks = Chunks(buffer.numel(), self._world_size, self._block_size)
        return StageBuffers(chunks, self._codec, self._rank, buffer.device)

    def _noise(self, buffers: StageBuffers, draw: tuple[int, int], stage: int, chunks: int) -> Tensor | None:
        """Return noise for stochastic rounding; it follows from its arguments, so that a resumed run draws the same."""
        if self._noise_seed is None:
            return None
        seed = 0
        for part in (self._noise_seed, self._rank, *draw, stage):
            seed = (seed * 6364136223846793005 + part + 1442695040888963407) % (1 << 63)
        device = buffers.sum.device
        generator = torch.Generator(device).manual_seed(seed)
        return uniform_noise(torch.Size([chunks, buffers.chunks.blocks, buffers.chunks.block]), generator, device)


add_short_name(SHORT_NAMES, "int8", BlockQuantize)
add_short_name(SHORT_NAMES, "fp8", BlockQuantize, dtype="fp8")
add_short_name(SHORT_NAMES, "onebit", OneBit)
