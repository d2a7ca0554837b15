"""Averaging itself: which tensors, and that layout, views and frozen parameters are left as they are."""

import averaging_case as case
import pytest
import torch
from ranks import run_ranks
from torch import nn

from lightning_ddp_hooks import DataParallel, comm
from lightning_ddp_hooks.averaging import DiLoCo, PeriodicModelAverager
from lightning_ddp_hooks.averaging.flat import FlatMean

pytestmark = pytest.mark.ranks


def mean_of_many_kinds():
    rank = comm.rank()
    group = comm.resolve_group(None)
    tensors = [
        torch.full((3, 2), float(rank)),
        torch.arange(24.0).view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last) * (rank + 1),
        torch.full((5,), 1.5, dtype=torch.bfloat16),
        torch.full((2,), 60000.0, dtype=torch.float16),
        torch.full((2,), complex(rank, -rank), dtype=torch.complex64),
        torch.zeros(0),
        torch.full((700,), float(rank), dtype=torch.float64),
    ]
    before = [(t.data_ptr(), t.stride()) for t in tensors]
    FlatMean(tensors, chunk_bytes=64).run(group)
    kept = before == [(t.data_ptr(), t.stride()) for t in tensors]
    elsewhere = [torch.empty_like(t) for t in tensors]
    FlatMean(tensors).run(group, into=elsewhere)
    return tensors, kept, elsewhere


def test_mean_keeps_layout_and_dtype():
    for tensors, kept, elsewhere in run_ranks(mean_of_many_kinds, world_size=3):
        assert kept
        expected = [
            torch.ones(3, 2),
            torch.arange(24.0).view(1, 2, 3, 4) * 2,
            torch.full((5,), 1.5, dtype=torch.bfloat16),
            torch.full((2,), 60000.0, dtype=torch.float16),  # the sum would be Inf in float16
            torch.full((2,), 1 - 1j, dtype=torch.complex64),
            torch.zeros(0),
            torch.ones(700, dtype=torch.float64),
        ]
        for found, other, right in zip(tensors, elsewhere, expected, strict=True):
            torch.testing.assert_close(found, right)
            torch.testing.assert_close(other, right)


def average_with_views(averager):
    model = case.make_model(torch.float32).to(memory_format=torch.channels_last)
    wrapped = DataParallel(model, gradient_as_bucket_view=True)
    bound = case.bind(averager, model)
    for step in range(3):
        case.loss_of(wrapped, comm.rank(), step).backward()
    facts = [(p.data_ptr(), p.stride(), p.grad.data_ptr()) for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(comm.rank())
    for _ in range(2):
        bound.average_parameters()
    same = facts == [(p.data_ptr(), p.stride(), p.grad.data_ptr()) for p in model.parameters()]
    channels_last = model[0].weight.is_contiguous(memory_format=torch.channels_last)
    wrapped.detach()
    return same, channels_last, case.snapshot(model)


@pytest.mark.parametrize("averager", [PeriodicModelAverager(period=1), DiLoCo(period=1)], ids=["periodic", "diloco"])
def test_averaging_keeps_parameters_strides_and_gradient_views(averager):
    results = run_ranks(average_with_views, averager)
    assert [result[:2] for result in results] == [(True, True)] * 2
    case.assert_equal(results[0][2], results[1][2])


def average_whatever_gradients_there_are():
    rank = comm.rank()
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)])
    model[2].requires_grad_(False)
    bound = case.bind(PeriodicModelAverager(period=1), model)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(rank)
    # Each rank has gradients for another layer: the ranks must flatten the same tensors all the same.
    model[rank](torch.ones(1, 2)).sum().backward()
    model[1].requires_grad_(False)  # has been trainable, may have drifted
    bound.average_parameters()
    model[2].requires_grad_(True)
    frozen = [layer.weight[0, 0].item() for layer in model]
    bound.average_parameters()
    return frozen, [layer.weight[0, 0].item() for layer in model]


def test_what_is_averaged_depends_on_what_was_trainable_and_not_on_gradients():
    results = run_ranks(average_whatever_gradients_there_are)
    assert results == [([0.5, 0.5, 0.0], [0.5] * 3), ([0.5, 0.5, 1.0], [0.5] * 3)]


def average_buffers(choice):
    model = nn.BatchNorm1d(2)
    model.register_buffer("replaced", torch.zeros(1))
    bound = case.bind(PeriodicModelAverager(period=1, average_buffers=choice), model)
    model.running_mean.fill_(comm.rank())
    model.replaced = torch.full((1,), float(comm.rank()))  # another tensor than at binding
    bound.average_parameters()
    return model.running_mean[0].item(), model.replaced.item()


@pytest.mark.parametrize(("choice", "expected"), [(True, [(0.5, 0.5)] * 2), (False, [(0.0, 0.0), (1.0, 1.0)])])
def test_buffers_by_choice(choice, expected):
    assert run_ranks(average_buffers, choice) == expected


def average_optimizer_state(choice):
    rank = comm.rank()
    model = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
    optimizer = torch.optim.Adam(model.parameters())
    bound = case.bind(PeriodicModelAverager(period=1, optimizer_state=choice), model, lambda: [optimizer])
    model[0](torch.full((1, 2), float(rank))).sum().backward()
    if rank == 1:  # rank 0 has no state for this layer
        model[1](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    bound.average_parameters()
    state = optimizer.state_dict()["state"]
    return state[0]["exp_avg"][0, 0].item(), state[0]["step"].item(), len(state), state.get(2, {}).get("exp_avg")


def test_optimizer_state_by_choice():
    none = run_ranks(average_optimizer_state, "none")
    averaged = run_ranks(average_optimizer_state, "averaged")
    assert [r[0] for r in none] == [0.0, pytest.approx(0.1)]
    assert [r[0] for r in averaged] == [pytest.approx(0.05)] * 2
    assert [r[1:3] for r in averaged] == [(1.0, 2), (1.0, 4)]
    assert torch.equal(averaged[1][3], none[1][3])
