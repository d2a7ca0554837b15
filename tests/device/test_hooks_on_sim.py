"""Each hook on an asynchronous device: the CPU's values, and a host that does not wait."""

from typing import Any

import pytest
import sim
import torch
import torch.distributed as dist
from on_sim import Net, batch, wrap
from ranks import run_ranks
from torch import Tensor

from lightning_ddp_hooks import hooks

pytestmark = pytest.mark.ranks

STEPS = 7
HOOKS: dict[str, Any] = {
    **{name: name for name in ("allreduce", "noop", "fp16", "bf16", "int8", "fp8", "onebit", "topk")},
    **{name: name for name in ("quantize_per_tensor", "quantize_per_channel")},
    "powersgd": hooks.PowerSGD(rank=2, start_iter=2, min_compression_rate=1),
    "powersgd, cold": hooks.PowerSGD(rank=1, start_iter=2, min_compression_rate=1, warm_start=False),
    "batched_powersgd": hooks.BatchedPowerSGD(rank=2, start_iter=2),
    "post_local_sgd": hooks.PostLocalSGD(start_local_sgd_iter=3, subgroup_size=1),
    "cast": hooks.Cast(hooks.PowerSGD(rank=2, start_iter=2, min_compression_rate=1), torch.bfloat16),
    "schedule": hooks.Schedule([hooks.Stage(0, "allreduce"), hooks.Stage(3, "int8")]),
    "per parameter": hooks.PerParameter(rules=[hooks.Rule("fp16", ndim=2)], default="allreduce"),
}


def _train(device: torch.device, name: str) -> list[Tensor]:
    torch.manual_seed(0)
    net = Net().to(device)
    model = wrap(net, comm_hook=HOOKS[name])
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(STEPS):
        own = batch(step, dist.get_rank()).to(device)
        optimizer.zero_grad()
        model(own).square().mean().backward()
        optimizer.step()
    return [param.detach().cpu() for param in net.parameters()]


def _train_on_both(name: str) -> tuple[list[Tensor], list[Tensor]]:
    device = sim.join_world(seed=dist.get_rank(), delayed=0.2, longest_ms=1)
    return _train(device, name), _train(torch.device("cpu"), name)


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_gives_what_it_gives_on_the_cpu(name: str) -> None:
    for found, expected in run_ranks(_train_on_both, name):
        for value, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-5)


def _train_without_waits(name: str) -> None:
    device = sim.join_world(delayed=0)
    net = Net().to(device)
    model = wrap(net, comm_hook=HOOKS[name])
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    batches = [batch(step, dist.get_rank()).to(device) for step in range(STEPS)]
    for step, own in enumerate(batches):
        torch.accelerator.synchronize()  # so that the numbers of the step before are there
        if step < 5:  # by then each hook has begun, and the buckets' order has been learned
            model(own).square().mean().backward()
            optimizer.step()
            continue
        with sim.no_host_waits():
            sim.sleep(600)
            optimizer.zero_grad()
            model(own).square().mean().backward()
            optimizer.step()
            assert not torch.accelerator.current_stream().query()


# Asks for CUDA by name whether the host may wait, or copies from pageable memory.
_WAITS = {"powersgd", "powersgd, cold", "batched_powersgd", "cast"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.xfail(name in _WAITS, reason="PowerSGD waits")) for name in HOOKS]
)
def test_the_host_does_not_wait_in_a_steady_step(name: str) -> None:
    run_ranks(_train_without_waits, name)
