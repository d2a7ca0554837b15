"""PowerSGD: gradients travel as two thin factors of a low-rank approximation, and what that misses is sent later."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_hooks.hooks.allreduce import Mean, narrower
from lightning_ddp_hooks.hooks.contract import BindContext, BoundHook, Phases, ReplicatingHook, require_types
from lightning_ddp_hooks.hooks.error_feedback import ErrorFeedback
from lightning_ddp_hooks.hooks.low_rank import MatrixSlot, matrix_shape, near_square, worth_compressing, write_product
from lightning_ddp_hooks.hooks.powersgd_workspace import NonfiniteGuard, PowerSGDWorkspace
from lightning_ddp_hooks.hooks.registry import SHORT_NAMES
from lightning_ddp_hooks.hooks.state import copy_to_cpu, tagged, untagged, whole_number
from lightning_ddp_hooks.hooks.workspace import PerBucket
from lightning_ddp_hooks.reducer import requests
from lightning_ddp_hooks.reducer.bucket import GradBucket


@dataclass(frozen=True, kw_only=True)
class PowerSGD(ReplicatingHook):
    """Send a rank-``r`` approximation of each gradient matrix, and keep what it misses for the next step.

    A matrix M (rows x cols) is sent as P (rows x r) and Q (cols x r): one step of power iteration, that begins where
    the last one ended. Vectors, and matrices that would not shrink enough, travel dense, together with the Ps.

    Sends ``r * (rows + cols)`` elements for each matrix in place of ``rows * cols``; two collectives per bucket.

    Args:
        rank: of the approximation. 1 to 4 is usual; a language model may need up to 32.
        start_iter: training step at which compression begins; the mean is exact before it. The beginning of training is
            the most sensitive to error, so about a tenth of all steps is a good choice. May be 0.
        min_compression_rate: a matrix is compressed only if that makes it smaller than ``1 / min_compression_rate``.
        error_feedback: add what was not sent to the next gradient. Without it the result is biased.
        warm_start: begin with the last step's Q. Without it Q is random in each step, and the approximation worse.
        seed: of the first Q.
        orthogonalization_epsilon: added to the length of each column of P before it is divided by it; columns of zeros
            need none.
        batch_same_shape: work on matrices of one shape in one operation where they lie at equal distances in the
            bucket.

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

    rank: int = 1
    start_iter: int = 1000
    min_compression_rate: float = 2.0
    error_feedback: bool = True
    warm_start: bool = True
    seed: int = 0
    orthogonalization_epsilon: float = 0.0
    batch_same_shape: bool = True

    def __post_init__(self) -> None:
        """Check types and ranges."""
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
            raise ValueError(
                f"Expected `orthogonalization_epsilon` of at least 0, got {self.orthogonalization_epsilon}."
            )

    def bind(self, context: BindContext) -> BoundHook:
        """Bind the hook."""
        return BoundPowerSGD(self, context)


@dataclass(frozen=True, kw_only=True)
class BatchedPowerSGD(PowerSGD):
    """PowerSGD on the whole bucket as one near-square matrix: the least to compute, and less accurate.

    Rows of that matrix have nothing to do with each other, so a higher rank helps less than with `PowerSGD`; use rank
    1. What does not fit into the matrix (less than a row) travels dense, instead of padding. The matrices follow the
    buckets, which a resumed run learns anew: nothing that is owed gets lost, but the run is not repeated exactly.

    Sends about ``2 * rank * sqrt(numel)`` elements for a bucket of ``numel``.

    Args:
        rank: see `PowerSGD`, as for all others.
        start_iter: training step at which compression begins.
        min_compression_rate: below it the bucket travels dense.
        error_feedback: add what was not sent to the next gradient.
        warm_start: begin with the last step's Q.
        seed: of the first Q.
        orthogonalization_epsilon: added to the length of each column of P.
        batch_same_shape: has no meaning here, since a bucket is one matrix; leave it.

    Example:
        >>> Trainer(strategy=DDPHooksStrategy(comm_hook=BatchedPowerSGD(start_iter=500)))
    """

    def __post_init__(self) -> None:
        """Check the ranges."""
        super().__post_init__()
        if not self.batch_same_shape:
            raise ValueError(
                "`batch_same_shape` has no meaning for BatchedPowerSGD: a bucket is one matrix. Leave it out."
            )

    def bind(self, context: BindContext) -> BoundHook:
        """Bind the hook."""
        return BoundPowerSGD(self, context, whole_bucket=True)


class BoundPowerSGD(BoundHook):
    """PowerSGD at work.

    One bucket ("sum" is over the ranks):

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
        self._numel_before = 0
        self._numel_after = 0

    def reduce(self, bucket: GradBucket) -> Phases:
        """Average the bucket: exactly before the first step of compression, approximately from then on."""
        step = self._step()
        if step < self._config.start_iter:
            return (yield from self._mean.reduce(bucket))
        work = self._workspaces.of(bucket)
        self._numel_before += work.numel
        self._numel_after += work.compressed_numel
        if not work.batches:
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
        guard.suppress_(work.left)
        work.orthonormalize(config.orthogonalization_epsilon)
        for batch, matrix in zip(work.batches, matrices, strict=True):
            torch.bmm(batch.left_view(work.left), matrix, out=batch.right_view(work.own_right))
        yield requests.AllReduce(work.pack_second())
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
        """Count the step if it was not finite."""
        self._not_finite = self._not_finite + (int(guard.known_false) if guard.flag is None else ~guard.flag)

    def _make_workspace(self, bucket: GradBucket) -> PowerSGDWorkspace:
        dtype = narrower(bucket.buffer().dtype, self._comm_dtype)
        work = PowerSGDWorkspace(bucket, self._slots(bucket), dtype, batched=self._config.batch_same_shape)
        work.adopt(self._right, self._config.seed)
        return work

    def _slots(self, bucket: GradBucket) -> list[MatrixSlot]:
        """Find the matrices in the bucket that are worth it."""
        rank, rate = self._config.rank, self._config.min_compression_rate
        if self._whole_bucket:
            rows, cols = near_square(bucket.buffer().numel())
            key = f"bucket {zlib.crc32(' '.join(bucket.names).encode()):08x}"
            found = [(key, 0, rows, cols)]
        else:
            found, offset = [], 0
            for name, gradient in zip(bucket.names, bucket.gradients(), strict=True):
                shape = None if gradient.is_complex() else matrix_shape(gradient)  # a complex matrix travels dense
                if shape is not None:
                    found.append((name, offset, *shape))
                offset += gradient.numel() * (2 if gradient.is_complex() else 1)
        return [
            MatrixSlot(key, offset, rows, cols, min(rank, rows, cols))
            for key, offset, rows, cols in found
            if worth_compressing(rows, cols, rank, rate)
        ]

    def stats(self) -> dict[str, Any]:
        """Return how much was compressed, and how many steps were left out of the residuals.

        Returns:
            ``numel_before`` and ``numel_after`` (elements that would have been and were handed to collectives since
            compression began), ``compression_rate``, ``steps_not_finite`` (buckets that were not finite).
        """
        after = self._numel_after
        return {
            "numel_before": self._numel_before,
            "numel_after": after,
            "compression_rate": self._numel_before / after if after else 1.0,
            "steps_not_finite": int(self._not_finite),
        }

    def rescale(self, factor: float) -> None:
        """Multiply the errors; the right factors have no scale of their own."""
        self._error.rescale(factor)

    def state_dict(self) -> dict[str, Any]:
        """Return the mean error and the right factors by name; collective."""
        return tagged(
            self.name,
            {
                "rank": self._config.rank,
                "error": self._error.state_dict(self._control_group),
                "right": copy_to_cpu(self._right),
                "steps_not_finite": int(self._not_finite),
            },
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore errors and factors; factors of another rank or size are drawn anew."""
        if not state:
            return
        content = untagged(self.name, state)
        self._error.load_state_dict(content["error"])
        self._right = {key: factor.clone() for key, factor in content["right"].items()}
        self._workspaces.clear()
        self._not_finite = whole_number(content["steps_not_finite"])


SHORT_NAMES["powersgd"] = PowerSGD
SHORT_NAMES["batched_powersgd"] = BatchedPowerSGD
