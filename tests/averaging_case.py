"""A small model with data by rank and step, trained locally on ranks or by a reference in one process."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.averaging.averager import BoundAverager, ModelAverager, plain_context
from lightning_ddp_hooks.hooks.contract import BindContext, BoundHook, CommHook, Phases
from lightning_ddp_hooks.reducer import requests
from lightning_ddp_hooks.reducer.bucket import GradBucket


def make_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 2)
    )
    return model.to(dtype)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    dtype = next(model.parameters()).dtype
    batch = torch.randn(4, 2, 4, 4, generator=generator).to(dtype)
    target = torch.randn(4, 2, generator=generator).to(dtype) + rank
    return (model(batch) - target).square().mean()


def bind(
    averager: ModelAverager, model: nn.Module, optimizers: Callable[[], list[torch.optim.Optimizer]] = list
) -> BoundAverager:
    named = list(model.named_parameters())
    return averager.bind(
        plain_context(
            [name for name, _ in named], [p for _, p in named], lambda: list(model.buffers()), optimizers=optimizers
        )
    )


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def local_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, rank, step).backward()
    optimizer.step()


def train(averager: ModelAverager, steps: int, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd):
    """Train for some steps without exchanging gradients; return the model's state after each."""
    model = make_model()
    optimizer = make_optimizer(model)
    bound = bind(averager, model, lambda: [optimizer])
    history = []
    for step in range(steps):
        local_step(model, optimizer, comm.rank(), step)
        bound.average_parameters()
        history.append(snapshot(model))
    return history


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def mean_states(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {
        name: torch.stack([state[name] for state in states]).mean(0) if value.is_floating_point() else value
        for name, value in states[0].items()
    }


def assert_close(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert_close(a, b, 0.0)


@dataclass(frozen=True, kw_only=True)
class StagedMean(CommHook):
    """The mean in several collectives, between which each rank takes its own time."""

    form: Literal["scattered", "many", "ordered", "in pairs"] = "scattered"

    def bind(self, context: BindContext) -> BoundHook:
        return _BoundStagedMean(self.form, context)


class _BoundStagedMean(BoundHook):
    name = "StagedMean"

    def __init__(self, form: str, context: BindContext) -> None:
        self.form = form
        self.random = random.Random(context.rank)
        self.world_size = context.world_size
        if form == "in pairs":
            self.pair, self.across = context.subgroup([[0, 1], [2, 3]]), context.subgroup([[0, 2], [1, 3]])

    def reduce(self, bucket: GradBucket) -> Phases:
        buffer = bucket.buffer()
        if self.form == "scattered":
            padded = torch.zeros(-(-buffer.numel() // self.world_size) * self.world_size, dtype=buffer.dtype)
            padded[: buffer.numel()] = buffer
            part = yield requests.ReduceScatter(padded)
            self._pause()
            whole = yield requests.AllGather(part)
            return whole[: buffer.numel()].div_(bucket.divisor)
        if self.form == "many":
            for part in buffer.chunk(7):
                yield requests.AllReduce(part)
                self._pause()
        elif self.form == "ordered":
            half = buffer.numel() // 2
            yield requests.InOrder()
            yield requests.AllReduce(buffer[:half])
            self._pause()
            yield requests.EndOfBackward()
            yield requests.AllReduce(buffer[half:])
        else:
            yield requests.AllReduce(buffer, subgroup=self.pair)
            self._pause()
            yield requests.AllReduce(buffer, subgroup=self.across)
        buffer.div_(bucket.divisor)
        return None

    def _pause(self) -> None:
        time.sleep(self.random.random() / 500)
