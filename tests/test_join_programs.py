"""Random loops in Join contexts over several epochs, against one process that holds all ranks' batches."""

import random
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from backends import backend_fixture  # noqa: F401
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from lightning_ddp_hooks import DataParallel
from lightning_ddp_hooks.hooks import PowerSGD

pytestmark = pytest.mark.ranks

WORLD = 3
RATE = 0.05


@dataclass(frozen=True)
class Program:
    """What ranks do: ``batches[epoch][rank][step][backward]`` micro-batches, of which the last one is reduced."""

    batches: list[list[list[list[int]]]]
    by_world_size: bool
    zeroed: str  # where gradients are cleared
    hook: str
    settings: dict[str, Any]


def sum_by_divisor(_: Any, bucket: Any) -> Any:
    work = dist.all_reduce(bucket.buffer().div_(bucket.divisor), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


HOOKS: dict[str, Any] = {
    "none": None,
    "torch": (None, allreduce_hook),
    "function": (None, sum_by_divisor),
    "PowerSGD": PowerSGD(rank=6, start_iter=0, min_compression_rate=0.01),
}


def make_program(seed: int) -> Program:
    choose = random.Random(seed)
    backwards = choose.choice((1, 1, 2, 3))
    own_ends = choose.random() < 0.5  # ranks accumulate over different numbers of micro-batches
    same = [choose.choice((1, 3)) for _ in range(6)]
    batches = [
        [
            [
                [choose.choice((1, 2, 3)) if own_ends else same[step] for _ in range(backwards)]
                for step in range(choose.randrange(5))
            ]
            for _ in range(WORLD)
        ]
        for _ in range(2)
    ]
    return Program(
        batches,
        by_world_size=choose.random() < 0.6,
        zeroed=choose.choice(("start", "end", "in place")),
        hook=choose.choice(list(HOOKS)) if seed % 2 else "none",
        settings={"gradient_as_bucket_view": choose.random() < 0.5, "find_unused_parameters": choose.random() < 0.3},
    )


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def loss_of(model: nn.Module, *key: int) -> Tensor:
    number = sum(100**place * value for place, value in enumerate(key))
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    return (model(x) - x.sin().sum(1, keepdim=True)).square().mean()


def expected(program: Program) -> dict[str, Tensor]:
    model = make_model()
    for epoch, ranks in enumerate(program.batches):
        for step in range(max(map(len, ranks))):
            active = [rank for rank in range(WORLD) if step < len(ranks[rank])]
            for backward in range(len(ranks[active[0]][step])):
                losses = [
                    loss_of(model, rank, epoch, step, backward, batch)
                    for rank in active
                    for batch in range(ranks[rank][step][backward])
                ]
                (torch.stack(losses).sum() / (WORLD if program.by_world_size else len(active))).backward()
            _step(model)
            model.zero_grad()
    return model.state_dict()


@torch.no_grad()
def _step(model: nn.Module) -> None:
    for param in model.parameters():
        assert param.grad is not None
        param -= RATE * param.grad


def train(program: Program, backend: str) -> dict[str, Tensor]:
    rank = dist.get_rank()
    settings = {"bucket_cap_mb": 1e-4, "reducer_backend": backend, **program.settings}
    model = DataParallel(make_model(), comm_hook=HOOKS[program.hook], **settings)
    for epoch, ranks in enumerate(program.batches):
        with model.join(divide_by_initial_world_size=program.by_world_size):
            for step, backwards in enumerate(ranks[rank]):
                if program.zeroed == "start":
                    model.zero_grad()
                for backward, count in enumerate(backwards):
                    for batch in range(count):
                        with nullcontext() if batch == count - 1 else model.no_sync():
                            loss_of(model, rank, epoch, step, backward, batch).backward()
                _step(model)
                if program.zeroed != "start":
                    model.zero_grad(set_to_none=program.zeroed == "end")
        held = [param.grad is not None and bool(param.grad.any()) for param in model.parameters()]
        assert any(held) == (program.zeroed == "start" and max(map(len, ranks)) > 0)
    return {name: value.clone() for name, value in model.module.state_dict().items()}


SEEDS = {"python": range(20), "native": range(20, 40)}


def train_all(backend: str) -> list[dict[str, Tensor]]:
    return [train(make_program(seed), backend) for seed in SEEDS[backend]]


def test_random_loops(backend: str) -> None:
    wanted = [expected(make_program(seed)) for seed in SEEDS[backend]]
    for states in run_ranks(train_all, backend, world_size=WORLD, timeout=150):
        for seed, state, reference in zip(SEEDS[backend], states, wanted, strict=True):
            for name, value in state.items():
                torch.testing.assert_close(
                    value, reference[name], rtol=1e-9, atol=1e-11, msg=f"{seed} {make_program(seed)} {name}"
                )


# ---------------------------------------------------------------------- loops that do not go together


class Norm(nn.Module):
    """Its buffers are sent before a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def part_ways(by_world_size: bool) -> str:
    """Run two forwards for a backward on rank 1, and one on the others."""
    model, rank = DataParallel(Norm()), dist.get_rank()
    try:
        with model.join(by_world_size):
            for _ in range(3 - rank):
                losses = [model(torch.randn(3, 4)).sum() for _ in range(1 + (rank == 1))]
                sum(losses).backward()
    except RuntimeError as error:
        return str(error)
    return "nothing raised"


@pytest.mark.parametrize("by_world_size", [True, False])
def test_ranks_that_communicate_in_different_orders_raise_at_once(by_world_size: bool) -> None:
    for text in run_ranks(part_ways, by_world_size, world_size=WORLD, timeout=30):
        assert text.startswith("Ranks announced different collectives (rank")
        assert "a forward that begins with a broadcast of buffers of DistributedDataParallel (joinable 0)" in text
        assert "a backward that reduces gradients of DistributedDataParallel (joinable 0)" in text
