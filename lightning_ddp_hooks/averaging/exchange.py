"""Pseudo-gradients on their way: what the replicas have moved since the last outer step, averaged over the ranks.

They travel in the reducer's buckets, so that every communication hook can compress them. One exchange is one round of
the queue (reducer/queue.py):

    send      outer - param --> Bucket --> launch; end_launches
    means     wait for each bucket; end_round          some steps later, at the same point of the program on all ranks
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor
from torch.profiler import record_function

from lightning_ddp_hooks import comm, traffic
from lightning_ddp_hooks.averaging.averager import AveragingContext
from lightning_ddp_hooks.averaging.outer import OuterModel
from lightning_ddp_hooks.hooks.contract import BindContext, BoundHook, CommHook
from lightning_ddp_hooks.reducer.bucket import Bucket, GradBucket
from lightning_ddp_hooks.reducer.in_flight_bucket import InFlightBucket
from lightning_ddp_hooks.reducer.layout import BucketLayout, assign_buckets
from lightning_ddp_hooks.reducer.queue import CollectiveQueue
from lightning_ddp_hooks.reducer.stream import comm_stream

_BUCKET_BYTES = 25 << 20


class PseudoGradientExchange:
    """Averages pseudo-gradients over a group that nothing else uses; at most one exchange is in flight."""

    def __init__(
        self,
        context: AveragingContext,
        outer: OuterModel,
        group: comm.ProcessGroup,
        hook: CommHook | None,
        step: Callable[[], int],
    ) -> None:
        self._names, self._params = context.names, context.params
        self._outer = outer
        self._group = group
        self._streams = {device: comm_stream(device) for device in {param.device for param in context.params}}
        at_once = any(comm.is_stream_ordered(group, device) for device in self._streams)
        self._queue = CollectiveQueue(group, at_once=at_once)
        self.hook: BoundHook | None = None
        if hook is not None:
            bind_context = BindContext(
                control_group=context.control_group,
                names=context.names,
                params=context.params,
                step=step,
                subgroup=self._queue.subgroup,
            )
            self.hook = self._queue.hook = hook.bind(bind_context)
        self.pending = False  # whether something was sent whose means have not been taken
        self._sent: list[tuple[Bucket, InFlightBucket, list[int]]] = []  # keeps the memory alive until it is read
        self._means: dict[int, Tensor] | None = None

    @property
    def in_flight(self) -> bool:
        """Whether collectives have begun that nobody has waited for."""
        return bool(self._sent)

    @torch.no_grad()
    def send(self, indices: Sequence[int]) -> None:
        """Start to average the pseudo-gradients of these parameters, which have outer parameters; collective."""
        assert not self.pending, "one exchange at a time"
        self.pending = True
        indices = [index for index in indices if self._params[index].numel()]
        likes = [self._like(index) for index in indices]
        parts = assign_buckets(likes, [_BUCKET_BYTES], groups=[self._key(index) for index in indices])
        divisor = float(comm.world_size(self._group))
        with record_function("ldh::outer_send"), traffic.counted_as("averaging"):
            for number, part in enumerate(parts):
                positions = [indices[place] for place in part]
                bucket = self._fill(positions, [likes[place] for place in part])
                names = tuple(self._names[index] for index in positions)
                # The index names the bucket to a hook that keeps state for it: its first parameter is in no other.
                view = GradBucket(bucket, positions[0], number == len(parts) - 1, names, divisor)
                # The compute stream has filled it by now, before training changes the parameters.
                with self._streams[bucket.layout.device].after_compute():
                    self._sent.append((bucket, self._queue.launch(view), positions))
            with self._on_streams():
                self._queue.end_launches()
        if self.hook is not None and self.hook.one_at_a_time and not self._queue.at_once:
            # A function may send on a group that others use too: nothing of it may be issued at a time of its own.
            self.means()

    @torch.no_grad()  # a hook goes on here, and must find the mode in which it was begun
    def means(self) -> dict[int, Tensor]:
        """Wait for the means over the ranks, by parameter position; collective, and may be called again."""
        if self._means is None:
            means: dict[int, Tensor] = {}
            with record_function("ldh::outer_wait"):
                with self._on_streams():
                    for bucket, in_flight, positions in self._sent:
                        result = in_flight.wait()
                        if result.data_ptr() != bucket.buffer.data_ptr():
                            bucket.buffer.copy_(result.reshape(-1))
                        means.update(zip(positions, bucket.views, strict=True))
                for stream in self._streams.values():
                    stream.join()
            self._sent.clear()
            self._queue.end_round()
            self._means = means
        return self._means

    def take(self) -> dict[int, Tensor]:
        """Return the means, after which the next exchange may begin; collective."""
        means, self._means, self.pending = self.means(), None, False
        return means

    def restore(self, means: Mapping[int, Tensor] | None) -> None:
        """Take up means from a checkpoint, or None, in the place of what is on its way; collective."""
        if self.in_flight:
            self.take()
        self._means = None if means is None else dict(means)
        self.pending = means is not None

    def close(self, *, failed: bool = False) -> None:
        """Free the queue's groups; after an error only if nobody can be stuck in them."""
        if not failed:
            self.restore(None)  # ranks may differ in how much of it they have issued
        if not failed or (not self.in_flight and comm.is_cpu_group(self._group)):
            self._queue.close()

    def _fill(self, positions: Sequence[int], likes: Sequence[Tensor]) -> Bucket:
        layout = BucketLayout.build(range(len(likes)), likes)
        bucket = Bucket(replace(layout, device=self._params[positions[0]].device), likes)
        for index, view in zip(positions, bucket.views, strict=True):
            view.copy_(self._outer.values[index]).sub_(self._params[index])
        if self._queue.hook.takes_divided:
            bucket.buffer.div_(comm.world_size(self._group))
        return bucket

    def _key(self, index: int) -> Hashable:
        param = self._params[index]
        return param.device, None if self.hook is None else self.hook.group_of(self._names[index], param)

    def _like(self, index: int) -> Tensor:
        """Return what has the pseudo-gradient's shape, strides and dtype: the parameter, unless it is a short float."""
        param, value = self._params[index], self._outer.values[index]
        return param if param.dtype == value.dtype else torch.empty_like(param, dtype=value.dtype, device="meta")

    def _on_streams(self) -> ExitStack:
        stack = ExitStack()
        for stream in self._streams.values():
            stack.enter_context(stream.context())
        return stack
