"""Where buckets lie in memory, and that a new layout takes the same memory."""

import torch
from torch import nn

from lightning_ddp_hooks.reducer.bucket import STATUS_NUMEL
from lightning_ddp_hooks.reducer.buffer_pool import ALIGNMENT, GradBufferPool
from lightning_ddp_hooks.reducer.layout import UNLIMITED, initial_layout, rebuilt_layout


def params() -> list[nn.Parameter]:
    kinds = [torch.float32, torch.bfloat16, torch.complex64, torch.float32, torch.float64, torch.complex64]
    return [nn.Parameter(torch.randn(7 + n, 5, dtype=torch.float64).to(dtype)) for n, dtype in enumerate(kinds)]


def test_a_rebuild_takes_the_same_memory_and_buckets_do_not_overlap() -> None:
    watched = params()
    pool = GradBufferPool()
    first = pool.place(initial_layout(watched, [UNLIMITED]), watched)
    memory = {bucket.comm_buffer.dtype: bucket.comm_buffer.untyped_storage().data_ptr() for bucket in first}
    for limit in (1, 300, UNLIMITED):
        buckets = pool.place(rebuilt_layout(watched, [5, 3, 4, 0, 1, 2], [limit]), watched)
        assert sorted(index for bucket in buckets for index in bucket.layout.indices) == list(range(6))
        assert [bucket.status_slot is not None for bucket in buckets] == [False] * (len(buckets) - 1) + [True]
        taken = []
        for bucket in buckets:
            assert bucket.comm_buffer.untyped_storage().data_ptr() == memory[bucket.comm_buffer.dtype]
            begin = bucket.comm_buffer.storage_offset() * bucket.comm_buffer.itemsize
            assert begin % ALIGNMENT == 0
            taken.append((bucket.comm_buffer.dtype.itemsize, begin, begin + bucket.comm_buffer.nbytes))
        for before, after in zip(sorted(taken), sorted(taken)[1:], strict=False):
            assert before[0] != after[0] or before[2] <= after[1]


def test_views_show_what_the_buffer_holds_wherever_it_lies() -> None:
    watched = params()
    for bucket in GradBufferPool().place(rebuilt_layout(watched, range(6), [1]), watched):
        (index,) = bucket.layout.indices
        bucket.views[0].copy_(watched[index])
        flat = watched[index].detach().flatten()
        assert torch.equal(bucket.buffer, torch.view_as_real(flat).flatten() if flat.is_complex() else flat)


def test_the_last_bucket_has_a_status_slot_behind_its_gradients() -> None:
    watched = params()
    *others, last = GradBufferPool().place(initial_layout(watched, [1]), watched)
    assert others
    assert all(bucket.status_slot is None for bucket in others)
    assert last.status_slot is not None
    assert last.status_slot.numel() == STATUS_NUMEL
    assert last.status_slot.data_ptr() == last.buffer.data_ptr() + last.buffer.nbytes


def test_gradients_keep_the_memory_that_the_pool_forgets() -> None:
    watched = params()[:1]
    pool = GradBufferPool()
    (old,) = pool.place(initial_layout(watched, [UNLIMITED]), watched)
    old.buffer.fill_(7)
    pool.forget()
    (new,) = pool.place(initial_layout(watched, [UNLIMITED]), watched)
    new.buffer.fill_(8)
    assert torch.equal(old.views[0], torch.full_like(old.views[0], 7))
