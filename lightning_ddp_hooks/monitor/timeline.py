"""What a training step's time went to: measured instants, and the arithmetic on them. Pure; no clock, no torch.

    begin      backward_begin                          backward_end            finished
      |  forward  |              backward                    |  wait | optimizer  |
                        bucket 0   [ready|launched ==== done]
                                     bucket 1   [ready|launched ==|==== done]
                                                              hidden  exposed

A bucket is *in flight* from ``launched`` to ``done``. Communication takes the time in which any bucket is in flight;
what the step waits for it is *exposed*, and the rest is hidden behind the backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from statistics import median

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class BucketTiming:
    """One bucket on its way through one step; times in seconds on the step's clock.

    Attributes:
        index: Position in the order of reduction.
        names: Names of its parameters.
        grad_bytes: Size of its gradients.
        sent_bytes: Bytes that this rank sent for it, by the formulas in ``traffic.py``.
        ready: When its gradients were complete and its turn had come.
        launched: When its first collective was on its way; from ``ready`` to here a hook computes what to send.
        done: When it was reduced; with a hook of several collectives, after the last one.
        error: Relative error of the reduced gradients to the exact mean; None unless it was asked for.
    """

    index: int
    names: tuple[str, ...]
    grad_bytes: int
    sent_bytes: int
    ready: float
    launched: float
    done: float
    error: float | None = None

    @property
    def in_flight(self) -> Interval:
        """Interval from ``launched`` to ``done``."""
        return (self.launched, max(self.launched, self.done))


@dataclass(frozen=True, slots=True)
class StepTiming:
    """One training step: an accumulation window, or a ``training_step`` of manual optimization.

    Attributes:
        step: Number of the step.
        begin: Start of its first forward.
        backward_begin: Start of the first backward that reduces gradients (without one: of the last backward).
        backward_end: When the last backward had computed its gradients; then come the wait and the optimizer.
        finished: End of the step, after the optimizer.
        buckets: Its buckets in order of launch; over all backwards, if there are several.
        wait: Seconds that the step waited for communication.
        waits: When it did; by default once, from ``backward_end`` on.
        other_bytes: Bytes that were sent for other purposes, such as ``("buffers", 8192)``.
        local_bytes: Size of gradients that were not exchanged, where a model averager lets replicas train on their own.
        hook_work: When, in those waits, a hook computed between its collectives and after them, so that nobody waited;
            known on the host's clock only, otherwise empty.
    """

    step: int
    begin: float
    backward_begin: float
    backward_end: float
    finished: float
    buckets: tuple[BucketTiming, ...]
    wait: float
    waits: tuple[Interval, ...] = ()
    other_bytes: tuple[tuple[str, int], ...] = ()
    local_bytes: int = 0
    hook_work: tuple[Interval, ...] = ()

    @property
    def duration(self) -> float:
        """Seconds from ``begin`` to ``finished``."""
        return self.finished - self.begin

    @property
    def wait_intervals(self) -> tuple[Interval, ...]:
        """Intervals in which the step waited."""
        if self.waits or not self.wait:
            return self.waits
        return ((self.backward_end, self.backward_end + self.wait),)

    @property
    def grad_bytes(self) -> int:
        """Size of the gradients that were reduced."""
        return sum(bucket.grad_bytes for bucket in self.buckets)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sent, for whatever purpose."""
        return sum(bucket.sent_bytes for bucket in self.buckets) + sum(count for _, count in self.other_bytes)


# ---------------------------------------------------------------------- intervals


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return disjoint intervals in ascending order that cover the same time; empty ones are left out."""
    merged: list[Interval] = []
    for begin, end in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Return how much time the intervals cover together."""
    return sum(end - begin for begin, end in union(intervals))


def intersect(first: Iterable[Interval], second: Iterable[Interval]) -> list[Interval]:
    """Return what both cover."""
    others = union(second)
    pieces = [(max(a, c), min(b, d)) for a, b in union(first) for c, d in others]
    return [(begin, end) for begin, end in pieces if begin < end]


def subtract(first: Iterable[Interval], second: Iterable[Interval]) -> list[Interval]:
    """Return what the first covers and the second does not."""
    left = union(first)
    for begin, end in union(second):
        left = [piece for a, b in left for piece in ((a, min(b, begin)), (max(a, end), b)) if piece[0] < piece[1]]
    return left


# ---------------------------------------------------------------------- one step


def communication_time(step: StepTiming) -> float:
    """Return for how many seconds any bucket was in flight."""
    return length(bucket.in_flight for bucket in step.buckets)


def hook_time(step: StepTiming) -> float:
    """Return for how many seconds hooks computed or communication was started."""
    return length([*((bucket.ready, bucket.launched) for bucket in step.buckets), *step.hook_work])


def overlap(step: StepTiming) -> float:
    """Return the fraction of the communication that the step did not wait for; 1 if there was none."""
    in_flight = [bucket.in_flight for bucket in step.buckets]
    total = length(in_flight)
    return 1.0 - length(intersect(in_flight, step.wait_intervals)) / total if total else 1.0


def exposed_by_bucket(step: StepTiming) -> tuple[float, ...]:
    """Return for each bucket how long the step waited for it, and not for one before it, in seconds.

    The sum may be less than ``step.wait``; see `Waiting` for the rest.
    """
    idle = subtract(step.wait_intervals, step.hook_work)
    shares = []
    counted = float("-inf")  # up to here the step waited for buckets before this one
    for bucket in step.buckets:
        launched, done = bucket.in_flight
        shares.append(length(intersect([(max(counted, launched), done)], idle)))
        counted = max(counted, done)
    return tuple(shares)


@dataclass(frozen=True, slots=True)
class Phases:
    """What a step, or a typical one, spent its time on; in seconds.

    Attributes:
        forward: Time before the first backward, which includes further forwards of an accumulation window.
        backward: Time in which gradients are computed.
        hook: Time in which hooks compute and collectives are started during the backward, and hooks compute after it.
        wait: Time waited for communication, without what a hook computes meanwhile.
        rest: Time of the optimizer, model averaging, callbacks.
    """

    forward: float
    backward: float
    hook: float
    wait: float
    rest: float


def phases(step: StepTiming) -> Phases:
    """Divide the step's duration; the parts add up to it."""
    backward = [(step.backward_begin, step.backward_end)]
    launching = intersect(((b.ready, b.launched) for b in step.buckets), backward)
    forward, hook = step.backward_begin - step.begin, length(launching)
    computing = length(backward) - length([*launching, *intersect(step.wait_intervals, backward)])
    late = length(intersect(step.hook_work, step.wait_intervals))
    return Phases(
        forward, computing, hook + late, step.wait - late, step.duration - forward - computing - hook - step.wait
    )


# ---------------------------------------------------------------------- many steps


def effective_compression(steps: Sequence[StepTiming], world_size: int) -> float | None:
    """Return how many times more a ring all-reduce of all gradients in their own dtype would have sent.

    Everything that was sent counts, also buffers and model averages; steps in which a model averager exchanges nothing
    count as gradients that were not sent. The result is 1 for one rank, which has nothing to send, and None if there
    was something to send and nothing was sent.
    """
    dense = 2.0 * (world_size - 1) / world_size * sum(step.grad_bytes + step.local_bytes for step in steps)
    sent = sum(step.sent_bytes for step in steps)
    if sent:
        return dense / sent
    return None if dense else 1.0


def typical_steps(steps: Sequence[StepTiming]) -> list[StepTiming]:
    """Return the steps with the most frequent list of buckets, of those that exchange gradients (else of all).

    The first steps, before the buckets are rebuilt, are not among them.
    """
    exchanging = [step for step in steps if step.buckets] or list(steps)
    layouts = [tuple(hash(bucket.names) for bucket in step.buckets) for step in exchanging]
    usual = max(layouts, key=Counter(layouts).__getitem__, default=())
    return [step for step, layout in zip(exchanging, layouts, strict=True) if layout == usual]


def median_step(steps: Sequence[StepTiming]) -> StepTiming:
    """Return the typical step whose duration, wait and hook time are nearest to the medians; of several, the first."""
    typical = typical_steps(steps)
    figures = [(step.duration, step.wait, hook_time(step)) for step in typical]
    medians = [median(column) for column in zip(*figures, strict=True)]
    distances = [sum(abs(mine - usual) for mine, usual in zip(its, medians, strict=True)) for its in figures]
    return typical[distances.index(min(distances))]


def typical_phases(steps: Sequence[StepTiming]) -> Phases:
    """Return the median of each part over the typical steps; they need not add up to a step."""
    divided = [astuple(phases(step)) for step in typical_steps(steps)]
    return Phases(*(median(column) for column in zip(*divided, strict=True)))


@dataclass(frozen=True, slots=True)
class Waiting:
    """What a typical step waits for; in seconds, and the parts add up to ``total``.

    Attributes:
        total: Median over the typical steps.
        buckets: Part of each bucket, as in `exposed_by_bucket`.
        hook: Part in which a hook computes, after the backward.
        after: Part in which no bucket is in flight: results are copied back, ranks agree on unused parameters.
    """

    total: float
    buckets: tuple[float, ...]
    hook: float
    after: float


def typical_waiting(steps: Sequence[StepTiming]) -> Waiting:
    """Divide the median wait as the steps around it are divided: the middle half of the typical steps.

    Medians of the parts would not do: where one step waits for one bucket and the next step for another one, they are
    all zero.
    """
    ordered = sorted(typical_steps(steps), key=lambda step: step.wait)
    total = median(step.wait for step in ordered)
    quarter = len(ordered) // 4
    low, high = ordered[quarter].wait, ordered[-1 - quarter].wait
    middle = [step for step in ordered if low <= step.wait <= high]
    scale = total / (sum(step.wait for step in middle) or 1.0)
    buckets = [scale * sum(column) for column in zip(*map(exposed_by_bucket, middle), strict=True)]
    hook = scale * sum(length(intersect(step.hook_work, step.wait_intervals)) for step in middle)
    return Waiting(total, tuple(buckets), hook, max(0.0, total - sum(buckets) - hook))
