"""The one place that issues the collectives of buckets, in an order that is the same on all ranks.

A hook's generator yields requests (requests.py); the queue carries them out. Buckets are launched in the same order on
all ranks, and a *round* is all buckets of one backward (or of one exchange of an averager).

[Note: order of collectives] Each communicator sees the same sequence on all ranks, whatever their timing:
  * **at once** (backends ordered by streams, such as NCCL: waiting only queues). A bucket runs through all its
    collectives when it is launched, on one communicator. Two communicators used in different orders on different ranks
    could hang, so there is only one.
  * **in lanes** (gloo: waiting blocks the host). The k-th collective of each bucket goes to the k-th lane, a process
    group of its own, in bucket order; so phases of different buckets overlap. A collective for which there is no lane
    yet waits until its bucket is the first one left and no other can go on without it, which is a state that does not
    depend on timing; then it goes to the last lane. At the end of the round the lanes that were missing are made, on
    all ranks alike. So a hook may yield any number of collectives.
A status (status.py) travels with the last bucket's first collective or right behind it, or behind everything if that
bucket has none.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_hooks import comm, traffic
from lightning_ddp_hooks.reducer import requests, shm_backend
from lightning_ddp_hooks.reducer.agreement import ranks_text
from lightning_ddp_hooks.reducer.bucket import Bucket, GradBucket
from lightning_ddp_hooks.reducer.in_flight_bucket import BucketHook, EarlierBuckets, InFlightBucket
from lightning_ddp_hooks.reducer.issue import Issued, issue_collective
from lightning_ddp_hooks.reducer.requests import Phases, Request, Subgroup
from lightning_ddp_hooks.traffic import CONTROL

_MAX_LANES = 4


class PlainMean:
    """The mean over the ranks of gradients that were divided while they were copied into the bucket."""

    name = "AllReduce"
    one_at_a_time = False
    takes_divided = True

    def reduce(self, bucket: GradBucket) -> Phases:
        """Sum the bucket."""
        yield requests.AllReduce(bucket.buffer())
        return None


class CollectiveQueue:
    """Runs a hook on buckets.

    Attributes:
        hook: Hook that reduces the buckets.
        at_once: Whether waiting only queues.
        all_launched: Whether all buckets of the round are launched.
        compared_over: CPU group over which ranks compare each request before it is issued, one bucket at a time; None
            if they do not.
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
        self.at_once = at_once
        self._timeout = timeout
        self._lanes: dict[Subgroup | None, list[comm.ProcessGroup]] = {None: [group]}
        self._stages: dict[Subgroup | None, int] = {}
        self._made: list[comm.ProcessGroup] = []
        self._round: list[InFlightBucket] = []
        self._status: Tensor | None = None
        self._status_work: comm.Work | None = None
        self.all_launched = False
        self.compared_over: comm.ProcessGroup | None = None

    def subgroup(self, parts: Sequence[Sequence[int]]) -> Subgroup:
        """Make groups of parts of the ranks; collective."""
        own = tuple(sorted(next(part for part in parts if comm.rank(self.group) in part)))
        made = shm_backend.split_group(self.group, [sorted(part) for part in parts], timeout=self._timeout)
        handle = Subgroup(own)
        self._made.append(made)
        self._lanes[handle] = [made]
        return handle

    # ------------------------------------------------------------------ a round

    def launch(
        self, bucket: GradBucket, storage: Bucket | None = None, *, sends_status: bool = False
    ) -> InFlightBucket:
        """Start to reduce a bucket, after following up what is done of earlier ones.

        Args:
            bucket: Bucket as the hook sees it.
            storage: Memory of the bucket; None if it has no place for a status.
            sends_status: Whether the status that lies in its slot is to be summed; `wait_for_status` has the sum.
        """
        if self.all_launched or any(other.index == bucket.index() for other in self._round):
            self.forget()  # of an earlier backward
        if self.hook.takes_divided:
            bucket.divisor = 1.0
        in_flight = InFlightBucket(self, bucket, storage, sends_status)
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
            earlier = EarlierBuckets()
            for in_flight in self._round:
                while not in_flight.finished and in_flight.may_go_on(earlier):
                    in_flight.go_on()
                    progress = True
                earlier.include(in_flight)
            if not self.all_launched:
                return

    def wait_for(self, in_flight: InFlightBucket) -> None:
        """Block until the bucket is done, moving others on meanwhile."""
        while True:
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

    def send_status(self, slot: Tensor, *, travels_along: bool) -> None:
        """Sum a status over the ranks, at the same place among the collectives on all ranks."""
        self._status = slot if travels_along else slot.clone()
        if not travels_along:
            with traffic.counted_as(CONTROL):
                self._status_work = comm.all_reduce(self._status, self.group)

    def wait_for_status(self) -> Tensor:
        """Wait for the sum of the status that was sent in this round."""
        if self._status is None:  # no collective of the last bucket's has shown a place for it
            slot = self._round[-1].unsent_status
            assert slot is not None, "no status was to be sent"
            self.send_status(slot, travels_along=False)
        if self._status_work is not None:
            self._status_work.wait()
        assert self._status is not None
        return self._status

    def end_round(self) -> None:
        """Let go of the buckets, and make lanes that were missing; collective where some were."""
        self.forget()
        if self.at_once:
            return
        for subgroup, lanes in self._lanes.items():  # in an order that is the same on all ranks
            while len(lanes) < min(self._stages.get(subgroup, 0), _MAX_LANES):
                lanes.append(comm.new_group(lanes[0], timeout=self._timeout))
                self._made.append(lanes[-1])

    def forget(self) -> None:
        """Let go of the buckets of the round, also of those in flight."""
        self._round = []
        self._status = self._status_work = None
        self.all_launched = False

    def close(self) -> None:
        """Free the groups that the queue has made."""
        for group in self._made:
            comm.destroy_group(group)
        self._made.clear()
        self.hook = PlainMean()  # a hook knows the queue by its subgroups

    # ------------------------------------------------------------------ issuing

    def compare(self, bucket: str, step: str) -> None:
        """Raise on all ranks if their hooks do not go on with the same step; collective."""
        assert self.compared_over is not None
        with traffic.counted_as(CONTROL):
            steps = comm.all_gather_object((bucket, step), self.compared_over)
        if len(set(steps)) > 1:
            sides = "; ".join(
                f"{ranks_text([rank for rank, its in enumerate(steps) if its == one])}: {one[1]} for {one[0]}"
                for one in dict.fromkeys(steps)
            )
            raise RuntimeError(
                f"Communication hook {self.hook.name} does not do the same on all ranks. {sides}. A hook must yield "
                "the same requests on every rank: no `if` on what only one rank knows."
            )

    def has_lane(self, subgroup: Subgroup | None, stage: int) -> bool:
        """Tell whether there is a lane for the collectives of a stage."""
        return self.at_once or stage < len(self._lanes[subgroup])

    def all_wait_for(self, first: InFlightBucket) -> bool:
        """Tell whether nothing can happen in the round unless ``first``, the first bucket left, goes on."""
        earlier = EarlierBuckets()
        for other in self._round:
            if other is not first and not other.finished and (other.is_waiting or other.may_go_on(earlier)):
                return False
            earlier.include(other)
        return self.all_launched

    def issue(self, request: Request, stage: int, storage: Bucket | None = None) -> Issued:
        """Issue the collectives of a request."""
        if isinstance(request, requests.Wait):
            handle = request.handle
            return Issued([handle], lambda: handle)
        if isinstance(request, requests.Together):
            with nullcontext() if request.purpose is None else traffic.counted_as(request.purpose):
                parts = [self.issue(part, stage) for part in request.requests]
            return Issued([h for part in parts for h in part.handles], lambda: [part.result() for part in parts])
        if isinstance(request, (requests.InOrder, requests.EndOfBackward)):
            raise TypeError(f"Expected collectives and Wait in Together, got {type(request).__name__}.")
        return issue_collective(request, self._group(request.subgroup, stage), storage)  # type: ignore[attr-defined]

    def _group(self, subgroup: Subgroup | None, stage: int) -> comm.ProcessGroup:
        lanes = self._lanes[subgroup]
        self._stages[subgroup] = max(self._stages.get(subgroup, 0), stage + 1)
        return lanes[0 if self.at_once else min(stage, len(lanes) - 1)]


def carry_out(phases: Generator[Request, Any, None], group: comm.ProcessGroup) -> None:
    """Carry out requests outside of a backward: one after the other on one group, waiting for each."""
    queue, result = CollectiveQueue(group, at_once=True), None
    with torch.no_grad(), suppress(StopIteration):
        while True:
            issued = queue.issue(phases.send(result), 0)
            for handle in issued.handles:
                handle.wait()
            result = issued.result()
