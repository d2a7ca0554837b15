"""The text of an error that another rank caused; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_ddp_hooks.health.note import Note, State, Whereabouts


@dataclass(frozen=True)
class Sighting:
    """What is known of another rank.

    Attributes:
        note: the last one that it wrote.
        silent_s: seconds since it was new.
    """

    note: Note
    silent_s: float


def lost_ranks(seen: Mapping[int, Sighting], silent_s: float) -> list[int]:
    """Return the ranks that ought to write notes and have not done so for ``silent_s`` seconds."""
    return [
        rank
        for rank, sighting in sorted(seen.items())
        if sighting.note.state is State.RUNNING and sighting.silent_s >= silent_s
    ]


def failed_ranks(seen: Mapping[int, Sighting]) -> list[int]:
    """Return the ranks that an error of their own has ended."""
    return [rank for rank, sighting in sorted(seen.items()) if sighting.note.state is State.FAILED]


def accounts(seen: Mapping[int, Sighting]) -> list[str]:
    """Return what the ranks that gave up have to say about who failed."""
    return [
        f"Rank {rank} gave up: {sighting.note.text}"
        for rank, sighting in sorted(seen.items())
        if sighting.note.state is State.GAVE_UP and sighting.note.text
    ]


def failure_report(
    rank: int, where: Whereabouts, seen: Mapping[int, Sighting], *, silent_s: float, store_host: str | None = None
) -> str:
    """Say which rank brought this one down, and where both were.

    Args:
        rank: this rank.
        where: this rank's place.
        seen: what is known of the other ranks.
        silent_s: after how many seconds of silence a rank counts as lost.
        store_host: where the store was, if it cannot be reached.

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
    if not lines:
        lines.append("A collective failed or timed out, but no rank is known to have failed: did ranks part ways?")
        lines += [f"Rank {other} ({s.note.state.value}): {s.note.where.text()}." for other, s in sorted(seen.items())]
    lines.append(f"Rank {rank}, this one, was at {where.text()}.")
    for other in failed:
        lines += [f"The error of rank {other}:", _indented(seen[other].note.text)]
    return "\n".join(lines)


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.rstrip().splitlines())
