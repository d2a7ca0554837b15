"""Buckets between the backward and ``.grad``: launched when they are full, waited for, and copied out.

Within a backward, in bucket order: `launch` as the engine announces them, then at its end `launch_remaining`,
`wait_all` and `copy_out`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from typing import NamedTuple, cast

import torch
from torch import Tensor

from lightning_ddp_hooks import _compat, comm
from lightning_ddp_hooks.reducer.backend import Engine
from lightning_ddp_hooks.reducer.bucket import Bucket, GradBucket
from lightning_ddp_hooks.reducer.engine import MeanEngine
from lightning_ddp_hooks.reducer.in_flight_bucket import InFlightBucket
from lightning_ddp_hooks.reducer.issue import is_same_memory
from lightning_ddp_hooks.reducer.observer import BackwardObserver, GradientGuard, told_of_wait
from lightning_ddp_hooks.reducer.queue import CollectiveQueue
from lightning_ddp_hooks.reducer.stream import CommStream, DeferredRead, comm_stream


class _Launched(NamedTuple):
    """A launched bucket; it holds the buffer until the reduced values have been copied out."""

    position: int
    bucket: Bucket
    pending: InFlightBucket | None  # None if the engine launched it by itself


class InFlightBuckets:
    """Sends the buckets of a backward and brings them back, on a stream for each device.

    Attributes:
        queue: Queue that issues the collectives of a hook.
        engine: Fills the buckets.
        buckets: Buckets in order of reduction.
        streams: Stream of each bucket.
        has_hook: Whether a hook reduces them in place of plain all-reduce.
        observer: Who is told of each step; None for nobody.
        nonfinite: Looks at each bucket before it is launched; None for nothing.
        divisor: What sums over ranks are divided by.
        launched_by_engine: Whether the engine launches by itself what becomes full during the backward.
        postpones: How many full buckets may wait to be launched until it is known which buckets are sent at all.
    """

    engine: Engine

    def __init__(self, queue: CollectiveQueue, group: comm.ProcessGroup) -> None:
        self.queue = queue
        self.buckets: list[Bucket] = []
        self.streams: list[CommStream] = []
        self.has_hook = False
        self.observer: BackwardObserver | None = None
        self.nonfinite: GradientGuard | None = None
        self.divisor = float(comm.world_size(group))
        self.launched_by_engine = False
        self.postpones = 0
        self._group = group
        self._names: list[tuple[str, ...]] = []
        self._stream_of: dict[torch.device, CommStream] = {}
        self._launched: list[_Launched] = []
        self._sent = 0
        self._postponed: list[int] = []
        self._unused_values: dict[int, Tensor] = {}

    # ------------------------------------------------------------------ between two backwards

    def use_buckets(self, buckets: Iterable[Bucket], names: Sequence[str], expected: Sequence[int]) -> None:
        """Take new buckets, and give them to the engine."""
        self.buckets = list(buckets)
        self._names = [tuple(names[i] for i in bucket.layout.indices) for bucket in self.buckets]
        self.streams = [self._stream(bucket.layout.device) for bucket in self.buckets]
        self.engine.set_layout(self.buckets, self.streams, expected)

    def _stream(self, device: torch.device) -> CommStream:
        if device not in self._stream_of:
            self._stream_of[device] = comm_stream(device)
        return self._stream_of[device]

    def select_launch_path(self) -> None:
        """Let the engine launch the mean by itself, if it can and nobody else has to see the buckets."""
        others_see = self.has_hook or self.observer is not None or self.nonfinite is not None
        self.launched_by_engine = self.engine.launches_mean and not others_see
        if self.engine.launches_mean:
            cast("MeanEngine", self.engine).set_mean_group(self._group if self.launched_by_engine else None)

    def apply_divisor(self) -> None:
        """Have gradients divided as they are copied in, if what reduces them expects that."""
        self.engine.set_scale(1.0 / self.divisor if self.queue.hook.takes_divided else 1.0)

    def bucket_key(self, name: str, param: Tensor) -> Hashable:
        """Return the hook's key for a parameter: those with different keys do not share a bucket."""
        ask = getattr(self.queue.hook, "group_of", None)
        return None if ask is None else ask(name, param)

    # ------------------------------------------------------------------ in a backward

    def start(self) -> None:
        """Begin a backward."""
        self._sent = 0
        self._postponed.clear()

    @property
    def under_way(self) -> bool:
        """Whether a bucket was launched that has not been copied out."""
        return bool(self._launched) or (self.launched_by_engine and self.engine.active and self.engine.launched > 0)

    @property
    def sent(self) -> int:
        """Number of buckets of this backward that are in flight or done; from any thread.

        Not those that were announced: a hook may have failed on one, or may not have come to it yet.
        """
        queued = sum(not (pending is None or pending.begun) for _, _, pending in list(self._launched))
        return max(self._sent - queued, self.engine.launched if self.launched_by_engine else 0)

    def bucket_full(self, index: int) -> None:
        """Launch a bucket that has become full, or postpone it."""
        self._postponed.append(index)
        while len(self._postponed) > self.postpones:
            self.launch(self._postponed.pop(0))

    def launch(
        self, index: int, unused: AbstractSet[int] = frozenset(), *, last: bool = False, sends_status: bool = False
    ) -> None:
        """Launch a bucket.

        Args:
            index: Index of the bucket.
            unused: Parameters whose result will be thrown away.
            last: Whether no further one is sent in this backward.
            sends_status: Whether the status in its slot is summed along.
        """
        bucket, stream, observer = self.buckets[index], self.streams[index], self.observer
        view = GradBucket(bucket, index, last, self._names[index], self.divisor)
        if unused:
            inside = zip(bucket.layout.indices, self._names[index], strict=True)
            view.unused = frozenset(name for i, name in inside if i in unused)
        if self.nonfinite is not None:
            self.nonfinite.look(view)
        if observer is not None:
            observer.bucket_full(view, 1.0 if self.queue.hook.takes_divided else 1.0 / self.divisor)
        with _compat.span("ldh::launch"), stream.after_compute():
            if observer is not None:
                observer.launch_begins(index)
            pending = self.queue.launch(view, bucket, sends_status=sends_status)
            self._launched.append(_Launched(index, bucket, pending))
            self._sent += 1
            if observer is not None:
                observer.launch_ended(index, pending)

    def adopt_engine_launches(self) -> None:
        """Look after the buckets that the engine has launched by itself, as after the others."""
        launched = self.buckets[: self.engine.launched]
        self._launched = [_Launched(index, bucket, None) for index, bucket in enumerate(launched)]
        self._sent = len(self._launched)

    def launch_remaining(
        self, unused: frozenset[int] = frozenset(), *, sends_status: bool = False, as_zeros: bool = False
    ) -> None:
        """Launch what was not launched during the backward.

        Args:
            unused: Parameters that no rank has a gradient for; a bucket of such ones alone is not sent.
            sends_status: Whether the last bucket's status is summed along.
            as_zeros: Whether zeros take the place of gradients: an exception has ended this rank's backward.
        """
        engine, end = self.engine, len(self.buckets)
        remaining = [i for i in range(engine.launched, end) if not unused.issuperset(self.buckets[i].layout.indices)]
        last = max([*self._postponed, *remaining], default=-1)
        for index in self._postponed:
            self.launch(index, last=index == last)
        self._postponed.clear()
        used = engine.used() if remaining else b""
        for index in remaining:
            bucket, is_last = self.buckets[index], index == last
            status = sends_status and is_last
            if as_zeros:
                bucket.buffer.zero_()
                self.launch(index, last=is_last, sends_status=status)
                continue
            members = list(zip(bucket.layout.indices, bucket.params, bucket.views, strict=True))
            for i, param, view in members:
                # What nobody used must stay as it is, also where it lies in a bucket that is sent.
                if not used[i] and param.grad is view:
                    self._unused_values[i] = view.clone()
            engine.fill(index)
            if not self.has_hook:
                self.launch(index, last=is_last, sends_status=status)
                continue
            frozen = {i for i, param, _ in members if not used[i] and not param.requires_grad}
            for i, param, view in members:
                # A hook must not choose or scale by gradients of earlier backwards.
                if i in unused and (i in self._unused_values or param.grad is not view):
                    view.zero_()
            self.launch(index, unused | frozen, last=is_last, sends_status=status)
        engine.launched = end

    def wait_all(self, *, reads_status: bool = False) -> DeferredRead | None:
        """Wait for all launched buckets; the reduced values are in the buckets then."""
        read: DeferredRead | None = None
        with _compat.span("ldh::wait"), told_of_wait(self.observer):
            with ExitStack() as streams:  # what follows the backward runs behind all that it has queued
                for stream in set(self._stream_of.values()):
                    streams.enter_context(stream.after_compute())
                self.queue.end_launches()
            for position, bucket, pending in self._launched:
                with self.streams[position].context():
                    if pending is None:
                        cast("MeanEngine", self.engine).wait(position)
                    elif not is_same_memory(result := pending.wait(), bucket.buffer):
                        bucket.buffer.copy_(result.reshape(-1))
                    if self.observer is not None:
                        self.observer.bucket_done(position, bucket.buffer)
            if reads_status:
                with self.streams[-1].context():
                    read = self.streams[-1].read(self.queue.wait_for_status())
            for stream in set(self._stream_of.values()):
                stream.join()
            self.queue.end_round()
        return read

    def finish_by_engine(self) -> DeferredRead:
        """Launch what remains, wait for all and copy out, by the engine alone; return the sum of the status."""
        engine = cast("MeanEngine", self.engine)
        slot = self.buckets[-1].status_slot
        assert slot is not None
        with _compat.span("ldh::wait"):
            engine.launch_remaining()
            engine.finish()
            with self.streams[-1].context():
                read = self.streams[-1].read(slot)
            self.streams[-1].join()  # the next backward writes the slot behind the read
            return read

    def copy_out(self, unused: frozenset[int]) -> None:
        """Bring the reduced values to where the gradients are; those that nobody used stay as they were."""
        untouched = sorted(unused)
        for position, bucket, _ in self._launched:
            self.engine.copy_out(position, untouched)
            if self._unused_values:
                for i, view in zip(bucket.layout.indices, bucket.views, strict=True):
                    if i in unused and i in self._unused_values:
                        view.copy_(self._unused_values[i])
        self.forget()

    def forget(self) -> None:
        """Let go of what was launched."""
        self._launched.clear()
        self._unused_values.clear()
        self._postponed.clear()
        self.queue.forget()

    # ------------------------------------------------------------------ facts, end

    def waits_for(self) -> str:
        """Say which buckets are waited for; from any thread, so that it may be out of date."""
        names = self._names
        seen = [pending for _, _, pending in list(self._launched)]
        waiting = [pending.index for pending in seen if pending is not None and not _is_done(pending)][:1]
        if not waiting and self.launched_by_engine:  # which of those that it launched by itself is not seen here
            waiting = list(range(self.engine.launched))
        parts = []
        for index in [index for index in waiting if index < len(names)][:4]:
            shown = ", ".join(map(repr, names[index][:4])) + (", ..." if len(names[index]) > 4 else "")
            parts.append(f"bucket {index} ({shown})")
        return "; ".join(parts)

    def close(self) -> None:
        """Free buckets and streams; gradients in the buckets get memory of their own."""
        for bucket in self.buckets:
            for param, view in zip(bucket.params, bucket.views, strict=True):
                if param.grad is view:
                    param.grad = view.clone()
        self.buckets.clear()
        self.streams.clear()
        self._stream_of.clear()


def _is_done(pending: InFlightBucket) -> bool:
    collective = pending.collective
    return comm.succeeded(collective) if isinstance(collective, comm.Work) else pending.finished
