"""The mean in 8 bits: block scales, all-to-all, sum in float32, all-gather."""

from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from lightning_ddp_hooks.hooks.chunks import Chunks
from lightning_ddp_hooks.hooks.contract import BindContext, BoundHook, CommHook
from lightning_ddp_hooks.hooks.kernels import BlockCodec, Float8Codec, Int8Codec
from lightning_ddp_hooks.hooks.registry import SHORT_NAMES
from lightning_ddp_hooks.hooks.two_stage import TwoStageHook
from lightning_ddp_hooks.hooks.values import require_types

BlockDtype = Literal["int8", "fp8"]

_MAX_BLOCK = 1 << 16


@dataclass(frozen=True, kw_only=True)
class BlockQuantize(CommHook):
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
        check_block_size(self.block_size)
        self._codec()

    def _codec(self) -> BlockCodec:
        return Int8Codec() if self.dtype == "int8" else Float8Codec()

    def bind(self, context: BindContext) -> BoundHook:
        """Make the group of the second stage."""
        return TwoStageHook(
            "BlockQuantize",
            context,
            self._codec(),
            block_size=self.block_size,
            error_feedback=self.error_feedback,
            stochastic_rounding=self.stochastic_rounding,
            seed=self.seed,
        )

    def wire_bytes(self, numel: int, world_size: int) -> int:
        """Return how many bytes a rank sends to others for a bucket of ``numel`` elements."""
        return Chunks.build(numel, world_size, self.block_size).wire_bytes(self._codec())


def check_block_size(block_size: int) -> None:
    """Raise unless blocks of this size can be packed.

    Raises:
        ValueError: not a multiple of 8 between 8 and 65536.
    """
    if not 8 <= block_size <= _MAX_BLOCK or block_size % 8:
        raise ValueError(f"Expected a block_size that is a multiple of 8 between 8 and {_MAX_BLOCK}, got {block_size}.")


SHORT_NAMES["int8"] = BlockQuantize
SHORT_NAMES["fp8"] = partial(BlockQuantize, dtype="fp8")
