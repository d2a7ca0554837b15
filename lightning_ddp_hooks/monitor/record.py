"""What a run has recorded: the last steps in full, sums over all of them, and the figures of other ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median

from lightning_ddp_hooks.monitor.timeline import (
    StepTiming,
    communication_time,
    effective_compression,
    overlap,
    typical_steps,
)


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of some steps; times in seconds.

    Attributes:
        steps: number of steps.
        duration: median duration of a step.
        communication: median communication time of a step.
        exposed: median time that a step waits.
        overlap: median fraction of the communication that was not waited for.
        sent_bytes: mean of what this rank sent in a step (averaging and the like do not come in every step).
        compression: effective compression over all steps; None if nothing was sent.
        error: mean relative error of compressed buckets, weighted by size; None unless it was measured.
    """

    steps: int
    duration: float
    communication: float
    exposed: float
    overlap: float
    sent_bytes: float
    compression: float | None
    error: float | None

    @property
    def exposed_share(self) -> float:
        """Part of a step that is spent waiting."""
        return self.exposed / self.duration if self.duration else 0.0

    @classmethod
    def of(cls, steps: Sequence[StepTiming], world_size: int) -> Summary:
        """Summarize steps, of which there is at least one: times over the typical ones, bytes over all."""
        typical = typical_steps(steps)
        return cls(
            steps=len(steps),
            duration=median(step.duration for step in typical),
            communication=median(map(communication_time, typical)),
            exposed=median(step.wait for step in typical),
            overlap=median(map(overlap, typical)),
            sent_bytes=sum(step.sent_bytes for step in steps) / len(steps),
            compression=effective_compression(steps, world_size),
            error=mean_error(steps),
        )


def mean_error(steps: Sequence[StepTiming]) -> float | None:
    """Return the mean relative error of the buckets that were compared, weighted by their size."""
    compared = [(b.error, b.grad_bytes) for step in steps for b in step.buckets if b.error is not None]
    total = sum(nbytes for _, nbytes in compared)
    return sum(error * nbytes for error, nbytes in compared) / total if total else None


def rank_row(rank: int, steps: Sequence[StepTiming], world_size: int) -> dict[str, float | None]:
    """Return one rank's figures in a form that travels between ranks; only its number if it has no steps."""
    return {"rank": rank, **(asdict(Summary.of(steps, world_size)) if steps else {"steps": 0})}


@dataclass
class RunRecord:
    """A run as the report tells it.

    Attributes:
        world_size: number of ranks.
        rank: rank that keeps this record.
        keep_steps: how many steps are kept in full; older ones are dropped.
        facts: what to say about the run (model, hook, backend), in this order.
        has_hook: whether a communication hook reduces the gradients.
        bucket_cap_bytes: size at which a bucket is closed.
        count: number of all steps that were recorded.
        parameter_bytes: size of each parameter's gradient, by name.
        outside_bytes: what was sent between steps, by purpose.
        ranks: result of `rank_row` on each rank; empty if they could not be asked.
        note: what a reader has to know, such as that the run has failed.
        steps: the last steps.
    """

    world_size: int
    rank: int
    keep_steps: int
    facts: dict[str, str] = field(default_factory=dict)
    has_hook: bool = False
    bucket_cap_bytes: int = 0
    count: int = 0
    parameter_bytes: Mapping[str, int] = field(default_factory=dict)
    outside_bytes: Mapping[str, int] = field(default_factory=dict)
    ranks: Sequence[Mapping[str, float | None]] = ()
    note: str | None = None
    steps: deque[StepTiming] = field(init=False)

    def __post_init__(self) -> None:
        self.steps = deque(maxlen=self.keep_steps)

    def add(self, steps: Sequence[StepTiming]) -> None:
        """Add steps in order."""
        self.steps.extend(steps)
        self.count += len(steps)
