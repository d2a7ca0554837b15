"""What a profiler's trace and the order of launches say of a steady step on a GPU."""

from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from compiled_graphs import LAYERS, WIDTH, Layers, note_sent
from ranks import run_ranks
from torch.profiler import ProfilerActivity, profile, record_function

import lightning_ddp_hooks as ldh

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]

Backend = Literal["python", "native"]
HOOKS: dict[str, Any] = {"mean": None, "fp16": "fp16", "powersgd": ldh.hooks.PowerSGD(rank=2, start_iter=0)}


def _waits_in_a_step(backend: Backend, hook: str) -> list[str]:
    """Return the calls of a steady step, forward to optimizer, in which the host waits for the device."""
    torch.cuda.set_device(0)
    group = dist.new_group(backend="nccl")  # gloo copies through the host
    net = Layers().cuda()
    model = ldh.DataParallel(net, group, bucket_cap_mb=1, comm_hook=HOOKS[hook], reducer_backend=backend)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    x = torch.randn(64, WIDTH, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for _ in range(4):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        with record_function("steady step"):
            step()
        torch.cuda.synchronize()
    events = trace.events()
    (span,) = [e.time_range for e in events if e.name == "steady step" and e.device_type.name == "CPU"]
    assert any(e.name.startswith("cuda") for e in events)  # calls of the runtime are in the trace
    return [e.name for e in events if "Synchronize" in e.name and span.start <= e.time_range.start <= span.end]


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("backend", ["python", "native"])
def test_the_host_waits_for_nothing_in_a_steady_step(backend: Backend, hook: str) -> None:
    assert run_ranks(_waits_in_a_step, backend, hook, world_size=1, timeout=100) == [[]]


def _sent_on_device(backend: Backend) -> tuple[list[int], float]:
    """Return how many buckets were sent as each compiled graph's backward began, and the distance to torch's DDP."""
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    net, twin = Layers().to(device), Layers().to(device)
    twin.load_state_dict(net.state_dict())
    model = ldh.DataParallel(torch.compile(net, backend="aot_eager"), bucket_cap_mb=1, reducer_backend=backend)
    other = torch.nn.parallel.DistributedDataParallel(twin)
    sent: list[int] = []
    for step in range(3):
        sent.clear()
        model.zero_grad()
        other.zero_grad()
        x = torch.randn(8, WIDTH, device=device, generator=torch.Generator(device).manual_seed(step))
        loss = model(x).square().mean()
        note_sent(loss, model.reducer.progress, sent)
        loss.backward()
        other(x).square().mean().backward()
    pairs = zip(net.parameters(), twin.parameters(), strict=True)
    return sent, max(float((ours.grad - theirs.grad).abs().max()) for ours, theirs in pairs)  # type: ignore[operator]


@pytest.mark.parametrize("backend", ["python", "native"])
def test_a_compiled_model_sends_between_the_graphs_of_its_backward(backend: Backend) -> None:
    for sent, distance in run_ranks(_sent_on_device, backend, timeout=100):
        assert sent == list(range(LAYERS))
        assert distance < 1e-6


def _collectives_in_the_backward(backend: Backend) -> int:
    """Count the kernels of NCCL that begin before the last matrix product of the backward has ended."""
    torch.cuda.set_device(dist.get_rank())
    group = dist.new_group(backend="nccl")
    net = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(8))).cuda()
    model = ldh.DataParallel(net, group, bucket_cap_mb=16, reducer_backend=backend)
    x = torch.randn(4096, 2048, device="cuda")
    for _ in range(3):
        model.zero_grad()
        model(x).square().mean().backward()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        model(x).square().mean().backward()
        torch.cuda.synchronize()
    kernels = [e for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    products = [e.time_range.end for e in kernels if any(name in e.name for name in ("gemm", "cutlass", "nvjet"))]
    return sum("nccl" in e.name.lower() and e.time_range.start < max(products) for e in kernels)


@pytest.mark.parametrize("backend", ["python", "native"])
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_collectives_run_inside_the_backward(backend: Backend) -> None:
    assert min(run_ranks(_collectives_in_the_backward, backend, timeout=100)) >= 2
