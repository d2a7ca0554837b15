"""What a run has recorded: the last steps in full, sums over all of them, and what other ranks say."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from lightning_ddp_hooks.monitor.timeline import (
    StepTiming,
    communication_time,
    effective_compression,
    median,
    overlap,
    typical_steps,
)


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of some steps; times in seconds.

    Attributes:
        steps: how many.
        duration: of a step, median.
        communication: in a step, median.
        exposed: in a step, median.
        overlap: median fraction of the communication that was not waited for.
        sent_bytes: by this rank in a step, mean (averaging and the like do not come in every step).
        compression: effective, over all steps; None if nothing was sent.
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
        """The part of a step that is spent waiting."""
        return self.exposed / self.duration if self.duration else 0.0

    @classmethod
    def of(cls, steps: Sequence[StepTiming], world_size: int) -> Summary:
        """Summarise steps: times over the typical ones, bytes over all.

        Raises:
            ValueError: there are no steps.
        """
        typical = typical_steps(steps)
        return cls(
            steps=len(steps),
            duration=median([step.duration for step in typical]),
            communication=median([communication_time(step) for step in typical]),
            exposed=median([step.wait for step in typical]),
            overlap=median([overlap(step) for step in typical]),
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

    Args:
        world_size: number of ranks.
        rank: whose record this is.
        keep_steps: how many steps are kept in full; older ones are dropped.
        facts: what to say about the run (model, hook, backend), in this order.
        has_hook: whether a communication hook reduces the gradients.
        bucket_cap_bytes: size at which a bucket is closed.

    Attributes:
        steps: the last steps.
        count: of all steps that were recorded.
        parameter_bytes: size of each parameter's gradient, by name.
        outside_bytes: what was sent between steps, by purpose.
        ranks: what `rank_row` returned on each rank; empty if they could not be asked.
        note: what a reader has to know, such as that the run has failed.
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

    def __post_init__(self) -> None:
        """Make room for the steps."""
        self.steps: deque[StepTiming] = deque(maxlen=self.keep_steps)

    def add(self, steps: Sequence[StepTiming]) -> None:
        """Add steps in order."""
        self.steps.extend(steps)
        self.count += len(steps)
