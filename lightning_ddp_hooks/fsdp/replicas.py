"""The sum of gradients over the replicas, by a communication hook.

In a backward FSDP2 reduces each parameter group by itself, when its last gradient has come:

    unsharded gradients --reduce-scatter (within a host)--> mean over the shard ranks --hook (between hosts)--> .grad

A group's part of the result is what a hook knows as a bucket: one flat tensor with a shard of each parameter, filled up
to the size of the largest shard. FSDP2 goes on with the result as soon as the hook returns, so each bucket is done
before the next one begins; on a device that only means that its stream waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.profiler import record_function

from lightning_ddp_hooks import comm, traffic
from lightning_ddp_hooks._compat.of_fsdp import ParamGroup
from lightning_ddp_hooks.hooks.contract import BindContext, BoundHook, CommHook
from lightning_ddp_hooks.reducer.bucket import Bucket, GradBucket
from lightning_ddp_hooks.reducer.issue import is_same_memory
from lightning_ddp_hooks.reducer.layout import BucketLayout
from lightning_ddp_hooks.reducer.queue import CollectiveQueue


class ReplicaReduction:
    """Reduces the parameter groups of a model over its replicas, on a group of its own; making it is collective.

    Attributes:
        hook: Hook at work; None for the mean.
    """

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        replicas: comm.ProcessGroup,
        control_group: comm.ProcessGroup,
        hook: CommHook | None,
        step: Callable[[], int],
        is_due: Callable[[], bool],
    ) -> None:
        self._is_due = is_due
        self._group = comm.new_group(replicas)
        # Each bucket is done before the next one begins.
        self._queue = CollectiveQueue(self._group, at_once=True)
        self.hook: BoundHook | None = None
        if hook is not None:
            params = [param for group in groups for param in group.params if param.param.requires_grad]
            context = BindContext(
                control_group=control_group,
                names=[param.name for param in params],
                params=[_like(param.padded_shape, param.param.dtype) for param in params],
                step=step,
                subgroup=self._queue.subgroup,
            )
            self.hook = self._queue.hook = hook.bind(context)
        # A module comes before its children, and its gradients after theirs.
        last = len(groups) - 1
        self._buckets = [_GroupBucket(group, last - place, is_last=not place) for place, group in enumerate(groups)]
        for bucket in self._buckets:
            bucket.group.take_all_reduce(self._reduction_of(bucket))

    def _reduction_of(self, bucket: _GroupBucket) -> Callable[[Tensor], None]:
        def reduce(output: Tensor) -> None:
            if self._is_due():
                with torch.no_grad(), record_function("ldh::reduce_over_replicas"), traffic.counted_as("gradients"):
                    self._reduce(bucket, output)

        return reduce

    def _reduce(self, bucket: _GroupBucket, output: Tensor) -> None:
        if output.device.type != "cpu":  # allocated on the stream of the reduce-scatter
            output.record_stream(torch.accelerator.current_stream(output.device))  # type: ignore[arg-type]
        if not bucket.add(output):
            return
        size = comm.world_size(self._group)
        divisor = 1.0 if bucket.group.divides else float(size)
        if self._queue.hook.takes_divided and divisor != 1.0:
            output.div_(divisor)
        in_flight = self._queue.launch(bucket.view_of(output, divisor))
        self._queue.end_launches()
        result = in_flight.wait()
        self._queue.end_round()
        if not is_same_memory(result, output):
            output.copy_(result.view(-1))

    def close(self) -> None:
        """Free the groups, once nothing is reduced any more."""
        self._queue.close()
        comm.destroy_group(self._group)


class _GroupBucket:
    """The bucket of one parameter group, whose memory is another one in each backward."""

    def __init__(self, group: ParamGroup, index: int, *, is_last: bool) -> None:
        self.group = group
        self._index, self._is_last = index, is_last
        self._partial: Tensor | None = None  # of backwards that were not to be reduced over the replicas
        self._names: tuple[str, ...] = ()
        self._likes: list[Tensor] = []

    def add(self, output: Tensor) -> bool:
        """Keep what is not to be reduced yet, in the place of which FSDP2 gets zeros; tell whether it is."""
        if not self.group.reduces_over_replicas:
            self._partial = output.clone() if self._partial is None else self._partial.add_(output)
            output.zero_()
            return False
        if self._partial is not None:
            output.add_(self._partial)
            self._partial = None
        return True

    def view_of(self, output: Tensor, divisor: float) -> GradBucket:
        """Return the bucket in the memory of a reduce-scatter's result."""
        trained = [param for param in self.group.params if param.param.requires_grad]
        names = tuple(param.name for param in trained)
        if names != self._names or (self._likes and self._likes[0].dtype != output.dtype):
            self._names, self._likes = names, [_like(param.padded_shape, output.dtype) for param in trained]
        layout = replace(BucketLayout.build(range(len(self._likes)), self._likes), device=output.device)
        if layout.numel != output.numel():
            raise RuntimeError(
                f"Expected gradients of all trainable parameters of {self.group.name or 'the model'!r} "
                f"({', '.join(names[:4])}{', ...' if len(names) > 4 else ''}), that is {layout.numel} elements, got "
                f"{output.numel()}: FSDP2 leaves out what a backward did not use. Have it count as zeros by "
                "`model.set_reduce_scatter_unused_params(True)`, freeze it, or shard it as a module of its own."
            )
        bucket = Bucket(layout, self._likes, memory=output)
        return GradBucket(bucket, self._index, self._is_last, self._names, divisor)


def _like(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
