"""What hooks do to gradients, measured on an asynchronous device: as on the CPU, and the host never waits."""

from contextlib import nullcontext

import pytest
import sim
import torch
import torch.distributed as dist
from monitor_fakes import FakeClock
from on_sim import Net, batch, wrap
from ranks import run_ranks

from lightning_ddp_hooks import comm, hooks, traffic
from lightning_ddp_hooks.monitor.quality import Quality
from lightning_ddp_hooks.monitor.quality_meter import QualityMeter
from lightning_ddp_hooks.monitor.recorder import Recorder
from lightning_ddp_hooks.reducer.stream import start_read
from lightning_ddp_hooks.traffic import ByteCounter

pytestmark = pytest.mark.ranks

STEPS, LEARNED = 6, 3
HOOKS = {
    "none": None,
    "bf16": "bf16",
    "powersgd": hooks.PowerSGD(rank=1, start_iter=0, min_compression_rate=1),
    "topk": hooks.TopK(ratio=0.2),
}


def _measure(on_device: bool) -> dict[str, list[float]]:
    rank, found = dist.get_rank(), {}
    device = sim.join_world(seed=rank, delayed=0.2, longest_ms=1) if on_device else torch.device("cpu")
    for name, hook in HOOKS.items():
        torch.manual_seed(0)
        net = Net().to(device)
        model = wrap(net, comm_hook=hook, broadcast_buffers=False)
        counter, clock = ByteCounter(), FakeClock(asynchronous=True)
        traffic.count_bytes(counter)
        meter = QualityMeter.of_run(model._run, comm.new_group(comm.resolve_group(None)), 1, start_read)
        recorder = model.reducer.observer = Recorder(clock, counter, meter)
        batches = [batch(step, rank).to(device) for step in range(STEPS)]
        for step, own in enumerate(batches):
            watched = on_device and step >= LEARNED
            if watched:
                torch.accelerator.synchronize()  # the last backward's status has arrived
            clock.now = step + 1.0
            with sim.no_host_waits() if watched else nullcontext():
                if watched:
                    sim.sleep(50)
                recorder.begin_step(step)
                net.zero_grad()
                model(own).square().mean().backward()
                assert not recorder.end_step()  # not before the device has passed its marks
        if on_device:
            torch.accelerator.synchronize()
        clock.synchronize()
        quality = Quality.of(recorder.settle(), comm.world_size())
        traffic.count_bytes(None)
        assert quality is not None
        assert quality.steps == STEPS
        total = quality.total
        found[name] = [total.local, total.mean, total.error, total.own, total.due, total.memory]
        model.detach()
    return found


def test_figures_are_those_of_the_cpu_and_the_host_never_waits() -> None:
    for found, expected in zip(run_ranks(_measure, True), run_ranks(_measure, False), strict=True):
        for name, figures in found.items():
            assert figures == pytest.approx(expected[name], rel=1e-3, abs=1e-9), name
