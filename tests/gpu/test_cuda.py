"""The real device: the numbers of the CPU, overlap as the profiler saw it, and memory that is not reused too soon.

Two ranks share one GPU over gloo, which moves CUDA tensors too; NCCL is used where each rank has a GPU of its own.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from odd_models import CASES, Case, Mlp, data, reference
from ranks import run_ranks
from torch import nn
from torch.profiler import ProfilerActivity, profile

import lightning_ddp_hooks as ldh

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]

ON_DEVICE = [
    "plain",
    "accumulation",
    "heads differ by rank and step",
    "complex",
    "channels_last with BatchNorm and 1x1",
]
BACKENDS = ["python", "native"]


class _OnDevice(nn.Module):
    """A module whose inputs are moved to the device, so that the cases for the CPU can be used."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module(*(a.cuda() if isinstance(a, torch.Tensor) else a for a in args))


def _train_on_device(name: str, views: bool, backend: str) -> list[torch.Tensor]:
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    case: Case = CASES[name]
    torch.manual_seed(0)
    module = case.build().cuda()
    model = ldh.DataParallel(
        _OnDevice(module),
        bucket_cap_mb=0.001,
        first_bucket_mb=0.0005,
        gradient_as_bucket_view=views,
        reducer_backend=backend,  # type: ignore[arg-type]
        **case.settings,
    )
    optimizer = case.optimizer(list(module.parameters()))
    for step in range(5):
        optimizer.zero_grad()
        case.run(model, module, dist.get_rank(), step, model.no_sync)
        optimizer.step()
    return [p.detach().cpu() for p in module.parameters()]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("views", [True, False], ids=["views", "copies"])
@pytest.mark.parametrize("name", ON_DEVICE)
def test_a_device_trains_as_the_reference(name: str, views: bool, backend: str) -> None:
    wanted = reference(CASES[name], 5, 2)
    for params in run_ranks(_train_on_device, name, views, backend, timeout=100):
        for found, expected in zip(params, wanted, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def _slow_hook_trace(backend: str) -> tuple[bool, bool, float]:
    """Reduce with a hook that keeps the communication stream busy; say what the trace shows."""
    torch.cuda.set_device(0)
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))).cuda()

    def hook(state: None, bucket: ldh.GradBucket) -> torch.Tensor:
        torch.cuda._sleep(2_000_000)
        return bucket.buffer().mul(2.0)  # a new tensor, so that the copy back is part of the order

    model = ldh.DataParallel(net, bucket_cap_mb=16, comm_hook=(None, hook), reducer_backend=backend)  # type: ignore[arg-type]
    x = torch.randn(4096, 2048, device="cuda")
    for _ in range(3):
        model.zero_grad()
        model(x).square().mean().backward()
    model.zero_grad()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        model(x).square().mean().backward()
        # Work that follows the backward at once, on the compute stream, without any wait of the host.
        norm = torch.stack([p.grad.norm() for p in net.parameters() if p.grad is not None]).norm()
        torch.cuda.synchronize()
    kernels = [e for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    sleeps = [e.time_range for e in kernels if "sleep" in e.name or "spin" in e.name]
    gemms = [e.time_range for e in kernels if "gemm" in e.name or "cutlass" in e.name or "nvjet" in e.name]
    overlaps = any(s.start < g.end and g.start < s.end for s in sleeps for g in gemms)
    ours = norm.item()
    for p in net.parameters():
        p.grad = None
    net(x).square().mean().backward()
    alone = torch.stack([p.grad.norm() for p in net.parameters() if p.grad is not None]).norm().item()
    return bool(sleeps), overlaps, ours / alone


@pytest.mark.parametrize("backend", BACKENDS)
def test_reduction_overlaps_with_the_backward_and_the_optimizer_sees_its_result(backend: str) -> None:
    [(slept, overlaps, ratio)] = run_ranks(_slow_hook_trace, backend, world_size=1, timeout=100)
    assert slept
    assert overlaps
    assert ratio == pytest.approx(2.0, rel=1e-4)


def _stress_allocator(backend: str) -> float:
    """Give the allocator every chance to hand memory of a bucket in flight to someone else."""
    torch.cuda.set_device(0)
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(20))).cuda()
    twin = nn.Sequential(*(nn.Linear(256, 256) for _ in range(20))).cuda()
    twin.load_state_dict(net.state_dict())

    def hook(state: None, bucket: ldh.GradBucket) -> torch.Tensor:
        parts = [bucket.buffer() / 3 for _ in range(3)]
        torch.cuda._sleep(200_000)
        return parts[0] + parts[1] + parts[2]

    model = ldh.DataParallel(net, bucket_cap_mb=0.3, comm_hook=(None, hook), reducer_backend=backend)  # type: ignore[arg-type]
    worst = 0.0
    for step in range(40):
        x = torch.randn(64, 256, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
        for module in (model, twin):
            module.zero_grad()
            module(x).square().mean().backward()
            junk = [torch.full((256, 256), float("nan"), device="cuda") for _ in range(8)]
            del junk
        for a, b in zip(net.parameters(), twin.parameters(), strict=True):
            assert a.grad is not None
            assert b.grad is not None
            worst = max(worst, (a.grad - b.grad).abs().max().item())
    return worst


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_of_a_bucket_in_flight_is_not_reused(backend: str) -> None:
    [worst] = run_ranks(_stress_allocator, backend, world_size=1, timeout=100)
    assert worst < 1e-6


def _no_host_wait() -> int:
    torch.cuda.set_device(0)
    net = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))).cuda()
    group = dist.new_group(backend="nccl")  # gloo copies through the host
    model = ldh.DataParallel(net, group, bucket_cap_mb=1)
    x = torch.randn(64, 512, device="cuda")
    for _ in range(3):
        model(x).square().mean().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(x).square().mean().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return 1


def test_a_step_makes_the_host_wait_for_nothing() -> None:
    assert run_ranks(_no_host_wait, world_size=1, timeout=100) == [1]


def _nccl(backend: str) -> list[torch.Tensor]:
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    group = dist.new_group(backend="nccl")
    torch.manual_seed(0)
    net = Mlp().cuda()
    model = ldh.DataParallel(net, group, bucket_cap_mb=0.0005, reducer_backend=backend)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(5):
        optimizer.zero_grad()
        model(data(rank, step, 4, 8).cuda()).square().mean().backward()
        optimizer.step()
    return [p.detach().cpu() for p in net.parameters()]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_nccl_trains_as_the_reference(backend: str) -> None:
    case = Case(Mlp, CASES["plain"].run, optimizer=lambda params: torch.optim.SGD(params, lr=0.05))
    wanted = reference(case, 5, 2)
    for params in run_ranks(_nccl, backend, timeout=100):
        for found, expected in zip(params, wanted, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
