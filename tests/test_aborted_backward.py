"""A backward that an exception ends and that the user catches: all ranks go on right, or all raise."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from backends import backend_fixture  # noqa: F401
from ranks import run_ranks
from torch import Tensor, nn

import lightning_ddp_hooks as ldh

pytestmark = pytest.mark.ranks

LAYERS = 6
BAD_STEP = 3
STEPS = 6


class Boom(Exception):
    pass


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(LAYERS)), nn.Tanh()).double()


def _input(step: int, rank: int) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + rank)).double()


def _reference(step: int) -> list[Tensor]:
    """The mean gradient of all ranks, as one process computes it."""
    twin = _net()
    world = dist.get_world_size()
    for rank in range(world):
        (twin(_input(step, rank)).square().mean() / world).backward()
    return [param.grad for param in twin.parameters()]  # type: ignore[misc]


def _train(ranks_that_fail: list[int], at_layer: int, settings: dict[str, Any], hook: Any = None) -> list[str]:
    """Train with an exception in one backward; say for each step how far gradients are off, or what raised."""
    rank = dist.get_rank()
    net = _net()
    model = ldh.DataParallel(net, comm_hook=hook, bucket_cap_mb=0.002, first_bucket_mb=0.001, **settings)
    failing = False

    def boom(grad: Tensor) -> None:
        if failing:
            raise Boom("boom")

    net[at_layer].register_forward_hook(
        lambda module, args, out: out.requires_grad and out.register_hook(boom) and None
    )
    found = []
    for step in range(STEPS):
        failing = step == BAD_STEP and rank in ranks_that_fail
        if step == BAD_STEP:
            time.sleep(0.05 * rank)  # ranks are not at the same place when it happens
        model.zero_grad()
        try:
            model(_input(step, rank)).square().mean().backward()
        except Boom:
            found.append("boom")
            continue
        except RuntimeError as error:
            return [*found, f"raised: {error}"]
        off = max(float((p.grad - g).abs().max()) for p, g in zip(net.parameters(), _reference(step), strict=True))
        found.append("right" if off < 1e-12 else f"off by {off}")
    return found


POLICIES: dict[str, dict[str, Any]] = {
    "status": {},
    "status, copies": {"gradient_as_bucket_view": False},
    "flags": {"find_unused_parameters": True},
}
STATELESS_HOOKS: dict[str, Callable[[], Any]] = {
    "mean": lambda: None,
    "AllReduce": ldh.hooks.AllReduce,
    "PerParameter": lambda: ldh.hooks.PerParameter([ldh.hooks.Rule(None, ndim=2)]),
}


def _all_fail(backend: str) -> dict[str, list[str]]:
    return {
        f"{policy}, {hook}, layer {layer}": _train(
            list(range(dist.get_world_size())), layer, {**settings, "reducer_backend": backend}, make()
        )
        for policy, settings in POLICIES.items()
        for hook, make in STATELESS_HOOKS.items()
        for layer in (0, 2, LAYERS - 1, LAYERS)  # the last two: before any gradient, and before anything of ours
    }


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_exception_on_all_ranks_leaves_the_next_steps_right(backend: str, world_size: int) -> None:
    wanted = [*["right"] * BAD_STEP, "boom", *["right"] * (STEPS - BAD_STEP - 1)]
    for found in run_ranks(_all_fail, backend, world_size=world_size, timeout=100):
        assert {case: steps for case, steps in found.items() if steps != wanted} == {}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("hook", "layer"), [("mean", 2), ("AllReduce", 2), ("mean", LAYERS - 1)])
def test_an_exception_on_one_rank_raises_on_all(backend: str, hook: str, layer: int, policy: str) -> None:
    """Also one before the first gradient, as in the last layer."""
    settings = {**POLICIES[policy], "reducer_backend": backend}
    first, second = run_ranks(_train, [1], layer, settings, STATELESS_HOOKS[hook]())
    assert first[:BAD_STEP] == second[:BAD_STEP] == ["right"] * BAD_STEP
    assert second[BAD_STEP] == "boom"
    for text in (first[-1], second[-1]):
        assert text.startswith("raised: The backward of rank 1 was ended by an exception"), (first, second)
    assert first[BAD_STEP] == first[-1]  # in the same step
    assert second[BAD_STEP + 1] == second[-1]  # as soon as the rank that caught it goes on


def test_the_memory_of_a_hook_cannot_be_taken_back_so_all_ranks_raise() -> None:
    hook = ldh.hooks.PowerSGD(rank=1, start_iter=0, min_compression_rate=0.5)
    for found in run_ranks(_train, [0, 1], 2, {}, hook):
        assert found[BAD_STEP] == "boom"
        assert "remembers of them cannot be taken back: resume from a checkpoint" in found[-1]
        assert len(found) == BAD_STEP + 2


def _fail_first(hook: Any) -> list[str]:
    model = ldh.DataParallel(_net(), comm_hook=hook)
    found = []
    for step in range(2):
        output = model(_input(step, dist.get_rank())).square().mean()
        model.module[0].weight.register_hook(_boom if step == 0 else torch.clone)
        try:
            output.backward()
        except Boom:
            found.append("boom")
        else:
            found.append("done")
        model.module[0].weight._backward_hooks.clear()
        model.zero_grad()
    return found


def _boom(grad: Tensor) -> Tensor:
    raise Boom("boom")


def test_an_exception_in_the_recorded_backward_takes_nothing_from_a_hook_that_it_has_not_seen() -> None:
    hook = ldh.hooks.PowerSGD(rank=1, start_iter=0, min_compression_rate=0.5)
    assert run_ranks(_fail_first, hook) == [["boom", "done"]] * 2
