"""What a communication hook asks for: collectives, and places in the order of buckets, as plain values.

A hook is a generator. It yields a request and is resumed with the result once the request is done; it never issues a
collective itself, so it cannot mix up the ranks:

    def reduce(self, bucket):
        total = yield AllReduce(bucket.buffer())
        total.div_(bucket.divisor)
        return total

`CollectiveQueue` (queue.py) carries requests out, in an order that is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


class Waitable(Protocol):
    """A handle of something in flight: a ``Work``, a ``Future``, or any object with ``wait()``."""

    def wait(self) -> object:
        """Block until it is done (on a device: make the current stream wait for it)."""


@dataclass(frozen=True, eq=False)
class Subgroup:
    """This rank's part of the ranks, to which a request may be limited; made by `CollectiveQueue.subgroup`.

    Attributes:
        ranks: Positions of its members in the queue's group, ascending.
    """

    ranks: tuple[int, ...]


class Request:
    """Base of all requests."""


@dataclass(frozen=True, eq=False)
class AllReduce(Request):
    """Sum ``tensor`` over the ranks in place; the result is ``tensor``.

    Args:
        tensor: Contiguous tensor of the same shape and dtype on all ranks.
        subgroup: Ranks to sum over; None for all.
    """

    tensor: Tensor
    subgroup: Subgroup | None = None


@dataclass(frozen=True, eq=False)
class AllToAll(Request):
    """Send the i-th of ``world_size`` parts of ``tensor`` to rank i; the result holds one part of each rank.

    Args:
        tensor: Contiguous tensor; without ``sizes`` the number of ranks divides its number of elements.
        output: Where the result goes, flat; None to allocate.
        subgroup: Ranks that take part; None for all.
        sizes: Number of elements that this rank sends to each rank, and that it gets from each; None for equal parts.
    """

    tensor: Tensor
    output: Tensor | None = None
    subgroup: Subgroup | None = None
    sizes: tuple[Sequence[int], Sequence[int]] | None = None


@dataclass(frozen=True, eq=False)
class AllGather(Request):
    """Gather every rank's ``tensor``; the result is flat, one rank's elements behind the other's.

    Args:
        tensor: Contiguous tensor of the same shape and dtype on all ranks.
        output: Where the result goes, of ``world_size`` times the size; None to allocate.
        subgroup: Ranks that take part; None for all.
    """

    tensor: Tensor
    output: Tensor | None = None
    subgroup: Subgroup | None = None


@dataclass(frozen=True, eq=False)
class ReduceScatter(Request):
    """Sum the i-th of ``world_size`` equal parts of all ranks' tensors on rank i; the result is this rank's part.

    Args:
        tensor: Contiguous tensor whose number of elements the number of ranks divides.
        output: Where the result goes, of the size of a part; None to allocate.
        subgroup: Ranks that take part; None for all.
    """

    tensor: Tensor
    output: Tensor | None = None
    subgroup: Subgroup | None = None


@dataclass(frozen=True, eq=False)
class Broadcast(Request):
    """Send ``tensor`` of one rank to all others, in place; the result is ``tensor``.

    Args:
        tensor: Contiguous tensor of the same shape and dtype on all ranks.
        source: Position of the sending rank in the group (or subgroup).
        subgroup: Ranks that take part; None for all.
    """

    tensor: Tensor
    source: int
    subgroup: Subgroup | None = None


@dataclass(frozen=True, eq=False)
class Together(Request):
    """Carry out several requests at the same time; the result is the list of theirs.

    Args:
        requests: Collectives and `Wait` requests, the same kinds in the same order on all ranks.
        purpose: Name that their bytes are counted under; None for what the bucket was launched for.
    """

    requests: Sequence[Request]
    purpose: str | None = None


@dataclass(frozen=True, eq=False)
class Wait(Request):
    """Wait for a handle of somebody else's, such as the future that a function hook returns; the result is its own.

    Args:
        handle: What to wait for.
    """

    handle: Waitable


@dataclass(frozen=True, eq=False)
class InOrder(Request):
    """Be resumed behind the buckets before this one: when each of them has passed its own `InOrder`, or is done."""


@dataclass(frozen=True, eq=False)
class EndOfBackward(Request):
    """Be resumed once the backward has no more gradients to compute, and all its buckets are launched."""


Phases = Generator[Request, Any, Tensor | None]
"""What a hook's ``reduce`` returns: yields requests, returns the reduced values (None: they are in the bucket)."""
