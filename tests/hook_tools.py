"""A hook without a reducer: buckets made by hand, driven through the queue as the reducer drives it."""

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.hooks import BlockQuantize, OneBit
from lightning_ddp_hooks.hooks.contract import BindContext, BoundHook, CommHook
from lightning_ddp_hooks.hooks.kernels import Chunks, Int8Codec, SignCodec
from lightning_ddp_hooks.reducer.bucket import Bucket, GradBucket
from lightning_ddp_hooks.reducer.layout import BucketLayout
from lightning_ddp_hooks.reducer.queue import CollectiveQueue


class Rig:
    """One rank's end of a hook: ``rig.step([gradient of bucket 0, ...])`` returns what becomes of them."""

    def __init__(
        self, hook: CommHook, numels: Sequence[int], dtype: torch.dtype = torch.float32, *, at_once: bool = False
    ) -> None:
        self.params = [torch.zeros(numel, dtype=dtype) for numel in numels]
        self.names = [f"layer{index}.weight" for index in range(len(numels))]
        self.now = 0
        self.group = comm.new_group(comm.resolve_group(None))
        self.world_size = comm.world_size(self.group)
        self.queue = CollectiveQueue(self.group, at_once=at_once)
        self.bound: BoundHook = hook.bind(
            BindContext(
                subgroup=self.queue.subgroup,
                control_group=comm.new_group(self.group),
                names=self.names,
                params=self.params,
                step=lambda: self.now,
            )
        )
        self.queue.hook = self.bound
        self.delays: random.Random | None = None
        self.set_layout([[index] for index in range(len(numels))])

    def set_layout(self, layout: Sequence[Sequence[int]]) -> None:
        self.layout = [list(indices) for indices in layout]
        self.buckets = [Bucket(BucketLayout.build(indices, self.params), self.params) for indices in self.layout]

    def step(self, gradients: Sequence[Tensor], divisor: float | None = None) -> list[Tensor]:
        """Reduce gradients, one per parameter, and return them reduced."""
        pending = []
        for index, (bucket, indices) in enumerate(zip(self.buckets, self.layout, strict=True)):
            by = divisor or float(self.world_size)
            bucket.buffer.copy_(torch.cat([gradients[i].view(-1) for i in indices]))
            if self.bound.takes_divided:
                bucket.buffer.div_(by)
            names = tuple(self.names[i] for i in indices)
            view = GradBucket(bucket, index, index == len(self.buckets) - 1, names, by)
            self._pause()
            pending.append(self.queue.launch(view, bucket))
        self.queue.end_launches()
        results: list[Tensor | None] = [None] * len(self.params)
        for task, indices in zip(pending, self.layout, strict=True):
            self._pause()
            flat = task.wait()
            for i, part in zip(indices, flat.view(-1).split([self.params[i].numel() for i in indices]), strict=True):
                results[i] = part.clone()
        self.queue.end_round()
        self.now += 1
        return [part for part in results if part is not None]

    def _pause(self) -> None:
        if self.delays is not None:
            time.sleep(self.delays.random() * 0.004)


def gradients_of(rank: int, step: int, numels: Sequence[int], scale: float = 1.0) -> list[Tensor]:
    """The gradients that rank ``rank`` has in a step: any rank can compute those of all."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(numel, generator=generator) * scale for numel in numels]


def exact_mean(step: int, numels: Sequence[int], world_size: int) -> list[Tensor]:
    per_rank = [gradients_of(rank, step, numels) for rank in range(world_size)]
    return [torch.stack([g[i].double() for g in per_rank]).mean(0) for i in range(len(numels))]


def require_plain(value: object, where: str = "state") -> None:
    """Raise unless ``value`` consists of what a ``weights_only`` checkpoint may hold; names where else it lies."""
    if type(value) is dict:
        for key, item in value.items():
            if not isinstance(key, (str, int)):
                raise TypeError(f"{where} has a key of type {type(key).__name__}; expected str or int.")
            require_plain(item, f"{where}[{key!r}]")
    elif type(value) is list:
        for position, item in enumerate(value):
            require_plain(item, f"{where}[{position}]")
    elif value is not None and type(value) not in (Tensor, str, int, float, bool):
        raise TypeError(f"{where} is a {type(value).__name__}.")


def block_hook_bytes(hook: BlockQuantize | OneBit, numel: int, world_size: int) -> int:
    """How many bytes a rank sends to others for a bucket, in both stages."""
    one_bit = isinstance(hook, OneBit)
    chunks = Chunks(numel, world_size, hook.block_size)
    return 2 * (world_size - 1) * chunks.message_bytes(SignCodec() if one_bit else Int8Codec())


def count_wire_bytes(action: Callable[[], Any]) -> int:
    """Run ``action`` and return how many bytes this rank hands to collectives for others, as rings send them."""
    total = 0
    world = dist.get_world_size()
    gather = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # of older torch
    kept = {name: getattr(dist, name) for name in ("all_reduce", "all_to_all_single", gather)}

    def counting(name: str, factor: float, operand: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal total
            total += round(factor * args[operand].nbytes)
            return kept[name](*args, **kwargs)

        return call

    # What a rank sends of a tensor: all-reduce twice (n - 1) / n of it, all-to-all once, all-gather (n - 1) times.
    dist.all_reduce = counting("all_reduce", 2 * (world - 1) / world, 0)
    dist.all_to_all_single = counting("all_to_all_single", (world - 1) / world, 1)
    setattr(dist, gather, counting(gather, world - 1, 1))
    try:
        action()
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)
    return total
