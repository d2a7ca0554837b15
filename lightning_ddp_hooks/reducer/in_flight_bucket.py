"""One launched bucket on its way through the requests of its hook."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from lightning_ddp_hooks import traffic
from lightning_ddp_hooks.reducer import requests
from lightning_ddp_hooks.reducer.bucket import Bucket, GradBucket
from lightning_ddp_hooks.reducer.issue import Issued, describe_request, is_done, subgroups_of, takes_along
from lightning_ddp_hooks.reducer.requests import Phases, Request

if TYPE_CHECKING:
    from lightning_ddp_hooks.reducer.queue import CollectiveQueue


class BucketHook(Protocol):
    """What the queue needs of a hook; `hooks.contract.BoundHook` says more of each member."""

    name: str
    one_at_a_time: bool
    takes_divided: bool

    def reduce(self, bucket: GradBucket) -> Phases:
        """Reduce one bucket."""


class EarlierBuckets:
    """What is known of the buckets before one: the least number of stages issued, and whether all passed their turn."""

    def __init__(self) -> None:
        self.stages: float = float("inf")
        self.all_passed = True
        self.all_finished = True

    def include(self, in_flight: InFlightBucket) -> None:
        """Add one bucket."""
        if not in_flight.finished:
            self.stages = min(self.stages, in_flight.stages)
            self.all_passed &= in_flight.passed_turn
            self.all_finished = False


class InFlightBucket:
    """A launched bucket on its way through the requests of its hook.

    Attributes:
        index: Index of the bucket.
        stages: Number of collectives that were issued for it.
        finished: Whether it has been reduced.
        passed_turn: Whether it has passed an `InOrder` request.
        unsent_status: Status that travels with the first collective; None if there is none, or it was sent.
        on_collective: Called with each collective's handle that is issued from now on, if not None.
        on_finished: Called when the bucket has been reduced, if not None.
    """

    def __init__(
        self, queue: CollectiveQueue, bucket: GradBucket, storage: Bucket | None, sends_status: bool = False
    ) -> None:
        self.index = bucket.index()
        self.stages = 0
        self.finished = False
        self.passed_turn = False
        self.on_collective: Callable[[Any], None] | None = None
        self.on_finished: Callable[[], None] | None = None
        self._queue = queue
        self._bucket = bucket
        self._storage = storage
        self.unsent_status = storage.status_slot if sends_status and storage is not None else None
        self._hook = queue.hook
        self._phases: Phases | None = None
        self._request: Request | None = None  # that is yet to be issued, or to be allowed
        self._issued: Issued | None = None
        self._result: Tensor | None = None
        # Later phases are issued while other buckets are at work, but count for what this one was launched for.
        self._total = traffic.current_total()

    @property
    def begun(self) -> bool:
        """Whether its hook has issued something, or is done."""
        return self._issued is not None or self.stages > 0 or self.finished

    @property
    def collective(self) -> Any:
        """Handle of what is in flight; None if nothing is."""
        return None if self._issued is None or not self._issued.handles else self._issued.handles[-1]

    @property
    def is_waiting(self) -> bool:
        """Whether something that was issued for it has not been waited for."""
        return self._issued is not None

    def may_go_on(self, earlier: EarlierBuckets) -> bool:
        """Tell whether it can be moved on now without waiting, and in order."""
        if self._phases is None:
            one_at_a_time = self._hook.one_at_a_time or self._queue.compared_over is not None
            return earlier.all_finished or not one_at_a_time
        if self._issued is not None:
            return all(is_done(handle) for handle in self._issued.handles)
        request = self._request
        if isinstance(request, requests.InOrder):
            return earlier.all_passed
        if isinstance(request, requests.EndOfBackward):
            return self._queue.all_launched
        if request is None or isinstance(request, requests.Wait):
            return True
        lanes_there = all(self._queue.has_lane(part, self.stages) for part in subgroups_of(request))
        if lanes_there:
            return earlier.stages > self.stages
        return earlier.all_finished and self._queue.all_wait_for(self)

    def go_on(self) -> None:
        """Issue the request that is due, or resume the hook up to its next one."""
        if self._issued is not None:
            self.block()  # also what is done: waiting orders streams, and raises what has failed
            return
        request = self._request
        if request is not None and not isinstance(request, (requests.InOrder, requests.EndOfBackward)):
            self._request = None
            storage = self._storage if self.stages == 0 else None
            with torch.no_grad(), traffic.counted_in(self._total):
                self._issued = self._queue.issue(request, self.stages, storage)
            if not isinstance(request, requests.Wait):
                self.stages += 1
                if self.unsent_status is not None:
                    self._queue.send_status(self.unsent_status, travels_along=takes_along(request, storage))
                    self.unsent_status = None
            if self.on_collective is not None and self.collective is not None:
                self.on_collective(self.collective)
            if self._queue.at_once:  # whether a device is done yet must not decide what comes next
                self.block()
            return
        self.passed_turn |= isinstance(request, requests.InOrder)
        self._request = None
        self.block()

    def block(self) -> None:
        """Wait for what is in flight, if anything is, and resume the hook."""
        if self._queue.compared_over is None:
            self._run_hook()
        else:
            self._run_hook_compared()
        if self.finished and self.on_finished is not None:
            self.on_finished()

    def _run_hook_compared(self) -> None:
        place = describe(self._bucket)
        try:
            self._run_hook()
        except Exception as error:
            with suppress(RuntimeError):  # this rank has an error of its own to raise
                self._queue.compare(place, f"{type(error).__name__}: {error}")
            raise
        self._queue.compare(place, "the end" if self.finished else describe_request(self._request))

    def _run_hook(self) -> None:
        issued = self._issued
        try:
            for handle in () if issued is None else issued.handles:
                handle.wait()
        except Exception as error:
            raise RuntimeError(
                f"Communication hook {self._hook.name} failed on {describe(self._bucket)}: {error}"
            ) from error
        self._issued = None
        # Not in the generator, where it would reach into the code that runs between two phases.
        with torch.no_grad(), traffic.counted_in(self._total):
            try:
                if self._phases is None:
                    self._phases = phases_of(self._hook, self._bucket)
                    self._request = _check_request(self._hook, next(self._phases))
                else:
                    yielded = self._phases.send(None if issued is None else issued.result())
                    self._request = _check_request(self._hook, yielded)
            except StopIteration as end:
                if end.value is not None:
                    self._result = check_result(self._hook.name, self._bucket, end.value)
                self.finished = True

    def wait(self) -> Tensor:
        """Block until the bucket is reduced; return the reduced values, which may lie in the bucket's own buffer."""
        self._queue.wait_for(self)
        self._phases = None
        return self._bucket.buffer() if self._result is None else self._result


def _check_request(hook: BucketHook, yielded: object) -> Request:
    if isinstance(yielded, Request):
        return yielded
    raise TypeError(
        f"Communication hook {hook.name} yielded a {type(yielded).__name__}; expected a request for a collective, on "
        "every rank alike, such as `total = yield requests.AllReduce(tensor)` (also AllToAll, AllGather, "
        "ReduceScatter, Broadcast, Together; `from lightning_ddp_hooks.hooks import requests`). A hook does not issue "
        "collectives itself; for another handle that can be waited for there is `yield requests.Wait(handle)`."
    )


def phases_of(hook: Any, bucket: GradBucket) -> Phases:
    """Begin to reduce a bucket."""
    phases: object = hook.reduce(bucket)
    if isinstance(phases, Iterator):
        return phases  # type: ignore[return-value]
    found = "None" if phases is None else f"a {type(phases).__name__}"
    raise TypeError(
        f"{type(hook).__qualname__}.reduce returned {found}; expected a generator, on every rank alike: `yield` a "
        "request for each collective (`total = yield requests.AllReduce(tensor)`), then `return` the "
        "reduced tensor, or None if it lies in the bucket. A plain function `hook(state, bucket)` that returns a "
        "tensor or a future needs no class: pass `comm_hook=(state, hook)`."
    )


def check_result(hook: str, bucket: GradBucket, value: object) -> Tensor:
    """Return a hook's result as the tensor it must be.

    Accepts a tensor, or the one-element list that ``work.get_future()`` gives.
    """
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    expected = bucket.buffer().numel()
    if not isinstance(value, Tensor):
        found = "None" if value is None else f"a {type(value).__name__}"
    elif (
        value.layout is not torch.strided or value.is_meta or (value.is_complex() and not bucket.buffer().is_complex())
    ):
        found = f"a tensor of layout {value.layout} and dtype {value.dtype} on {value.device}"
    elif value.numel() != expected:
        found = f"a tensor of {value.numel()} elements"
    else:
        return value
    raise RuntimeError(
        f"Communication hook {hook} returned {found} for {describe(bucket)}; expected a tensor of {expected} elements, "
        "or a future of one."
    )


def describe(bucket: GradBucket) -> str:
    """Name a bucket and its parameters in a message."""
    shown = ", ".join(bucket.names[:4]) + (", ..." if len(bucket.names) > 4 else "")
    return f"bucket {bucket.index()} ({shown})"
