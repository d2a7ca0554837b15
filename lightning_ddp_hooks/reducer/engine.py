"""What the reducer and the hot path need of each other; `python_engine.py` and ``native/`` have the hot path itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.reducer.bucket import Bucket
from lightning_ddp_hooks.reducer.stream import CommStream

# Gradients of at least this many elements are copied as they come, while they are in the cache; smaller ones together.
EAGER_NUMEL = 16384


class EngineCallbacks(Protocol):
    """Whom an engine reports to; it owns the engine, which holds it weakly."""

    def open_backward(self) -> None:
        """Prepare for a synced backward, whose first gradient has come."""
        ...

    def bucket_full(self, index: int) -> None:
        """Launch a bucket: all its gradients are in its buffer, and all buckets before it were announced.

        Not called for the last bucket, nor while the engine launches the mean by itself.
        """
        ...

    def backward_ended(self) -> None:
        """End the backward in which a gradient came."""
        ...

    def backward_aborted(self) -> None:
        """Deal with a backward that an exception has ended, before the gradient that has come now counts."""
        ...


class Engine(Protocol):
    """What the reducer needs of a hot path; `PythonEngine` says more of each member."""

    backend: str
    launches_mean: bool
    sync: bool
    recording: bool
    callback_queued: bool
    active: bool
    aborted: bool
    launched: int

    @property
    def complete(self) -> bool:
        """Whether all gradients of the backward have come that lie in buckets."""
        ...

    def set_layout(self, buckets: Sequence[Bucket], streams: Sequence[CommStream], expected: Sequence[int]) -> None:
        """Take new buckets, in order of reduction."""
        ...

    def set_scale(self, scale: float) -> None:
        """Set the factor that gradients are multiplied with as they are copied in."""
        ...

    def start(self) -> None:
        """Begin to count the gradients of a synced backward."""
        ...

    def queue_callback(self) -> None:
        """Have the end of the backward that is running told."""
        ...

    def watch(self, outputs: Sequence[Tensor]) -> None:
        """Have the end of a backward told that comes through one of the tensors."""
        ...

    def stop(self) -> None:
        """Close the backward."""
        ...

    def unready(self) -> list[int]:
        """Return the parameters whose gradient has not come, or not as often as expected."""
        ...

    def fired(self) -> list[int]:
        """Return how often each parameter's gradient has come."""
        ...

    def order(self) -> list[int]:
        """Return the parameters in the order in which they became ready."""
        ...

    def late(self) -> list[int]:
        """Return the parameters whose gradient changed after it had been copied."""
        ...

    def used(self) -> bytes:
        """Return one byte for each parameter: 1 if it got a gradient since `forget_use`."""
        ...

    def forget_use(self) -> None:
        """Begin a new accumulation window."""
        ...

    def fill(self, bucket: int) -> None:
        """Copy into the bucket what has not been copied yet."""
        ...

    def copy_out(self, bucket: int, untouched: Sequence[int]) -> None:
        """Make the bucket's values the gradients, except of the parameters named (in ascending order)."""
        ...

    def close(self) -> None:
        """Remove all hooks and let go of the buckets."""
        ...


class MeanEngine(Engine, Protocol):
    """An engine that can launch the plain mean by itself (the native one)."""

    def set_mean_group(self, group: comm.ProcessGroup | None) -> None:
        """Sum full buckets over a group without a callback; None announces them again."""
        ...

    def launch_remaining(self) -> None:
        """Fill and launch all buckets that were not launched."""
        ...

    def wait(self, bucket: int) -> None:
        """Wait for the sum of a bucket that the engine launched; on a device only the current stream waits."""
        ...

    def finish(self) -> None:
        """Wait for all sums that the engine launched, and make them the gradients."""
        ...
