"""The monitor on the real device: marks on streams, read without making the host wait."""

from itertools import pairwise
from typing import Any

import on_gpu
import pytest
import torch
from ranks import run_ranks

import lightning_ddp_hooks as ldh
from lightning_ddp_hooks import traffic
from lightning_ddp_hooks.monitor.clock import clock_for
from lightning_ddp_hooks.monitor.quality_meter import QualityMeter
from lightning_ddp_hooks.monitor.recorder import Recorder
from lightning_ddp_hooks.monitor.timeline import StepTiming, exposed_by_bucket
from lightning_ddp_hooks.reducer.stream import start_read
from lightning_ddp_hooks.traffic import ByteCounter

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]


def _run(hook: Any, steps: int, *, strict: bool, compare: bool = False) -> tuple[list[int], list[StepTiming]]:
    """Train with a recorder; return which steps were known at once, and all of them."""
    device, group = on_gpu.own_device(), on_gpu.stream_ordered_group()
    net = on_gpu.layers(8, 2048, device)
    model = ldh.DataParallel(net, group, bucket_cap_mb=16, comm_hook=hook)
    counted = ByteCounter()
    traffic.count_bytes(counted)
    error = QualityMeter(on_gpu.stream_ordered_group(), 1, start_read) if compare else None
    recorder = Recorder(clock_for(device, queues_waits=True), counted, error)
    model.reducer.observer = recorder
    x = torch.randn(on_gpu.ROWS, 2048, device=device)
    early: list[int] = []
    found: list[StepTiming] = []
    for step in range(steps):
        if strict and step == 3:
            on_gpu.forbid_waits(True)
        recorder.begin_step(step)
        loss = model(x).square().mean()
        recorder.backward_begins()
        loss.backward()
        recorder.backward_ended()
        for p in net.parameters():
            p.grad = None
        known = recorder.end_step()
        early += [timing.step for timing in known if timing.step == step]
        found += known
    on_gpu.forbid_waits(False)
    found += recorder.settle()
    traffic.count_bytes(None)
    return early, found


def _plain() -> tuple[list[int], list[StepTiming]]:
    return _run(None, 8, strict=True)


def test_steps_are_measured_without_a_wait_of_the_host() -> None:
    [(early, steps)] = run_ranks(_plain, world_size=1, timeout=100)

    assert [step.step for step in steps] == list(range(8))
    assert on_gpu.DRY or early != list(range(8))  # the host is ahead of the device
    for before, step in pairwise(steps):
        assert before.finished <= step.begin + 1e-4
    for step in steps[3:]:
        assert step.begin < step.backward_begin < step.backward_end <= step.finished
        assert len(step.buckets) >= 8
        for bucket in step.buckets:
            assert step.backward_begin <= bucket.ready <= bucket.launched + 1e-5
            assert bucket.done <= step.finished + 1e-5


def _sleeping_hook(state: None, bucket: ldh.GradBucket) -> torch.Tensor:
    on_gpu.spin(20_000_000)  # about 10 ms on the communication stream
    return bucket.buffer()


def _slow() -> tuple[list[int], list[StepTiming]]:
    return _run((None, _sleeping_hook), 6, strict=False)


def test_a_slow_hook_shows_as_time_in_flight_and_as_waiting() -> None:
    [(_, steps)] = run_ranks(_slow, world_size=1, timeout=100)

    for step in steps[3:]:
        for bucket in step.buckets:
            assert on_gpu.DRY or 2e-3 < bucket.done - bucket.launched < 0.2
        # The stream does one after the other, so the last ones are waited for.
        assert on_gpu.DRY or step.wait > 0.5 * sum(b.done - b.launched for b in step.buckets[-4:])
        assert on_gpu.DRY or sum(exposed_by_bucket(step)) == pytest.approx(step.wait, rel=0.1)


def _compared() -> tuple[list[int], list[StepTiming]]:
    return _run("bf16", 5, strict=False, compare=True)


def test_the_compression_error_is_measured_on_the_device() -> None:
    [(_, steps)] = run_ranks(_compared, world_size=1, timeout=100)

    errors = [bucket.error for step in steps[2:] for bucket in step.buckets]
    assert all(error is not None and error < 2**-8 for error in errors)
