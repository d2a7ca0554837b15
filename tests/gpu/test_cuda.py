"""The real device: the numbers of the CPU and of torch's DDP, and memory that is not reused too soon.

Two ranks share one GPU over gloo, which moves CUDA tensors too. NCCL takes no two ranks on one GPU: with it there are as
many ranks as GPUs.
"""

from typing import Any, Literal

import on_gpu
import pytest
import torch
import torch.distributed as dist
from odd_models import CASES, Mlp, reference
from ranks import run_ranks
from torch import Tensor, nn

import lightning_ddp_hooks as ldh

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]

Backend = Literal["python", "native"]
BACKENDS = ["python", "native"]
ON_DEVICE = [
    "plain",
    "accumulation",
    "heads differ by rank and step",
    "complex",
    "channels_last with BatchNorm and 1x1",
]


class _OnDevice(nn.Module):
    """A module whose inputs are moved to the device, so that the cases for the CPU can be used."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.module, self.device = module, device

    def forward(self, *args: Any) -> Any:
        return self.module(*(a.to(self.device) if isinstance(a, Tensor) else a for a in args))


def _train_cases(views: bool, backend: Backend) -> dict[str, list[Tensor]]:
    device, found = on_gpu.own_device(), {}
    for name in ON_DEVICE:
        case = CASES[name]
        torch.manual_seed(0)
        module = case.build().to(device)
        settings = {"gradient_as_bucket_view": views, "reducer_backend": backend, **case.settings}
        model = ldh.DataParallel(_OnDevice(module, device), bucket_cap_mb=0.001, first_bucket_mb=0.0005, **settings)
        optimizer = case.optimizer(list(module.parameters()))
        for step in range(5):
            optimizer.zero_grad()
            case.run(model, module, dist.get_rank(), step, model.no_sync)
            optimizer.step()
        found[name] = [p.detach().cpu() for p in module.parameters()]
        model.detach()
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("views", [True, False], ids=["views", "copies"])
def test_two_ranks_on_a_device_train_as_one_process(views: bool, backend: Backend) -> None:
    for found in run_ranks(_train_cases, views, backend, timeout=100):
        for name, params in found.items():
            for value, expected in zip(params, reference(CASES[name], 5, 2), strict=True):
                torch.testing.assert_close(
                    value, expected, rtol=1e-9, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}"
                )


def _beside_ddp(nccl: bool) -> dict[str, bool]:
    """Tell for each way to reduce whether the parameters are bitwise those that torch's DDP trains."""
    device = on_gpu.own_device()
    group = on_gpu.stream_ordered_group() if nccl else None
    trained: dict[str, list[Tensor]] = {}
    for way in ("ddp", *(f"{backend}, {views=}" for backend in BACKENDS for views in (True, False))):
        torch.manual_seed(0)
        net = Mlp().to(device)
        if way == "ddp":
            model: nn.Module = nn.parallel.DistributedDataParallel(net, process_group=group)
        else:
            backend, views = way.split(", ")
            settings: Any = {"reducer_backend": backend, "gradient_as_bucket_view": views == "views=True"}
            model = ldh.DataParallel(net, process_group=group, bucket_cap_mb=0.0005, **settings)
        optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
        for step in range(6):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            x = torch.randn(4, 8, generator=generator, dtype=torch.float64).to(device)
            model(x).square().mean().backward()
            optimizer.step()
        trained[way] = [p.detach().cpu() for p in net.parameters()]
    expected = trained.pop("ddp")
    return {
        way: all(torch.equal(a, b) for a, b in zip(params, expected, strict=True)) for way, params in trained.items()
    }


@pytest.mark.parametrize("nccl", [False, True], ids=["gloo", "nccl"])
def test_parameters_are_bitwise_those_of_torch_ddp(nccl: bool) -> None:
    for found in run_ranks(_beside_ddp, nccl, world_size=on_gpu.gpus() if nccl else 2, timeout=100):
        assert found == dict.fromkeys(found, True)


def _stress_allocator(backend: Backend) -> float:
    """Give the allocator every chance to hand memory of a bucket in flight to someone else."""
    device = on_gpu.own_device()
    net, twin = on_gpu.layers(20, 256, device), on_gpu.layers(20, 256, device)

    def hook(state: None, bucket: ldh.GradBucket) -> Tensor:
        parts = [bucket.buffer() / 3 for _ in range(3)]
        on_gpu.spin(200_000)
        return parts[0] + parts[1] + parts[2]

    model = ldh.DataParallel(net, bucket_cap_mb=0.3, comm_hook=(None, hook), reducer_backend=backend)
    worst = torch.zeros((), device=device)
    for step in range(40):
        x = torch.randn(64, 256, generator=torch.Generator().manual_seed(step)).to(device)
        for module in (model, twin):
            module.zero_grad()
            module(x).square().mean().backward()
            junk = [torch.full((256, 256), float("nan"), device=device) for _ in range(8)]
            del junk
        for a, b in zip(net.parameters(), twin.parameters(), strict=True):
            worst = torch.maximum(worst, (a.grad - b.grad).abs().max())  # type: ignore[operator]
    return float(worst)


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_of_a_bucket_in_flight_is_not_reused(backend: Backend) -> None:
    [worst] = run_ranks(_stress_allocator, backend, world_size=1, timeout=100)
    assert worst < 1e-6  # NaN is not


# ---------------------------------------------------------------------- memory


def _peaks() -> dict[str, int]:
    """Return the peak of the memory that training allocates beyond the model, for each way to reduce."""
    device, group = on_gpu.own_device(), on_gpu.stream_ordered_group()
    found = {}
    for way in ("ddp", *BACKENDS):
        net = on_gpu.layers(8, 1024, device)
        if way == "ddp":
            model: nn.Module = nn.parallel.DistributedDataParallel(
                net, process_group=group, gradient_as_bucket_view=True
            )
        else:
            model = ldh.DataParallel(net, process_group=group, reducer_backend=way)  # type: ignore[arg-type]
        x = torch.randn(64, 1024, device=device)
        before = 0
        for step in range(5):
            if step == 3:
                before = on_gpu.restart_peak()
            model.zero_grad()
            model(x).square().mean().backward()
        on_gpu.synchronize()
        found[way] = on_gpu.peak()
        del model, net, x
    return found


def test_the_peak_of_memory_is_at_most_that_of_torch_ddp() -> None:
    [peaks] = run_ranks(_peaks, world_size=1, timeout=100)
    print(f"peak in MiB: { {way: round(found / 2**20, 2) for way, found in peaks.items()} }")
    for backend in BACKENDS:
        assert peaks[backend] <= peaks["ddp"] + 2**20


# ---------------------------------------------------------------------- graphs


def _captured() -> tuple[str, float]:
    """Capture a whole step, then the module alone; return what the first says, and how far off the second is."""
    device, group = on_gpu.own_device(), on_gpu.stream_ordered_group()
    net, twin = on_gpu.layers(4, 256, device), on_gpu.layers(4, 256, device)
    x = torch.randn(8, 256, device=device)
    said = "cannot be captured into a graph"
    if not on_gpu.DRY:
        model = ldh.DataParallel(net, process_group=group)
        model(x).square().mean().backward()
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                model(x).square().mean().backward()
            said = "nothing"
        except RuntimeError as error:
            said = str(error)
        torch.cuda.synchronize()
        model.detach()
        net = torch.cuda.make_graphed_callables(on_gpu.layers(4, 256, device), (x,))
    model = ldh.DataParallel(net, process_group=group, bucket_cap_mb=0.3)
    worst = 0.0
    for step in range(4):
        x = torch.randn(8, 256, generator=torch.Generator().manual_seed(step)).to(device)
        for module in (model, twin):
            module.zero_grad()
            module(x).square().mean().backward()
        pairs = zip(net.parameters(), twin.parameters(), strict=True)
        worst = max(worst, *(float((a.grad - b.grad).abs().max()) for a, b in pairs))  # type: ignore[operator]
    return said, worst


def test_a_step_is_not_captured_into_a_graph_but_the_module_may_be() -> None:
    [(said, worst)] = run_ranks(_captured, world_size=1, timeout=100)
    assert "cannot be captured into a graph" in said
    assert worst < 1e-6
