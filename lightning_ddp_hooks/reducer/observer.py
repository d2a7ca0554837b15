"""What the reducer tells an observer of each synced backward, if there is one.

    backward_opened
      bucket_full 0 -> launch_begins 0 -> launch_ended 0        (for each bucket, in order, while the backward goes on)
    wait_begins -> bucket_done 0, 1, ... -> wait_ended          (maybe several waits)
    backward_finished, or backward_aborted

An observer must not change anything, nor issue collectives on the reducer's groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from torch import Tensor

from lightning_ddp_hooks.reducer.bucket import GradBucket


class BackwardObserver(Protocol):
    """Watches the synced backwards of a reducer; called from the thread that runs them."""

    def backward_opened(self) -> None:
        """The first gradient of a synced backward has come."""

    def bucket_full(self, bucket: GradBucket, scale: float) -> None:
        """A bucket is about to be launched; the compute stream is current.

        Args:
            bucket: Bucket whose gradients are complete.
            scale: Factor: the sum over ranks of what is in the buffer, times this, is the mean.
        """

    def launch_begins(self, index: int) -> None:
        """The communication stream is current and behind the bucket's gradients."""

    def launch_ended(self, index: int, pending: object) -> None:
        """The bucket was handed over.

        Args:
            index: Index of the bucket.
            pending: An `InFlightBucket`, whose ``collective``, ``on_collective``, ``finished`` and ``on_finished`` tell
                how far it is.
        """

    def wait_begins(self) -> None:
        """The backward has no more to compute, and waits for other ranks."""

    def bucket_done(self, index: int, buffer: Tensor) -> None:
        """The reduced values are in the buffer; the communication stream is current."""

    def wait_ended(self) -> None:
        """The backward goes on; the compute stream is current, and behind the communication."""

    def backward_finished(self) -> None:
        """All gradients are reduced and back in place."""

    def backward_aborted(self) -> None:
        """An error has ended the backward; what was told of it counts for nothing. Maybe none was open."""


class GradientGuard(Protocol):
    """Looks at this rank's own gradients before they are sent; the compute stream is current.

    Attributes:
        order: Names of parameters in the order in which their gradients became ready, once that was recorded.
    """

    order: Sequence[str]

    def look(self, bucket: GradBucket) -> None:
        """Look at a full bucket."""

    def look_at(self, name: str, gradient: Tensor) -> None:
        """Look at a gradient that is in no bucket."""

    def forget(self) -> None:
        """Forget what was seen: the backward was aborted."""


def told_of_wait(observer: BackwardObserver | None) -> AbstractContextManager[None]:
    """Tell an observer, if there is one, that what runs under this context waits for other ranks."""
    return _UNTOLD if observer is None else _telling(observer)


_UNTOLD: AbstractContextManager[None] = nullcontext()


@contextmanager
def _telling(observer: BackwardObserver) -> Iterator[None]:
    observer.wait_begins()
    yield
    observer.wait_ended()
