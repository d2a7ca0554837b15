"""Hooks where ranks agree by flags (unused parameters, manual optimization): order of collectives, the last bucket."""

import time
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from backends import backend_fixture  # noqa: F401
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from lightning_ddp_hooks.hooks import BindContext, CommHook, TorchHook
from lightning_ddp_hooks.reducer.agreement import UnusedPolicy
from lightning_ddp_hooks.reducer.config import ReducerConfig
from lightning_ddp_hooks.reducer.reducer import Reducer

pytestmark = pytest.mark.ranks
LAYERS = 4
MANUAL, FIND_UNUSED = UnusedPolicy.ALIKE, UnusedPolicy.ALLOWED


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class _Net(nn.Module):
    """Layers of which any may be left out, each in a bucket of its own once the buckets are rebuilt."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleList(nn.Linear(12, 12, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor, use: Iterable[int], seconds: float = 0.0) -> Tensor:
        for index in sorted(use):
            x = _Slow.apply(torch.tanh(self.layers[index](x)), seconds)
        return x


def _reducer(net: nn.Module, hook: CommHook, policy: UnusedPolicy, backend: str) -> Reducer:
    config = ReducerConfig(
        bucket_cap_mb=1e-4,
        first_bucket_mb=1e-4,
        find_unused_parameters=policy is FIND_UNUSED,
        reducer_backend=backend,  # type: ignore[arg-type]
    )
    reducer = Reducer(net, config, policy=policy, ends_steps=policy is MANUAL)
    context = BindContext(
        control_group=reducer.control_group,
        names=reducer.names,
        params=reducer.params,
        step=lambda: reducer.synced_backwards,
        subgroup=reducer.queue.subgroup,
    )
    reducer.set_hook(hook.bind(context))
    return reducer


def _train(reducer: Reducer, uses: Iterable[Iterable[int]], slow: bool = False) -> list[dict[str, Tensor]]:
    """One backward for each set of layers; returns the gradients of each."""
    found = []
    for step, use in enumerate(uses):
        reducer.before_forward()
        torch.manual_seed(100 * step + dist.get_rank())
        with reducer.backward_window():
            reducer._parameters.module(torch.randn(3, 12), use, 0.02 if slow else 0.0).square().mean().backward()
        reducer.end_step()
        named = zip(reducer.names, reducer.params, strict=True)
        found.append({name: param.grad.clone() for name, param in named if param.grad is not None})
        for param in reducer.params:
            param.grad = None
    return found


# ---------------------------------------------------------------------------------------- hooks that wait in their call


def _two_collectives(_: None, bucket: Any) -> Any:
    """Wait for one collective before returning another's future; what it sends first shows which bucket it is of."""
    numel = torch.full((1,), float(bucket.buffer().sum()))
    dist.all_reduce(numel)
    return dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True).get_future()


def _blocking(backend: str, policy: UnusedPolicy, torchs: bool, slow_rank: int) -> list[dict[str, Tensor]]:
    if torchs:
        state = powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2, orthogonalization_epsilon=1e-8)
        hook = TorchHook(hook=powerSGD_hook.powerSGD_hook, state=state)
    else:
        hook = TorchHook(hook=_two_collectives)
    reducer = _reducer(_Net(), hook, policy, backend)
    rank = dist.get_rank()
    uses = [set(range(LAYERS))] * 3
    if policy is FIND_UNUSED:
        uses += [{(step + rank) % LAYERS, step % 3} for step in range(6)]
    else:
        uses += [{0, 1}, {2, 3}] * 3
    return _train(reducer, uses, slow=rank == slow_rank)


@pytest.mark.parametrize("torchs", [True, False], ids=["powerSGD_hook", "user's"])
@pytest.mark.parametrize("policy", [MANUAL, FIND_UNUSED])
def test_a_hook_that_waits_in_its_call_goes_with_flags_whichever_rank_is_slow(
    backend: str, policy: UnusedPolicy, torchs: bool
) -> None:
    for slow_rank in (0, 1):
        first, second = run_ranks(_blocking, backend, policy, torchs, slow_rank)
        for step, (one, other) in enumerate(zip(first, second, strict=True)):
            assert one.keys() == other.keys(), step
            for name, gradient in one.items():
                assert gradient.isfinite().all()
                assert torch.equal(gradient, other[name]), (step, name)


# ---------------------------------------------------------------------------------------- the last bucket


def _note_last(log: list[bool], bucket: Any) -> Any:
    log.append(bucket.is_last())
    return dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True).get_future()


def _count_last(backend: str, policy: UnusedPolicy, one_at_a_time: bool) -> tuple[list[list[bool]], int]:
    seen: list[bool] = []
    hook = TorchHook(hook=_note_last, state=seen, one_at_a_time=one_at_a_time)
    reducer = _reducer(_Net(), hook, policy, backend)
    rank = dist.get_rank()
    uses: list[set[int]] = [set(range(LAYERS)), {2, 3}, {0, 1}, {1}, {3}, {0, 3}, set(range(LAYERS))]
    if policy is FIND_UNUSED:
        uses += [{3} if rank else {2}, {1, 3} if rank else {3}, {0} if rank else {1, 2, 3}]
    marks = []
    for use in uses:
        seen.clear()
        _train(reducer, [use])
        marks.append(list(seen))
    return marks, len(uses)


@pytest.mark.parametrize("one_at_a_time", [True, False])
@pytest.mark.parametrize("policy", [MANUAL, FIND_UNUSED])
def test_every_synced_backward_has_one_last_bucket_and_sends_it_last(
    backend: str, policy: UnusedPolicy, one_at_a_time: bool
) -> None:
    first, second = run_ranks(_count_last, backend, policy, one_at_a_time)
    assert first == second
    marks, backwards = first
    assert len(marks) == backwards
    for one in marks:
        assert one == [False] * (len(one) - 1) + [True]
    assert {len(one) for one in marks} > {1, 2}  # not all buckets are always sent
