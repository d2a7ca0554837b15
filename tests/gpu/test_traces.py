"""What a profiler's trace and the order of launches say of a steady step on a GPU."""

from typing import Any, Literal

import on_gpu
import pytest
import torch
import torch.distributed as dist
from compiled_graphs import LAYERS, WIDTH, Layers, note_sent
from ranks import run_ranks
from torch import Tensor

import lightning_ddp_hooks as ldh
from lightning_ddp_hooks import hooks

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]

Backend = Literal["python", "native"]
HOOKS: dict[str, Any] = {
    "mean": None,
    "fp16": "fp16",
    "bf16": "bf16",
    "powersgd": hooks.PowerSGD(rank=2, start_iter=0),
    "int8": "int8",
    "topk": hooks.TopK(ratio=0.01),
}


# ---------------------------------------------------------------------- the host waits for nothing


def _waits_in_a_step(backend: Backend) -> dict[str, list[str]]:
    """Return for each hook the calls of a steady step, forward to optimizer, in which the host waits for the device."""
    device, group, found = on_gpu.own_device(), on_gpu.stream_ordered_group(), {}
    for name, hook in HOOKS.items():
        net = Layers().to(device)
        model = ldh.DataParallel(net, process_group=group, bucket_cap_mb=1, comm_hook=hook, reducer_backend=backend)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        x = torch.randn(64, WIDTH, device=device)

        def step(model: Any = model, optimizer: Any = optimizer, x: Tensor = x) -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        for _ in range(4):
            step()
        on_gpu.synchronize()
        on_gpu.forbid_waits(True)
        step()
        on_gpu.forbid_waits(False)
        trace = on_gpu.Trace(step)
        assert trace.saw_calls or on_gpu.DRY  # calls of the runtime are in the trace
        found[name] = trace.waits
        model.detach()
    return found


@pytest.mark.parametrize("backend", ["python", "native"])
def test_the_host_waits_for_nothing_in_a_steady_step(backend: Backend) -> None:
    for found in run_ranks(_waits_in_a_step, backend, world_size=on_gpu.gpus(), timeout=100):
        assert found == {name: [] for name in HOOKS}


# ---------------------------------------------------------------------- communication runs beside the backward


def _gloo_inside_the_backward(backend: Backend) -> tuple[int, int]:
    """Count the buckets whose way to the host begins before the last matrix product of the backward has ended."""
    device = on_gpu.own_device()
    model = ldh.DataParallel(on_gpu.layers(8, 2048, device), bucket_cap_mb=16, reducer_backend=backend)
    x = torch.randn(on_gpu.ROWS, 2048, device=device)

    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    for _ in range(3):
        step()
    trace = on_gpu.Trace(step)
    return trace.inside_the_products("Memcpy DtoH"), len(model.stats()["bucket_sizes"])  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["python", "native"])
def test_two_ranks_on_a_device_send_inside_the_backward(backend: Backend) -> None:
    for inside, buckets in run_ranks(_gloo_inside_the_backward, backend, timeout=100):
        assert buckets >= 4
        assert inside >= buckets // 2


def _nccl_inside_the_backward(backend: Backend) -> int:
    device, group = on_gpu.own_device(), on_gpu.stream_ordered_group()
    net = on_gpu.layers(8, 2048, device)
    model = ldh.DataParallel(net, process_group=group, bucket_cap_mb=16, reducer_backend=backend)
    x = torch.randn(on_gpu.ROWS, 2048, device=device)
    for _ in range(3):
        model.zero_grad()
        model(x).square().mean().backward()
    return on_gpu.Trace(lambda: model(x).square().mean().backward()).inside_the_products("nccl")


@pytest.mark.parametrize("backend", ["python", "native"])
@pytest.mark.skipif(on_gpu.gpus() < 2, reason="needs two GPUs: with one rank NCCL launches nothing")
def test_collectives_run_inside_the_backward(backend: Backend) -> None:
    assert min(run_ranks(_nccl_inside_the_backward, backend, world_size=on_gpu.gpus(), timeout=100)) >= 2


def _slow_hook(backend: Backend) -> tuple[int, float]:
    """Reduce with a hook that keeps the communication stream busy, and use its result at once."""
    device, group = on_gpu.own_device(), on_gpu.stream_ordered_group()
    net, twin = on_gpu.layers(8, 2048, device), on_gpu.layers(8, 2048, device)

    def hook(state: None, bucket: ldh.GradBucket) -> Tensor:
        on_gpu.spin(2_000_000)
        return bucket.buffer().mul(2.0)  # a new tensor, so that the copy back is part of the order

    model = ldh.DataParallel(
        net, process_group=group, bucket_cap_mb=16, comm_hook=(None, hook), reducer_backend=backend
    )
    x = torch.randn(on_gpu.ROWS, 2048, device=device)
    norms = []

    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()
        # Work that follows the backward at once, on the compute stream, without any wait of the host.
        norms.append(torch.stack([p.grad.norm() for p in net.parameters() if p.grad is not None]).norm())

    for _ in range(3):
        step()
    inside = on_gpu.Trace(step).inside_the_products("spin", "sleep")
    twin(x).square().mean().backward()
    alone = torch.stack([p.grad.norm() for p in twin.parameters() if p.grad is not None]).norm()
    return inside, float(norms[-1] / alone)


@pytest.mark.parametrize("backend", ["python", "native"])
def test_reduction_overlaps_with_the_backward_and_what_follows_sees_its_result(backend: Backend) -> None:
    [(inside, ratio)] = run_ranks(_slow_hook, backend, world_size=1, timeout=100)
    assert inside >= 1
    assert ratio == pytest.approx(2.0, rel=1e-4)


# ---------------------------------------------------------------------- compiled


def _sent_on_device() -> dict[str, tuple[list[int], float]]:
    """Return how many buckets were sent as each compiled graph's backward began, and the distance to torch's DDP."""
    device, found = on_gpu.own_device(), {}
    for backend in ("python", "native"):
        torch.manual_seed(0)
        net, twin = Layers().to(device), Layers().to(device)
        twin.load_state_dict(net.state_dict())
        compiled = torch.compile(net, backend="aot_eager")
        model = ldh.DataParallel(compiled, bucket_cap_mb=1, reducer_backend=backend)  # type: ignore[arg-type]
        other = torch.nn.parallel.DistributedDataParallel(twin)
        sent: list[int] = []
        for step in range(3):
            sent.clear()
            model.zero_grad()
            other.zero_grad()
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())).to(device)
            loss = model(x).square().mean()
            note_sent(loss, model.reducer.progress, sent)
            loss.backward()
            other(x).square().mean().backward()
        pairs = zip(net.parameters(), twin.parameters(), strict=True)
        found[backend] = sent, max(float((a.grad - b.grad).abs().max()) for a, b in pairs)  # type: ignore[operator]
        model.detach()
    return found


def test_a_compiled_model_sends_between_the_graphs_of_its_backward() -> None:
    for found in run_ranks(_sent_on_device, timeout=100):
        for sent, distance in found.values():
            assert sent == list(range(LAYERS))
            assert distance < 1e-6
