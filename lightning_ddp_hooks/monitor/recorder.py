"""Records steps: an observer of the reducer notes instants, and a step becomes a `StepTiming` once all have passed.

    begin_step -> backward_begins -> (what the reducer tells) -> backward_ended -> end_step -> [StepTiming]

On a device a step is handed out some steps later, when its last event has passed; the host never waits for that.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.monitor.clock import Clock, CudaClock, Instant
from lightning_ddp_hooks.monitor.timeline import BucketTiming, StepTiming
from lightning_ddp_hooks.traffic import ByteCounter, ByteTotal


class WatchedBucket(Protocol):
    """What a recorder needs of the reducer's ``GradBucket``."""

    names: tuple[str, ...]

    def index(self) -> int:
        """Return its position in the order of reduction."""
        ...

    def buffer(self) -> Tensor:
        """Return the flat gradients."""
        ...

    def parameters(self) -> list[Tensor]:
        """Return the parameters in it."""
        ...


class _Flight:
    """A bucket on its way."""

    __slots__ = ("bucket", "done", "error", "exact", "grad_bytes", "index", "launched", "names", "ready", "scale",
                 "tally", "work")  # fmt: skip

    def __init__(self, bucket: WatchedBucket, scale: float, ready: Instant) -> None:
        self.bucket: WatchedBucket | None = bucket
        self.index = bucket.index()
        self.names = bucket.names
        self.grad_bytes = bucket.buffer().nbytes
        self.scale = scale
        self.tally = ByteTotal()
        self.ready = self.launched = ready
        self.done: Instant | None = None
        self.exact: Tensor | None = None
        self.work: comm.Work | None = None
        self.error: Tensor | None = None

    def note_done(self, instant: Instant) -> None:
        self.done = instant


@dataclass
class _Step:
    """A step as it is being recorded, or whose instants have not all passed."""

    number: int
    begin: Instant
    backward_begin: Instant | None = None
    backward_end: Instant | None = None
    latest_begin: Instant | None = None
    latest_end: Instant | None = None
    waits: list[tuple[Instant, Instant]] = field(default_factory=list)
    hook_work: list[tuple[Instant, Instant]] = field(default_factory=list)
    flights: list[_Flight] = field(default_factory=list)
    finished: Instant | None = None
    other_bytes: tuple[tuple[str, int], ...] = ()
    local_bytes: int = 0
    measures_error: bool = False
    spoilt: bool = False


class CompressionError:
    """Compares reduced buckets with the exact mean, every few steps.

    Args:
        group: for the extra all-reduce of the gradients as they were; nothing else uses it.
        every_n_steps: in which steps; the same on all ranks.
    """

    def __init__(self, group: comm.ProcessGroup, every_n_steps: int) -> None:
        self.group = group
        self.every_n_steps = every_n_steps
        self._uncounted = ByteTotal()

    def begin(self, buffer: Tensor) -> tuple[Tensor, comm.Work]:
        """Start to sum a copy of the gradients, in at least float32."""
        copy = buffer.detach().clone() if buffer.dtype.itemsize >= 4 else buffer.detach().float()
        with comm.counted_in(self._uncounted):
            return copy, comm.all_reduce(copy, self.group)

    def end(self, exact: Tensor, work: comm.Work, scale: float, reduced: Tensor) -> Tensor:
        """Return ``|reduced - mean| / |mean|``; 0 where the mean is zero and nothing else came out."""
        work.wait()
        exact.mul_(scale)
        error, size = torch.sub(reduced, exact).norm(), exact.norm()
        return torch.where(error == 0, error, error / size)


class Recorder:
    """Watches a reducer; a `BackwardObserver` by its methods.

    Args:
        clock: makes instants.
        traffic: the account that `comm` keeps; what is sent for a bucket goes to a tally of the bucket's own.
        compression_error: compares with the exact mean; None leaves that out.

    Attributes:
        parameter_bytes: size of the gradient of each parameter that was in a bucket, by name.
        outside_bytes: what was sent between steps, by purpose.
    """

    def __init__(self, clock: Clock, traffic: ByteCounter, compression_error: CompressionError | None = None) -> None:
        self._clock = clock
        self._traffic = traffic
        self._compression_error = compression_error
        self._step: _Step | None = None
        self._unresolved: deque[_Step] = deque()
        self._open: dict[int, _Flight] = {}
        self._wait_begin: Instant | None = None
        self._has_waited = False
        self._hook_went_on: Instant | None = None
        self._counted_before: ByteTotal | None = None
        self._seen: set[tuple[str, ...]] = set()
        self.parameter_bytes: dict[str, int] = {}
        self.outside_bytes: dict[str, int] = {}

    # ------------------------------------------------------------------ steps

    def begin_step(self, number: int) -> None:
        """Begin a step; one that is open is given up."""
        for name, sent in self._traffic.take().items():
            self.outside_bytes[name] = self.outside_bytes.get(name, 0) + sent
        self._step = step = _Step(number, self._clock.stamp())
        if self._compression_error is not None:
            step.measures_error = number % self._compression_error.every_n_steps == 0

    @property
    def in_step(self) -> bool:
        """Whether a step is open."""
        return self._step is not None

    def backward_begins(self) -> None:
        """Note that a backward begins, which may reduce gradients or only accumulate them."""
        if self._step is not None:
            self._step.latest_begin = self._clock.stamp()

    def backward_ended(self) -> None:
        """Note that a backward has ended."""
        if self._step is not None:
            self._step.latest_end = self._clock.stamp()

    def spoil_step(self) -> None:
        """Leave the step that is open out, since something else happens in the middle of it."""
        if self._step is not None:
            self._step.spoilt = True

    def end_step(self, local_bytes: int = 0) -> list[StepTiming]:
        """End the step that is open, if any, and return the steps whose instants have all passed by now.

        Args:
            local_bytes: size of the gradients that stay on this rank if none are exchanged in this step.
        """
        step, self._step = self._step, None
        if step is not None and not step.spoilt:
            step.finished = self._clock.stamp()
            step.other_bytes = tuple(self._traffic.take().items())
            step.local_bytes = 0 if step.flights else local_bytes
            self._unresolved.append(step)
        return self._resolve()

    def settle(self, *, wait: bool = True) -> list[StepTiming]:
        """Return the steps that have not been returned yet.

        Args:
            wait: for all of them; False (after an error, when the device may be stuck) takes those that are there.
        """
        if self._unresolved and wait:
            self._clock.settle()
        return self._resolve()

    def _resolve(self) -> list[StepTiming]:
        steps = []
        # All marks of a step are in order behind its last one, but for those of collectives nobody waited for.
        while self._unresolved and all(self._clock.known(i) for i in _instants(self._unresolved[0])):
            steps.append(self._timing(self._unresolved.popleft()))
        return steps

    def _timing(self, step: _Step) -> StepTiming:
        seconds = self._clock.seconds
        begin, finished = seconds(step.begin), seconds(_last(step.finished, step.begin))
        waits = tuple((seconds(a), seconds(b)) for a, b in step.waits)
        backward_begin = step.backward_begin if step.backward_begin is not None else step.latest_begin
        backward_end = step.backward_end if step.backward_end is not None else _last(step.latest_end, step.begin)
        timing = StepTiming(
            step=step.number,
            begin=begin,
            backward_begin=begin if backward_begin is None else seconds(backward_begin),
            backward_end=seconds(backward_end),
            finished=finished,
            buckets=tuple(self._bucket_timing(flight, waits) for flight in step.flights),
            wait=sum(end - start for start, end in waits),
            waits=waits,
            other_bytes=step.other_bytes,
            local_bytes=step.local_bytes,
            hook_work=tuple((seconds(a), seconds(b)) for a, b in step.hook_work),
        )
        if isinstance(self._clock, CudaClock):
            instants = _instants(step)
            self._clock.move_base(step.begin)
            self._clock.give_back(instants)
        return timing

    def _bucket_timing(self, flight: _Flight, waits: tuple[tuple[float, float], ...]) -> BucketTiming:
        seconds = self._clock.seconds
        return BucketTiming(
            index=flight.index,
            names=flight.names,
            grad_bytes=flight.grad_bytes,
            sent_bytes=flight.tally.sent,
            ready=seconds(flight.ready),
            launched=seconds(flight.launched),
            done=seconds(_last(flight.done, flight.launched)),
            error=None if flight.error is None else float(flight.error),
        )

    # ------------------------------------------------------------------ what the reducer tells

    def backward_opened(self) -> None:
        """Note the backward in which the first gradient came."""
        step = self._step
        self._has_waited = False
        if step is not None and step.backward_begin is None:
            step.backward_begin = self._clock.stamp() if step.latest_begin is None else step.latest_begin

    def bucket_full(self, bucket: WatchedBucket, scale: float) -> None:
        """Note when the gradients are complete."""
        if self._step is None:
            return
        flight = _Flight(bucket, scale, self._clock.stamp())
        self._open[flight.index] = flight
        if flight.names not in self._seen:
            self._seen.add(flight.names)
            sizes = (param.nbytes for param in bucket.parameters())
            self.parameter_bytes.update(zip(flight.names, sizes, strict=True))

    def launch_begins(self, index: int) -> None:
        """Count for the bucket what is sent from now on; keep its gradients, if they are to be compared."""
        flight = self._open.get(index)
        if flight is None or self._step is None:
            return
        if self._step.measures_error and self._compression_error is not None and flight.bucket is not None:
            # Here, where the copy belongs to the communication stream.
            flight.exact, flight.work = self._compression_error.begin(flight.bucket.buffer())
        if self._clock.asynchronous:
            flight.launched = self._clock.stamp()
        self._counted_before, self._traffic.current = self._traffic.current, flight.tally

    def launch_ended(self, index: int, pending: Any) -> None:
        """Arrange to learn when the bucket is done."""
        flight = self._open.get(index)
        if flight is None:
            return
        self._count_as_before()
        if not self._clock.asynchronous:
            flight.launched = self._clock.stamp()
        if not hasattr(pending, "on_finished"):
            self._clock.when_done(pending, flight.note_done)
            return
        # A task of a hook: its last collective tells; that the hook goes on is noticed later, at the next launch.
        if pending.finished:
            flight.done = self._clock.stamp()
            return

        def collective(work: object) -> None:
            self._note_hook_work(flight.done)
            flight.done = None
            self._clock.when_done(work, flight.note_done)

        def finished() -> None:
            self._note_hook_work(flight.done)
            if flight.done is None:
                flight.done = self._clock.stamp()

        pending.on_collective, pending.on_finished = collective, finished
        if pending.collective is not None:
            collective(pending.collective)

    def _note_hook_work(self, collective_done: Instant | None) -> None:
        """Note that in a wait a hook has just come to its next collective, or to its end.

        The thread that waits runs one hook after the other, each from where its collective was done.
        """
        last, step = self._hook_went_on, self._step
        if step is None or last is None or self._wait_begin is None or self._clock.asynchronous:
            return
        now = self._hook_went_on = self._clock.stamp()
        if isinstance(collective_done, float) and isinstance(last, float):
            step.hook_work.append((max(last, collective_done), now))

    def wait_begins(self) -> None:
        """Note when the step has nothing left but to wait."""
        if self._step is None:
            return
        self._wait_begin = self._hook_went_on = self._clock.stamp()
        if not self._has_waited:  # of the last pass, the first time
            self._step.backward_end = self._wait_begin
        self._has_waited = True

    def bucket_done(self, index: int, buffer: Tensor) -> None:
        """Note when the bucket was done, if nothing else has told; compare it."""
        flight = self._open.pop(index, None)
        if flight is None or self._step is None:
            return
        if flight.done is None:
            flight.done = self._clock.stamp()
        if flight.exact is not None and flight.work is not None and self._compression_error is not None:
            flight.error = self._compression_error.end(flight.exact, flight.work, flight.scale, buffer)
        flight.bucket = flight.exact = flight.work = None
        self._step.flights.append(flight)

    def wait_ended(self) -> None:
        """Note when the step goes on."""
        if self._step is not None and self._wait_begin is not None:
            self._step.waits.append((self._wait_begin, self._clock.stamp()))
        self._wait_begin = None

    def backward_finished(self) -> None:
        """Nothing is in flight any more."""
        self._open.clear()

    def backward_aborted(self) -> None:
        """Forget what is in flight; the step goes on."""
        self._count_as_before()
        self._open.clear()
        self._wait_begin = None

    def _count_as_before(self) -> None:
        if self._counted_before is not None:
            self._traffic.current, self._counted_before = self._counted_before, None


def _last(instant: Instant | None, fallback: Instant) -> Instant:
    return fallback if instant is None else instant


def _instants(step: _Step) -> list[Instant]:
    """List the instants of a step, each once, the last one first: it is the least likely to have passed."""
    marks: list[Instant | None] = [step.finished, step.begin, step.backward_begin, step.backward_end]
    marks += [step.latest_begin, step.latest_end]
    for begin, end in (*step.waits, *step.hook_work):
        marks += [begin, end]
    for flight in step.flights:
        marks += [flight.ready, flight.launched, flight.done]
    return list({id(mark): mark for mark in marks if mark is not None}.values())
