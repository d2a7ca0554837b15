"""Outer gradients on their way: what the replicas have moved, averaged over the ranks, maybe compressed.

A delta travels in the reducer's own buckets, so that every communication hook can compress it:

    outer - param --> Bucket --> CollectiveQueue.launch ... some steps later ... means
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.averaging.outer import OuterModel
from lightning_ddp_hooks.hooks.contract import BoundHook
from lightning_ddp_hooks.reducer.bucket import Bucket, GradBucket
from lightning_ddp_hooks.reducer.layout import BucketLayout, assign_buckets
from lightning_ddp_hooks.reducer.queue import CollectiveQueue, InFlightBucket
from lightning_ddp_hooks.reducer.stream import CommStream, comm_stream

_BUCKET_BYTES = 25 << 20


class _Flight(NamedTuple):
    """A launched bucket; it holds the buffer until its values have been read."""

    bucket: Bucket
    pending: InFlightBucket
    stream: CommStream


@dataclass
class Delta:
    """Outer gradients that have been sent."""

    flights: list[_Flight] = field(default_factory=list)
    landed: dict[int, Tensor] | None = None
    positions: list[list[int]] = field(default_factory=list)

    @classmethod
    def arrived(cls, means: Mapping[int, Tensor]) -> Delta:
        """Return a delta that is there already (from a checkpoint)."""
        return cls(landed=dict(means))

    @torch.no_grad()  # a hook goes on here, and must find the mode in which it was begun
    def means(self) -> dict[int, Tensor]:
        """Wait for the means over the ranks; parameter position -> mean. May be called again."""
        if self.landed is None:
            self.landed = {}
            with record_function("ldh::outer_wait"):
                for flight, positions in zip(self.flights, self.positions, strict=True):
                    with flight.stream.context():
                        result = flight.pending.wait()
                        if isinstance(result, Tensor) and result.data_ptr() != flight.bucket.buffer.data_ptr():
                            flight.bucket.buffer.copy_(result.view(-1))
                    flight.stream.join()
                    self.landed.update(zip(positions, flight.bucket.views, strict=True))
            self.flights.clear()
        return self.landed


class DeltaExchange:
    """Sends what parameters have moved away from their outer parameters.

    Args:
        names: of the parameters.
        params: the parameters.
        outer: the outer parameters.
        group: the ranks; nothing else uses the group.
        hook: compresses; None for the plain mean.
    """

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[nn.Parameter],
        outer: OuterModel,
        group: comm.ProcessGroup,
        hook: BoundHook | None,
    ) -> None:
        self._names = list(names)
        self._params = list(params)
        self._outer = outer
        self._world_size = comm.world_size(group)
        at_once = any(comm.is_stream_ordered(group, param.device) for param in params)
        self._queue = CollectiveQueue(group, at_once=at_once, hook=hook)
        self._hook = hook
        self._streams: dict[torch.device, CommStream] = {}

    @torch.no_grad()
    def send(self, indices: Sequence[int]) -> Delta:
        """Start to average the deltas of these parameters, which have outer parameters; collective.

        At most one delta may be in flight.
        """
        indices = [index for index in indices if self._params[index].numel()]
        likes = {index: self._like(index) for index in indices}
        keys = [
            None if self._hook is None else self._hook.group_of(self._names[index], self._params[index])
            for index in indices
        ]
        parts = assign_buckets([likes[index] for index in indices], [_BUCKET_BYTES], groups=keys)
        delta = Delta()
        for number, part in enumerate(parts):
            positions = [indices[place] for place in part]
            bucket = self._fill(positions, [likes[index] for index in positions])
            stream = self._stream(bucket.layout.device)
            # The index names the bucket to a hook that keeps state for it: the first parameter in it is unique.
            view = GradBucket(
                bucket,
                positions[0],
                number == len(parts) - 1,
                tuple(self._names[index] for index in positions),
                float(self._world_size),
            )
            # The deltas are computed on the compute stream, before training changes the parameters.
            with record_function("ldh::outer_send"), comm.counted_as("averaging"), stream.after_compute():
                delta.flights.append(_Flight(bucket, self._queue.launch(view, bucket), stream))
            delta.positions.append(positions)
        self._queue.end_launches()
        return delta

    def _fill(self, positions: Sequence[int], likes: Sequence[Tensor]) -> Bucket:
        layout = BucketLayout.build(range(len(likes)), likes)
        bucket = Bucket(replace(layout, device=self._params[positions[0]].device), likes)
        for index, view in zip(positions, bucket.views, strict=True):
            view.copy_(self._outer.values[index]).sub_(self._params[index])
        if self._queue.hook.takes_divided:
            bucket.buffer.div_(self._world_size)
        return bucket

    def _like(self, index: int) -> Tensor:
        """Return what has the delta's shape, strides and dtype: the parameter itself, unless it is a short float."""
        param, value = self._params[index], self._outer.values[index]
        if param.dtype == value.dtype:
            return param
        return torch.empty_like(param, dtype=value.dtype, device="meta")

    def _stream(self, device: torch.device) -> CommStream:
        if device not in self._streams:
            self._streams[device] = comm_stream(device)
        return self._streams[device]
