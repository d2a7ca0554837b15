"""The text of an error that another rank caused; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_ddp_hooks.health.heartbeat import Heartbeat, Progress, State

LIKELY_CAUSE = "A likely cause: dataloaders of different lengths on the ranks."
"""Of ranks that are at different places though none has failed, if nothing more is known."""


@dataclass(frozen=True)
class PeerStatus:
    """What is known of another rank.

    Attributes:
        note: the last one that it wrote.
        silent_s: seconds since it was new.
        still_s: seconds since the rank came to where it is.
    """

    note: Heartbeat
    silent_s: float
    still_s: float = 0.0


def lost_ranks(seen: Mapping[int, PeerStatus], silent_s: float) -> list[int]:
    """Return the ranks that ought to write notes and have not done so for ``silent_s`` seconds."""
    return [
        rank
        for rank, sighting in sorted(seen.items())
        if sighting.note.state is State.RUNNING and sighting.silent_s >= silent_s
    ]


def failed_ranks(seen: Mapping[int, PeerStatus]) -> list[int]:
    """Return the ranks that an error of their own has ended."""
    return [rank for rank, sighting in sorted(seen.items()) if sighting.note.state is State.FAILED]


def deadlocked(where: Progress, seen: Mapping[int, PeerStatus], world_size: int, still_s: float) -> bool:
    """Tell whether all ranks wait for each other, but not for the same thing, and so would wait for ever.

    A rank that says what it waits for has done its part of that, and does nothing else until the others have. (A rank
    that is in a backward may also be computing, but then it has buckets to send that no other rank has got past.) Ranks
    in a backward wait for the same, also where one is a bucket ahead: a slow network is no reason to give up.

    Args:
        where: this rank's place.
        seen: what is known of the other ranks.
        world_size: the number of ranks.
        still_s: for how long nobody must have moved.
    """
    waits = {_wait(where)}
    for sighting in seen.values():
        if sighting.note.state is not State.RUNNING or sighting.still_s < still_s:
            return False
        if sighting.silent_s >= still_s / 2:  # it may be anywhere by now, or nowhere
            return False
        waits.add(_wait(sighting.note.where))
    return len(seen) == world_size - 1 and "" not in waits and len(waits) > 1


def _wait(where: Progress) -> str:
    return "gradients" if where.buckets and where.waits_for else where.waits_for


def accounts(seen: Mapping[int, PeerStatus]) -> list[str]:
    """Return what the ranks that gave up have to say about who failed."""
    return [
        f"Rank {rank} gave up: {sighting.note.text}"
        for rank, sighting in sorted(seen.items())
        if sighting.note.state is State.GAVE_UP and sighting.note.text
    ]


def failure_report(
    rank: int,
    where: Progress,
    seen: Mapping[int, PeerStatus],
    *,
    silent_s: float,
    store_host: str | None = None,
    are_deadlocked: bool = False,
    likely_cause: str = LIKELY_CAUSE,
) -> str:
    """Say which rank brought this one down, and where both were.

    Args:
        rank: this rank.
        where: this rank's place.
        seen: what is known of the other ranks.
        silent_s: after how many seconds of silence a rank counts as lost.
        store_host: where the store was, if it cannot be reached.
        are_deadlocked: whether all are known to wait for different things.
        likely_cause: told if no rank is known to have failed.

    Returns:
        A text of several lines, that ends without a line break.
    """
    failed, lost = failed_ranks(seen), lost_ranks(seen, silent_s)
    lines = []
    for other in failed:
        lines.append(f"Rank {other} failed at {seen[other].note.where.text()}.")
    for other in lost:
        sighting = seen[other]
        lines.append(
            f"Rank {other} died or was stopped: no sign of life for {sighting.silent_s:.0f} s; it was last seen at "
            f"{sighting.note.where.text()}."
        )
    if store_host is not None:
        lines.append(f"Rank 0 (store host, {store_host}) is unreachable: it died, was stopped, or its host is gone.")
    if not lines:
        lines += accounts(seen)
    nobody_failed = not lines
    if nobody_failed and are_deadlocked:
        lines.append("The ranks have parted ways: they wait for different things, and would do so for ever.")
        lines += [f"Rank {other} is at {s.note.where.text()}." for other, s in sorted(seen.items())]
    elif nobody_failed:
        lines.append("A collective failed or timed out, but no rank is known to have failed: did ranks part ways?")
        lines += [f"Rank {other} ({s.note.state.value}): {s.note.where.text()}." for other, s in sorted(seen.items())]
    lines.append(f"Rank {rank}, this one, was at {where.text()}.")
    if nobody_failed and likely_cause:
        lines.append(likely_cause)
    for other in failed:
        lines += [f"The error of rank {other}:", _indented(seen[other].note.text)]
    return "\n".join(lines)


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.rstrip().splitlines())
