"""What PowerSGD keeps for one bucket: its matrices, the memory of their factors, and the messages."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_ddp_hooks._compat import foreach_copy_
from lightning_ddp_hooks.hooks.error_feedback import residual_dtype
from lightning_ddp_hooks.hooks.low_rank import (
    MatrixBatch,
    MatrixSlot,
    Rows,
    gaps,
    left_blocks,
    make_batches,
    orthonormalize_,
    random_rows,
    write_rest,
)
from lightning_ddp_hooks.reducer.bucket import GradBucket

# Far below the rounding of a row of length one.
_TINY = 1e-20

_FLOAT16_MAX = torch.finfo(torch.float16).max


class NonfiniteGuard:
    """Whether a step's sums, which all ranks have alike, are finite: known to the host if it asks, else a tensor."""

    def __init__(self, summed: Tensor, before: NonfiniteGuard | None = None, *, ask: bool) -> None:
        flag = torch.isfinite(summed.sum())
        if before is not None and before.flag is not None:
            flag &= before.flag
        self.flag: Tensor | None = None if ask else flag
        self.known_false = ask and not bool(flag)

    def fill_(self, tensor: Tensor, value: float) -> None:
        """Fill ``tensor`` if the step is not finite."""
        if self.flag is not None:
            tensor.masked_fill_(~self.flag, value)
        elif self.known_false:
            tensor.fill_(value)

    def keep_rest_(self, error: Tensor, matrix: Tensor, left: Tensor, right: Tensor) -> None:
        """Write ``matrix - left.T @ right`` into ``error`` if the step is finite."""
        if self.flag is not None:  # the factors are zero if it is not
            self.copy_(error, matrix)
            error.baddbmm_(left.transpose(1, 2), right, alpha=-1)
        elif not self.known_false:
            write_rest(error, matrix, left, right)

    def copy_(self, target: Tensor, source: Tensor) -> None:
        """Copy if the step is finite."""
        if self.flag is not None:
            torch.where(self.flag, source, target, out=target)
        elif not self.known_false:
            target.copy_(source)


def asks_host(device: torch.device) -> bool:
    """Tell whether the host looks at whether values are finite; on a device it would have to wait for the answer."""
    return device.type == "cpu"


class PowerSGDWorkspace:
    """The matrices of a bucket, and the flat memory of their factors; rebuilt when other parameters lie in it."""

    def __init__(self, bucket: GradBucket, slots: list[MatrixSlot], comm_dtype: torch.dtype, *, batched: bool) -> None:
        buffer = bucket.buffer()
        self.numel = buffer.numel()
        self._ask = asks_host(buffer.device)
        self.batches: list[MatrixBatch] = make_batches(slots, batched=batched)
        self._slots = [slot for batch in self.batches for slot in batch.slots]
        self._gaps = gaps(slots, self.numel)
        dense_numel = self._gaps[-1].right.stop if self._gaps else 0
        left_numel = sum(slot.rank * slot.left for slot in slots)
        right_numel = sum(slot.rank * slot.right for slot in slots)
        self.compressed_numel = left_numel + right_numel + dense_numel

        # float16 and bfloat16 gradients are worked on in float32, in a copy.
        self._dtype, self._device = residual_dtype(buffer.dtype), buffer.device
        self._work = None if buffer.dtype is self._dtype else self._new(self.numel)
        self._buffer = buffer
        self._views: dict[str, tuple[int, list[Tensor]]] = {}
        if not slots:
            return

        # First message: left factors | dense.
        self._first = self._new(left_numel + dense_numel)
        self.left = self._first[:left_numel]
        self._dense = [gap.right_view(self._first[left_numel:]) for gap in self._gaps]
        # Second message: right factors. The own ones are needed for the error after the sum.
        self.own_right, self.sum_right, self._right, self._fresh = (self._new(right_numel) for _ in range(4))
        self._narrow = None
        if comm_dtype.itemsize < self._dtype.itemsize:
            self._narrow = (torch.empty_like(self._first, dtype=comm_dtype), self._right.to(comm_dtype))
        # A product of a matrix with a row of length one is at most so much larger than the matrix's elements; float16
        # factors are sent that much smaller, and cannot overflow where gradients do not. Powers of two lose nothing.
        bounds_by = comm_dtype is torch.float16
        self._left_bound = _power_above(max(slot.right for slot in slots)) if bounds_by else 1.0
        self._right_bound = _power_above(max(slot.left for slot in slots)) if bounds_by else 1.0
        self._rows = Rows([slot.right for slot in self._slots for _ in range(slot.rank)], self._device)
        self._left_blocks = list(left_blocks(self.batches, self.left))
        thin = all(slot.rank == 1 for slot in slots)
        self._left_rows = Rows([slot.left for slot in self._slots], self._device) if thin else None

    def _new(self, numel: int) -> Tensor:
        return torch.zeros(numel, dtype=self._dtype, device=self._device)

    def adopt(self, known: dict[str, Tensor], seed: int) -> None:
        """Begin with right factors of ``known`` where they fit, with random ones elsewhere; put ours into it."""
        if not self._slots:
            return
        sizes = [slot.rank * slot.right for slot in self._slots]
        for slot, fresh, factor in zip(self._slots, self._fresh.split(sizes), self._right.split(sizes), strict=True):
            shape = (slot.rank, slot.right)
            fresh.view(shape).copy_(random_rows(slot.key, *shape, seed, self._dtype))
            before, known[slot.key] = known.get(slot.key), factor.view(shape)
            known[slot.key].copy_(before if before is not None and before.shape == shape else fresh.view(shape))
        self._rows.normalize_(self._fresh)

    def begin(self, buffer: Tensor) -> list[Tensor]:
        """Return the matrices of the bucket, one tensor for each batch."""
        self._buffer = buffer
        flat = buffer if self._work is None else self._work.copy_(buffer)
        return self.views(flat, "gradient")

    def views(self, flat: Tensor, use: str) -> list[Tensor]:
        """Return the matrices (or the "dense" rest) of ``flat``; made anew only when it is another tensor."""
        known = self._views.get(use)
        if known is None or known[0] != flat.data_ptr():
            batches = self._gaps if use == "dense" else self.batches
            known = self._views[use] = (flat.data_ptr(), [batch.view(flat) for batch in batches])
        return known[1]

    def starting_right(self, *, warm: bool, seed: int, step: int) -> Tensor:
        """Return right factors with rows of length one to begin the step with."""
        start = self.own_right  # free until the second phase
        if warm:
            start.copy_(self._right)
            self._rows.normalize_or_replace_(start, self._fresh)
            # No element is exactly zero, so that each element of the matrix counts: one that is not finite shows.
            start.add_(_TINY)
        else:
            keys = ((f"{step} {slot.key}", slot) for slot in self._slots)
            flat = torch.cat([random_rows(key, s.rank, s.right, seed, self._dtype).view(-1) for key, s in keys])
            # Pinned, since the host would wait for a copy from other memory.
            start.copy_(flat if start.is_cpu else flat.pin_memory(), non_blocking=True)
            self._rows.normalize_(start)
        return start

    def pack_first(self, scale: float) -> Tensor:
        """Return the first message."""
        flat = self._buffer if self._work is None else self._work
        if self._dense:
            foreach_copy_(self._dense, self.views(flat, "dense"))
            self._first[self.left.numel() :].mul_(scale)
        if self._left_bound != 1.0:
            self.left.mul_(1.0 / self._left_bound)
        return self._first if self._narrow is None else self._narrow[0].copy_(self._first)

    def unpack_first(self) -> NonfiniteGuard:
        """Take up the sum of the first messages; tell whether all was finite."""
        if self._narrow is not None:
            self._first.copy_(self._narrow[0])
        if self._left_bound != 1.0:
            self.left.mul_(self._left_bound)
        return NonfiniteGuard(self._first, ask=self._ask)

    def orthonormalize(self, epsilon: float) -> None:
        """Make the left factors orthonormal."""
        if self._left_rows is not None:
            self._left_rows.normalize_(self.left, epsilon)
        else:
            for block in self._left_blocks:
                orthonormalize_(block, epsilon)

    def pack_second(self, scale: float) -> Tensor:
        """Return the second message."""
        if self._narrow is None:
            return self.sum_right.copy_(self.own_right)
        factor = scale / self._right_bound if self._right_bound != 1.0 else 1.0
        narrow = self._narrow[1].copy_(self.own_right if factor == 1.0 else self.own_right.mul_(factor))
        self.own_right.copy_(narrow)  # what was lost in rounding has not been sent and belongs to the error
        if factor != 1.0:
            self.own_right.mul_(1.0 / factor)
        return narrow

    def unpack_second(self, scale: float, before: NonfiniteGuard) -> NonfiniteGuard:
        """Take up the mean of the second messages, and keep it for the next step if it is finite."""
        if self._narrow is not None:
            self.sum_right.copy_(self._narrow[1])
        self.sum_right.mul_(scale if self._right_bound == 1.0 else self._right_bound)
        guard = NonfiniteGuard(self.sum_right, before, ask=self._ask)
        guard.copy_(self._right, self.sum_right)
        guard.fill_(self.own_right, 0.0)  # own or summed: a float16 message may overflow on some rank only
        guard.fill_(self.sum_right, math.nan)
        return guard

    def end(self, *, poison: bool = False) -> None:
        """Write what is not in the buffer yet: the dense part, and all of it if the work was done in a copy."""
        flat = self._buffer if self._work is None else self._work
        if poison:
            flat.fill_(math.nan)
        elif self._dense:
            foreach_copy_(self.views(flat, "dense"), self._dense)
        if self._work is not None:
            if self._buffer.dtype is torch.float16:  # an approximation, and what is owed, may pass its range
                self._work.clamp_(-_FLOAT16_MAX, _FLOAT16_MAX)
            self._buffer.copy_(self._work)


def _power_above(length: int) -> float:
    """Return the power of two at or above the square root of a length."""
    return float(2 ** math.ceil(math.log2(length) / 2))
