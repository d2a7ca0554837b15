"""Low-rank arithmetic by itself: where matrices lie, orthonormal rows, products."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_ddp_hooks.hooks import low_rank
from lightning_ddp_hooks.hooks.low_rank import (
    MatrixSlot,
    Rows,
    gaps,
    left_blocks,
    make_batches,
    matrix_shape,
    near_square,
    orthonormalize_,
    random_rows,
    worth_compressing,
    write_product,
    write_rest,
)


def layout(shapes: list[tuple[int, int, int]], rank: int = 2) -> tuple[list[MatrixSlot], int]:
    """Matrices with so many other elements before each."""
    slots, offset = [], 0
    for number, (before, rows, cols) in enumerate(shapes):
        offset += before
        slots.append(MatrixSlot(f"m{number}", offset, rows, cols, min(rank, rows, cols)))
        offset += rows * cols
    return slots, offset + 3


SHAPES = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([2, 3]), st.sampled_from([2, 5])), max_size=8)


@given(SHAPES, st.booleans())
@settings(deadline=None, max_examples=60)
def test_batches_show_each_matrix_once_and_gaps_the_rest(shapes: list[tuple[int, int, int]], batched: bool) -> None:
    slots, numel = layout(shapes)
    flat = torch.arange(numel, dtype=torch.float64)
    seen = []
    for batch in make_batches(slots, batched=batched):
        view = batch.view(flat)
        assert view.data_ptr() == flat[batch.slots[0].offset :].data_ptr()
        for slot, matrix in zip(batch.slots, view, strict=True):
            its_own = flat[slot.offset : slot.offset + slot.numel].view(slot.rows, slot.cols)
            assert torch.equal(matrix, its_own if slot.rows <= slot.cols else its_own.T)
        seen += view.flatten().tolist()
    packed = []
    for gap in gaps(slots, numel):
        packed += list(range(numel))[gap.right]
        seen += gap.view(flat).flatten().tolist()
    assert packed == list(range(len(packed)))
    assert sorted(seen) == flat.tolist()


@given(SHAPES)
@settings(deadline=None, max_examples=40)
def test_factors_lie_one_behind_the_other_and_blocks_show_all_left_ones(shapes: list[tuple[int, int, int]]) -> None:
    slots, _ = layout(shapes)
    batches = make_batches(slots)
    left = torch.arange(sum(s.rank * s.left for s in slots), dtype=torch.float64)
    right = torch.arange(sum(s.rank * s.right for s in slots), dtype=torch.float64)
    assert [x for b in batches for x in b.left_view(left).flatten().tolist()] == left.tolist()
    assert [x for b in batches for x in b.right_view(right).flatten().tolist()] == right.tolist()
    assert [x for block in left_blocks(batches, left) for x in block.flatten().tolist()] == left.tolist()


def test_equal_layers_make_one_batch_and_one_gap() -> None:
    slots, numel = layout([(4, 8, 8)] * 1000)
    assert len(make_batches(slots)) == 1
    assert len(gaps(slots[:-1], slots[-1].offset)) == 1
    assert numel == 1000 * 68 + 3


@pytest.mark.parametrize("count", [1, 40])  # below and above the number from which Gram-Schmidt takes over
@pytest.mark.parametrize("rank", [1, 2, 4, 7])
def test_rows_become_orthonormal_and_span_the_same(count: int, rank: int) -> None:
    block = torch.randn(count, rank, 9) * torch.logspace(-12, 6, rank).view(-1, 1)
    before = block.double()
    orthonormalize_(block)
    torch.testing.assert_close(block @ block.mT, torch.eye(rank).expand(count, -1, -1), rtol=0, atol=1e-5)
    q = block.double()
    rest = before - before @ q.mT @ q
    assert (rest.norm(dim=2) <= 1e-5 * before.norm(dim=2)).all()


@pytest.mark.parametrize("count", [1, 40])
def test_dependent_rows_leave_an_orthogonal_projection(count: int) -> None:
    row = torch.randn(count, 1, 50)
    block = torch.cat([row, -3 * row, torch.zeros_like(row), torch.randn(count, 1, 50)], dim=1)
    before = block.clone()
    orthonormalize_(block)
    gram = block @ block.mT
    torch.testing.assert_close(gram @ gram, gram, rtol=0, atol=1e-5)  # no direction counts twice
    torch.testing.assert_close(before @ block.mT @ block, before, rtol=0, atol=1e-4)


@pytest.mark.parametrize("shape", [(1, 3, 5), (4, 300, 200), (1, 600, 900)])
@pytest.mark.parametrize("rank", [1, 2, 4, 6])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_are_the_same_on_both_ways(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int], rank: int, transposed: bool
) -> None:
    count, rows, cols = shape
    left, right = torch.randn(count, rank, rows), torch.randn(count, rank, cols)
    matrix = torch.randn(count, cols, rows).mT if transposed else torch.randn(shape)
    expected = (left.double().mT @ right.double()).float()
    for outer_numel in (0, 1 << 40):
        monkeypatch.setattr(low_rank, "_OUTER_NUMEL", outer_numel)
        out = torch.full_like(matrix, math.nan)
        write_product(out, left, right)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        write_rest(out.fill_(math.nan), matrix, left, right)
        torch.testing.assert_close(out, matrix - expected, rtol=1e-5, atol=1e-5)


def test_rows_of_various_lengths_are_normalized_at_once() -> None:
    lengths = [3, 1, 5]
    flat = torch.tensor([3.0, 0, 4, 0, 1, 1, 1, 1, 0])
    rows = Rows(lengths, flat.device)
    normalized = flat.clone()
    rows.normalize_(normalized)
    assert normalized.tolist() == pytest.approx([0.6, 0, 0.8, 0, 0.5, 0.5, 0.5, 0.5, 0])
    rows.normalize_or_replace_(flat, torch.full((9,), 7.0))
    assert flat.tolist() == pytest.approx([0.6, 0, 0.8, 7, 0.5, 0.5, 0.5, 0.5, 0])


def strided(shape: tuple[int, ...], memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    return torch.zeros(shape).to(memory_format=memory_format)


@pytest.mark.parametrize(
    ("param", "expected"),
    [
        (strided((4, 6)), (4, 6)),
        (strided((4, 6)).T, (4, 6)),
        (strided((8, 3, 2, 2)), (8, 12)),
        (strided((8, 3, 2, 2), torch.channels_last), (8, 12)),
        (strided((8, 1, 1, 1)), None),
        (strided((7,)), None),
        (strided(()), None),
        (strided((0, 4)), None),
    ],
)
def test_a_gradient_is_a_matrix_as_it_lies_in_memory(param: Tensor, expected: tuple[int, int] | None) -> None:
    assert matrix_shape(param) == expected


def test_what_is_worth_compressing_is_smaller_by_the_rate() -> None:
    assert worth_compressing(100, 100, 2, min_rate=20)
    assert not worth_compressing(100, 100, 2, min_rate=25)
    assert not worth_compressing(1, 100, 1, min_rate=1)


@pytest.mark.parametrize("numel", [1, 2, 3, 17, 1024, 10_007])
def test_the_near_square_leaves_less_than_a_row(numel: int) -> None:
    rows, cols = near_square(numel)
    assert 0 <= numel - rows * cols < rows
    assert abs(rows - cols) <= 2


def test_random_rows_depend_on_seed_and_key_only() -> None:
    torch.manual_seed(1)
    first = random_rows("a.weight", 2, 5, seed=3, dtype=torch.float32)
    torch.manual_seed(2)
    assert torch.equal(first, random_rows("a.weight", 2, 5, seed=3, dtype=torch.float32))
    assert not torch.equal(first, random_rows("b.weight", 2, 5, seed=3, dtype=torch.float32))
    assert not torch.equal(first, random_rows("a.weight", 2, 5, seed=-4, dtype=torch.float32))
