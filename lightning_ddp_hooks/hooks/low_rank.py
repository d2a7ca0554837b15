"""Low-rank approximation of matrices: which are worth it, how they lie, and the arithmetic; no state, no communication.

Factors are stored with the rank as the *outer* dimension: a matrix ``(rows, cols)`` is ``left.T @ right`` with
``left`` of shape ``(rank, rows)`` and ``right`` of shape ``(rank, cols)``. A product of a large matrix with a few
columns is 6 to 40 times slower on the CPU when those columns are interleaved in memory.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# From so many matrices on, Gram-Schmidt over all at once beats one QR call each (CPU, measured; 8 rows to 4608).
_MANY_MATRICES = 32

# On a device every step of Gram-Schmidt is a kernel, and a batched QR is many.
_DEVICE_GRAM_SCHMIDT_RANK = 8

# Up to this rank, and from this size (times the rank) on, sums of outer products beat a matrix product (CPU, measured:
# 0.4 to 0.9 of the time from 512 x 512 to 512 x 2048, 1.3 and more at 256 x 256).
_OUTER_RANK = 4
_OUTER_NUMEL = 1 << 17

# What is left of a row after those before it have been taken out is rounding noise below this part of its length.
_NOISE = 1e-5


@dataclass(frozen=True)
class MatrixSlot:
    """One matrix within a flat buffer; its rows are contiguous."""

    key: str  # name of the parameter, or whatever the state of the matrix is kept under
    offset: int
    rows: int
    cols: int
    rank: int  # of its approximation

    @property
    def left(self) -> int:
        """Length of the factor that is made orthonormal: the shorter side, since that costs less."""
        return min(self.rows, self.cols)

    @property
    def right(self) -> int:
        """Length of the other factor, which is kept from step to step."""
        return max(self.rows, self.cols)

    @property
    def numel(self) -> int:
        """Number of elements of the matrix."""
        return self.rows * self.cols


@dataclass(frozen=True)
class MatrixBatch:
    """Matrices of one shape that lie at equal distances, so that one strided view shows them all without a copy.

    buffer   ..[ M0 ].....[ M1 ].....[ M2 ]...        view (3, rows, cols), strides (distance, cols, 1)
    """

    slots: Sequence[MatrixSlot]  # in the order of the buffer
    distance: int  # from the beginning of one to that of the next
    left: slice  # its left factors among all left factors
    right: slice

    def view(self, flat: Tensor) -> Tensor:
        """Return the matrices within ``flat`` as ``(count, left, right)``, transposed where they have more rows."""
        first = self.slots[0]
        shape, strides = (len(self.slots), first.rows, first.cols), (self.distance, first.cols, 1)
        view = flat.as_strided(shape, strides, flat.storage_offset() + first.offset)
        return view if first.rows <= first.cols else view.transpose(1, 2)

    def left_view(self, factors: Tensor) -> Tensor:
        """Return this batch's part of all left factors, ``(count, rank, left)``."""
        return factors[self.left].view(len(self.slots), self.slots[0].rank, -1)

    def right_view(self, factors: Tensor) -> Tensor:
        """Return this batch's part of all right factors, ``(count, rank, right)``."""
        return factors[self.right].view(len(self.slots), self.slots[0].rank, -1)


def make_batches(slots: Sequence[MatrixSlot], *, batched: bool = True) -> list[MatrixBatch]:
    """Put matrices of one shape at equal distances together (if ``batched``), in the order of `left_blocks`."""
    ordered = sorted(slots, key=lambda s: (s.rank, s.left, s.right, s.rows, s.offset))
    return _in_runs(ordered, batched=batched)


def _in_runs(slots: Sequence[MatrixSlot], *, batched: bool = True) -> list[MatrixBatch]:
    runs: list[list[MatrixSlot]] = []
    for slot in slots:
        if batched and runs and _continues(runs[-1], slot):
            runs[-1].append(slot)
        else:
            runs.append([slot])
    batches, left, right = [], 0, 0
    for run in runs:
        first, start = run[0], (left, right)
        left, right = left + len(run) * first.rank * first.left, right + len(run) * first.rank * first.right
        distance = run[1].offset - first.offset if len(run) > 1 else first.numel
        batches.append(MatrixBatch(run, distance, slice(start[0], left), slice(start[1], right)))
    return batches


def _continues(run: Sequence[MatrixSlot], slot: MatrixSlot) -> bool:
    last = run[-1]
    same = (last.rank, last.rows, last.cols) == (slot.rank, slot.rows, slot.cols)
    return same and (len(run) == 1 or slot.offset - last.offset == last.offset - run[-2].offset)


def gaps(slots: Sequence[MatrixSlot], numel: int) -> list[MatrixBatch]:
    """Return what lies between the matrices of a buffer, as matrices of one row; `right` tells where it is packed."""
    pieces, position = [], 0
    for slot in [*sorted(slots, key=lambda s: s.offset), MatrixSlot("", numel, 0, 0, 0)]:
        if slot.offset > position:
            pieces.append(MatrixSlot("", position, 1, slot.offset - position, 1))
        position = slot.offset + slot.numel
    return _in_runs(pieces)


def left_blocks(batches: Sequence[MatrixBatch], factors: Tensor) -> Iterator[Tensor]:
    """Yield all left factors as few tensors ``(count, rank, left)``: those of one shape follow one another."""
    for (rank, left), same in itertools.groupby(batches, key=lambda b: (b.slots[0].rank, b.slots[0].left)):
        joined = list(same)
        yield factors[joined[0].left.start : joined[-1].left.stop].view(-1, rank, left)


def worth_compressing(rows: int, cols: int, rank: int, min_rate: float) -> bool:
    """Tell whether the factors take less than ``1 / min_rate`` of the matrix."""
    return (rows + cols) * min(rank, rows, cols) * min_rate < rows * cols


def matrix_shape(param: Tensor) -> tuple[int, int] | None:
    """Return the shape of a gradient as a matrix as it lies in memory, or None for a vector or scalar.

    The outermost dimension in memory gives the rows: (out, in * height * width) for any convolution.
    """
    sizes = [(stride, size) for stride, size in zip(param.stride(), param.shape, strict=True) if size > 1]
    if len(sizes) < 2 or param.numel() == 0:
        return None
    rows = max(sizes)[1]
    return rows, param.numel() // rows


def orthonormalize_(block: Tensor, epsilon: float = 0.0) -> None:
    """Make the rows of each matrix of ``block``, shape ``(count, rank <= length, length)``, orthonormal in place.

    Rows that depend on those before them become zero, or whatever keeps the rows orthonormal. ``epsilon`` is added to
    each row's length before it is divided by it (0 is exact).
    """
    count, rank, _ = block.shape
    if rank == 1:
        _normalize_rows_(block, epsilon)
    elif epsilon > 0 or (rank <= _DEVICE_GRAM_SCHMIDT_RANK if not block.is_cpu else count >= _MANY_MATRICES):
        _gram_schmidt_(block, epsilon)
    else:
        block.copy_(torch.linalg.qr(block.transpose(1, 2)).Q.transpose(1, 2))


def _gram_schmidt_(block: Tensor, epsilon: float) -> None:
    """Take what rows have in common with those before them out, twice (once is not enough for nearly parallel rows)."""
    for index in range(block.shape[1]):
        row = block[:, index : index + 1]
        if index:
            done = block[:, :index]
            length = torch.linalg.vector_norm(row, dim=2, keepdim=True)
            for _ in range(2):
                row.baddbmm_(torch.bmm(row, done.transpose(1, 2)), done, alpha=-1)
            left = torch.linalg.vector_norm(row, dim=2, keepdim=True)
            row.mul_(left > _NOISE * length)
        _normalize_rows_(row, epsilon)


def _normalize_rows_(block: Tensor, epsilon: float) -> None:
    """Divide each row by its length in place; rows of zeros stay."""
    length = torch.linalg.vector_norm(block, dim=-1, keepdim=True).add_(epsilon)
    block.div_(length.masked_fill_(length == 0, 1.0))


class Rows:
    """Rows of various lengths, one behind the other in a flat tensor: what is done to all of them in a few kernels."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self._lengths = torch.tensor(lengths, dtype=torch.int64, device=device)
        self._row_of = torch.repeat_interleave(torch.arange(len(lengths), device=device), self._lengths)

    def normalize_(self, flat: Tensor, epsilon: float = 0.0) -> None:
        """Divide each row by its length in place; rows of zeros stay."""
        flat.mul_(self._inverse_lengths(flat, epsilon).index_select(0, self._row_of))

    def normalize_or_replace_(self, flat: Tensor, substitute: Tensor) -> None:
        """The same, but rows of ``substitute`` take the place of rows of zeros, which would stay zero forever."""
        inverse = self._inverse_lengths(flat, 0.0)
        flat.mul_(inverse.index_select(0, self._row_of))
        flat.addcmul_(substitute, (inverse == 0).to(flat.dtype).index_select(0, self._row_of))

    def _inverse_lengths(self, flat: Tensor, epsilon: float) -> Tensor:
        # `unsafe` leaves out a check of the lengths for which the host would have to wait
        length = torch.segment_reduce(flat * flat, "sum", lengths=self._lengths, unsafe=True).sqrt_()
        return torch.where(length > 0, 1.0 / (length + epsilon), 0.0)


def write_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Write ``left.T @ right`` into ``out``; all are batches."""
    if _as_outer_products(out, left):
        torch.mul(left[:, 0].unsqueeze(2), right[:, 0].unsqueeze(1), out=out)
        for n in range(1, left.shape[1]):
            out.addcmul_(left[:, n].unsqueeze(2), right[:, n].unsqueeze(1))
    else:
        torch.bmm(left.transpose(1, 2), right, out=out)


def write_rest(out: Tensor, matrix: Tensor, left: Tensor, right: Tensor) -> None:
    """Write ``matrix - left.T @ right`` into ``out``; all are batches."""
    if _as_outer_products(out, left):
        torch.addcmul(matrix, left[:, 0].unsqueeze(2), right[:, 0].unsqueeze(1), value=-1, out=out)
        for n in range(1, left.shape[1]):
            out.addcmul_(left[:, n].unsqueeze(2), right[:, n].unsqueeze(1), value=-1)
    else:
        torch.baddbmm(matrix, left.transpose(1, 2), right, alpha=-1, out=out)


def _as_outer_products(out: Tensor, left: Tensor) -> bool:
    """Tell whether to add up outer products: on the CPU, large products of few rows are slow as matrix products."""
    rank = left.shape[1]
    return out.is_cpu and rank <= _OUTER_RANK and out.shape[1] * out.shape[2] >= _OUTER_NUMEL * rank


def random_rows(key: str, rank: int, length: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Return normal numbers, shape ``(rank, length)``, on the CPU; they depend on ``seed`` and ``key`` only."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {key}".encode()))  # it looks at 32 bits
    return torch.randn(rank, length, generator=generator, dtype=dtype)


def near_square(numel: int) -> tuple[int, int]:
    """Return rows and columns of the squarest matrix of ``numel`` elements with less than a row left over."""
    rows = max(1, math.isqrt(numel))
    return rows, numel // rows
