"""How a full bucket is reduced: the role, and the plain mean that plays it by default."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from torch import Tensor

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.reducer.bucket import Bucket, GradBucket


class Pending(Protocol):
    """A bucket in flight."""

    def wait(self) -> object:
        """Block until the bucket is reduced.

        Returns:
            The reduced values as a tensor of the buffer's length, or anything else if they are in the buffer.
        """
        ...


class BucketComm(Protocol):
    """Reduces buckets over the ranks; `launch` is called in bucket order, and so are the waits.

    Attributes:
        divides: whether it expects gradients that are already divided by the number of ranks.
        carries_tail: whether the element behind the gradients is summed along.
    """

    divides: bool
    carries_tail: bool

    def group_of(self, name: str, param: Tensor) -> Hashable:
        """Return a key for a parameter; parameters with different keys do not share a bucket."""
        ...

    def launch(self, bucket: GradBucket, storage: Bucket) -> Pending:
        """Start to reduce the bucket."""
        ...

    def close(self) -> None:
        """Free what was made for it; not called when ranks may be stuck in a collective."""
        ...


class MeanAllReduce:
    """Sum over the ranks of gradients that were divided while they were copied into the bucket.

    Args:
        group: the ranks to sum over.
    """

    divides = True
    carries_tail = True

    def __init__(self, group: comm.ProcessGroup) -> None:
        self._group = group

    def group_of(self, name: str, param: Tensor) -> Hashable:
        """Let any parameters share a bucket."""
        return None

    def launch(self, bucket: GradBucket, storage: Bucket) -> Pending:
        """Start the sum, with the tail."""
        return comm.all_reduce(storage.wire, self._group)

    def close(self) -> None:
        """Leave the group to its owner."""
