"""What a rank sends to others: a formula for each collective, and who counts it. No communication; `comm` tells of it.

The formulas count payload that one rank hands to its links, without the headers of TCP/IP (about 0.1% on loopback, 3 to
5% on Ethernet). They hold for the algorithms that gloo runs and NCCL's rings:

=============== ================================= ==================================================================
collective      bytes sent by a rank              source
=============== ================================= ==================================================================
all-reduce      ``2 (n - 1) / n`` x buffer        ring: reduce-scatter, then all-gather. Patarasu, Yuan, "Bandwidth
                                                  optimal all-reduce algorithms for clusters of workstations", 2009
reduce-scatter  ``(n - 1) / n`` x input           its first half
all-gather      ``(n - 1)`` x own part            its second half; gloo/allgather.cc passes parts round the ring
all-to-all      ``(n - 1) / n`` x input           each part but one's own goes to its rank. gloo/alltoall.cc
broadcast       buffer x children in the tree     binomial tree; Thakur, Rabenseifner, Gropp, "Optimization of
                                                  collective communication operations in MPICH", 2005;
                                                  gloo/broadcast.cc. NCCL's chain: once, but for its last rank
gather          own part, but for the root        direct. gloo/gather.cc
=============== ================================= ==================================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

Collective = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "gather"]


def sent_by_rank(
    collective: Collective, nbytes: int, world_size: int, *, rank: int = 0, root: int = 0, tree: bool = True
) -> int:
    """Return how many bytes a rank sends to others in a collective into which it puts ``nbytes``.

    ``root`` is where a broadcast begins, or a gather ends. With ``tree``, a broadcast goes down a binomial tree (gloo),
    else along a chain (NCCL).
    """
    n = world_size
    if n == 1:
        return 0
    if collective == "all_reduce":
        return 2 * (n - 1) * nbytes // n
    if collective in ("reduce_scatter", "all_to_all"):
        return (n - 1) * nbytes // n
    if collective == "all_gather":
        return (n - 1) * nbytes
    place = (rank - root) % n
    if collective == "gather":
        return nbytes if place else 0
    if not tree:
        return nbytes if place < n - 1 else 0
    return nbytes * tree_children(place, n)


def tree_children(place: int, world_size: int) -> int:
    """Return to how many ranks the rank at a place of a binomial tree sends; the root is at place 0."""
    children, distance = 0, 1
    while distance < world_size:
        children += distance > place and place + distance < world_size
        distance *= 2
    return children


class ByteTotal:
    """A running sum of bytes that were sent."""

    __slots__ = ("sent",)

    def __init__(self) -> None:
        self.sent = 0


CONTROL = "control"
"""What ranks send to agree with each other, and whatever else has no name."""


class ByteCounter:
    """Counts what this rank sends, by purpose; what is sent now is added to the total `current`.

    With ``gives_way``, another counter may take the place of this one.
    """

    def __init__(self, *, gives_way: bool = False) -> None:
        self.gives_way = gives_way
        self._named: dict[str, ByteTotal] = {}
        self.current = self.tally(CONTROL)

    def tally(self, name: str) -> ByteTotal:
        """Return the total of a named purpose."""
        return self._named.setdefault(name, ByteTotal())

    def count(self, collective: Collective, nbytes: int, world_size: int, *, rank: int, root: int, tree: bool) -> None:
        """Count a collective that this rank puts ``nbytes`` into; see `sent_by_rank`."""
        self.note(collective, nbytes, world_size)
        self.current.sent += sent_by_rank(collective, nbytes, world_size, rank=rank, root=root, tree=tree)

    def note(self, collective: Collective, nbytes: int, world_size: int) -> None:
        """Called for each collective that this rank puts ``nbytes`` into; for those who want more than sums."""

    def take(self) -> dict[str, int]:
        """Return what was sent for each named purpose since the last call, without those that sent nothing."""
        taken = {name: total.sent for name, total in self._named.items() if total.sent}
        for total in self._named.values():
            total.sent = 0
        return taken


counter: ByteCounter | None = None
"""What this process counts in; nobody counts by default."""


def count_bytes(new: ByteCounter | None) -> None:
    """Count what this rank sends; None stops that."""
    global counter
    if new is not None and counter is not None and counter is not new and not counter.gives_way:
        raise RuntimeError("What this rank sends is being counted already, by another monitor.")
    counter = new


def stop_counting(old: ByteCounter) -> None:
    """Stop counting in ``old``, if that is where this rank counts."""
    global counter
    if counter is old:
        counter = None


def current_total() -> ByteTotal | None:
    """Return the total that is added to now; None while nobody counts."""
    return None if counter is None else counter.current


def counted_in(total: ByteTotal | None) -> AbstractContextManager[None]:
    """Add what is sent under this context to ``total``; None leaves things as they are."""
    return _NOT_COUNTED if counter is None or total is None else _counting(counter, total)


def counted_as(purpose: str) -> AbstractContextManager[None]:
    """Count what is sent under this context, and not for a bucket, under a name."""
    return _NOT_COUNTED if counter is None else _counting(counter, counter.tally(purpose))


_NOT_COUNTED: AbstractContextManager[None] = nullcontext()


@contextmanager
def _counting(within: ByteCounter, total: ByteTotal) -> Iterator[None]:
    before, within.current = within.current, total
    try:
        yield
    finally:
        within.current = before
