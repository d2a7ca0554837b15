"""Predicts what a training step takes from what was measured of its parts. Pure; no torch, no clock.

Known are the step without communication (when each bucket's gradients are ready), what the hook computes and sends for
each bucket, and the network. Predicted is the step with communication, for any number of ranks:

    thread   | forward |  backward ...[h0] ....[h1].........[h2]| wait | decode | optimizer |
    link                              |== bucket 0 ==|== bucket 1 ==|== bucket 2 ==|
                          ready:      0        1             2

The rules are those of the reducer: buckets are launched in order; what a hook computes holds up the thread that runs
the backward; collectives queue on the link; a further phase of a bucket is issued when the next bucket is launched, or
else when the step waits. So it is on a CPU.

The model leaves out that communication takes processor time from the backward, that ranks are not equally fast, and
that links are shared with others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_ddp_hooks.advisor.link_model import Link
from lightning_ddp_hooks.traffic import Collective, sent_by_rank


@dataclass(frozen=True)
class Phase:
    """One collective of a bucket: the seconds that the hook computes before it, and the bytes each rank puts in."""

    compute: float
    collective: Collective
    nbytes: int


@dataclass(frozen=True)
class BucketCost:
    """What a hook does for one bucket: its collectives in order, and the seconds it computes after the last one."""

    phases: tuple[Phase, ...]
    finish: float = 0.0

    def sent(self, world_size: int) -> int:
        """Return how many bytes a rank sends for the bucket."""
        return sum(sent_by_rank(phase.collective, phase.nbytes, world_size) for phase in self.phases)


@dataclass(frozen=True)
class ComputeStep:
    """A training step without communication; in seconds."""

    before: float  # until the backward that reduces gradients: data, forward, earlier micro-batches
    ready: tuple[float, ...]  # each bucket's gradients are complete; from the start of that backward, ascending
    backward: float
    after: float  # optimizer and all else

    @property
    def seconds(self) -> float:
        """Duration of the whole step."""
        return self.before + self.backward + self.after


@dataclass(frozen=True)
class Prediction:
    """A predicted step; in seconds."""

    step: float
    exposed: float  # waiting for communication
    hook: float  # computing of the hook at the expense of the step
    communication: float  # the link is in use
    sent: float  # bytes of a rank, on average over steps


def predict(step: ComputeStep, buckets: Sequence[BucketCost], link: Link, world_size: int) -> Prediction:
    """Predict a step in which gradients are reduced, bucket by bucket in this order."""
    run = _Thread(link, world_size)
    for ready, cost in zip(step.ready, buckets, strict=True):
        run.launch(ready, cost)
    end = run.finish(step.backward)
    sent = float(sum(cost.sent(world_size) for cost in buckets))
    return Prediction(step.before + end + step.after, run.waited, run.hook, run.communication, sent)


def predict_averaging(step: ComputeStep, nbytes: int, link: Link, world_size: int, *, period: int) -> Prediction:
    """Predict the average step of replicas that train by themselves and exchange ``nbytes`` every ``period`` steps."""
    exposed = link.seconds("all_reduce", nbytes, world_size) / period
    sent = sent_by_rank("all_reduce", nbytes, world_size) / period
    return Prediction(step.seconds + exposed, exposed, hook=0.0, communication=exposed, sent=sent)


@dataclass
class _InFlight:
    """A bucket in flight: the phase it is in, and when that is done."""

    cost: BucketCost
    phase: int = -1
    done: float = 0.0

    @property
    def finished(self) -> bool:
        return self.phase == len(self.cost.phases)


@dataclass
class _Thread:
    """Hooks on the thread of the backward, as on a CPU."""

    link: Link
    world_size: int
    now: float = 0.0
    delay: float = 0.0  # by how much the backward is late
    link_free: float = 0.0
    waited: float = 0.0
    hook: float = 0.0
    communication: float = 0.0
    buckets: list[_InFlight] = field(default_factory=list)

    def launch(self, ready: float, cost: BucketCost) -> None:
        before = self.now = max(self.now, ready + self.delay)
        self.buckets.append(_InFlight(cost))
        self.advance()
        self.delay += self.now - before

    def advance(self) -> None:
        """Start every phase that can start by now; a bucket does not overtake the one before it."""
        reached: float = float("inf")  # phase of the bucket before
        for bucket in self.buckets:
            while not bucket.finished and bucket.done <= self.now and bucket.phase < reached:
                self.start_next_phase(bucket)
            reached = float("inf") if bucket.finished else bucket.phase

    def start_next_phase(self, bucket: _InFlight) -> None:
        bucket.phase += 1
        phase = None if bucket.finished else bucket.cost.phases[bucket.phase]
        seconds = bucket.cost.finish if phase is None else phase.compute
        self.now += seconds
        self.hook += seconds
        if phase is not None:
            seconds = self.link.seconds(phase.collective, phase.nbytes, self.world_size)
            self.communication += seconds
            bucket.done = self.link_free = max(self.now, self.link_free) + seconds

    def finish(self, backward: float) -> float:
        """Return when all buckets are done, for a backward of that length."""
        self.now = max(self.now, backward + self.delay)
        for bucket in self.buckets:
            while not bucket.finished:
                self.advance()
                if not bucket.finished:
                    self.waited += max(0.0, bucket.done - self.now)
                    self.now = max(self.now, bucket.done)
                    self.start_next_phase(bucket)
        return self.now
