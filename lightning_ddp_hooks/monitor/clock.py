"""Instants: read from the host's clock, or marked on a device's stream and read once the device has passed them.

Neither makes the host wait. The device's instants are brought to the host's clock by a pair of marks that were made
together at the start, so that all times of a run lie on one axis.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

Instant = float | torch.cuda.Event
"""Seconds on the host's clock, or a mark on a stream."""


class Clock(Protocol):
    """Makes instants; tests put a fake in its place.

    Attributes:
        asynchronous: whether the host runs ahead of what is measured.
    """

    asynchronous: bool

    def stamp(self) -> Instant:
        """Mark where the current stream is now."""
        ...

    def when_done(self, work: object, tell: Callable[[Instant], None]) -> bool:
        """Have ``tell`` called with the instant at which a collective is done; False if there is no way to tell."""
        ...

    def known(self, instant: Instant) -> bool:
        """Tell whether the instant has passed."""
        ...

    def seconds(self, instant: Instant) -> float:
        """Return an instant that has passed, in seconds on the host's clock."""
        ...

    def settle(self) -> None:
        """Wait until all instants have passed; at the end of a run."""
        ...


class HostClock:
    """The host's monotonic clock, `time.perf_counter`."""

    asynchronous = False
    _now = staticmethod(time.perf_counter)

    def stamp(self) -> Instant:
        """Return the time."""
        return self._now()

    def when_done(self, work: object, tell: Callable[[Instant], None]) -> bool:
        """Have the time noted on the thread that completes the collective; nothing else happens there."""
        if not hasattr(work, "get_future"):
            return False
        now = self._now
        try:
            future = work.get_future()
        except RuntimeError:  # not every backend has futures
            return False
        future.add_done_callback(lambda _: tell(now()))
        return True

    def known(self, instant: Instant) -> bool:
        """Tell so: every time that was read has passed."""
        return True

    def seconds(self, instant: Instant) -> float:
        """Return the instant."""
        assert isinstance(instant, float)
        return instant

    def settle(self) -> None:
        """Nothing is outstanding."""


class CudaClock:
    """Events on the streams of a device.

    Args:
        device: whose streams are marked.
        queues_waits: whether waiting for a collective only queues the wait (NCCL), so that a stream of its own can
            wait for one and be marked behind it; else (gloo) only the end of the reducer's own wait is known.
    """

    asynchronous = True

    def __init__(self, device: torch.device, *, queues_waits: bool) -> None:
        self._device = device
        # Waits for one collective after the other, and nobody waits for it.
        self._probe = torch.cuda.Stream(device) if queues_waits else None
        self._free: list[torch.cuda.Event] = []
        self._base = self._event()
        self._base.record(torch.cuda.current_stream(device))
        self._base.synchronize()  # once, before the first step
        self._base_seconds = time.perf_counter()

    def _event(self) -> torch.cuda.Event:
        return self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)

    def stamp(self) -> Instant:
        """Record an event on the current stream."""
        event = self._event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def when_done(self, work: object, tell: Callable[[Instant], None]) -> bool:
        """Have the probing stream wait for the collective, and mark it there."""
        wait = getattr(work, "wait", None)
        if self._probe is None or wait is None or not hasattr(work, "get_future"):
            return False
        with torch.cuda.stream(self._probe):
            wait()
            tell(self.stamp())
        return True

    def known(self, instant: Instant) -> bool:
        """Ask the event, without waiting."""
        return isinstance(instant, float) or bool(instant.query())

    def seconds(self, instant: Instant) -> float:
        """Measure from the base to the event."""
        if isinstance(instant, float):
            return instant
        return self._base_seconds + float(self._base.elapsed_time(instant)) / 1e3

    def settle(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self._device)

    def move_base(self, instant: Instant) -> None:
        """Measure from a later event from now on: a difference is a float32 of milliseconds, which gets coarse."""
        assert isinstance(instant, torch.cuda.Event)
        self._base_seconds = self.seconds(instant)
        self._base = instant

    def give_back(self, instants: list[Instant]) -> None:
        """Let events be used again whose times have been read."""
        self._free += [i for i in instants if isinstance(i, torch.cuda.Event) and i is not self._base]


def clock_for(device: torch.device, *, queues_waits: bool) -> Clock:
    """Return the clock for buckets on ``device``."""
    return CudaClock(device, queues_waits=queues_waits) if device.type == "cuda" else HostClock()
