"""Who waits for whom: the steps of all ranks compared. Pure.

    rank 0   |post ........... others are late ........... |=== transfer ===| done
    rank 1   |    data, forward, backward             post |=== transfer ===| done

A collective ends at about the same moment on all ranks. So it is in flight for the shortest time on the rank that
posted it last; that is the transfer, and what the others wait beyond it they wait for that rank. Durations are all that
this takes: the clocks of hosts need not agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from lightning_ddp_hooks.monitor.timeline import StepTiming, exposed_by_bucket, intersect, length, phases, subtract

PHASES = ("data", "validation", "save", "forward", "backward", "hook", "optimizer")
"""What a rank does by itself between two meetings with the others."""

_FIXED = 6 + len(PHASES)
_KEPT_INCOMPLETE = 1000
_SINGLE = 0.6  # from this share of all waiting for others on, one rank is to blame, or one phase of it


@dataclass(frozen=True)
class RankStep:
    """One rank's step in seconds, in a form that travels."""

    step: int
    duration: float  # from the end of the step before
    wait: float  # without what a hook computes meanwhile
    after: float  # of that, while no bucket was in flight: ranks agree on something
    own: tuple[float, ...]  # by `PHASES`
    in_flight: tuple[float, ...]  # each collective of each bucket
    waited: tuple[float, ...]  # for each of them, and not for one before it
    gaps: tuple[float, ...]  # of the backward, from the bucket before until each one was full

    @classmethod
    def of(cls, step: StepTiming) -> RankStep:
        """Reduce a step to durations."""
        parts, exposed = phases(step), sum(exposed_by_bucket(step))
        idle, counted = subtract(step.wait_intervals, step.hook_work), float("-inf")
        in_flight, waited = [], []
        for bucket in step.buckets:
            for begin, end in bucket.meetings or (bucket.in_flight,):
                in_flight.append(end - begin)
                waited.append(length(intersect([(max(counted, begin), end)], idle)))
                counted = max(counted, end)
            counted = max(counted, bucket.done)
        gaps, free = [], step.backward_begin
        for bucket in step.buckets:
            gaps.append(max(0.0, bucket.ready - free))
            free = max(free, bucket.ready, min(bucket.launched, step.backward_end))
        return cls(
            step=step.step,
            duration=step.duration + sum(step.between),
            wait=parts.wait,
            after=max(0.0, parts.wait - exposed),
            own=(*step.between, parts.forward, parts.backward, parts.hook, parts.rest),
            in_flight=tuple(in_flight),
            waited=tuple(waited),
            gaps=tuple(gaps),
        )


def pack(steps: Sequence[RankStep], capacity: int) -> list[float]:
    """Write the last steps that fit as so many numbers."""
    rows: list[list[float]] = []
    free = capacity - 1
    for step in reversed(steps):
        row = [step.step, step.duration, step.wait, step.after, len(step.in_flight), len(step.gaps), *step.own]
        row += [*step.in_flight, *step.waited, *step.gaps]
        free -= len(row)
        if free < 0:
            break
        rows.append(row)
    numbers = [float(len(rows)), *(number for row in reversed(rows) for number in row)]
    return numbers + [0.0] * (capacity - len(numbers))


def unpack(numbers: Sequence[float]) -> list[RankStep]:
    """Undo `pack`."""
    steps, at = [], 1
    for _ in range(int(numbers[0])):
        step, duration, wait, after, collectives, buckets, *own = numbers[at : at + _FIXED]
        at, columns = at + _FIXED, []
        for count in map(int, (collectives, collectives, buckets)):
            columns.append(tuple(numbers[at : at + count]))
            at += count
        steps.append(RankStep(int(step), duration, wait, after, tuple(own), *columns))
    return steps


@dataclass(frozen=True)
class Split:
    """How ranks spend their steps: means in seconds, by rank."""

    steps: int
    duration: float
    skew: tuple[float, ...]  # waits for others
    transfer: tuple[float, ...]  # waits for data on their way
    held_up: tuple[float, ...]  # holds up each of the others
    own: tuple[tuple[float, ...], ...]  # by `PHASES`
    gaps: tuple[tuple[float, ...], ...]  # by bucket, of the most frequent number of buckets


def split(steps: Sequence[Sequence[RankStep]]) -> Split:
    """Divide the waiting in steps, of which there is at least one, each of them of two ranks or more in order."""
    ranks = range(len(steps[0]))
    skew, held_up = [0.0] * len(ranks), [0.0] * len(ranks)
    for step in steps:
        meetings = [(of_rank.in_flight, of_rank.waited) for of_rank in step]
        in_flight = [*zip(*(flights for flights, _ in meetings), strict=True), tuple(r.after for r in step)]
        waited = [*zip(*(waits for _, waits in meetings), strict=True), in_flight[-1]]
        for flights, waits in zip(in_flight, waited, strict=True):
            transfer = min(flights)
            last = flights.index(transfer)
            for rank in ranks:
                late = max(0.0, waits[rank] - transfer)
                skew[rank] += late / len(steps)
                held_up[last] += late / len(steps) / (len(ranks) - 1)
    counts = Counter(len(step[0].gaps) for step in steps)
    usual = [step for step in steps if len(step[0].gaps) == counts.most_common(1)[0][0]]

    def means(of: Sequence[Sequence[RankStep]], name: str) -> tuple[tuple[float, ...], ...]:
        columns = (zip(*(getattr(step[rank], name) for step in of), strict=True) for rank in ranks)
        return tuple(tuple(map(fmean, column)) for column in columns)

    return Split(
        steps=len(steps),
        duration=fmean(of_rank.duration for step in steps for of_rank in step),
        skew=tuple(skew),
        transfer=tuple(fmean(step[rank].wait for step in steps) - skew[rank] for rank in ranks),
        held_up=tuple(held_up),
        own=means(steps, "own"),
        gaps=means(usual, "gaps"),
    )


@dataclass(frozen=True)
class SlowRank:
    """The rank that the others wait for."""

    rank: int
    held_up: float  # seconds of each step
    share: float  # of the step
    phase: str | None  # in which it loses the time; None if it is in no one of them
    bucket: int | None  # position of that whose gradients are late first, if it is the backward
    excess: dict[str, float]  # seconds over the median of the others, by phase


def slow_rank(found: Split) -> SlowRank | None:
    """Return the rank that most of the waiting for others is for, unless they take turns."""
    rank = max(range(len(found.held_up)), key=found.held_up.__getitem__)
    held_up = found.held_up[rank]
    if not held_up or held_up < _SINGLE * sum(found.held_up):
        return None
    excess = dict(zip(PHASES, _beyond_others(found.own, rank), strict=True))
    phase = max(excess, key=excess.__getitem__)
    bucket = None
    if phase == "backward" and found.gaps[rank]:
        late = _beyond_others(found.gaps, rank)
        bucket = late.index(max(late))
    known = excess[phase] >= (1 - _SINGLE) * held_up
    share = held_up / found.duration if found.duration else 0.0
    return SlowRank(rank, held_up, share, phase if known else None, bucket if known else None, excess)


def _beyond_others(rows: Sequence[Sequence[float]], rank: int) -> list[float]:
    others = [row for other, row in enumerate(rows) if other != rank]
    return [own - median(column) for own, column in zip(rows[rank], zip(*others, strict=True), strict=True)]


class StepTable:
    """Steps as they come in from the ranks, until all ranks have sent them."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._incomplete: dict[int, dict[int, RankStep]] = {}

    def add(self, ranks: Iterable[Sequence[RankStep]]) -> list[list[RankStep]]:
        """Take what each rank has sent; return the steps that are complete now."""
        for rank, steps in enumerate(ranks):
            for step in steps:
                self._incomplete.setdefault(step.step, {})[rank] = step
        complete = [step for step, rows in sorted(self._incomplete.items()) if len(rows) == self._world_size]
        found = [[rows[rank] for rank in range(self._world_size)] for rows in map(self._incomplete.pop, complete)]
        # What did not fit on some rank does not come any more.
        newest = complete[-1] if complete else max(self._incomplete, default=0) - _KEPT_INCOMPLETE
        self._incomplete = {step: rows for step, rows in self._incomplete.items() if step > newest}
        return [rows for rows in found if len({(len(row.in_flight), len(row.gaps)) for row in rows}) == 1]


def metrics(found: Split) -> dict[str, float]:
    """Return figures for a logger, by name; times in milliseconds."""
    slow = slow_rank(found)
    values = {"skew_ms": 1e3 * max(found.skew), "transfer_ms": 1e3 * fmean(found.transfer)}
    if slow is not None:
        values |= {"slow_rank": float(slow.rank), "held_up": slow.share}
        values |= {f"late_{phase}_ms": 1e3 * seconds for phase, seconds in slow.excess.items()}
    return {f"comm/{name}": value for name, value in values.items()}
