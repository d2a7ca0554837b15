"""The mean in 8 bits or in one, with a scale for each block: all-to-all, sum in float32, all-gather."""

from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from lightning_ddp_hooks.hooks.contract import BindContext, BoundHook, ReplicatingHook, require_types
from lightning_ddp_hooks.hooks.kernels import BlockCodec, Float8Codec, Int8Codec, SignCodec
from lightning_ddp_hooks.hooks.registry import SHORT_NAMES
from lightning_ddp_hooks.hooks.two_stage import TwoStageHook

BlockDtype = Literal["int8", "fp8"]

_MAX_BLOCK = 1 << 16


@dataclass(frozen=True, kw_only=True)
class BlockQuantize(ReplicatingHook):
    """Sends 8 bits per gradient and stage, with a float32 scale for each block, and sums in float32.

    Each rank quantises its bucket and sends each rank one chunk; that rank decodes and sums what it gets, quantises the
    sum and sends it to all. So a value is quantised twice, whatever the number of ranks, and the volume stays that of a
    ring all-reduce of 8 bit numbers: ``2 (1 + 4 / block_size)`` bytes per element times ``(world_size - 1) /
    world_size`` (2.03 times it with blocks of 256; 8 for float32 all-reduce).

    One shot is off by at most half a step at each stage, where a step of int8 is 1/127 of the largest magnitude of the
    block. With error feedback the sum over steps is off by no more than that of one step.

    Args:
        dtype: ``"int8"``, or ``"fp8"`` (e4m3), which is coarser for the large values of a block and finer for the
            small.
        block_size: elements with one scale; a multiple of 8. Smaller ones are more exact and send more scales.
        error_feedback: add what was not sent to the next gradient, at both stages. Takes memory of
            ``1 + 1 / world_size`` float32 gradients.
        stochastic_rounding: round up with the probability of the remainder, so that the mean of many roundings is the
            value itself; the rounding error of one is larger. Of use without error feedback.
        seed: of stochastic rounding.

    Raises:
        TypeError: a setting of the wrong type.
        ValueError: a setting out of range, or a torch build without the dtype.

    Example:
        >>> DDPHooksStrategy(comm_hook=BlockQuantize(dtype="int8", block_size=256))

    Two-stage compressed all-reduce with block scales and error feedback at both stages: Tang et al., "1-bit Adam",
    2021, https://arxiv.org/abs/2102.02888; Dettmers et al., "8-bit optimizers via block-wise quantization", 2022,
    https://arxiv.org/abs/2110.02861; Wang et al., "ZeRO++", 2023, https://arxiv.org/abs/2306.10209.
    """

    dtype: BlockDtype = "int8"
    block_size: int = 256
    error_feedback: bool = True
    stochastic_rounding: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the settings."""
        require_types(self, whole=("block_size", "seed"), flags=("error_feedback", "stochastic_rounding"))
        if self.dtype not in get_args(BlockDtype):
            raise ValueError(f"Expected dtype 'int8' or 'fp8', got {self.dtype!r}.")
        _check_block_size(self.block_size)
        self._codec()

    def _codec(self) -> BlockCodec:
        return Int8Codec() if self.dtype == "int8" else Float8Codec()

    def bind(self, context: BindContext) -> BoundHook:
        """Bind the hook."""
        return TwoStageHook(
            "BlockQuantize",
            context,
            self._codec(),
            block_size=self.block_size,
            error_feedback=self.error_feedback,
            stochastic_rounding=self.stochastic_rounding,
            seed=self.seed,
        )


@dataclass(frozen=True, kw_only=True)
class OneBit(ReplicatingHook):
    """Sends the sign of each gradient and the mean magnitude of each block; what that misses is sent later.

    The compressed all-reduce of 1-bit Adam: each rank compresses its bucket and sends each rank one chunk; that rank
    sums what it gets, compresses the sum and sends it to all. Both stages keep what they did not send. Wire bytes per
    element: ``2 (1/8 + 4 / block_size)`` times ``(world_size - 1) / world_size`` (0.27 times it with blocks of 512;
    8 for float32 all-reduce).

    Differences from the paper: it is the gradient that is compressed, not the momentum, so that any optimizer can be
    used; a scale belongs to a block and not to the whole tensor; and the scale is the mean magnitude, which leaves the
    smallest squared error. An Adam whose second moment has settled takes the noise of the signs better: let the
    compression begin after a few hundred steps.

    Args:
        start_iter: until this step gradients are reduced in full.
        block_size: elements with one scale; a multiple of 8.
        error_feedback: keep what was not sent. Signs alone do not converge in general (Karimireddy et al., 2019,
            https://arxiv.org/abs/1901.09847); turn it off for comparison only. Takes memory of ``1 + 1 / world_size``
            float32 gradients.

    Raises:
        TypeError: a setting of the wrong type.
        ValueError: a setting out of range.

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
        """Check the settings."""
        require_types(self, whole=("start_iter", "block_size"), flags=("error_feedback",))
        if self.start_iter < 0:
            raise ValueError(f"Expected start_iter of at least 0, got {self.start_iter}.")
        _check_block_size(self.block_size)

    def bind(self, context: BindContext) -> BoundHook:
        """Bind the hook."""
        return TwoStageHook(
            "OneBit",
            context,
            SignCodec(),
            block_size=self.block_size,
            error_feedback=self.error_feedback,
            start_iter=self.start_iter,
        )


def _check_block_size(block_size: int) -> None:
    """Raise unless blocks of this size can be packed.

    Raises:
        ValueError: not a multiple of 8 between 8 and 65536.
    """
    if not 8 <= block_size <= _MAX_BLOCK or block_size % 8:
        raise ValueError(f"Expected a block_size that is a multiple of 8 between 8 and {_MAX_BLOCK}, got {block_size}.")


SHORT_NAMES["int8"] = BlockQuantize
SHORT_NAMES["fp8"] = partial(BlockQuantize, dtype="fp8")
SHORT_NAMES["onebit"] = OneBit
