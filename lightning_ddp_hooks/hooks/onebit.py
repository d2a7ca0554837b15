"""The mean in one bit: signs with a scale for each block, and error feedback at both stages."""

from dataclasses import dataclass

from lightning_ddp_hooks.hooks.block_quantize import check_block_size
from lightning_ddp_hooks.hooks.chunks import Chunks
from lightning_ddp_hooks.hooks.contract import BindContext, BoundHook, CommHook
from lightning_ddp_hooks.hooks.kernels import SignCodec
from lightning_ddp_hooks.hooks.registry import SHORT_NAMES
from lightning_ddp_hooks.hooks.two_stage import TwoStageHook
from lightning_ddp_hooks.hooks.values import require_types


@dataclass(frozen=True, kw_only=True)
class OneBit(CommHook):
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
        check_block_size(self.block_size)

    def bind(self, context: BindContext) -> BoundHook:
        """Make the group of the second stage."""
        return TwoStageHook(
            "OneBit",
            context,
            SignCodec(),
            block_size=self.block_size,
            error_feedback=self.error_feedback,
            start_iter=self.start_iter,
        )

    def wire_bytes(self, numel: int, world_size: int) -> int:
        """Return how many bytes a rank sends to others for a bucket of ``numel`` elements, once compression is on."""
        return Chunks.build(numel, world_size, self.block_size).wire_bytes(SignCodec())


SHORT_NAMES["onebit"] = OneBit
