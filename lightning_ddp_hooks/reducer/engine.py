"""What an engine calls, and what only the native one can do; `PythonEngine` shows what all engines have."""

from __future__ import annotations

from typing import Protocol

from lightning_ddp_hooks import comm

# Gradients of at least this many elements are copied as they come, while they are in the cache; smaller ones together.
EAGER_NUMEL = 16384


class EngineCallbacks(Protocol):
    """Whom an engine reports to; it owns the engine, which holds it weakly."""

    def open_backward(self) -> None:
        """Prepare for a synced backward, whose first gradient has come."""

    def bucket_full(self, index: int) -> None:
        """Launch a bucket: all its gradients are in its buffer, and all buckets before it were announced.

        Not called for the last bucket, nor while the engine launches the mean by itself.
        """

    def backward_ended(self) -> bool:
        """End the backward in which a gradient came; True to be told again at the end of the enclosing one."""

    def backward_aborted(self) -> None:
        """Deal with a backward that an exception has ended, before the gradient that has come now counts."""


class MeanEngine(Protocol):
    """What an engine has besides if it can launch plain all-reduce by itself (the native one)."""

    def set_mean_group(self, group: comm.ProcessGroup | None) -> None:
        """Sum full buckets over a group without a callback; None announces them again."""

    def launch_remaining(self) -> None:
        """Fill and launch all buckets that were not launched."""

    def wait(self, bucket: int) -> None:
        """Wait for the sum of a bucket that the engine launched; on a device only the current stream waits."""

    def finish(self) -> None:
        """Wait for all sums that the engine launched, and make them the gradients."""
