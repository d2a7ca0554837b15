"""Hooks on an asynchronous device: what they give on the CPU, and a host that never waits in a steady step."""

from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import sim
import torch
import torch.distributed as dist
from on_sim import Net, batch
from ranks import run_ranks
from torch import Tensor

import lightning_ddp_hooks as ldh
from lightning_ddp_hooks import comm, hooks
from lightning_ddp_hooks.averaging.loss_scale import SharedScale

pytestmark = pytest.mark.ranks

STEPS, LEARNED = 6, 3

HOOKS: dict[str, Any] = {
    **{name: name for name in ("allreduce", "noop", "fp16")},
    "post_local_sgd": hooks.PostLocalSGD(start_local_sgd_iter=2, subgroup_size=1),
    "sum in float32": hooks.Cast(dtype="bfloat16", accumulate="float32"),
    "quantize_per_tensor": "quantize_per_tensor",
    "quantize_per_channel": hooks.QuantizePerChannel(bucket_size=40),
    "int8": hooks.BlockQuantize(block_size=32),
    "onebit": hooks.OneBit(start_iter=0, block_size=32),
    "topk": hooks.TopK(ratio=0.2),
    "powersgd": hooks.PowerSGD(rank=2, start_iter=0, min_compression_rate=1),
    "cold powersgd": hooks.PowerSGD(rank=2, start_iter=0, min_compression_rate=1, warm_start=False),
    "batched_powersgd": hooks.BatchedPowerSGD(rank=2, start_iter=0, min_compression_rate=1),
    "cast powersgd": hooks.Cast(hooks.PowerSGD(rank=2, start_iter=0, min_compression_rate=1), "bfloat16"),
    "per parameter": hooks.PerParameter([hooks.Rule("topk", ndim=2)], default="bf16"),
    "schedule": hooks.Schedule([hooks.Stage(0, "bf16"), hooks.Stage(2, hooks.TopK(ratio=0.2))]),
}
if hasattr(torch, "float8_e4m3fn"):
    HOOKS["fp8"] = hooks.BlockQuantize(dtype="fp8", block_size=32)


def reduced_by_all(on_device: bool) -> dict[str, list[Tensor]]:
    device = torch.device("cpu")
    if on_device:
        device = sim.join_world(seed=dist.get_rank(), delayed=0.2, longest_ms=1)
    return {name: reduced(name, device) for name in HOOKS}


def reduced(name: str, device: torch.device) -> list[Tensor]:
    """Gradients of some steps of an untrained model."""
    rank, on_device = dist.get_rank(), device.type != "cpu"
    torch.manual_seed(0)
    net = Net().to(device)
    model = ldh.DataParallel(
        net, comm_hook=HOOKS[name], bucket_cap_mb=0.001, first_bucket_mb=0.0005, reducer_backend="python"
    )
    batches = [batch(step, rank).to(device) for step in range(STEPS)]
    found = []
    for step, own in enumerate(batches):
        watched = on_device and step >= LEARNED
        if watched:
            torch.accelerator.synchronize()  # the last backward's status has arrived
        with sim.no_host_waits() if watched else nullcontext():
            if watched:
                sim.sleep(100)
            net.zero_grad()
            model(own).square().mean().backward()
            found.append(torch.cat([param.grad.flatten() for param in net.parameters() if param.grad is not None]))
    model.detach()
    return [values.cpu() for values in found]


@cache
def ranks_with_all_hooks(on_device: bool) -> list[dict[str, list[Tensor]]]:
    return run_ranks(reduced_by_all, on_device, timeout=100)


@pytest.mark.parametrize("name", list(HOOKS))
def test_a_hook_gives_what_it_gives_on_the_cpu_without_waiting(name: str) -> None:
    there, other = (found[name] for found in ranks_with_all_hooks(True))
    here = ranks_with_all_hooks(False)[0][name]
    for step in range(STEPS):
        if name not in ("noop", "post_local_sgd"):
            assert torch.equal(there[step], other[step])
        largest = float(here[step].abs().max())
        torch.testing.assert_close(there[step], here[step], rtol=0, atol=0.02 * largest)


class Scaler:
    """What is looked at of a GradScaler, which does not know the simulated device."""

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((), 64.0, device=device)

    def _get_scale_async(self) -> Tensor:
        return self.scale


def share_scale() -> list[float]:
    device = sim.join_world(seed=dist.get_rank(), delayed=0.2, longest_ms=1)
    scaler = Scaler(device)
    shared = SharedScale(scaler, comm.resolve_group(None))  # type: ignore[arg-type]
    flags = torch.zeros(STEPS, device=device)
    flags[LEARNED + dist.get_rank()] = 1.0
    for step in range(STEPS):
        with sim.no_host_waits() if step else nullcontext():  # the first one makes a group
            shared.exchange([flags[step]])
            scaler.scale.sub_(flags[step], alpha=32.0)
    return [float(flag) for flag in flags]


def test_overflows_are_shared_without_waiting() -> None:
    found = [0.0] * STEPS
    found[LEARNED + 1] = 1.0  # a step later; what rank 1 found in this step has been answered by then
    assert run_ranks(share_scale) == [found] * 2


class _Skipping(Net):
    """Leaves out its first layers, whose gradients come last."""

    def forward(self, batch: Tensor, skip: int = 0) -> Tensor:
        return self.head(self.layers[skip:](batch))  # type: ignore[no-any-return]


class _NotesLast(hooks.CommHook, hooks.BoundHook):
    def __init__(self) -> None:
        self.marks: list[bool] = []

    def bind(self, context: hooks.BindContext) -> hooks.BoundHook:
        return self

    def reduce(self, bucket: ldh.GradBucket) -> hooks.Phases:
        self.marks.append(bucket.is_last())
        yield hooks.requests.AllReduce(bucket.buffer())
        bucket.buffer().div_(bucket.divisor)
        return None


def last_buckets(on_device: bool, backend: str) -> tuple[list[list[bool]], list[Tensor]]:
    rank = dist.get_rank()
    device = sim.join_world(seed=rank, delayed=0.2, longest_ms=1) if on_device else torch.device("cpu")
    torch.manual_seed(0)
    net, hook = _Skipping().to(device), _NotesLast()
    model = ldh.DataParallel(
        net,
        comm_hook=hook,
        bucket_cap_mb=0.0005,
        first_bucket_mb=0.0005,
        find_unused_parameters=True,
        reducer_backend=backend,  # type: ignore[arg-type]
    )
    marks, found = [], []
    for step, skip in enumerate([0, 0, 2, 4, 1, 0]):
        hook.marks = []
        net.zero_grad()
        model(batch(step, rank).to(device), skip=min(skip + rank, 4)).square().mean().backward()
        marks.append(hook.marks)
        found.append(torch.cat([param.grad.flatten() for param in net.parameters() if param.grad is not None]))
    return marks, [values.cpu() for values in found]


@pytest.mark.parametrize("backend", ["python", "native"])
def test_one_bucket_is_the_last_whatever_is_sent(backend: str) -> None:
    (there, gradients), (other, others) = run_ranks(last_buckets, True, backend)
    here, expected = run_ranks(last_buckets, False, backend)[0]
    assert there == other == here
    for marks in there:
        assert marks == [False] * (len(marks) - 1) + [True]
    assert len({len(marks) for marks in there}) > 2
    for one, theirs, wanted in zip(gradients, others, expected, strict=True):
        assert torch.equal(one, theirs)
        torch.testing.assert_close(one, wanted)
