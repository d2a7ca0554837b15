"""Buffers move exactly when torch's DDP moves them, and never into memory that they do not fit."""

import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from backends import backend_fixture  # noqa: F401
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_hooks import DataParallel

pytestmark = pytest.mark.ranks

Seen = list[tuple[str, float]]


class Counting(nn.Module):
    """Notes its buffer in each forward, and moves it while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("total", torch.zeros(1))
        self.seen: list[float] = []
        self.total: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.total.item())
        if self.training:
            with torch.no_grad():
                self.total += x.sum()
        return (x * self.weight).sum()


OPERATIONS = ("train", "train", "no_sync", "evaluate", "evaluate", "forward alone", "two forwards", "change on rank 0")


def play(model: Any, program: list[str]) -> Seen:
    module, rank, seen = model.module, dist.get_rank(), []
    for step, operation in enumerate(program):
        x = torch.full((1,), float(rank + 1 + step))
        if operation == "change on rank 0":
            if rank == 0:
                module.total += 100
        elif operation == "evaluate":
            module.eval()
            with torch.no_grad():
                model(x)
            module.train()
        else:
            with model.no_sync() if operation == "no_sync" else nullcontext():
                loss = model(x) if operation != "two forwards" else model(x) + model(2 * x)
                if operation != "forward alone":
                    loss.backward()
        seen.append((operation, module.total.item()))
    return [*seen, *(("forward", value) for value in module.seen)]


def play_on_both(backend: str) -> list[tuple[Seen, Seen]]:
    pairs = []
    for seed in range(25):
        generator = random.Random(seed)
        program = [generator.choice(OPERATIONS) for _ in range(14)]
        ours = DataParallel(Counting(), reducer_backend=backend, gradient_as_bucket_view=bool(seed % 2))
        theirs = DistributedDataParallel(Counting(), gradient_as_bucket_view=bool(seed % 2))
        pairs.append((play(ours, program), play(theirs, program)))
    return pairs


def test_they_move_when_those_of_torch_do(backend: str) -> None:
    for pairs in run_ranks(play_on_both, backend):
        for ours, theirs in pairs:
            assert ours == theirs


# ---------------------------------------------------------------------- buffers that are replaced


class Cached(nn.Module):
    """Has a cache as long as the longest input so far."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.register_buffer("mean", torch.zeros(2))
        self.cache: Tensor
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if len(self.cache) < length:
            self.register_buffer("cache", torch.arange(length).float(), persistent=False)
        return (self.linear(x)[..., 0] * self.cache[:length]).mean()


POLICIES: list[dict[str, Any]] = [{}, {"find_unused_parameters": True}, {"static_graph": True}]


def grow(lengths: tuple[int, int], at: int, settings: dict[str, Any]) -> list[str]:
    """Train with inputs that become longer at some step; return what each step raised."""
    model = DataParallel(Cached(), **settings)
    rank, found = dist.get_rank(), []
    for step in range(at + 4):
        length = lengths[rank] if step >= at else 1
        try:
            model(torch.ones(2, length, 4)).backward()
            found.append("")
        except RuntimeError as error:
            found.append(str(error))
            break
    assert model.module.cache.tolist() == list(range(len(model.module.cache)))
    return found


def grow_all(backend: str) -> list[list[str]]:
    return [
        grow(lengths, at, {**settings, "reducer_backend": backend})
        for settings in POLICIES
        for at in (0, 1, 4)
        for lengths in ((5, 9), (9, 5), (1, 5), (5, 1))
    ]


def test_lengths_that_differ_by_rank_raise_on_all_ranks(backend: str) -> None:
    first, second = run_ranks(grow_all, backend)
    assert first == second
    for found in first:
        assert "Buffers have become different" in found[-1]
        assert "cache: shape" in found[-1]
        assert "broadcast_buffers=False" in found[-1]


def grow_alike(settings: dict[str, Any]) -> list[tuple[float, float]]:
    model = DataParallel(Cached(), **settings)
    rank, module, found = dist.get_rank(), model.module, []
    for step in range(6):
        if rank == 0:
            module.mean += 1
            module.cache += 1.0
        model(torch.ones(2, 1 + step // 3, 4)).backward()
        found.append((module.mean[0].item(), module.cache[0].item()))
    return found


def test_a_buffer_that_all_ranks_replace_alike_is_sent_on() -> None:
    for settings in POLICIES:
        first, second = run_ranks(grow_alike, settings)
        assert [mean for mean, _ in first] == [mean for mean, _ in second] == [1, 2, 3, 4, 5, 6]
        # The new cache is each rank's own until ranks have compared it, one step later.
        assert first[-1] == second[-1]


def keep_own(settings: dict[str, Any], ignored: list[str]) -> list[int]:
    module = Cached()
    module._ddp_params_and_buffers_to_ignore = ignored  # type: ignore[assignment]
    model = DataParallel(module, **settings)
    for _ in range(3):
        model(torch.ones(2, 5 + 4 * dist.get_rank(), 4)).backward()
    return [len(module.cache)]


@pytest.mark.parametrize(("settings", "ignored"), [({"broadcast_buffers": False}, []), ({}, ["cache"])])
def test_buffers_that_are_not_sent_may_differ(settings: dict[str, Any], ignored: list[str]) -> None:
    assert run_ranks(keep_own, settings, ignored) == [[5], [9]]


def build_unlike() -> str:
    module = Cached()
    module.register_buffer("mask", torch.zeros(2 + dist.get_rank()))
    with pytest.raises(RuntimeError) as caught:
        DataParallel(module)
    return str(caught.value)


def test_lengths_that_differ_at_construction_raise_on_all_ranks() -> None:
    for text in run_ranks(build_unlike):
        assert "mask: shape (2,)" in text


def wrap_what_cannot_be_sent() -> None:
    for bad in (torch.eye(2).to_sparse(), torch.zeros(1).expand(2)):
        net = nn.Linear(2, 2)
        net.register_buffer("odd", bad)
        with pytest.raises(ValueError, match="'odd' is sparse, or an expanded tensor"):
            DataParallel(net)
        DataParallel(net, broadcast_buffers=False)


def test_buffers_that_cannot_be_sent_or_written_raise_on_all_ranks() -> None:
    run_ranks(wrap_what_cannot_be_sent, timeout=20)
