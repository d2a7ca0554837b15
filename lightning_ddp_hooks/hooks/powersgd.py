"""PowerSGD: gradients travel as two thin factors of a low-rank approximation, and what that misses is sent later."""

# No postponed annotations: torch's DDP looks at those of the functions when it is given one.
import logging
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.hooks.allreduce import Mean, TensorFuture, narrower
from lightning_ddp_hooks.hooks.contract import BindContext, BoundHook, Phases, ReplicatingHook, require_types
from lightning_ddp_hooks.hooks.error_feedback import ErrorFeedback
from lightning_ddp_hooks.hooks.low_rank import MatrixSlot, matrix_shape, near_square, worth_compressing, write_product
from lightning_ddp_hooks.hooks.on_torch import TorchDDPState, run_on_torch_ddp
from lightning_ddp_hooks.hooks.powersgd_workspace import NonfiniteGuard, PowerSGDWorkspace
from lightning_ddp_hooks.hooks.registry import SHORT_NAMES
from lightning_ddp_hooks.hooks.state import copy_to_cpu, tagged, untagged, whole_number
from lightning_ddp_hooks.hooks.workspace import PerBucket
from lightning_ddp_hooks.reducer import requests
from lightning_ddp_hooks.reducer.bucket import GradBucket
from lightning_ddp_hooks.short_names import add_short_name

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PowerSGD(ReplicatingHook):
    """Send a rank-``r`` approximation of each gradient matrix, and keep what it misses for the next step.

    A matrix M (rows x cols) is sent as P (rows x r) and Q (cols x r): one step of power iteration, that begins where
    the last one ended. Vectors, and matrices that would not shrink enough, travel dense, together with the Ps. Sends
    ``r * (rows + cols)`` elements for each matrix in place of ``rows * cols``; two collectives per bucket.

    Args:
        rank: Rank of the approximation. 1 to 4 is usual; a language model may need up to 32.
        start_iter: Training step at which compression begins; the mean is exact before it. The beginning of training is
            the most sensitive to error, so about a tenth of all steps is a good choice. May be 0.
        min_compression_rate: A matrix is compressed only if that makes it smaller than ``1 / min_compression_rate``.
        error_feedback: Add what was not sent to the next gradient. Without it the result is biased.
        warm_start: Begin with the last step's Q. Without it Q is random in each step, and the approximation worse.
        seed: Seed of the first Q.
        orthogonalization_epsilon: Addend to each column's length in P before the division by it; may be 0.
        batch_same_shape: Work on matrices of one shape at once where they lie at equal distances in the bucket.

    A step whose gradients are not finite on some rank leaves the residuals of all ranks as they were, and is counted
    (``stats()["steps_not_finite"]``); the gradients come out as NaN, so that a GradScaler or a check sees them.

    Differences from torch's ``powerSGD_hook``: state is found by name, so that buckets may be rebuilt and
    ``start_iter`` may be 0; a rank's error is what *it* did not send (M - P (M^T P)^T, as in the paper), which does
    not grow with the differences between ranks, and has the same mean; only P is made orthonormal.

    Source: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical low-rank gradient compression for distributed
    optimization", 2019, https://arxiv.org/abs/1905.13727.

    Example:
        >>> Trainer(strategy=DDPHooksStrategy(comm_hook=PowerSGD(rank=2, start_iter=500)))
    """

    delayed_by = "start_iter"
    sized_by = "rank"

    rank: int = 1
    start_iter: int = 1000
    min_compression_rate: float = 2.0
    error_feedback: bool = True
    warm_start: bool = True
    seed: int = 0
    orthogonalization_epsilon: float = 0.0
    batch_same_shape: bool = True

    def __post_init__(self) -> None:
        require_types(
            self,
            whole=("rank", "start_iter", "seed"),
            numbers=("min_compression_rate", "orthogonalization_epsilon"),
            flags=("error_feedback", "warm_start", "batch_same_shape"),
        )
        if self.rank < 1:
            raise ValueError(f"Expected `rank` of at least 1, got {self.rank}.")
        if self.start_iter < 0:
            raise ValueError(f"Expected `start_iter` of at least 0, got {self.start_iter}.")
        if not self.min_compression_rate > 0:
            raise ValueError(f"Expected `min_compression_rate` above 0, got {self.min_compression_rate}.")
        if not 0 <= self.orthogonalization_epsilon < math.inf:
            epsilon = self.orthogonalization_epsilon
            raise ValueError(f"Expected `orthogonalization_epsilon` of at least 0, got {epsilon}.")

    def bind(self, context: BindContext) -> BoundHook:
        """Bind the hook."""
        return _BoundPowerSGD(self, context)


@dataclass(frozen=True, kw_only=True)
class BatchedPowerSGD(PowerSGD):
    """PowerSGD on the whole bucket as one near-square matrix: the least to compute, and less accurate.

    Rows of that matrix have nothing to do with each other, so a higher rank helps less than with `PowerSGD`; use rank
    1. What does not fit into the matrix (less than a row) travels dense, instead of padding. The matrices follow the
    buckets, which a resumed run learns anew: nothing that is owed gets lost, but the run is not repeated exactly.

    Sends about ``2 * rank * sqrt(numel)`` elements for a bucket of ``numel``. Settings are those of `PowerSGD`;
    ``batch_same_shape`` has no meaning here, since a bucket is one matrix.

    Example:
        >>> Trainer(strategy=DDPHooksStrategy(comm_hook=BatchedPowerSGD(start_iter=500)))
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.batch_same_shape:
            raise ValueError(
                "`batch_same_shape` has no meaning for BatchedPowerSGD: a bucket is one matrix. Leave it out."
            )

    def bind(self, context: BindContext) -> BoundHook:
        """Bind the hook."""
        return _BoundPowerSGD(self, context, whole_bucket=True)


class _BoundPowerSGD(BoundHook):
    """PowerSGD at work; one bucket, with "sum" over the ranks.

    M = gradient + error    P = M Q --sum--> orthonormal P    Q = M^T P --sum--> gradient = P Q^T
                            dense   --sum--> dense            (own Q)   ------> error = M - P Q^T
    """

    casts_itself = True

    def __init__(self, config: PowerSGD, context: BindContext, *, whole_bucket: bool = False) -> None:
        self.name = type(config).__name__
        self.keeps_state = config.error_feedback or config.warm_start
        self._config = config
        self._step = context.step
        self._control_group = context.control_group
        self._comm_dtype = context.comm_dtype
        self._whole_bucket = whole_bucket
        self._mean = Mean(context.comm_dtype)
        self._error = ErrorFeedback()
        self._right: dict[str, Tensor] = {}  # matrix -> its right factor (rank, length), the last step's Q
        self._workspaces = PerBucket(self._make_workspace)
        self._not_finite: int | Tensor = 0
        self._numel_before = self._numel_after = 0

    def reduce(self, bucket: GradBucket) -> Phases:
        step = self._step()
        work = None if step < self._config.start_iter else self._workspaces.of(bucket)
        if work is not None:
            self._numel_before += work.numel
            self._numel_after += work.compressed_numel
        if work is None or not work.batches:
            return (yield from self._mean.reduce(bucket))
        # Of a gradient that is not there nothing is learned.
        unused = {name: self._right[name].clone() for name in bucket.unused if name in self._right}
        with self._error.preserve_unused(bucket):
            yield from self._compress(bucket, work, step)
        for name, factor in unused.items():
            self._right[name].copy_(factor)
        return None

    def _compress(self, bucket: GradBucket, work: PowerSGDWorkspace, step: int) -> Phases:
        config = self._config
        scale = 1.0 / bucket.divisor
        matrices = work.begin(bucket.buffer())
        error = work.views(self._error.of(bucket), "error") if config.error_feedback else None

        # First phase: left factors and what is dense. Errors are only read until all is known to be finite.
        right = work.starting_right(warm=config.warm_start, seed=config.seed, step=step).mul_(scale)
        for n, (batch, matrix) in enumerate(zip(work.batches, matrices, strict=True)):
            if error is not None:
                matrix.add_(error[n])
            torch.bmm(batch.right_view(right), matrix.transpose(1, 2), out=batch.left_view(work.left))
        yield requests.AllReduce(work.pack_first(scale))
        guard = work.unpack_first()
        if guard.known_false:  # on the CPU all ranks see the same sum and leave the rest out
            work.end(poison=True)
            self._count(guard)
            return None

        # Second phase: right factors.
        guard.fill_(work.left, 0.0)
        work.orthonormalize(config.orthogonalization_epsilon)
        for batch, matrix in zip(work.batches, matrices, strict=True):
            torch.bmm(batch.left_view(work.left), matrix, out=batch.right_view(work.own_right))
        yield requests.AllReduce(work.pack_second(scale))
        guard = work.unpack_second(scale, guard)
        self._count(guard)

        # The error is what was not sent; the result takes the place of the gradient.
        for n, (batch, matrix) in enumerate(zip(work.batches, matrices, strict=True)):
            left = batch.left_view(work.left)
            if error is not None:
                guard.keep_rest_(error[n], matrix, left, batch.right_view(work.own_right))
            write_product(matrix, left, batch.right_view(work.sum_right))
        work.end()
        return None

    def _count(self, guard: NonfiniteGuard) -> None:
        self._not_finite = self._not_finite + (int(guard.known_false) if guard.flag is None else ~guard.flag)

    def _make_workspace(self, bucket: GradBucket) -> PowerSGDWorkspace:
        config, found, offset = self._config, [], 0
        if self._whole_bucket:
            key = f"bucket {zlib.crc32(' '.join(bucket.names).encode()):08x}"
            found = [(key, 0, *near_square(bucket.buffer().numel()))]
        else:
            for name, gradient in zip(bucket.names, bucket.gradients(), strict=True):
                shape = None if gradient.is_complex() else matrix_shape(gradient)  # a complex matrix travels dense
                if shape is not None:
                    found.append((name, offset, *shape))
                offset += gradient.numel() * (2 if gradient.is_complex() else 1)
        slots = [
            MatrixSlot(key, offset, rows, cols, min(config.rank, rows, cols))
            for key, offset, rows, cols in found
            if worth_compressing(rows, cols, config.rank, config.min_compression_rate)
        ]
        dtype = narrower(bucket.buffer().dtype, self._comm_dtype)
        work = PowerSGDWorkspace(bucket, slots, dtype, batched=config.batch_same_shape)
        work.adopt(self._right, config.seed)
        return work

    def error_memory(self) -> Mapping[str, Tensor]:
        return self._error.residuals()

    def stats(self) -> dict[str, Any]:
        """Return how many elements went to collectives without and with compression, and the buckets not finite."""
        after = self._numel_after
        return {
            "numel_before": self._numel_before,
            "numel_after": after,
            "compression_rate": self._numel_before / after if after else 1.0,
            "steps_not_finite": int(self._not_finite),
        }

    def rescale(self, factor: float) -> None:
        self._error.rescale(factor)  # the right factors have no scale of their own

    def state_dict(self) -> dict[str, Any]:
        return self._state_over(self._control_group)

    def own_state_dict(self) -> dict[str, Any]:
        return self._state_over(None)

    def _state_over(self, group: comm.ProcessGroup | None) -> dict[str, Any]:
        content: dict[str, Any] = {"rank": self._config.rank, "error": self._error.state_dict(group)}
        content |= {"right": copy_to_cpu(self._right), "steps_not_finite": int(self._not_finite)}
        return tagged(self.name, content)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not state:
            return
        content = untagged(self.name, state)
        self._error.load_state_dict(content["error"])
        # Factors of another rank or size are drawn anew.
        self._right = {key: factor.clone() for key, factor in content["right"].items()}
        self._workspaces.clear()
        if self._whole_bucket and self._right and comm.rank(self._control_group) == 0:
            logger.warning(
                "BatchedPowerSGD resumes with all that it owes, but not exactly as a run that was not interrupted: its "
                "matrices are whole buckets, which are learned anew. PowerSGD resumes exactly."
            )
        self._not_finite = whole_number(content["steps_not_finite"])


class PowerSGDState(TorchDDPState):
    """The state that `powersgd_hook` and `batched_powersgd_hook` take; arguments as in torch's ``PowerSGDState``.

    It counts its own steps. On our reducer the declarations `PowerSGD` and `BatchedPowerSGD` are the better choice:
    they overlap the phases of several buckets. A pickle, or a copy, holds this rank's part of the state and no process
    group: it takes the default one at its first bucket.

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
        declared = PowerSGD(
            rank=matrix_approximation_rank,
            start_iter=start_powerSGD_iter,
            min_compression_rate=min_compression_rate,
            error_feedback=use_error_feedback,
            warm_start=warm_start,
            seed=random_seed,
            orthogonalization_epsilon=orthogonalization_epsilon,
            batch_same_shape=batch_tensors_with_same_shape,
        )
        super().__init__(declared, process_group)
        self._batched = BatchedPowerSGD(**{**vars(declared), "batch_same_shape": True})
        self._log_every = max(1, compression_stats_logging_frequency)
        self._next_log = start_powerSGD_iter

    def use(self, *, batched: bool) -> None:
        """Compress whole buckets as one matrix each, or matrix by matrix: one of them for good."""
        if batched and self.bound is None:
            self.hook = self._batched
        if batched != (self.hook is self._batched):
            raise RuntimeError("This PowerSGDState belongs to the other PowerSGD hook already; make one for each hook.")

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


def powersgd_hook(state: PowerSGDState, bucket: comm.TorchGradBucket) -> TensorFuture:
    """Run `PowerSGD` on a bucket, with both phases inside the call; by torch's contract.

    So with any number of buckets all ranks issue collectives in one order (torch's hook on gloo aborts with several).

    Example:
        >>> ddp_model.register_comm_hook(PowerSGDState(None, matrix_approximation_rank=2), powersgd_hook)
    """
    state.use(batched=False)
    return run_on_torch_ddp(state, bucket)


def batched_powersgd_hook(state: PowerSGDState, bucket: comm.TorchGradBucket) -> TensorFuture:
    """Run `BatchedPowerSGD` on a bucket; by torch's contract.

    Example:
        >>> ddp_model.register_comm_hook(PowerSGDState(None), batched_powersgd_hook)
    """
    state.use(batched=True)
    return run_on_torch_ddp(state, bucket)


add_short_name(SHORT_NAMES, "powersgd", PowerSGD)
add_short_name(SHORT_NAMES, "batched_powersgd", BatchedPowerSGD)
