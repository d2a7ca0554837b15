"""PowerSGD as functions by torch's contract, with the state that torch's users know."""

# No postponed annotations: torch's DDP looks at those of the functions when it is given one.
import logging
from typing import Any

import torch

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.hooks.on_torch import TorchDDPState, run_on_torch_ddp
from lightning_ddp_hooks.hooks.powersgd import BatchedPowerSGD, PowerSGD

logger = logging.getLogger(__name__)


class PowerSGDState(TorchDDPState):
    """The state that `powersgd_hook` and `batched_powersgd_hook` take; arguments as in torch's ``PowerSGDState``.

    It counts its own steps. On our reducer the declarations `PowerSGD` and `BatchedPowerSGD` are the better choice:
    they overlap the phases of several buckets.

    Args:
        process_group: Ranks to average over; None for all.
        matrix_approximation_rank: See ``rank`` of `PowerSGD`.
        start_powerSGD_iter: See ``start_iter``; may be 0.
        min_compression_rate: See `PowerSGD`.
        use_error_feedback: See ``error_feedback``.
        warm_start: See `PowerSGD`.
        orthogonalization_epsilon: See `PowerSGD`.
        random_seed: See ``seed``.
        compression_stats_logging_frequency: Steps of compression from one log of the statistics to the next.
        batch_tensors_with_same_shape: See ``batch_same_shape``.

    Example:
        >>> state = PowerSGDState(process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=10)
        >>> ddp_model.register_comm_hook(state, powersgd_hook)
    """

    def __init__(
        self,
        process_group: comm.ProcessGroup | None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = True,
    ) -> None:
        settings: dict[str, Any] = {
            "rank": matrix_approximation_rank,
            "start_iter": start_powerSGD_iter,
            "min_compression_rate": min_compression_rate,
            "error_feedback": use_error_feedback,
            "warm_start": warm_start,
            "seed": random_seed,
            "orthogonalization_epsilon": orthogonalization_epsilon,
        }
        super().__init__(PowerSGD(**settings, batch_same_shape=batch_tensors_with_same_shape), process_group)
        self._batched = BatchedPowerSGD(**settings)
        self._log_every = max(1, compression_stats_logging_frequency)
        self._next_log = start_powerSGD_iter

    def use_batched(self) -> None:
        """Compress whole buckets, as one matrix each."""
        if self.bound is None:
            self.hook = self._batched
        elif self.hook is not self._batched:
            raise RuntimeError("This PowerSGDState belongs to `powersgd_hook` already; make one for each hook.")

    def compression_stats(self) -> tuple[float, int, int]:
        """Return (rate, elements before, elements after) since compression began."""
        stats = self.bound.stats() if self.bound is not None else {}
        before, after = int(stats.get("numel_before", 0)), int(stats.get("numel_after", 0))
        return (before / after if after else 0.0, before, after)

    def step_ended(self) -> None:
        """Count a backward, and log the statistics now and then."""
        super().step_ended()
        if self.steps > self._next_log:
            self._next_log = self.steps + self._log_every
            rate, before, after = self.compression_stats()
            logger.info("PowerSGD, step %d: %d elements became %d, rate %.2f", self.steps, before, after, rate)


def powersgd_hook(state: PowerSGDState, bucket: comm.TorchGradBucket) -> torch.futures.Future[torch.Tensor]:
    """Run `PowerSGD` on a bucket; by torch's contract, for torch's DDP and for our reducer.

    Both phases run inside the call, so that with any number of buckets all ranks issue the same collectives in the same
    order (torch's ``powerSGD_hook`` on gloo aborts with several).

    Example:
        >>> ddp_model.register_comm_hook(PowerSGDState(None, matrix_approximation_rank=2), powersgd_hook)
    """
    return run_on_torch_ddp(state, bucket)


def batched_powersgd_hook(state: PowerSGDState, bucket: comm.TorchGradBucket) -> torch.futures.Future[torch.Tensor]:
    """Run `BatchedPowerSGD` on a bucket; by torch's contract, for torch's DDP and for our reducer.

    Example:
        >>> ddp_model.register_comm_hook(PowerSGDState(None), batched_powersgd_hook)
    """
    state.use_batched()
    return run_on_torch_ddp(state, bucket)
