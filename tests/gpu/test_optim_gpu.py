"""The optimizer in the hook on a device: the bits of the unsharded one, and streams in the right order.

Two ranks share one GPU over gloo, which moves CUDA tensors too.
"""

from typing import Any

import on_gpu
import pytest
import torch
import torch.distributed as dist
from optim_case import BUCKETS, OPTIMIZERS, WIDTH, assert_bitwise, groups_of, make_model, state_bytes
from ranks import run_ranks
from torch import Tensor, nn

import lightning_ddp_hooks as ldh
from lightning_ddp_hooks import optim

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]

WAYS: dict[str, Any] = {
    "step": None,
    "hook": (optim.hook_with_zero_step, {}),
    "interleaved": (optim.hook_with_zero_step_interleaved, {}),
    "interleaved, shard_buckets": (optim.hook_with_zero_step_interleaved, {"shard_buckets": True}),
}
ON_DEVICE = ["sgd", "adamw fused", "adamw foreach"]


def _loss(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    x = torch.randn(5, WIDTH, generator=generator).to(next(model.parameters()).device)
    return (model(x) - x[:, :3].sin()).square().mean()


def _train(way: str, optimizer: str, backend: str) -> tuple[list[Tensor], int]:
    model = make_model().to(on_gpu.own_device())
    ddp = ldh.DataParallel(model, reducer_backend=backend, **BUCKETS)  # type: ignore[arg-type]
    made: Any = OPTIMIZERS[optimizer]
    if way == "unsharded":
        stepper: Any = made(groups_of(model))
    else:
        overlaps = WAYS[way] is not None
        stepper = optim.ShardedOptimizer(groups_of(model), made.func, overlap_with_ddp=overlaps, **made.keywords)
        if overlaps:
            make, arguments = WAYS[way]
            ddp.register_comm_hook(None, make(None, ddp, stepper, **arguments))
    for step in range(6):
        stepper.zero_grad()
        _loss(ddp, step).backward()
        stepper.step()
    # No synchronization before this: the compute stream has to wait for what the hook did on its own.
    flat = torch.cat([p.detach().flatten() for p in model.parameters()]).cpu()
    return [flat], state_bytes(getattr(stepper, "optim", stepper))


def _compare(backend: str) -> dict[str, dict[str, tuple[list[Tensor], int]]]:
    return {name: {way: _train(way, name, backend) for way in ("unsharded", *WAYS)} for name in ON_DEVICE}


@pytest.mark.parametrize("backend", ["python", "native"])
def test_every_way_gives_the_bits_of_the_unsharded_optimizer(backend: str) -> None:
    for results in run_ranks(_compare, backend, timeout=100):
        for ways in results.values():
            for way in WAYS:
                assert_bitwise(ways[way][0], ways["unsharded"][0])
                assert ways[way][1] < ways["unsharded"][1]


def _large(way: str) -> tuple[Tensor, int]:
    """Train with so much work in flight that a missing wait would show."""
    device = on_gpu.own_device()
    model = on_gpu.layers(8, 1024, device)
    ddp = ldh.DataParallel(model, bucket_cap_mb=8)
    if way == "unsharded":
        stepper: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    else:
        overlaps = WAYS[way] is not None
        stepper = optim.ShardedOptimizer(model.parameters(), torch.optim.AdamW, overlap_with_ddp=overlaps, lr=1e-3)
        if overlaps:
            make, arguments = WAYS[way]
            ddp.register_comm_hook(None, make(None, ddp, stepper, **arguments))
    x = torch.randn(64, 1024, device=device)
    on_gpu.restart_peak()
    for _ in range(10):
        stepper.zero_grad()
        ddp(x).square().mean().backward()
        stepper.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).cpu(), on_gpu.peak()


def _large_each() -> dict[str, tuple[Tensor, int]]:
    return {way: _large(way) for way in ("unsharded", *WAYS)}


def test_no_update_is_seen_too_soon_or_too_late_and_memory_is_saved() -> None:
    for results in run_ranks(_large_each, timeout=100):
        for way in WAYS:
            assert torch.equal(results[way][0], results["unsharded"][0]), way
            assert on_gpu.DRY or results[way][1] < results["unsharded"][1], way
