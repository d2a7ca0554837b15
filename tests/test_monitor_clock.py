"""The clock of a device, on streams and events that are simulated: each stream has a time of its own."""

from types import SimpleNamespace

import pytest
import torch

from lightning_ddp_hooks.monitor import clock as clock_module
from lightning_ddp_hooks.monitor.clock import Clock, DeviceClock, clock_for

DEVICE = torch.device("xpu", 0)


class FakeStream:
    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self.now = 0.0  # ms that its queue reaches to


class FakeEvent:
    """An event that passes when the device's time reaches it."""

    made = 0
    device_time = 0.0

    def __init__(self, device: torch.device, *, enable_timing: bool) -> None:
        assert device == DEVICE
        assert enable_timing
        FakeEvent.made += 1

    def record(self, stream: FakeStream) -> None:
        self.at = stream.now

    def query(self) -> bool:
        return self.at <= FakeEvent.device_time

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert self.query()
        assert end.query()
        return end.at - self.at

    def synchronize(self) -> None:
        FakeEvent.device_time = max(FakeEvent.device_time, self.at)


class FakeWork:
    """A collective that is done at a time; waiting only queues, on the stream that is current."""

    def __init__(self, accelerator: SimpleNamespace, done: float) -> None:
        self._accelerator = accelerator
        self._done = done

    def get_future(self) -> None:
        raise AssertionError("not on a device")

    def wait(self) -> None:
        stream = self._accelerator.current_stream(DEVICE)
        stream.now = max(stream.now, self._done)


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A device of a kind that this package has never heard of, in place of torch's."""
    current = [FakeStream()]
    FakeEvent.made, FakeEvent.device_time = 0, 0.0
    fake = SimpleNamespace(
        compute=current[0],
        current_stream=lambda device: current[0],
        set_stream=lambda stream: current.__setitem__(0, stream),
        synchronize=lambda device: setattr(FakeEvent, "device_time", float("inf")),
    )
    names = {"Event": FakeEvent, "Stream": FakeStream, "accelerator": fake, "device": torch.device}
    monkeypatch.setattr(clock_module, "torch", SimpleNamespace(**names))
    monkeypatch.setattr(clock_module.time, "perf_counter", lambda: 100.0)
    return fake


def test_marks_are_read_once_the_device_has_passed_them(accelerator: SimpleNamespace) -> None:
    clock = DeviceClock(DEVICE, queues_waits=True)
    accelerator.compute.now = 30.0
    mark = clock.stamp()
    assert not clock.known(mark)
    FakeEvent.device_time = 30.0
    assert clock.known(mark)
    assert clock.seconds(mark) == pytest.approx(100.03)


def test_a_collective_is_marked_on_a_stream_that_nobody_waits_for(accelerator: SimpleNamespace) -> None:
    clock = DeviceClock(DEVICE, queues_waits=True)
    told: list[object] = []
    assert clock.when_done(FakeWork(accelerator, done=50.0), told.append)
    assert accelerator.current_stream(DEVICE) is accelerator.compute
    assert accelerator.compute.now == 0.0
    clock.synchronize()
    assert clock.seconds(told[0]) == pytest.approx(100.05)  # type: ignore[arg-type]
    assert not clock.when_done(object(), told.append)
    assert not DeviceClock(DEVICE, queues_waits=False).when_done(FakeWork(accelerator, 1.0), told.append)


def test_a_wait_that_fails_leaves_the_stream_as_it_was(accelerator: SimpleNamespace) -> None:
    clock = DeviceClock(DEVICE, queues_waits=True)
    failing = SimpleNamespace(get_future=None, wait=lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        clock.when_done(failing, lambda _: None)
    assert accelerator.current_stream(DEVICE) is accelerator.compute


def test_events_are_used_again_and_times_stay_on_one_axis(accelerator: SimpleNamespace) -> None:
    clock = DeviceClock(DEVICE, queues_waits=True)
    for step in range(1, 6):
        accelerator.compute.now = 10.0 * step
        begin = clock.stamp()
        accelerator.compute.now += 4.0
        end = clock.stamp()
        FakeEvent.device_time = accelerator.compute.now
        assert clock.seconds(begin) == pytest.approx(100 + 0.01 * step)
        assert clock.seconds(end) == pytest.approx(100.004 + 0.01 * step)
        clock.recycle([begin, end, 7.0], base=begin)
    assert FakeEvent.made == 3


def test_only_the_host_has_the_hosts_clock(accelerator: SimpleNamespace) -> None:
    assert type(clock_for(torch.device("cpu"), queues_waits=False)) is Clock
    assert type(clock_for(DEVICE, queues_waits=False)) is DeviceClock
