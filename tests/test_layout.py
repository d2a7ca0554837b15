"""Which gradient lies where: pure arithmetic, compared with torch's own rule."""

import sys

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_ddp_hooks.reducer.bucket import Bucket
from lightning_ddp_hooks.reducer.layout import UNLIMITED, BucketLayout, assign_buckets, initial_layout, rebuilt_layout

MIB = 1 << 20


def three_layers() -> list[nn.Parameter]:
    return list(nn.Sequential(*(nn.Linear(512, 512) for _ in range(3))).parameters())


def test_a_parameter_that_passes_the_limit_still_goes_in() -> None:
    assert assign_buckets(three_layers(), [MIB, MIB]) == [[0], [1, 2], [3, 4], [5]]


def test_one_unlimited_bucket_takes_all() -> None:
    assert assign_buckets(three_layers(), [UNLIMITED]) == [[0, 1, 2, 3, 4, 5]]


def test_buckets_are_reduced_in_reverse_order_of_registration() -> None:
    layouts = initial_layout(three_layers(), [MIB, MIB])
    assert [layout.indices for layout in layouts] == [(5,), (3, 4), (1, 2), (0,)]


def test_the_rebuild_follows_the_order_in_which_gradients_became_ready() -> None:
    layouts = rebuilt_layout(three_layers(), [5, 4, 3, 2, 1, 0], [MIB, MIB])
    assert [layout.indices for layout in layouts] == [(5, 4), (3, 2), (1, 0)]
    assert [layout.nbytes for layout in layouts] == [1050624] * 3


def test_parameters_with_different_keys_do_not_share_a_bucket() -> None:
    layouts = rebuilt_layout(three_layers(), [5, 4, 3, 2, 1, 0], [UNLIMITED], groups=["a", "b", "a", "b", "a", "b"])
    assert [layout.indices for layout in layouts] == [(5, 3, 1), (4, 2, 0)]


def test_the_bucket_that_is_complete_first_is_reduced_first() -> None:
    params = [nn.Parameter(torch.zeros(4, dtype=dtype)) for dtype in (torch.float32, torch.float64, torch.float32)]
    layouts = rebuilt_layout(params, [0, 1, 2], [UNLIMITED])
    assert [layout.indices for layout in layouts] == [(1,), (0, 2)]


@pytest.mark.parametrize(
    ("limits", "sparse", "message"),
    [([], None, "one or more limits"), ([0], None, "at least 1 byte"), ([1], [True], "Expected 6 entries in `sparse`")],
)
def test_bad_limits_and_flags_raise(limits: list[int], sparse: list[bool] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        assign_buckets(three_layers(), limits, sparse)


_DTYPES = st.sampled_from([torch.float32, torch.float64, torch.float16])


@given(
    shapes=st.lists(st.tuples(st.integers(0, 40), _DTYPES, st.booleans()), min_size=1, max_size=30),
    first=st.integers(1, 200),
    cap=st.integers(1, 400),
)
def test_the_rule_is_torchs(shapes: list[tuple[int, torch.dtype, bool]], first: int, cap: int) -> None:
    params = [torch.zeros(n, dtype=dtype) for n, dtype, _ in shapes]
    sparse = [flag for *_, flag in shapes]
    theirs, _ = dist._compute_bucket_assignment_by_size(params, [first, cap], sparse)
    assert sorted(assign_buckets(params, [first, cap], sparse)) == sorted(theirs)
    ours_unlimited = assign_buckets(params, [sys.maxsize])
    assert ours_unlimited == dist._compute_bucket_assignment_by_size(params, [sys.maxsize], [False] * len(params))[0]


def test_a_model_of_less_than_two_first_buckets_has_one_bucket() -> None:
    params = three_layers()  # of about 1 MiB each
    assert len(rebuilt_layout(params, range(6), [MIB, 25 * MIB])) == 2
    assert len(rebuilt_layout(params, range(3), [MIB, 25 * MIB])) == 2
    assert len(rebuilt_layout(params[1:], range(3), [MIB, 25 * MIB])) == 1
    assert len(rebuilt_layout(params[1:], range(3), [MIB, MIB // 4])) > 1


@pytest.mark.parametrize(
    "param",
    [
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(8, 4, 1, 1).to(memory_format=torch.channels_last),
        torch.zeros(3, 4).t(),
        torch.zeros(()),
        torch.zeros(0, 3),
        torch.zeros(2, 3, dtype=torch.complex64),
        torch.zeros(4, 1).expand(4, 3),
        torch.zeros(4, 6)[:, ::2],
    ],
    ids=["channels_last", "1x1", "transposed", "scalar", "empty", "complex", "expanded", "strided"],
)
def test_views_have_the_parameters_shape_and_strides_and_lie_in_the_buffer(param: torch.Tensor) -> None:
    before = torch.zeros(3, dtype=param.dtype)
    bucket = Bucket(BucketLayout.build([0, 1], [before, param]), [before, param], status=True)
    view = bucket.views[1]
    assert view.shape == param.shape
    if param.is_contiguous() or param.numel() == param.untyped_storage().nbytes() // param.element_size():
        assert view.stride() == param.stride()
    assert bucket.status_slot is not None
    for memory in (bucket.buffer, bucket.status_slot):
        memory.zero_()  # it is not cleared when it is made
    view.fill_(1)
    real = 2 if param.is_complex() else 1
    assert int(bucket.buffer.count_nonzero()) == param.numel()
    assert bucket.buffer.numel() == (3 + param.numel()) * real
    assert bucket.status_slot.tolist() == [0, 0]
    view.detach_()  # what zero_grad(set_to_none=False) does; raises on tracked views
