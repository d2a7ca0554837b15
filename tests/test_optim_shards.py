"""Sharded steps as the network and the memory see them: bytes, shares, whole matrices beside cut parameters."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from backends import require
from optim_case import assert_bitwise, state_bytes, values
from ranks import run_ranks
from torch import Tensor, nn
from torch.optim import Optimizer

import lightning_ddp_hooks as ldh
from lightning_ddp_hooks import optim, traffic
from lightning_ddp_hooks.optim import exchange

pytestmark = pytest.mark.ranks

BUCKETS: dict[str, Any] = {"bucket_cap_mb": 0.15, "first_bucket_mb": 0.05}
STEPS = 4


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    sizes = (64, 192, 256, 64)
    layers = [nn.Sequential(nn.Linear(a, b), nn.LayerNorm(b), nn.Tanh()) for a, b in pairwise(sizes)]
    return nn.Sequential(*layers).to(dtype)


def backward(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    x = torch.randn(8, 64, generator=generator).to(next(model.parameters()).dtype)
    (model(x) - x.sin()).square().mean().backward()


class MuonWithAdamW(Optimizer):
    """Both rules in one optimizer, by a value of each group, as several packages have it."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.01, "use_muon": False})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["first"], state["second"] = torch.zeros_like(param), torch.zeros_like(param)
                state["first"].lerp_(param.grad, 0.1)
                if group["use_muon"]:
                    x = state["first"] / (state["first"].norm() + 1e-7)
                    for _ in range(5):
                        x = 1.5 * x - 0.5 * (x @ x.t()) @ x
                    param.sub_(x, alpha=group["lr"])
                else:
                    state["second"].lerp_(param.grad.square(), 0.05)
                    param.addcdiv_(state["first"], state["second"].sqrt().add_(1e-6), value=-group["lr"])


def matrices_and_others(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    params = list(model.parameters())
    return [p for p in params if p.dim() > 1], [p for p in params if p.dim() <= 1]


def both_in_one(model: nn.Module, make: Callable[..., Any]) -> list[Any]:
    matrices, others = matrices_and_others(model)
    return [make([{"params": matrices, "use_muon": True}, {"params": others}], MuonWithAdamW)]


def one_beside_the_other(model: nn.Module, make: Callable[..., Any]) -> list[Any]:
    matrices, others = matrices_and_others(model)
    return [make(matrices, torch.optim.Muon, lr=0.01), make(others, torch.optim.AdamW, lr=0.01)]


def adamw(model: nn.Module, make: Callable[..., Any]) -> list[Any]:
    return [make(model.parameters(), torch.optim.AdamW, lr=0.01, fused=True)]


class Trained:
    """What some steps left behind; ``sent``: bytes that this rank sent in the last one."""

    def __init__(self, kind: Any, way: str, *, dtype: torch.dtype = torch.float32, backend: str = "python") -> None:
        self.model = make_model(dtype)
        ddp = ldh.DataParallel(self.model, reducer_backend=backend, **BUCKETS)  # type: ignore[arg-type]

        def make(params: Any, rule: Any, **settings: Any) -> Any:
            if way == "unsharded":
                return rule(params, **settings)
            zero = optim.ShardedOptimizer(params, rule, overlap_with_ddp=way != "two phases", **settings)
            if way != "two phases":
                hook = optim.hook_with_zero_step_interleaved if way == "hook" else optim.hook_with_zero_step
                ddp.register_comm_hook(None, hook(None, ddp, zero))
            return zero

        self.optimizers = kind(self.model, make)
        counter = traffic.ByteCounter()
        for step in range(STEPS):
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            if step == STEPS - 1:
                traffic.count_bytes(counter)
            backward(ddp, step)
            for optimizer in self.optimizers:
                optimizer.step()
        traffic.stop_counting(counter)
        self.sent = sum(counter.take().values())
        self.held = sum(state_bytes(getattr(optimizer, "optim", optimizer)) for optimizer in self.optimizers)


def all_ranks(value: Any) -> list[Any]:
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


def _assert_like(found: Trained, expected: Trained) -> None:
    if dist.get_world_size() == 2:
        assert_bitwise(values(found.model), values(expected.model))
    else:
        torch.testing.assert_close(values(found.model), values(expected.model), rtol=1e-8, atol=1e-10)


def _check(backend: str) -> None:
    dtype = torch.float32 if dist.get_world_size() == 2 else torch.float64
    for kind, ways in ((adamw, ["hook", "behind"]), (both_in_one, ["hook"]), (one_beside_the_other, ["two phases"])):
        plain = Trained(kind, "unsharded", dtype=dtype, backend=backend)
        for way in ways:
            sharded = Trained(kind, way, dtype=dtype, backend=backend)
            _assert_like(sharded, plain)
            held = all_ranks(sharded.held)
            assert plain.held <= sum(held) < plain.held * 1.01
            if kind is adamw:
                assert max(held) < plain.held / len(held) * 1.02
            if way != "two phases":
                in_all_reduces = 2 * (len(held) - 1) * sum(value.nbytes for value in values(plain.model))
                ratio = sum(all_ranks(sharded.sent)) / in_all_reduces
                assert 0.99 < ratio < 1.01, (kind, way, ratio)
                # Nothing is left that is not the mean.
                assert all(param.grad is None for param in sharded.model.parameters())
            for zero, whole in zip(sharded.optimizers, plain.optimizers, strict=True):
                _check_state(zero, whole)


def _check_state(zero: optim.ShardedOptimizer, whole: Optimizer) -> None:
    zero.consolidate_state_dict()
    if dist.get_rank() == 0:
        found, expected = zero.state_dict()["state"], whole.state_dict()["state"]
        assert list(found) == list(expected)
        for key, entries in expected.items():
            for name, value in entries.items():
                torch.testing.assert_close(found[key][name], value, rtol=1e-8, atol=1e-12, check_stride=False)


def _check_half_precision_and_rows() -> None:
    expected = Trained(adamw, "unsharded", dtype=torch.bfloat16)
    assert_bitwise(values(Trained(adamw, "hook", dtype=torch.bfloat16).model), values(expected.model))
    plain = exchange._in_rows
    calls = []

    def as_on_a_device(tensor: Tensor, sizes: Any) -> bool:
        calls.append(sizes)
        return len(sizes) * max(sizes) <= 1.3 * sum(sizes)

    exchange._in_rows = as_on_a_device  # type: ignore[assignment]
    try:
        for kind in (adamw, both_in_one):
            rows, whole = Trained(kind, "hook"), Trained(kind, "unsharded")
            assert_bitwise(values(rows.model), values(whole.model))
    finally:
        exchange._in_rows = plain
    assert calls


def _two_ranks(backend: str) -> None:
    _check(backend)
    _check_half_precision_and_rows()


def test_ranks_send_no_more_than_in_an_all_reduce_and_share_the_state_evenly() -> None:
    run_ranks(_two_ranks, "python", timeout=100)


@pytest.mark.timeout(900)
def test_so_do_three_with_the_native_engine() -> None:
    require("native")
    run_ranks(_check, "native", world_size=3, timeout=100)


def _work() -> list[float]:
    """Return what each rank's updates cost, by formula."""
    torch.manual_seed(0)
    # Of equal numbers of elements, but by no means of equal cost.
    shapes = [(256, 256)] * 2 + [(16, 4096)] * 6
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    zero = optim.ShardedOptimizer(params, torch.optim.Muon, lr=0.01)
    shards, group = zero.sharded_step.shards, zero.param_groups[0]
    own = [param for param in params if shards.own(param)]
    assert len([param for param in own if param.shape[0] == 256]) == 1
    return all_ranks(sum(optim.cost.cost_of_update(zero.optim, group, param) for param in own))


def test_whole_matrices_are_shared_by_what_they_cost() -> None:
    costs = run_ranks(_work)[0]
    assert max(costs) < 1.1 * min(costs)
