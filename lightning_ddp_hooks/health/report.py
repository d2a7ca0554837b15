"""Who failed, judged from the ranks' heartbeats, and the text that an error gets if another rank caused it; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_ddp_hooks.health.heartbeat import CALLED_BY, Heartbeat, PeerStatus, Progress, State

LIKELY_CAUSE = "A likely cause: dataloaders of different lengths on the ranks."
"""Of ranks that are at different places though none has failed, if nothing more is known."""

NOT_ON_ALL_RANKS = "A likely cause: not all ranks come to that line, such as one under `if trainer.is_global_zero`."
"""Of ranks of which one waits in a collective that the user's own line has called."""


def lost_ranks(peers: Mapping[int, PeerStatus], silent_s: float) -> list[int]:
    """Return the running ranks that have sent no heartbeat for ``silent_s`` seconds."""
    return [rank for rank in _in_state(peers, State.RUNNING) if peers[rank].silent_s >= silent_s]


def failed_ranks(peers: Mapping[int, PeerStatus]) -> list[int]:
    """Return the ranks that an error of their own has ended."""
    return _in_state(peers, State.FAILED)


def resignations(peers: Mapping[int, PeerStatus]) -> list[str]:
    """Return the reasons given by ranks that gave up."""
    gave_up = [(rank, peers[rank].heartbeat.text) for rank in _in_state(peers, State.GAVE_UP)]
    return [f"Rank {rank} gave up: {text}" for rank, text in gave_up if text]


def _in_state(peers: Mapping[int, PeerStatus], state: State) -> list[int]:
    return [rank for rank, peer in sorted(peers.items()) if peer.heartbeat.state is state]


def deadlocked(progress: Progress, peers: Mapping[int, PeerStatus], world_size: int, idle_s: float) -> bool:
    """Tell whether all ranks wait for each other, but not for the same thing, and so would wait forever.

    A rank that says what it waits for has done its part of that, and does nothing else until the others have. (A rank
    that is in a backward may also be computing, but then it has buckets to send that no other rank has got past.) Ranks
    in a backward wait for the same, also where one is a bucket ahead: a slow network is no reason to give up. None may
    have made progress for ``idle_s`` seconds.
    """
    waits = {_wait(progress)}
    for peer in peers.values():
        # One that has been silent may be anywhere by now, or nowhere.
        if peer.heartbeat.state is not State.RUNNING or peer.idle_s < idle_s or peer.silent_s >= idle_s / 2:
            return False
        waits.add(_wait(peer.heartbeat.progress))
    return len(peers) == world_size - 1 and "" not in waits and len(waits) > 1


def stalled_ranks(progress: Progress, peers: Mapping[int, PeerStatus], world_size: int, idle_s: float) -> list[int]:
    """Return the ranks that have done something else for ``idle_s`` seconds while all others wait for their gradients.

    None are returned if this one does not wait for gradients, or another rank waits for something else, which may be
    that rank's doing, or if a rank may be anywhere.
    """
    found = []
    for rank, peer in peers.items():
        wait = _wait(peer.heartbeat.progress)
        if wait == _GRADIENTS:
            continue
        if wait or peer.heartbeat.state is not State.RUNNING or peer.idle_s < idle_s or peer.silent_s >= idle_s / 2:
            return []
        found.append(rank)
    return found if len(peers) == world_size - 1 and _wait(progress) == _GRADIENTS else []


def is_blamed(rank: int, peers: Mapping[int, PeerStatus]) -> bool:
    """Tell whether another rank gave up because this one has stalled."""
    return any(peers[other].heartbeat.text.startswith(_stands(rank)) for other in _in_state(peers, State.GAVE_UP))


def _stands(rank: int) -> str:
    return f"Rank {rank} has made no progress"


_GRADIENTS = "gradients"


def _wait(progress: Progress) -> str:
    return _GRADIENTS if progress.buckets and progress.waits_for else progress.waits_for


def failure_report(
    rank: int,
    progress: Progress,
    peers: Mapping[int, PeerStatus],
    *,
    silent_s: float,
    store_host: str | None = None,
    are_deadlocked: bool = False,
    stalled: Sequence[int] = (),
    line: str = "",
    likely_cause: str = LIKELY_CAUSE,
) -> str:
    """Return several lines that say which rank brought this one down, and where both were.

    ``store_host`` is given if it cannot be reached; ``likely_cause`` is added if no rank is known to have failed, and
    ``line`` is where this one's code is.
    """
    failed = failed_ranks(peers)
    places = {other: peer.heartbeat.place() for other, peer in sorted(peers.items())}
    lines = [f"Rank {other} failed at {places[other]}." for other in failed]
    lines += [
        f"Rank {other} died or was stopped: no sign of life for {peers[other].silent_s:.0f} s; it was last seen at "
        f"{places[other]}."
        for other in lost_ranks(peers, silent_s)
    ]
    if store_host is not None:
        lines.append(f"Rank 0 (store host, {store_host}) is unreachable: it died, was stopped, or its host is gone.")
    lines += [
        f"{_stands(other)} for {peers[other].idle_s:.0f} s, while others wait for its gradients: it "
        f"is at {places[other]}. If it has work of its own that takes so long, set `stall_timeout`."
        for other in stalled
    ]
    lines = lines or resignations(peers)
    nobody_failed = not lines
    if nobody_failed and are_deadlocked:
        lines.append("The ranks have parted ways: they wait for different things, and would do so forever.")
        lines += [f"Rank {other} is at {place}." for other, place in places.items()]
    elif nobody_failed:
        lines.append("A collective failed or timed out, but no rank is known to have failed: did ranks part ways?")
        lines += [f"Rank {other} ({peers[other].heartbeat.state.value}): {place}." for other, place in places.items()]
    lines.append(f"Rank {rank}, this one, was at {Heartbeat(0, progress, line=line).place()}.")
    waits = [progress.waits_for, *(peer.heartbeat.progress.waits_for for peer in peers.values())]
    if nobody_failed and any(CALLED_BY in text for text in waits):
        lines.append(NOT_ON_ALL_RANKS)
    elif nobody_failed and likely_cause:
        lines.append(likely_cause)
    for other in failed:
        error = peers[other].heartbeat.text.rstrip().splitlines()
        lines += [f"The error of rank {other}:", *(f"  {line}" for line in error)]
    # What many read is the last line.
    told = peers[failed[0]].heartbeat.text.strip() if failed else ""
    whose = (
        f"rank {failed[0]} failed: {told.splitlines()[-1].strip()}"
        if told
        else lines[0].splitlines()[0].partition(": ")[0]
    )
    lines.append(f"In short: {whose}")
    return "\n".join(lines)


def attach_report(error: BaseException, report: str) -> None:
    """Put a report in front of an error's text; add it as a note if the error has no text."""
    if error.args and isinstance(error.args[0], str):
        told, _, verdict = report.rpartition("\n")
        error.args = (f"{told}\nWhat failed here: {error.args[0]}\n{verdict}", *error.args[1:])
    elif hasattr(error, "add_note"):  # from Python 3.11 on
        error.add_note(report)
