"""Instants: read from the host's clock, or marked on a device's stream and read once the device has passed them.

Neither makes the host wait. Instants of a device are converted to the host's clock by a pair of marks that were made
together at the start, so that all times of a run lie on one axis.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch

Instant = float | torch.Event
"""Seconds on the host's clock, or a mark on a stream."""


class Clock:
    """The host's monotonic clock."""

    asynchronous = False  # whether the host runs ahead of what is measured

    def stamp(self) -> Instant:
        """Mark where the current stream is now."""
        return time.perf_counter()

    def when_done(self, work: object, tell: Callable[[Instant], None]) -> bool:
        """Have ``tell`` called with the instant at which a collective is done; return False if that is not possible.

        It is called on the thread that completes the collective; nothing else happens there.
        """
        if not hasattr(work, "get_future"):
            return False
        try:
            future = work.get_future()
        except RuntimeError:  # not every backend has futures
            return False
        future.add_done_callback(lambda _: tell(time.perf_counter()))
        return True

    def known(self, instant: Instant) -> bool:
        """Tell whether the instant has passed, without waiting."""
        return True

    def seconds(self, instant: Instant) -> float:
        """Return an instant that has passed, in seconds on the host's clock."""
        assert isinstance(instant, float)
        return instant

    def synchronize(self) -> None:
        """Wait until all instants have passed; at the end of a run."""

    def recycle(self, instants: Iterable[Instant], base: Instant) -> None:
        """Reuse marks whose times have been read, and measure from ``base`` from now on."""


class DeviceClock(Clock):
    """Events on the streams of an accelerator.

    Args:
        device: Device whose streams are marked.
        queues_waits: Whether waiting for a collective only queues the wait (NCCL), so that a separate stream can wait
            for one and be marked behind it; otherwise (gloo) only the end of the reducer's own wait is known.
    """

    asynchronous = True

    def __init__(self, device: torch.device, *, queues_waits: bool) -> None:
        self._device = device
        # Waits for one collective after the other, and nobody waits for it.
        self._probe = torch.Stream(device) if queues_waits else None
        self._free: list[torch.Event] = []
        self._base = self.stamp()
        self._base.synchronize()  # once, before the first step
        self._base_seconds = time.perf_counter()

    def stamp(self) -> torch.Event:
        """Record an event on the current stream."""
        event = self._free.pop() if self._free else torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def when_done(self, work: object, tell: Callable[[Instant], None]) -> bool:
        """Have the probing stream wait for the collective, and mark it there."""
        wait = getattr(work, "wait", None)
        if self._probe is None or wait is None or not hasattr(work, "get_future"):
            return False
        before = torch.accelerator.current_stream(self._device)
        torch.accelerator.set_stream(self._probe)  # `with stream:` came after torch 2.6
        try:
            wait()
            tell(self.stamp())
        finally:
            torch.accelerator.set_stream(before)
        return True

    def known(self, instant: Instant) -> bool:
        """Ask the event, without waiting."""
        return isinstance(instant, float) or bool(instant.query())

    def seconds(self, instant: Instant) -> float:
        """Measure from the base to the event."""
        if isinstance(instant, float):
            return instant
        return self._base_seconds + float(self._base.elapsed_time(instant)) / 1e3

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.accelerator.synchronize(self._device)

    def recycle(self, instants: Iterable[Instant], base: Instant) -> None:
        """Reuse events, and move the base: a difference is a float32 of milliseconds, which gets coarse."""
        assert isinstance(base, torch.Event)
        self._free += [i for i in (*instants, self._base) if isinstance(i, torch.Event) and i is not base]
        self._base_seconds, self._base = self.seconds(base), base


def clock_for(device: torch.device, *, queues_waits: bool) -> Clock:
    """Return the clock for buckets on ``device``."""
    return Clock() if device.type == "cpu" else DeviceClock(device, queues_waits=queues_waits)
