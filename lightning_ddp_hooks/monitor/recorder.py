"""Records steps: an observer of the reducer notes instants, and a step becomes a `StepTiming` once all have passed.

    begin_step -> backward_begins -> (calls of the reducer) -> backward_ended -> end_step -> [StepTiming]

On a device a step is returned some steps later, when its last event has passed; the host never waits for that.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_hooks import comm, traffic
from lightning_ddp_hooks.monitor.clock import Clock, Instant
from lightning_ddp_hooks.monitor.timeline import BucketTiming, Interval, StepTiming
from lightning_ddp_hooks.traffic import ByteCounter, ByteTotal


class _RecordedBucket:
    """Instants of a bucket (a `GradBucket`) between its last gradient and the end of its reduction."""

    def __init__(self, bucket: Any, scale: float, ready: Instant) -> None:
        self.index: int = bucket.index()
        self.names: tuple[str, ...] = bucket.names
        self.gradients: Tensor | None = bucket.buffer()
        self.grad_bytes = bucket.buffer().nbytes
        self.scale = scale
        self.sent = ByteTotal()
        self.ready = self.launched = ready
        self.done: Instant | None = None
        self.meetings: list[list[Instant]] = []  # when each collective was posted, and when it was done
        self.exact: tuple[Tensor, comm.Work] | None = None
        self.error: Tensor | None = None

    def post(self, work: object, posted: Instant, clock: Clock) -> None:
        """Note a collective, and arrange to learn when it is done."""
        meeting = [posted]
        self.meetings.append(meeting)
        self.done = None

        def note_done(instant: Instant) -> None:
            self.done = instant
            meeting.append(instant)

        clock.when_done(work, note_done)

    def timing(self, clock: Clock) -> BucketTiming:
        done = _first_known(self.done, self.launched)
        # Of one whose end was told too late it is known that it was over when the hook went on.
        ends = [*(posted for posted, *_ in self.meetings[1:]), done]
        seen = [(posted, *met, end)[:2] for (posted, *met), end in zip(self.meetings, ends, strict=False)]
        return BucketTiming(
            index=self.index,
            names=self.names,
            grad_bytes=self.grad_bytes,
            sent_bytes=self.sent.sent,
            ready=clock.seconds(self.ready),
            launched=clock.seconds(self.launched),
            done=clock.seconds(done),
            error=None if self.error is None else float(self.error),
            meetings=tuple((clock.seconds(posted), clock.seconds(met)) for posted, met in seen),
        )


@dataclass
class _RecordedStep:
    """Instants of a step that is open, or whose instants have not all passed."""

    number: int
    begin: Instant
    measures_error: bool = False
    backward_begin: Instant | None = None
    backward_end: Instant | None = None
    latest_begin: Instant | None = None
    latest_end: Instant | None = None
    finished: Instant | None = None
    waits: list[tuple[Instant, Instant]] = field(default_factory=list)
    hook_work: list[tuple[Instant, Instant]] = field(default_factory=list)
    buckets: list[_RecordedBucket] = field(default_factory=list)
    other_bytes: tuple[tuple[str, int], ...] = ()
    local_bytes: int = 0
    left_out: bool = False
    follows: bool = False  # the step before it was not left out
    asides: list[tuple[str, Instant, Instant]] = field(default_factory=list)  # between the two

    def instants(self) -> list[Instant]:
        """Return its instants, each once, the last one first: it is the least likely to have passed."""
        marks = [self.finished, self.begin, self.backward_begin, self.backward_end, self.latest_begin, self.latest_end]
        marks += [mark for interval in (*self.waits, *self.hook_work) for mark in interval]
        marks += [mark for _, *interval in self.asides for mark in interval]
        marks += [m for b in self.buckets for m in (b.ready, b.launched, b.done, *chain(*b.meetings))]
        return list({id(mark): mark for mark in marks if mark is not None}.values())

    def timing(self, clock: Clock, finished_before: float | None) -> StepTiming:
        """Return its times; all instants must have passed. Known may be when the step before it had finished."""

        def intervals(marks: list[tuple[Instant, Instant]]) -> tuple[Interval, ...]:
            return tuple((clock.seconds(begin), clock.seconds(end)) for begin, end in marks)

        waits, begin = intervals(self.waits), clock.seconds(self.begin)
        asides = dict.fromkeys(("validation", "save"), 0.0)
        for name, start, end in self.asides:
            asides[name] += clock.seconds(end) - clock.seconds(start)
        data = 0.0 if finished_before is None else max(0.0, begin - finished_before - sum(asides.values()))
        return StepTiming(
            step=self.number,
            begin=begin,
            backward_begin=clock.seconds(_first_known(self.backward_begin, self.latest_begin, self.begin)),
            backward_end=clock.seconds(_first_known(self.backward_end, self.latest_end, self.begin)),
            finished=clock.seconds(_first_known(self.finished, self.begin)),
            buckets=tuple(bucket.timing(clock) for bucket in self.buckets),
            wait=sum(end - begin for begin, end in waits),
            waits=waits,
            other_bytes=self.other_bytes,
            local_bytes=self.local_bytes,
            hook_work=intervals(self.hook_work),
            between=(data, asides["validation"], asides["save"]),
        )


def _first_known(*instants: Instant | None) -> Instant:
    return next(instant for instant in instants if instant is not None)


class CompressionError:
    """Compares reduced buckets with the exact mean, every few steps (the same on all ranks), on a group of its own."""

    def __init__(self, group: comm.ProcessGroup, every_n_steps: int) -> None:
        self.group = group
        self.every_n_steps = every_n_steps

    def begin(self, buffer: Tensor) -> tuple[Tensor, comm.Work]:
        """Start to sum a copy of the gradients, in at least float32."""
        copy = buffer.detach().clone() if buffer.dtype.itemsize >= 4 else buffer.detach().float()
        with traffic.counted_in(ByteTotal()):  # not the run's own traffic
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
        clock: Clock that makes instants.
        counter: Counter that `comm` adds to; what is sent for a bucket goes to a total of the bucket's own.
        error: Compares with the exact mean; None leaves that out.
        has_hook: Whether a hook may compute something between collectives and after them.
    """

    def __init__(
        self, clock: Clock, counter: ByteCounter, error: CompressionError | None = None, *, has_hook: bool = True
    ) -> None:
        self._clock = clock
        self._counter = counter
        self._error = error
        self._has_hook = has_hook
        self._step: _RecordedStep | None = None
        self._unresolved: deque[_RecordedStep] = deque()
        self._in_flight: dict[int, _RecordedBucket] = {}
        self._wait_begin: Instant | None = None
        self._has_waited = False
        self._hook_resumed: Instant | None = None
        self._counted_before: ByteTotal | None = None
        self._follows = False  # the last step was recorded to its end
        self._finished: float | None = None  # when the last one that was returned had finished
        self._aside: tuple[str, Instant] | None = None
        self._asides: list[tuple[str, Instant, Instant]] = []
        self.outside_bytes: Counter[str] = Counter()  # sent between steps, by purpose

    def begin_step(self, number: int) -> None:
        """Begin a step; one that is open is given up."""
        self.outside_bytes.update(self._counter.take())
        measures_error = self._error is not None and number % self._error.every_n_steps == 0
        self.end_aside()
        self._step = _RecordedStep(number, self._clock.stamp(), measures_error, follows=self._follows)
        self._step.asides, self._asides, self._follows = self._asides, [], False

    def begin_aside(self, name: str) -> None:
        """Note that a "validation" or a "save" begins between two steps."""
        self.end_aside()
        if self._step is None:
            self._aside = name, self._clock.stamp()

    def end_aside(self) -> None:
        """Note that it has ended, if there was one."""
        if self._aside is not None:
            self._asides.append((*self._aside, self._clock.stamp()))
        self._aside = None

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

    def leave_out_step(self) -> None:
        """Leave out the step that is open, since something else happens in the middle of it."""
        if self._step is not None:
            self._step.left_out = True

    def end_step(self, local_bytes: int = 0) -> list[StepTiming]:
        """End the step that is open, if any, and return the steps whose instants have all passed by now.

        ``local_bytes`` is the size of the gradients that stay on this rank if none are exchanged in this step.
        """
        step, self._step = self._step, None
        if step is not None and not step.left_out:
            step.finished = self._clock.stamp()
            step.other_bytes = tuple(self._counter.take().items())
            step.local_bytes = 0 if step.buckets else local_bytes
            self._follows = True
            self._unresolved.append(step)
        return self._resolve()

    def settle(self, *, wait: bool = True) -> list[StepTiming]:
        """Return the steps that have not been returned yet; without ``wait`` (the device may be stuck) those known."""
        if self._unresolved and wait:
            self._clock.synchronize()
        return self._resolve()

    def _resolve(self) -> list[StepTiming]:
        steps = []
        # All marks of a step are in order before its last one, except those of collectives nobody waited for.
        while self._unresolved and all(self._clock.known(i) for i in self._unresolved[0].instants()):
            step = self._unresolved.popleft()
            steps.append(step.timing(self._clock, self._finished if step.follows else None))
            self._finished = steps[-1].finished
            self._clock.recycle(step.instants(), base=step.begin)
        return steps

    # Calls of the reducer

    def backward_opened(self) -> None:
        """Note the backward in which the first gradient came."""
        step = self._step
        self._has_waited = False
        if step is not None and step.backward_begin is None:
            step.backward_begin = self._clock.stamp() if step.latest_begin is None else step.latest_begin

    def bucket_full(self, bucket: Any, scale: float) -> None:
        """Note when the gradients are complete."""
        if self._step is not None:
            self._in_flight[bucket.index()] = _RecordedBucket(bucket, scale, self._clock.stamp())

    def launch_begins(self, index: int) -> None:
        """Count for the bucket what is sent from now on; keep its gradients, if they are to be compared."""
        bucket = self._in_flight.get(index)
        if bucket is None or self._step is None:
            return
        if self._step.measures_error and self._error is not None and bucket.gradients is not None:
            # Here, where the copy belongs to the communication stream.
            bucket.exact = self._error.begin(bucket.gradients)
        if self._clock.asynchronous:
            bucket.launched = self._clock.stamp()
        self._counted_before, self._counter.current = self._counter.current, bucket.sent

    def launch_ended(self, index: int, pending: Any) -> None:
        """Arrange to learn when the bucket (an `InFlightBucket` of the queue) is done."""
        bucket = self._in_flight.get(index)
        if bucket is None:
            return
        self._restore_counting()
        if not self._clock.asynchronous:
            bucket.launched = self._clock.stamp()
        # What was over before its launch had ended took no time: this rank was the last to come.
        bucket.meetings = [[bucket.launched, bucket.launched]] * (pending.stages - (pending.collective is not None))
        if pending.finished:
            bucket.done = self._clock.stamp()
            return

        def on_collective(work: object) -> None:
            self._note_hook_work(bucket.done)
            bucket.post(work, self._clock.stamp(), self._clock)

        def on_finished() -> None:
            self._note_hook_work(bucket.done)
            if bucket.done is None:
                bucket.done = self._clock.stamp()

        pending.on_collective, pending.on_finished = on_collective, on_finished
        if pending.collective is not None:
            bucket.post(pending.collective, bucket.launched, self._clock)

    def _note_hook_work(self, collective_done: Instant | None) -> None:
        """Note that during a wait a hook has just come to its next collective, or to its end.

        The thread that waits runs one hook after the other, each from where its collective was done.
        """
        last, step = self._hook_resumed, self._step
        if not self._has_hook or self._clock.asynchronous or step is None or last is None or self._wait_begin is None:
            return
        now = self._hook_resumed = self._clock.stamp()
        if isinstance(collective_done, float) and isinstance(last, float):
            step.hook_work.append((max(last, collective_done), now))

    def wait_begins(self) -> None:
        """Note when the step has nothing left to do but wait."""
        if self._step is None:
            return
        self._wait_begin = self._hook_resumed = self._clock.stamp()
        if not self._has_waited:  # for the first time in the last backward
            self._step.backward_end = self._wait_begin
        self._has_waited = True

    def bucket_done(self, index: int, buffer: Tensor) -> None:
        """Note when the bucket was done, unless that is known already; compare it."""
        bucket = self._in_flight.pop(index, None)
        if bucket is None or self._step is None:
            return
        if bucket.done is None:
            bucket.done = self._clock.stamp()
        if bucket.exact is not None and self._error is not None:
            bucket.error = self._error.end(*bucket.exact, bucket.scale, buffer)
        bucket.gradients = bucket.exact = None
        self._step.buckets.append(bucket)

    def wait_ended(self) -> None:
        """Note when the step goes on."""
        if self._step is not None and self._wait_begin is not None:
            self._step.waits.append((self._wait_begin, self._clock.stamp()))
        self._wait_begin = None

    def backward_finished(self) -> None:
        """Forget buckets that never came back; none should be left."""
        self._in_flight.clear()

    def backward_aborted(self) -> None:
        """Forget what is in flight; the step goes on."""
        self._restore_counting()
        self._in_flight.clear()
        self._wait_begin = None

    def _restore_counting(self) -> None:
        if self._counted_before is not None:
            self._counter.current, self._counted_before = self._counted_before, None
