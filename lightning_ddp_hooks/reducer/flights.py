"""Buckets on their way: launched when they are full, waited for, and written back.

Within a pass, in bucket order: `launch` as the engine fills them, then at the end of the backward `launch_rest`,
`collect` and `write_back`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_ddp_hooks import _compat, comm
from lightning_ddp_hooks.reducer.bucket import Bucket, GradBucket
from lightning_ddp_hooks.reducer.engine import Engine
from lightning_ddp_hooks.reducer.observer import BackwardObserver, told_of_wait
from lightning_ddp_hooks.reducer.queue import CollectiveQueue, InFlightBucket
from lightning_ddp_hooks.reducer.stream import CommStream, comm_stream


@dataclass(frozen=True, slots=True)
class _Flight:
    """A launched bucket; it holds the buffer until the reduced values have been copied back."""

    index: int
    bucket: Bucket
    pending: InFlightBucket | _EngineSum


class _EngineSum:
    """A bucket that the engine launched by itself."""

    def __init__(self, engine: Engine, index: int) -> None:
        self._engine = engine
        self._index = index

    def wait(self) -> None:
        self._engine.wait(self._index)


class Flights:
    """Sends the buckets of a pass and brings them back, on a stream for each device.

    Args:
        group: the ranks to reduce over.

    Attributes:
        engine: fills the buckets.
        buckets: in order of reduction.
        streams: the stream of each bucket.
        queue: Issues their collectives; runs the mean, unless a hook was registered.
        custom: whether one was.
        observer: who is told.
        divisor: what sums over ranks are divided by.
        by_engine: whether the engine launches by itself what becomes full during the backward.
    """

    engine: Engine

    def __init__(self, group: comm.ProcessGroup) -> None:
        self.buckets: list[Bucket] = []
        self.streams: list[CommStream] = []
        self.queue = CollectiveQueue(group, at_once=False)
        self.custom = False
        self.observer: BackwardObserver | None = None
        self.divisor = float(comm.world_size(group))
        self.by_engine = True
        self._group = group
        self._names: list[tuple[str, ...]] = []
        self._stream_of: dict[torch.device, CommStream] = {}
        self._launched: list[_Flight] = []
        self._sent = 0
        self._saved: dict[int, Tensor] = {}

    @property
    def under_way(self) -> bool:
        """Whether a bucket was launched that has not been written back."""
        return bool(self._launched)

    @property
    def sent(self) -> int:
        """How many buckets of the pass are on their way or done; from any thread.

        Not what the engine has handed over: a hook may have failed on that, or may not have come to it yet.
        """
        queued = sum(not getattr(flight.pending, "begun", True) for flight in list(self._launched))
        return max(self._sent - queued, self.engine.launched if self.by_engine else 0)

    def pass_opens(self) -> None:
        """Begin to count what is sent."""
        self._sent = 0

    # ------------------------------------------------------------------ between two passes

    def use_buckets(self, buckets: Iterable[Bucket], names: Sequence[str], expected: Sequence[int]) -> None:
        """Take new buckets, and give them to the engine.

        Args:
            buckets: in order of reduction.
            names: of all parameters.
            expected: how often the gradient of each parameter comes in a pass.
        """
        self.buckets = list(buckets)
        self._names = [tuple(names[i] for i in bucket.layout.indices) for bucket in self.buckets]
        self.streams = [self._stream(bucket.layout.device) for bucket in self.buckets]
        self.engine.set_layout(self.buckets, self.streams, expected)

    def _stream(self, device: torch.device) -> CommStream:
        if device not in self._stream_of:
            self._stream_of[device] = comm_stream(device)
        return self._stream_of[device]

    def share_out(self) -> None:
        """Let the engine sum buckets by itself where there is neither a hook to run nor an observer to tell."""
        self.by_engine = not self.custom and self.observer is None
        self.engine.set_mean_group(self._group if self.by_engine else None)

    def apply_divisor(self) -> None:
        """Have gradients divided as they are copied in, if what reduces them expects that."""
        self.engine.set_scale(1.0 / self.divisor if self.queue.hook.takes_divided else 1.0)

    # ------------------------------------------------------------------ in a pass

    def group_of(self, name: str, param: Tensor) -> Hashable:
        """Return the hook's key for a parameter: those with different keys do not share a bucket."""
        ask = getattr(self.queue.hook, "group_of", None)
        return None if ask is None else ask(name, param)

    def launch(self, index: int, unused: AbstractSet[int] = frozenset()) -> None:
        """Launch a bucket.

        Args:
            index: of the bucket.
            unused: parameters whose result will be thrown away.
        """
        bucket, stream, observer = self.buckets[index], self.streams[index], self.observer
        last = index == len(self.buckets) - 1
        view = GradBucket(bucket, index, last, self._names[index], self.divisor)
        if unused:
            inside = zip(bucket.layout.indices, self._names[index], strict=True)
            view.unused = frozenset(name for i, name in inside if i in unused)
        if observer is not None:
            observer.bucket_full(view, 1.0 if self.queue.hook.takes_divided else 1.0 / self.divisor)
        with _compat.span("ldh::launch"), stream.after_compute():
            if observer is not None:
                observer.launch_begins(index)
            pending = self.queue.launch(view, bucket)
            self._launched.append(_Flight(index, bucket, pending))
            self._sent += 1
            if observer is not None:
                observer.launch_ended(index, pending)

    def take_over(self) -> None:
        """Look after the buckets that the engine has launched by itself, as after the others."""
        engine = self.engine
        self._launched = [
            _Flight(index, bucket, _EngineSum(engine, index))
            for index, bucket in enumerate(self.buckets[: engine.launched])
        ]
        self._sent = len(self._launched)

    def launch_rest(self, unused: frozenset[int]) -> None:
        """Launch what did not become full during the backward.

        Args:
            unused: parameters that no rank has a gradient for; a bucket of such ones alone is not sent.
        """
        engine = self.engine
        if engine.launched == len(self.buckets):
            return
        used = engine.used()
        for index in range(engine.launched, len(self.buckets)):
            bucket = self.buckets[index]
            if unused.issuperset(bucket.layout.indices):
                continue
            members = list(zip(bucket.layout.indices, bucket.params, bucket.views, strict=True))
            for i, param, view in members:
                # What nobody used must stay as it is, also where it lies in a bucket that is sent.
                if not used[i] and param.grad is view:
                    self._saved[i] = view.clone()
            engine.fill(index)
            if not self.custom:
                self.launch(index)
                continue
            frozen = {i for i, param, _ in members if not used[i] and not param.requires_grad}
            for i, param, view in members:
                # A hook must not choose or scale by gradients of earlier backwards.
                if i in unused and (i in self._saved or param.grad is not view):
                    view.zero_()
            self.launch(index, unused | frozen)
        engine.launched = len(self.buckets)

    def collect(self) -> None:
        """Wait for what was launched; the reduced values are in the buckets then."""
        with _compat.span("ldh::wait"), told_of_wait(self.observer):
            if not self._launched:
                self.engine.finish()
                return
            with ExitStack() as streams:  # what follows the backward runs behind all that it has queued
                for stream in set(self._stream_of.values()) if self.custom else ():
                    streams.enter_context(stream.after_compute())
                self.queue.end_launches()
            for flight in self._launched:
                bucket = flight.bucket
                with self.streams[flight.index].context():
                    result = flight.pending.wait()
                    if isinstance(result, Tensor) and not _is_same(result, bucket.buffer):
                        bucket.buffer.copy_(result.reshape(-1))
                    if self.observer is not None:
                        self.observer.bucket_done(flight.index, bucket.buffer)
            for stream in set(self._stream_of.values()):
                stream.join()
            self.queue.end_round()

    def write_back(self, unused: frozenset[int]) -> None:
        """Bring the reduced values to where the gradients are; those that nobody used stay as they were."""
        untouched = sorted(unused)
        for flight in self._launched:
            self.engine.write_back(flight.index, untouched)
            for i, view in zip(flight.bucket.layout.indices, flight.bucket.views, strict=True) if self._saved else ():
                if i in unused and i in self._saved:
                    view.copy_(self._saved[i])
        self.forget()

    def forget(self) -> None:
        """Let go of what was launched."""
        self._launched.clear()
        self._saved.clear()
        self.queue.forget()

    # ------------------------------------------------------------------ facts, end

    def waits_for(self) -> str:
        """Say which buckets are waited for; from any thread, so that it may be out of date."""
        names = self._names
        seen = [flight for flight in list(self._launched) if not isinstance(flight.pending, _EngineSum)]
        waiting = [flight.index for flight in seen if not _is_done(flight)][:1]
        if not waiting and self.by_engine:  # which of those that it launched by itself is not seen here
            waiting = list(range(self.engine.launched))
        parts = []
        for index in waiting:
            if index < len(names):
                shown = ", ".join(map(repr, names[index][:4])) + (", ..." if len(names[index]) > 4 else "")
                parts.append(f"bucket {index} ({shown})")
        return "; ".join(parts[:4])

    def close(self) -> None:
        """Free buckets and streams; gradients in the buckets get memory of their own."""
        for bucket in self.buckets:
            for param, view in zip(bucket.params, bucket.views, strict=True):
                if param.grad is view:
                    param.grad = view.clone()
        self.buckets.clear()
        self.streams.clear()
        self._stream_of.clear()


def _is_done(flight: _Flight) -> bool:
    collective = getattr(flight.pending, "collective", None)
    if isinstance(collective, comm.Work):
        return comm.succeeded(collective)
    return bool(getattr(flight.pending, "finished", False))


def _is_same(result: Tensor, buffer: Tensor) -> bool:
    return result.data_ptr() == buffer.data_ptr() and result.dtype == buffer.dtype and result.is_contiguous()
