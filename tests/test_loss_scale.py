"""A GradScaler's scale is one number on all ranks, whatever they find in their own gradients, and when they run out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

from lightning_ddp_hooks import DataParallel, comm
from lightning_ddp_hooks.averaging import PeriodicModelAverager
from lightning_ddp_hooks.averaging.loss_scale import SharedScale
from lightning_ddp_hooks.hooks import PostLocalSGD
from lightning_ddp_hooks.join import Join
from lightning_ddp_hooks.optim import PostLocalSGDOptimizer

pytestmark = pytest.mark.ranks


def make_scaler(**options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **{"init_scale": 64.0, "growth_interval": 3, **options})


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(3, 1)


def run_step(model: nn.Module, optimizer: Any, scaler: torch.amp.GradScaler, *, overflow: bool) -> None:
    optimizer.zero_grad()
    loss = model(torch.ones(2, 3)).square().mean() * (float("inf") if overflow else 1.0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def train_epochs(counts: tuple[int, ...], **options: Any) -> list[tuple[float, int]]:
    rank, found = dist.get_rank(), []
    model, scaler = DataParallel(make_model()), make_scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(2):
        with model.join(scaler=scaler if options.get("given") else None):
            for step in range(counts[rank]):
                run_step(model, optimizer, scaler, overflow=epoch == 0 and step in (4, 6) and rank == 0)
        state = scaler.state_dict()
        found.append((state["scale"], state["_growth_tracker"]))
    return found


@pytest.mark.parametrize("counts", [(9, 3), (9, 0)])
def test_a_rank_that_ran_out_goes_on_with_the_scale_of_the_others(counts: tuple[int, ...]) -> None:
    alone = make_scaler()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(2):
        for step in range(9):
            run_step(model, optimizer, alone, overflow=epoch == 0 and step in (4, 6))
    first, second = run_ranks(train_epochs, counts)
    assert first == second
    assert first[-1] == (alone.get_scale(), alone.state_dict()["_growth_tracker"])


def join_among_several_scalers() -> tuple[list[tuple[float, int]], int]:
    other = make_scaler()
    with pytest.warns(UserWarning, match="There are 2 GradScalers") if dist.get_rank() else pytest.warns():
        train_epochs((9, 3))
    return train_epochs((9, 3), given=True), len([other])


def test_among_several_scalers_the_one_that_is_meant_is_given() -> None:
    first, second = run_ranks(join_among_several_scalers)
    assert first == second


def reference(scale: float, overflows: list[bool], interval: int = 3) -> list[float]:
    """Return the scales after each step: an overflow is answered a step later, unless the scale has fallen since."""
    found, counted, sent = [], 0, None
    for overflow in overflows:
        earlier, sent = sent, (overflow, scale)
        if earlier is not None and earlier[0] and earlier[1] <= scale:
            scale, counted = scale / 2, 0
        else:
            counted += 1
            if counted == interval:
                scale, counted = scale * 2, 0
        found.append(scale)
    return found


def train_apart(overflows: list[tuple[int, ...]]) -> tuple[list[float], int]:
    model = make_model()
    scaler = make_scaler()
    averager = PeriodicModelAverager(period=4)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), averager, scaler=scaler)
    scales, moved = [], 0
    for ranks in overflows:
        before = model.weight.detach().clone()
        run_step(model, optimizer, scaler, overflow=comm.rank() in ranks)
        moved += not torch.equal(before, model.weight)
        scales.append(scaler.get_scale())
    return scales, moved


def test_ranks_that_train_for_themselves_have_one_scale() -> None:
    overflows = [(), (1,), (1,), (), (), (), (0, 1), (), (0,), (), (), (), (), ()]
    results = run_ranks(train_apart, overflows)
    assert [scales for scales, _ in results] == [reference(64.0, [bool(ranks) for ranks in overflows])] * 2
    averages = sum(step % 4 == 0 for step in range(len(overflows)))
    for rank, (_, moved) in enumerate(results):
        steps = sum(rank not in ranks for ranks in overflows)
        assert steps <= moved <= steps + averages  # only its own overflows keep a rank from a step


def train_apart_unevenly(counts: tuple[int, ...]) -> list[tuple[float, float]]:
    rank, found = comm.rank(), []
    scaler = make_scaler()
    model = DataParallel(make_model(), comm_hook=PostLocalSGD(start_local_sgd_iter=0, subgroup_size=1))
    local = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = PostLocalSGDOptimizer(local, PeriodicModelAverager(period=2), scaler=scaler)
    for epoch in range(2):
        with Join([model, optimizer], scaler=scaler):
            for step in range(counts[rank]):
                run_step(model, optimizer, scaler, overflow=step in (1, 5) and rank == epoch)
        found.append((scaler.get_scale(), model.module.weight.sum().item()))
    return found


@pytest.mark.parametrize("counts", [(8, 3), (0, 8)])
def test_the_scale_is_one_in_the_tail_of_local_training_too(counts: tuple[int, ...]) -> None:
    first, second = run_ranks(train_apart_unevenly, counts)
    assert first == second


def misuse(make: Callable[[], torch.amp.GradScaler | None]) -> str:
    model = make_model()
    scaler = make()
    try:
        optimizer = PostLocalSGDOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01), PeriodicModelAverager(period=1), scaler=scaler
        )
        run_step(model, optimizer, make_scaler() if scaler is None else scaler, overflow=False)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def other_interval() -> torch.amp.GradScaler:
    return make_scaler(growth_interval=3 + comm.rank())


def other_scale() -> torch.amp.GradScaler:
    return make_scaler(init_scale=2.0 ** comm.rank())


def one_rank_only() -> torch.amp.GradScaler | None:
    return make_scaler(enabled=comm.rank() == 0)


def none_given() -> None:
    return None


@pytest.mark.parametrize("make", [other_interval, other_scale, one_rank_only])
def test_scalers_that_differ_are_refused(make: Callable[[], Any]) -> None:
    assert all("different models or settings" in text for text in run_ranks(misuse, make))


def test_a_scaler_that_was_not_given_is_refused() -> None:
    assert all("averager, scaler=scaler" in text for text in run_ranks(misuse, none_given))


def watch_and_resume() -> list[list[float]]:
    whole, half, rest = make_scaler(), make_scaler(), make_scaler()
    overflows = [(1,), (), (0,), (0,), (), (1,), (), ()]
    found: list[list[float]] = []

    def train(scaler: torch.amp.GradScaler, state: list[float] | None, steps: list[tuple[int, ...]]) -> Any:
        shared = SharedScale(scaler, comm.resolve_group(None))
        shared.restore(state)
        shared.watch(lambda: True)
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for ranks in steps:
            run_step(model, optimizer, scaler, overflow=comm.rank() in ranks)
            found[-1].append(scaler.get_scale())
        state = shared.state()
        shared.close()
        assert "update" not in vars(scaler)
        return state

    found.append([])
    train(whole, None, overflows)
    found.append([])
    state = train(half, None, overflows[:4])
    rest.load_state_dict(half.state_dict())
    train(rest, state, overflows[4:])
    return found


def lack_gradients() -> list[float]:
    """Train with no gradient on rank 1 in steps 1 and 2, and an overflow on rank 0 in step 1."""
    model, scaler = make_model(), make_scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    shared, found = SharedScale(scaler, comm.resolve_group(None)), []
    shared.watch(lambda: True)
    for step in range(5):
        if comm.rank() == 1 and step in (1, 2):
            before = model.weight.detach().clone()
            optimizer.zero_grad()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(model.weight, before)
        else:
            run_step(model, optimizer, scaler, overflow=step == 1 and comm.rank() == 0)
        found.append(scaler.get_scale())
    shared.close()
    assert not {"update", "unscale_"} & vars(scaler).keys()
    return found


def test_a_rank_without_any_gradient_hears_of_the_overflow_of_another() -> None:
    assert run_ranks(lack_gradients) == [reference(64.0, [False, True, False, False, False])] * 2


def test_what_is_on_its_way_goes_into_a_checkpoint() -> None:
    first, second = run_ranks(watch_and_resume)
    assert first == second
    assert first[0] == first[1] == reference(64.0, [True, False, True, True, False, True, False, False])
