"""Predicts what a training step takes from what was measured of its parts. Pure; no torch, no clock.

Known are the step without communication (when each bucket's gradients are ready), what the hook computes and sends for
each bucket, and the network. Predicted is the step with communication, for any number of ranks:

    thread   | forward |  backward ...[h0] ....[h1].........[h2]| wait | decode | optimizer |
    link                              |== bucket 0 ==|== bucket 1 ==|== bucket 2 ==|
                          ready:      0        1             2

The rules are those of the reducer: buckets are launched in order; what a hook computes holds up the thread that runs
the backward; collectives queue on the link; a further phase of a bucket is issued when the next bucket is launched, and
else when the step waits. On a GPU hooks and collectives run on a stream of their own instead, beside the backward.

What is left out: that communication takes processor time from the backward, that ranks are not equally fast, and that
links are shared with others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_ddp_hooks.monitor.link_model import Network
from lightning_ddp_hooks.traffic import Collective, sent_by_rank


@dataclass(frozen=True)
class Phase:
    """One collective of a bucket, and what comes before it.

    Attributes:
        compute: seconds that the hook computes before it issues the collective.
        collective: which.
        nbytes: what each rank puts in.
    """

    compute: float
    collective: Collective
    nbytes: int


@dataclass(frozen=True)
class BucketCost:
    """What a hook does for one bucket.

    Attributes:
        phases: its collectives, in order; none for a hook that sends nothing.
        finish: seconds that it computes after the last one.
    """

    phases: tuple[Phase, ...]
    finish: float = 0.0

    def sent(self, world_size: int) -> int:
        """Return how many bytes a rank sends for the bucket."""
        return sum(sent_by_rank(phase.collective, phase.nbytes, world_size) for phase in self.phases)


@dataclass(frozen=True)
class ComputeStep:
    """A training step without communication; in seconds.

    Attributes:
        before: from its begin to that of the backward that reduces gradients (data, forward, earlier micro-batches).
        ready: for each bucket, when its gradients are complete; from the begin of that backward, ascending.
        backward: length of that backward.
        after: optimizer and all else.

    Raises:
        ValueError: times that cannot be.
    """

    before: float
    ready: tuple[float, ...]
    backward: float
    after: float

    def __post_init__(self) -> None:
        """Check the order."""
        if list(self.ready) != sorted(self.ready) or (self.ready and not 0 <= self.ready[-1] <= self.backward):
            raise ValueError(
                f"Expected ascending times within a backward of {self.backward} s for `ready`, got {self.ready}."
            )

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.before + self.backward + self.after


@dataclass(frozen=True)
class Prediction:
    """A step as predicted; in seconds.

    Attributes:
        step: from begin to end.
        exposed: what it waits for communication.
        hook: what the hook computes at the expense of the step.
        communication: how long the link is in use.
        sent: bytes that a rank sends, on average over steps.
    """

    step: float
    exposed: float
    hook: float
    communication: float
    sent: float

    @property
    def overlap(self) -> float:
        """The fraction of the communication that the step does not wait for; 1 if there is none."""
        return 1.0 if not self.communication else max(0.0, 1.0 - self.exposed / self.communication)


def allreduce_cost(bucket_bytes: Sequence[int]) -> list[BucketCost]:
    """Return what the plain mean does for each bucket: it is scaled in the copy, so nothing is computed."""
    return [BucketCost((Phase(0.0, "all_reduce", nbytes),)) for nbytes in bucket_bytes]


def predict(
    step: ComputeStep, buckets: Sequence[BucketCost], network: Network, world_size: int, *, on_stream: bool = False
) -> Prediction:
    """Predict a step in which gradients are reduced.

    Args:
        step: without communication.
        buckets: what is done for each bucket, in order of reduction.
        network: between the ranks.
        world_size: number of ranks.
        on_stream: hooks and collectives run on a stream of their own (GPU), not on the thread of the backward.

    Raises:
        ValueError: another number of buckets than the step has.
    """
    if len(buckets) != len(step.ready):
        raise ValueError(f"Expected the cost of {len(step.ready)} buckets, got {len(buckets)}.")
    run = _Stream(network, world_size) if on_stream else _Thread(network, world_size)
    for ready, cost in zip(step.ready, buckets, strict=True):
        run.launch(ready, cost)
    end = run.finish(step.backward)
    return Prediction(
        step=step.before + end + step.after,
        exposed=run.waited,
        hook=run.hook,
        communication=run.communication,
        sent=float(sum(cost.sent(world_size) for cost in buckets)),
    )


@dataclass
class _Task:
    """A bucket under way: which phase it is in, and when that is done."""

    cost: BucketCost
    phase: int = -1
    done: float = 0.0
    finished: bool = False


@dataclass
class _Thread:
    """Hooks on the thread of the backward, as on a CPU; follows `hooks.pipeline`."""

    network: Network
    world_size: int
    now: float = 0.0
    held: float = 0.0  # by how much the backward is late
    link_free: float = 0.0
    waited: float = 0.0
    hook: float = 0.0
    communication: float = 0.0
    tasks: list[_Task] = field(default_factory=list)

    def launch(self, ready: float, cost: BucketCost) -> None:
        self.now = max(self.now, ready + self.held)
        before = self.now
        self.tasks.append(_Task(cost))
        self.advance()
        self.held += self.now - before

    def advance(self) -> None:
        previous: _Task | None = None
        for task in self.tasks:
            while not task.finished and self._may_go_on(task, previous):
                self.step(task)
            previous = task

    def _may_go_on(self, task: _Task, previous: _Task | None) -> bool:
        if previous is not None and not previous.finished and previous.phase <= task.phase:
            return False
        return task.done <= self.now

    def step(self, task: _Task) -> None:
        task.phase += 1
        if task.phase == len(task.cost.phases):
            self._compute(task.cost.finish)
            task.finished = True
            return
        phase = task.cost.phases[task.phase]
        self._compute(phase.compute)
        seconds = self.network.seconds(phase.collective, phase.nbytes, self.world_size)
        self.communication += seconds
        task.done = self.link_free = max(self.now, self.link_free) + seconds

    def _compute(self, seconds: float) -> None:
        self.now += seconds
        self.hook += seconds

    def finish(self, backward: float) -> float:
        self.now = max(self.now, backward + self.held)
        for task in self.tasks:
            while not task.finished:
                self.advance()
                if not task.finished:
                    self.waited += max(0.0, task.done - self.now)
                    self.now = max(self.now, task.done)
                    self.step(task)
        return self.now


@dataclass
class _Stream:
    """Hooks and collectives one after the other on a stream beside the backward."""

    network: Network
    world_size: int
    free: float = 0.0
    waited: float = 0.0
    hook: float = 0.0
    communication: float = 0.0

    def launch(self, ready: float, cost: BucketCost) -> None:
        computed = sum(phase.compute for phase in cost.phases) + cost.finish
        sent = sum(self.network.seconds(p.collective, p.nbytes, self.world_size) for p in cost.phases)
        self.hook += computed
        self.communication += sent
        self.free = max(self.free, ready) + computed + sent

    def finish(self, backward: float) -> float:
        self.waited = max(0.0, self.free - backward)
        return max(self.free, backward)


def predict_averaging(
    step: ComputeStep,
    nbytes: int,
    network: Network,
    world_size: int,
    *,
    period: int,
    fragments: int = 1,
    delay: int = 0,
    wire_ratio: float = 1.0,
) -> Prediction:
    """Predict the average step of replicas that train by themselves and exchange the model now and then.

    Args:
        step: without communication.
        nbytes: size of the model.
        network: between the ranks.
        world_size: number of ranks.
        period: steps from one exchange of a parameter to the next.
        fragments: into how many parts the model is cut, of which one is sent every ``period / fragments`` steps.
        delay: steps that may pass before a part that was sent is needed.
        wire_ratio: bytes on the wire for each byte of the model.
    """
    part = nbytes * wire_ratio / fragments
    seconds = network.seconds("all_reduce", part, world_size)
    exposed = max(0.0, seconds - delay * step.seconds) * fragments / period
    return Prediction(
        step=step.seconds + exposed,
        exposed=exposed,
        hook=0.0,
        communication=seconds * fragments / period,
        sent=sent_by_rank("all_reduce", int(part), world_size) * fragments / period,
    )
