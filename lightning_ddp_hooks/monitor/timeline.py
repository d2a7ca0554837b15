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
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_ddp_hooks.monitor.quality import Norms

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class BucketTiming:
    """One bucket on its way through one step; times in seconds on the step's clock."""

    index: int  # in the order of reduction
    names: tuple[str, ...]
    grad_bytes: int
    sent_bytes: int  # by this rank, by the formulas in traffic.py
    ready: float  # its gradients were complete and its turn had come
    launched: float  # its first collective was on its way; from `ready` to here a hook computes what to send
    done: float  # it was reduced; with a hook of several collectives, after the last one
    error: float | None = None  # of the reduced gradients, relative to the exact mean; None unless asked for
    meetings: tuple[Interval, ...] = ()  # its collectives, each from this rank's post on; empty if not known
    norms: tuple[Norms, ...] = ()  # of its parameter groups, in steps that measure them

    @property
    def in_flight(self) -> Interval:
        """Interval from ``launched`` to ``done``."""
        return (self.launched, max(self.launched, self.done))


@dataclass(frozen=True, slots=True)
class StepTiming:
    """One training step: an accumulation window, or a ``training_step`` of manual optimization; times in seconds."""

    step: int
    begin: float  # of its first forward
    backward_begin: float  # of the first backward that reduces gradients (without one: of the last backward)
    backward_end: float  # the last backward had computed its gradients; then come the wait and the optimizer
    finished: float  # after the optimizer
    buckets: tuple[BucketTiming, ...]  # in order of launch; over all backwards, if there are several
    wait: float  # seconds that the step waited for communication
    waits: tuple[Interval, ...] = ()  # when it did; by default once, from `backward_end` on
    other_bytes: tuple[tuple[str, int], ...] = ()  # sent for other purposes, such as ("buffers", 8192)
    local_bytes: int = 0  # gradients that were not exchanged, where a model averager lets replicas train on their own
    # When, in those waits, a hook computed between its collectives and after them; known on the host's clock only.
    hook_work: tuple[Interval, ...] = ()
    between: tuple[float, float, float] = (0.0, 0.0, 0.0)  # before the step: loading data, validation, saving
    samples: int = 0  # of this rank's batches, where that was asked; 0 if they do not tell

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

    The sum may be less than ``step.wait``: a hook computes meanwhile, results are copied back, ranks agree.
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
    """What a step, or a typical one, spent its time on; in seconds."""

    forward: float  # before the first backward; includes further forwards of an accumulation window
    backward: float  # gradients are computed
    hook: float  # hooks compute, during the backward and after it, and collectives are started
    wait: float  # for communication, without what a hook computes meanwhile
    rest: float  # optimizer, model averaging, callbacks


def phases(step: StepTiming) -> Phases:
    """Divide the step's duration; the parts add up to it."""
    backward = [(step.backward_begin, step.backward_end)]
    launching = intersect(((b.ready, b.launched) for b in step.buckets), backward)
    forward, hook = step.backward_begin - step.begin, length(launching)
    computing = length(backward) - length([*launching, *intersect(step.wait_intervals, backward)])
    late = length(intersect(step.hook_work, step.wait_intervals))
    rest = step.duration - forward - computing - hook - step.wait
    return Phases(forward, computing, hook + late, step.wait - late, rest)


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
