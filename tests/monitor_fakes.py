"""What the monitor's tests share: a clock that is told the time, backwards without a reducer, a sample record."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_hooks.monitor.clock import Clock, Instant
from lightning_ddp_hooks.monitor.record import RunRecord
from lightning_ddp_hooks.monitor.recorder import Recorder
from lightning_ddp_hooks.monitor.skew import RankStep
from lightning_ddp_hooks.monitor.timeline import BucketTiming, StepTiming
from lightning_ddp_hooks.traffic import ByteCounter


class FakeClock(Clock):
    """Says what ``now`` says; on a device its instants pass when ``passed`` reaches them."""

    def __init__(self, *, asynchronous: bool = False) -> None:
        self.asynchronous = asynchronous
        self.now = 0.0
        self.passed = float("inf") if not asynchronous else 0.0
        self.tells: list[Callable[[Instant], None]] = []

    def stamp(self) -> Instant:
        return self.now

    def when_done(self, work: object, tell: Callable[[Instant], None]) -> bool:
        if work is None:
            return False
        self.tells.append(tell)
        return True

    def known(self, instant: Instant) -> bool:
        assert isinstance(instant, float)
        return instant <= self.passed

    def seconds(self, instant: Instant) -> float:
        assert isinstance(instant, float)
        assert instant <= self.passed, "read too early"
        return instant

    def synchronize(self) -> None:
        self.passed = float("inf")


class FakeBucket:
    def __init__(self, index: int, sizes: Sequence[int] = (3, 1)) -> None:
        self._index = index
        self.names = tuple(f"p{index}.{i}" for i in range(len(sizes)))
        self._params = [torch.ones(size) for size in sizes]
        self._buffer = torch.cat(self._params)

    def index(self) -> int:
        return self._index

    def buffer(self) -> Tensor:
        return self._buffer

    def parameters(self) -> list[Tensor]:
        return self._params


class FakeTask:
    """A launched bucket, as the queue returns it: with one collective in flight, or finished."""

    def __init__(self, *, finished: bool = False) -> None:
        self.finished = finished
        self.collective: object | None = None if finished else object()
        self.stages = 0 if finished else 1
        self.on_collective: Callable[[object], None] | None = None
        self.on_finished: Callable[[], None] | None = None


class Watched:
    """A recorder with a clock and an account, and the calls of a reducer at given times."""

    def __init__(self, clock: FakeClock | None = None, error: Any = None) -> None:
        self.clock = clock or FakeClock()
        self.traffic = ByteCounter()
        self.recorder = Recorder(self.clock, self.traffic, error)

    def at(self, now: float, call: str, *args: Any) -> Any:
        """Call a method of the recorder at a time."""
        self.clock.now = float(now)
        return getattr(self.recorder, call)(*args)

    def send(self, nbytes: int) -> None:
        """Send something, for whatever is sent now."""
        self.traffic.current.sent += nbytes

    def launch(self, bucket: FakeBucket, ready: float, launched: float, pending: object, sent: int = 0) -> None:
        self.at(ready, "bucket_full", bucket, 0.5)
        self.at(ready, "launch_begins", bucket.index())
        self.send(sent)
        self.at(launched, "launch_ended", bucket.index(), pending)


def sample_steps(count: int = 20) -> list[StepTiming]:
    """Make steps of 100 ms that wait for the last of three buckets, some longer than others."""
    steps = []
    for number in range(count):
        begin, slow = 0.2 * number, 0.001 * (number % 5)
        end = begin + 0.08
        buckets = tuple(
            BucketTiming(
                index=i,
                names=(f"layer{2 - i}.weight", f"layer{2 - i}.bias"),
                grad_bytes=4_000_000,
                sent_bytes=1_000_000,
                ready=begin + 0.03 + 0.02 * i,
                launched=begin + 0.032 + 0.02 * i,
                done=begin + 0.045 + 0.02 * i if i < 2 else end + 0.012 + slow,
            )
            for i in range(3)
        )
        wait = 0.012 + slow
        steps.append(
            StepTiming(number, begin, begin + 0.02, end, end + wait + 0.008, buckets, wait, (), (("buffers", 512),))
        )
    return steps


def sample_record(steps: Sequence[StepTiming] | None = None, *, world_size: int = 2) -> RunRecord:
    """Make a record of `sample_steps`, or of others."""
    steps = sample_steps() if steps is None else steps
    record = RunRecord(world_size=world_size, rank=0, keep_steps=1000, facts={"model": "Net", "hook": "BlockQuantize"})
    record.add(steps)
    if world_size > 1:
        record.compared.extend([RankStep.of(step)] * world_size for step in steps)
    record.outside_bytes = {"control": 1000}
    return record
