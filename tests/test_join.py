"""Uneven inputs in plain PyTorch: against one process that trains on the union of each step's batches."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader, IterableDataset

from lightning_ddp_hooks import DataParallel, comm
from lightning_ddp_hooks.hooks import AllReduce, PowerSGD
from lightning_ddp_hooks.join import Join, Joinable, JoinHook
from lightning_ddp_hooks.join.agreement import StepAgreement
from lightning_ddp_hooks.join.loader import JoinLoader, LoaderContext

COUNTS = [(7, 5, 2), (2, 5, 7), (0, 4, 2)]
WORLD = 3


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def batch(rank: int, index: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * rank + index), dtype=torch.float64)
    return x, x.sin().sum(1, keepdim=True)


def loss(model: nn.Module, rank: int, index: int) -> Tensor:
    x, y = batch(rank, index)
    return (model(x) - y).square().mean()


def reference(counts: Sequence[int], by_world_size: bool, accumulate: int = 1) -> dict[str, Tensor]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for index in range(max(counts)):
        active = [rank for rank, count in enumerate(counts) if index < count]
        total = sum(loss(model, rank, index) for rank in active)
        (total / (WORLD if by_world_size else len(active))).backward()
        if (index + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def train(counts: Sequence[int], hook: Any, by_world_size: bool, accumulate: int, **settings: Any) -> dict[str, Tensor]:
    rank = dist.get_rank()
    model = DataParallel(make_model(), comm_hook=hook, bucket_cap_mb=1e-4, first_bucket_mb=1e-4, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with model.join(by_world_size):
        for index in range(counts[rank]):
            last = (index + 1) % accumulate == 0
            if last:
                loss(model, rank, index).backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                with model.no_sync():
                    loss(model, rank, index).backward()
    model.detach()
    return copy.deepcopy(model.module.state_dict())


HOOKS = {
    "none": None,
    "AllReduce": AllReduce(),
    "torch": (None, allreduce_hook),
    "PowerSGD": PowerSGD(rank=6, start_iter=0, min_compression_rate=0.01),
}


def train_all(cases: Sequence[tuple[Sequence[int], str, bool, int, dict[str, Any]]]) -> list[dict[str, Tensor]]:
    return [
        train(counts, HOOKS[hook], by_world, every, **settings) for counts, hook, by_world, every, settings in cases
    ]


@pytest.mark.ranks
def test_gradients_are_those_of_the_union_of_batches_under_every_hook() -> None:
    cases: list[Any] = [
        (counts, hook, by_world, 1, {})
        for counts, hook, by_world in [
            (COUNTS[0], "none", True),
            (COUNTS[1], "none", False),
            (COUNTS[2], "AllReduce", False),
            (COUNTS[0], "torch", False),
            (COUNTS[1], "torch", True),
            (COUNTS[2], "PowerSGD", False),
        ]
    ]
    cases += [
        ((7, 5, 2), "none", False, 1, {"find_unused_parameters": True}),
        ((0, 4, 2), "none", True, 1, {"static_graph": True}),
        ((2, 5, 7), "none", True, 1, {"gradient_as_bucket_view": False}),
        ((8, 4, 2), "none", True, 2, {}),
        ((8, 5, 2), "AllReduce", True, 2, {}),
    ]
    for states in run_ranks(train_all, cases, world_size=WORLD):
        for (counts, hook, by_world, every, _), state in zip(cases, states, strict=True):
            expected = reference(counts, by_world, every)
            for name, value in state.items():
                torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-12, msg=f"{counts} {hook} {name}")


def train_norm() -> dict[str, Tensor]:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DataParallel(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)).double())
    counts = (1, 3, 5)
    with model.join():
        for index in range(counts[rank]):
            loss(model, rank, index).backward()
    return copy.deepcopy(model.module.state_dict())


@pytest.mark.ranks
def test_buffers_come_from_a_rank_that_still_has_data() -> None:
    norm = nn.BatchNorm1d(4).double()
    # Before each forward all take the buffers of the lowest rank that takes part in it.
    for rank, index in ((1, 0), (1, 1), (2, 2), (2, 3), (2, 4)):
        norm(batch(rank, index)[0])
    for state in run_ranks(train_norm, world_size=WORLD):
        torch.testing.assert_close(state["0.running_mean"], norm.running_mean)


def throw() -> tuple[int, str]:
    rank, steps = dist.get_rank(), 0
    model = DataParallel(make_model())
    with pytest.raises(RuntimeError, match="exhausted") as caught, model.join(throw_on_early_termination=True):  # noqa: PT012
        for index in range((2, 5, 7)[rank]):
            loss(model, rank, index).backward()
            steps += 1
    return steps, str(caught.value)


@pytest.mark.ranks
def test_every_rank_raises_before_the_first_uneven_step() -> None:
    results = run_ranks(throw, world_size=WORLD)
    assert [steps for steps, _ in results] == [2, 2, 2]
    assert results[0][1].startswith("Rank 0 exhausted all inputs: only ranks 1, 2 still have data. Leave out ")
    for _, text in results[1:]:
        assert text.startswith("Detected at least one rank that exhausted inputs. ")
        assert "only ranks 1, 2 still have data. Leave out `throw_on_early_termination`" in text


class Counter(Joinable):
    """Counts all ranks' inputs, as in torch's tutorial."""

    def __init__(self) -> None:
        self.total = 0
        self.last: bool | None = None

    def __call__(self) -> None:
        Join.notify_join_context(self)
        self.add(1)

    def add(self, number: int) -> None:
        count = torch.tensor(number)
        dist.all_reduce(count)
        self.total += int(count)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return CounterHook(self)

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD


class CounterHook(JoinHook):
    def __init__(self, counter: Counter) -> None:
        self.counter = counter

    def main_hook(self) -> None:
        self.counter.add(0)

    def post_hook(self, is_last_joiner: bool) -> None:
        self.counter.last = is_last_joiner


def count(counts: Sequence[int]) -> tuple[int, int, bool | None]:
    one, two = Counter(), Counter()
    model = DataParallel(make_model())
    with Join([one, model, two]):
        for index in range(counts[dist.get_rank()]):
            one()
            loss(model, dist.get_rank(), index).backward()
            if index % 2:
                two()
    return one.total, two.total, one.last


@pytest.mark.ranks
def test_own_joinables_together_with_a_model() -> None:
    for rank, (one, two, last) in enumerate(run_ranks(count, (7, 5, 2), world_size=WORLD)):
        assert (one, two, last) == (14, 6, rank == 0)


def misuse() -> None:
    model = DataParallel(make_model())
    with pytest.raises(ValueError, match="at least one"):
        Join([])
    with model.join(enable=False):
        loss(model, dist.get_rank(), 0).backward()
    with model.join(), pytest.raises(RuntimeError, match="do not nest"):
        model.join()
    with pytest.raises(KeyError), model.join():
        raise KeyError
    counters = [Counter() for _ in range(3)]
    with pytest.raises(RuntimeError, match="announced different collectives"), Join(counters):
        Join.notify(counters[2 * dist.get_rank()])


@pytest.mark.ranks
def test_misuse_raises_and_an_exception_leaves_at_once() -> None:
    run_ranks(misuse, world_size=2)


def fail_in_the_last_backward(at_the_top: bool) -> str:
    rank = dist.get_rank()
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1), nn.Tanh())
    model = DataParallel(net)
    failing = False

    def fail(grad: Tensor) -> None:
        if failing:
            raise KeyError

    net[1 if at_the_top else 0].register_forward_hook(lambda module, args, out: out.register_hook(fail) and None)
    try:
        with model.join():
            for step in range(1 + rank):  # rank 0 has joined when it happens
                failing = rank == 1 and step == 1
                with suppress(KeyError):
                    model(torch.ones(2, 4)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "nothing raised"


@pytest.mark.ranks
@pytest.mark.parametrize("at_the_top", [False, True])
def test_an_exception_caught_in_the_last_backward_is_settled_with_the_joined_ranks(at_the_top: bool) -> None:
    """Rank 2 has more data still, rank 0 has none."""
    for text in run_ranks(fail_in_the_last_backward, at_the_top, world_size=3):
        assert text.startswith("The backward of rank 1 was ended by an exception"), text


class SaysTooMuch:
    """Its length is an estimate."""

    def __init__(self, batches: list[Tensor]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches) + 3

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.batches)


def read(counts: Sequence[int]) -> list[tuple[int, list[int], list[tuple[int, ...]]]]:
    world, rank, found = comm.resolve_group(None), dist.get_rank(), []
    data = [torch.full((2,), float(index)) for index in range(counts[rank])]
    for loader in (DataLoader(data, batch_size=1), SaysTooMuch(data), Stream(data)):
        agreement = StepAgreement(comm.new_group(world, cpu=True))
        steps: list[tuple[int, ...]] = []
        context = LoaderContext(
            agreement=agreement,
            group=comm.new_group(world, cpu=True),
            announce=lambda said: steps.append(said.step.ranks),  # noqa: B023
        )
        for _ in range(2):
            sizes = [len(batch) for batch in JoinLoader(loader, context)]
        found.append((agreement.count, sizes, steps))
    return found


class Stream(IterableDataset[Tensor]):
    def __init__(self, batches: list[Tensor]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.batches)


@pytest.mark.ranks
def test_ranks_agree_only_on_what_is_not_certain() -> None:
    counts = (7, 5, 2)
    active = [tuple(rank for rank in range(WORLD) if index < counts[rank]) for index in range(7)]
    for rank, found in enumerate(run_ranks(read, counts, world_size=WORLD)):
        # In the first step, whenever a rank runs out, and at the end; or when what is at hand has been used up (after
        # 2, 2, 1 and 2 steps), and at the end. Two epochs.
        assert [agreed for agreed, _, _ in found] == [2 * 4, 2 * 5, 2 * 5]
        for _, sizes, steps in found:
            assert steps == active * 2
            assert [bool(size) for size in sizes] == [index < counts[rank] for index in range(7)]
