"""What a run has recorded: the last steps in full, figures of all of them for loggers, and those of other ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from lightning_ddp_hooks.monitor import timeline
from lightning_ddp_hooks.monitor.quality import Quality
from lightning_ddp_hooks.monitor.skew import RankStep, Split, split
from lightning_ddp_hooks.monitor.timeline import StepTiming


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of some steps: medians over the typical ones in seconds, bytes and errors over all."""

    steps: int
    duration: float
    communication: float
    exposed: float
    overlap: float
    sent_bytes: float  # mean, since averaging and the like do not come in every step
    compression: float | None  # None if nothing was sent
    error: float | None  # relative, of compressed buckets, mean by size; None unless it was measured

    @property
    def exposed_share(self) -> float:
        """Part of a step that is spent waiting."""
        return self.exposed / self.duration if self.duration else 0.0

    @classmethod
    def of(cls, steps: Sequence[StepTiming], world_size: int) -> Summary:
        """Summarize steps, of which there is at least one."""
        typical = timeline.typical_steps(steps)
        return cls(
            steps=len(steps),
            duration=median(step.duration for step in typical),
            communication=median(map(timeline.communication_time, typical)),
            exposed=median(step.wait for step in typical),
            overlap=median(map(timeline.overlap, typical)),
            sent_bytes=sum(step.sent_bytes for step in steps) / len(steps),
            compression=timeline.effective_compression(steps, world_size),
            error=_mean_error(steps),
        )


def _mean_error(steps: Sequence[StepTiming]) -> float | None:
    compared = [(b.error, b.grad_bytes) for step in steps for b in step.buckets if b.error is not None]
    total = sum(nbytes for _, nbytes in compared)
    return sum(error * nbytes for error, nbytes in compared) / total if total else None


@dataclass
class RunRecord:
    """A run as the report tells it, by the rank that keeps it."""

    world_size: int
    rank: int
    keep_steps: int  # number of steps that are kept in full; older ones are dropped
    facts: dict[str, str] = field(default_factory=dict)  # model, hook, backend and the like, in this order
    has_hook: bool = False
    sized_by: str | None = None  # the hook's setting for how much it sends
    is_approximate: bool = True  # whether the hook is to give all ranks about the mean
    bucket_cap_bytes: int = 0
    count: int = 0  # of all steps that were recorded
    outside_bytes: Mapping[str, int] = field(default_factory=dict)  # sent between steps, by purpose
    hosts: Sequence[str] = ()  # of each rank
    traced: Sequence[Sequence[StepTiming]] = ()  # the last steps of each rank; empty if they could not be asked
    sees_ends: bool = True  # whether the end of a collective is known, and not only that of the wait for it
    note: str | None = None  # what a reader has to know, such as that the run has failed
    steps: deque[StepTiming] = field(init=False)
    compared: deque[list[RankStep]] = field(init=False)  # steps of all ranks, as far as they have come

    def __post_init__(self) -> None:
        self.steps = deque(maxlen=self.keep_steps)
        self.compared = deque(maxlen=self.keep_steps)

    def add(self, steps: Sequence[StepTiming]) -> None:
        """Add steps in order."""
        self.steps.extend(steps)
        self.count += len(steps)

    @property
    def quality(self) -> Quality | None:
        """What the hook does to gradients, where that was measured."""
        return Quality.of(self.steps, self.world_size)

    def split(self, last: int | None = None) -> Split | None:
        """Divide the waiting in the last steps that are known of all ranks, by default all; None if there are none.

        The longest of them does not count: one hiccup says nothing about a rank.
        """
        steps = list(self.compared)[-(last or 0) :]
        longest = max(steps, key=lambda rows: rows[0].duration, default=None)
        steps = [rows for rows in steps if rows is not longest or len(steps) == 1]
        return split(steps) if steps and self.world_size > 1 else None


def step_metrics(steps: Sequence[StepTiming], world_size: int, *, per_bucket: bool = True) -> dict[str, float]:
    """Return means over the steps, of which there is at least one, by name; times in milliseconds.

    The names are ``exposed_ms``, ``time_ms``, ``overlap``, ``sent_bytes`` and, if something was sent, ``compression``;
    if reduced gradients were compared, ``error``; with ``per_bucket`` also ``bucket_0/exposed_ms``, ``.../time_ms``,
    ``.../sent_bytes`` and ``.../error`` for each bucket.
    """
    count = len(steps)
    values: dict[str, float | None] = {
        "exposed_ms": 1e3 * sum(step.wait for step in steps) / count,
        "time_ms": 1e3 * sum(map(timeline.communication_time, steps)) / count,
        "overlap": sum(map(timeline.overlap, steps)) / count,
        "sent_bytes": sum(step.sent_bytes for step in steps) / count,
        "compression": timeline.effective_compression(steps, world_size),
        "error": _mean_error(steps),
        **(_bucket_metrics(steps) if per_bucket else {}),
    }
    return {f"comm/{name}": value for name, value in values.items() if value is not None}


def _bucket_metrics(steps: Sequence[StepTiming]) -> dict[str, float]:
    """Return figures of each bucket, summed over the backwards of a step and averaged over the steps."""
    values: dict[str, float] = {}
    errors: dict[int, list[float]] = {}
    for step in steps:
        for bucket, exposed in zip(step.buckets, timeline.exposed_by_bucket(step), strict=True):
            launched, done = bucket.in_flight
            figures = {"exposed_ms": 1e3 * exposed, "time_ms": 1e3 * (done - launched), "sent_bytes": bucket.sent_bytes}
            for name, value in figures.items():
                key = f"bucket_{bucket.index}/{name}"
                values[key] = values.get(key, 0.0) + value / len(steps)
            if bucket.error is not None:
                errors.setdefault(bucket.index, []).append(bucket.error)
    return values | {f"bucket_{index}/error": sum(found) / len(found) for index, found in errors.items()}
