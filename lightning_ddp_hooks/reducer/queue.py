"""The one place that issues the collectives of buckets, in an order that is the same on all ranks.

A hook's generator yields requests (requests.py); the queue carries them out. Buckets are launched in bucket order, and a
*round* is all buckets of one backward (or of one exchange of an averager).

[Note: order of collectives] Each communicator sees the same sequence on all ranks, whatever their timing:
  * **at once** (backends ordered by streams, such as NCCL: waiting only queues). A bucket runs through all its
    collectives when it is launched, on one communicator. Two communicators used in different orders on different ranks
    could hang, so there is only one.
  * **in lanes** (gloo: waiting blocks the host). The k-th collective of each bucket goes to the k-th lane, a process
    group of its own, in bucket order; so phases of different buckets overlap. A collective for which there is no lane
    yet waits until all buckets are launched, and then goes in bucket order to the last lane; at the end of the round the
    lanes that were missing are made, on all ranks alike. So a hook may yield any number of collectives.
A status (status.py) travels with the last bucket's first collective, or right behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.reducer import requests
from lightning_ddp_hooks.reducer.bucket import Bucket, GradBucket
from lightning_ddp_hooks.reducer.requests import Phases, Request, Subgroup

_MAX_LANES = 4


class BucketHook(Protocol):
    """What the queue needs of a hook; `hooks.contract.BoundHook` says more of each member."""

    name: str
    one_at_a_time: bool
    takes_divided: bool

    def reduce(self, bucket: GradBucket) -> Phases:
        """Reduce one bucket."""
        ...


class PlainMean:
    """The mean over the ranks of gradients that were divided while they were copied into the bucket."""

    name = "AllReduce"
    one_at_a_time = False
    takes_divided = True

    def reduce(self, bucket: GradBucket) -> Phases:
        """Sum the bucket."""
        yield requests.AllReduce(bucket.buffer())
        return None


class _Issued(NamedTuple):
    """Collectives in flight, and what returns their result once they are done."""

    handles: list[Any]
    result: Callable[[], Any]


class CollectiveQueue:
    """Runs a hook on buckets.

    Args:
        group: Ranks to reduce over; nothing else uses the group.
        at_once: Whether waiting only queues; see [Note: order of collectives].
        timeout: Timeout of further groups; None for that of ``group``.

    Attributes:
        hook: Hook that reduces the buckets.
        all_launched: Whether all buckets of the round are launched.
    """

    def __init__(
        self,
        group: comm.ProcessGroup,
        *,
        at_once: bool,
        hook: BucketHook | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self.hook: BucketHook = PlainMean() if hook is None else hook
        self.group = group
        self._at_once = at_once
        self._timeout = timeout
        self._lanes: dict[Subgroup | None, list[comm.ProcessGroup]] = {None: [group]}
        self._stages: dict[Subgroup | None, int] = {}
        self._made: list[comm.ProcessGroup] = []
        self._round: list[InFlightBucket] = []
        self.all_launched = False

    def subgroup(self, parts: Sequence[Sequence[int]]) -> Subgroup:
        """Make groups of parts of the ranks; collective.

        Args:
            parts: Ranks of each part, as positions in the queue's group; together they name each rank once.

        Returns:
            The part that this rank is in.
        """
        own = tuple(sorted(next(part for part in parts if comm.rank(self.group) in part)))
        made = comm.split_group(self.group, [sorted(part) for part in parts], timeout=self._timeout)
        handle = Subgroup(own)
        self._made.append(made)
        self._lanes[handle] = [made]
        return handle

    # ------------------------------------------------------------------ a round

    def launch(self, bucket: GradBucket, storage: Bucket | None = None) -> InFlightBucket:
        """Start to reduce a bucket, after following up what is done of earlier ones.

        Args:
            bucket: Bucket as the hook sees it.
            storage: Memory of the bucket; None if it has no place for a status.
        """
        if self.all_launched or (self._round and bucket.index() <= self._round[-1].index):
            self.forget()  # of an earlier backward
        if self.hook.takes_divided:
            bucket.divisor = 1.0
        in_flight = InFlightBucket(self, bucket, storage)
        self._round.append(in_flight)
        self.advance()
        return in_flight

    def end_launches(self) -> None:
        """Say that all buckets of the round are launched; hooks that wait for the end of the backward go on."""
        self.all_launched = True
        self.advance()

    def advance(self) -> None:
        """Move every bucket on as far as it can go without waiting, and in order."""
        progress = True
        while progress:
            progress = False
            earlier = _Earlier()
            for in_flight in self._round:
                while not in_flight.finished and in_flight.may_go_on(earlier):
                    in_flight.go_on()
                    progress = True
                earlier.include(in_flight)
            if not self.all_launched:
                return

    def wait_for(self, in_flight: InFlightBucket) -> None:
        """Block until the bucket is done, moving others on meanwhile."""
        while not in_flight.finished:
            self.advance()
            if in_flight.finished:
                return
            blocked = next((other for other in self._round if other.is_waiting), None)
            if blocked is None:
                if self.all_launched:
                    raise RuntimeError(f"Communication hook {self.hook.name} waits for nothing: its order cannot hold.")
                self.end_launches()  # nobody will launch more while this call waits
                continue
            blocked.block()

    def end_round(self) -> None:
        """Let go of the buckets, and make lanes that were missing; collective where some were."""
        self.forget()
        if self._at_once:
            return
        for subgroup, stages in self._stages.items():
            lanes = self._lanes[subgroup]
            while len(lanes) < min(stages, _MAX_LANES):
                lanes.append(comm.new_group(lanes[0], timeout=self._timeout))
                self._made.append(lanes[-1])

    def forget(self) -> None:
        """Let go of the buckets of the round, also of those in flight."""
        self._round = []
        self.all_launched = False

    def close(self) -> None:
        """Free the groups that the queue has made."""
        for group in self._made:
            comm.destroy_group(group)
        self._made.clear()

    # ------------------------------------------------------------------ issuing

    def has_lane(self, subgroup: Subgroup | None, stage: int) -> bool:
        """Tell whether there is a lane for the collectives of a stage."""
        return self._at_once or stage < len(self._lanes[subgroup])

    def everybody_waits(self, for_whom: InFlightBucket, stage: int) -> bool:
        """Tell whether no bucket behind this one will issue anything before ``stage`` unless this one goes on."""
        behind = self._round[self._round.index(for_whom) + 1 :]
        return self.all_launched and all(other.finished or other.stands_at(stage) for other in behind)

    def issue(self, request: Request, stage: int, storage: Bucket | None = None) -> _Issued:
        """Issue the collectives of a request.

        Args:
            request: What the hook has yielded.
            stage: Number of collectives that the bucket has issued before.
            storage: Memory of the bucket, whose tail a sum of the whole buffer takes along.
        """
        if isinstance(request, requests.Wait):
            handle = request.handle
            return _Issued([handle], lambda: handle)
        if isinstance(request, requests.Together):
            parts = [self.issue(part, stage) for part in request.requests]
            return _Issued([h for part in parts for h in part.handles], lambda: [part.result() for part in parts])
        group = self._group(request.subgroup, stage)  # type: ignore[attr-defined]
        issued = _issue(request, group, storage)
        if self._at_once:
            for handle in issued.handles:
                handle.wait()
        return issued

    def _group(self, subgroup: Subgroup | None, stage: int) -> comm.ProcessGroup:
        lanes = self._lanes[subgroup]
        self._stages[subgroup] = max(self._stages.get(subgroup, 0), stage + 1)
        return lanes[0 if self._at_once else min(stage, len(lanes) - 1)]


class _Earlier:
    """What is known of the buckets before one: the least number of stages issued, and whether all passed their turn."""

    def __init__(self) -> None:
        self.stages: float = float("inf")
        self.all_passed = True
        self.all_finished = True

    def include(self, in_flight: InFlightBucket) -> None:
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
        on_collective: Called with each collective's handle that is issued from now on, if not None.
        on_finished: Called when the bucket has been reduced, if not None.
    """

    def __init__(self, queue: CollectiveQueue, bucket: GradBucket, storage: Bucket | None) -> None:
        self.index = bucket.index()
        self.stages = 0
        self.finished = False
        self.passed_turn = False
        self.on_collective: Callable[[Any], None] | None = None
        self.on_finished: Callable[[], None] | None = None
        self._queue = queue
        self._bucket = bucket
        self._storage = storage
        self._hook = queue.hook
        self._phases: Phases | None = None
        self._request: Request | None = None  # that is yet to be issued, or to be allowed
        self._issued: _Issued | None = None
        self._result: Tensor | None = None
        # Later phases are issued while other buckets are at work, but count for what this one was launched for.
        self._total = comm.current_total()

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

    def stands_at(self, stage: int) -> bool:
        """Tell whether it waits for its turn, or has issued as many collectives as ``stage``."""
        return self._request is not None and (
            isinstance(self._request, (requests.InOrder, requests.EndOfBackward)) or self.stages >= stage
        )

    def may_go_on(self, earlier: _Earlier) -> bool:
        """Tell whether it can be moved on now without waiting, and in order."""
        if self._phases is None:
            return earlier.all_finished or not self._hook.one_at_a_time
        if self._issued is not None:
            return all(is_done(handle) for handle in self._issued.handles)
        request = self._request
        if isinstance(request, requests.InOrder):
            return earlier.all_passed
        if isinstance(request, requests.EndOfBackward):
            return self._queue.all_launched
        if request is None or isinstance(request, requests.Wait):
            return True
        lanes_there = all(self._queue.has_lane(part, self.stages) for part in _subgroups(request))
        if lanes_there:
            return earlier.stages > self.stages
        return earlier.all_finished and self._queue.everybody_waits(self, self.stages)

    def go_on(self) -> None:
        """Issue the request that is due, or resume the hook up to its next one."""
        request = self._request
        if request is not None and not isinstance(request, (requests.InOrder, requests.EndOfBackward)):
            self._request = None
            with torch.no_grad(), comm.counted_in(self._total):
                self._issued = self._queue.issue(request, self.stages, self._storage)
            if not isinstance(request, requests.Wait):
                self.stages += 1
            if self.on_collective is not None and self.collective is not None:
                self.on_collective(self.collective)
            return
        self.passed_turn |= isinstance(request, requests.InOrder)
        self._request = None
        self._resume()

    def block(self) -> None:
        """Wait for what is in flight, and resume the hook."""
        assert self._issued is not None
        try:
            for handle in self._issued.handles:
                handle.wait()
        except Exception as error:
            raise RuntimeError(
                f"Communication hook {self._hook.name} failed on {describe(self._bucket)}: {error}"
            ) from error
        self._resume()

    def _resume(self) -> None:
        issued, self._issued = self._issued, None
        # Not in the generator, where it would reach into the code that runs between two phases.
        with torch.no_grad(), comm.counted_in(self._total):
            try:
                if self._phases is None:
                    self._phases = phases_of(self._hook, self._bucket)
                    self._request = _as_request(next(self._phases))
                else:
                    self._request = _as_request(self._phases.send(None if issued is None else issued.result()))
            except StopIteration as end:
                if end.value is not None:
                    self._result = check_result(self._hook.name, self._bucket, end.value)
                self.finished = True
        if self.finished and self.on_finished is not None:
            self.on_finished()

    def wait(self) -> Tensor:
        """Block until the bucket is reduced; return the reduced values, which may lie in the bucket's own buffer."""
        self._queue.wait_for(self)
        self._phases = None
        return self._bucket.buffer() if self._result is None else self._result


def _as_request(yielded: object) -> Request:
    # A handle, as hooks yielded them once.
    return yielded if isinstance(yielded, Request) else requests.Wait(yielded)  # type: ignore[arg-type]


def _subgroups(request: Request) -> Iterator[Subgroup | None]:
    if isinstance(request, requests.Together):
        for part in request.requests:
            if not isinstance(part, requests.Wait):
                yield from _subgroups(part)
    else:
        yield getattr(request, "subgroup", None)


def _issue(request: Request, group: comm.ProcessGroup, storage: Bucket | None) -> _Issued:
    size = group.size()
    if isinstance(request, requests.AllReduce):
        tensor = request.tensor
        whole = storage is not None and storage.tail is not None and request.subgroup is None
        if whole and storage is not None and _is_same(tensor, storage.buffer):
            return _Issued([comm.all_reduce(storage.wire, group)], lambda: tensor)
        return _Issued([comm.all_reduce(tensor, group)], lambda: tensor)
    if isinstance(request, requests.Broadcast):
        tensor = request.tensor
        return _Issued([comm.broadcast(tensor, group, request.source)], lambda: tensor)
    if isinstance(request, requests.AllToAll):
        tensor = request.tensor
        output = torch.empty_like(tensor) if request.output is None else request.output
        return _Issued([comm.start_all_to_all(output, tensor, group)], lambda: output)
    if isinstance(request, requests.AllGather):
        tensor = request.tensor
        gathered = tensor.new_empty(size * tensor.numel()) if request.output is None else request.output
        return _Issued([comm.start_all_gather(gathered, tensor, group)], lambda: gathered)
    if isinstance(request, requests.ReduceScatter):
        return comm_reduce_scatter(request, group)
    raise TypeError(f"Expected a request for a collective, got {type(request).__name__}.")


def comm_reduce_scatter(request: requests.ReduceScatter, group: comm.ProcessGroup) -> _Issued:
    """Issue a reduce-scatter; over gloo as an all-to-all and a sum, which sends half of what gloo's own does."""
    tensor, size = request.tensor, group.size()
    part = tensor.new_empty(tensor.numel() // size) if request.output is None else request.output
    if comm.backend_name(group) != "gloo":
        return _Issued([comm.start_reduce_scatter(part, tensor, group)], lambda: part)
    received = torch.empty_like(tensor)
    work = comm.start_all_to_all(received, tensor, group)
    wide = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype

    def sum_parts() -> Tensor:
        return part.copy_(received.view(size, -1).sum(dim=0, dtype=wide))

    return _Issued([work], sum_parts)


def _is_same(result: Tensor, buffer: Tensor) -> bool:
    return result.data_ptr() == buffer.data_ptr() and result.dtype == buffer.dtype and result.numel() == buffer.numel()


def is_done(handle: Any) -> bool:
    """Tell whether something in flight is done; False if there is no way to tell."""
    done = getattr(handle, "done", None) or getattr(handle, "is_completed", None)
    return bool(done()) if callable(done) else False


def phases_of(hook: Any, bucket: GradBucket) -> Phases:
    """Begin to reduce a bucket.

    Raises:
        TypeError: The hook's `reduce` is not a generator; names the hook.
    """
    phases: object = hook.reduce(bucket)
    if isinstance(phases, Iterator):
        return phases  # type: ignore[return-value]
    found = "None" if phases is None else f"a {type(phases).__name__}"
    raise TypeError(
        f"{type(hook).__qualname__}.reduce returned {found}; expected a generator, on every rank alike: `yield` the "
        "handle of each collective (`yield torch.distributed.all_reduce(tensor, async_op=True)`), then `return` the "
        "reduced tensor, or None if it lies in the bucket. A plain function `hook(state, bucket)` that returns a "
        "tensor or a future needs no class: pass `comm_hook=(state, hook)`."
    )


def check_result(hook: str, bucket: GradBucket, value: object) -> Tensor:
    """Return a hook's result as the tensor it must be.

    Accepts a tensor, or the one-element list that ``work.get_future()`` gives.

    Raises:
        RuntimeError: Anything else, or a wrong number of elements; names hook, bucket and parameters.
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
