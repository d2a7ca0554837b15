"""Measures what a hook computes and sends for each bucket, as one rank of a world of any size.

The world is simulated: collectives are done at once and move nothing, so that only the hook's own work remains, and no
other machine is needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_ddp_hooks import _compat, comm, traffic
from lightning_ddp_hooks.advisor.cost_model import BucketCost, Phase
from lightning_ddp_hooks.advisor.profile import BackwardProfile
from lightning_ddp_hooks.cli.candidates import CANDIDATES
from lightning_ddp_hooks.cli.common import synchronize
from lightning_ddp_hooks.hooks.contract import BindContext, BoundHook, CommHook
from lightning_ddp_hooks.reducer.bucket import Bucket, GradBucket
from lightning_ddp_hooks.reducer.layout import rebuilt_layout
from lightning_ddp_hooks.reducer.queue import CollectiveQueue
from lightning_ddp_hooks.traffic import ByteCounter, Collective

MIB = 1 << 20
_WARM_ROUNDS = 2
_SECONDS_PER_HOOK = 3.0
_MAX_ROUNDS = 7
_AFTER_EVERY_WARM_UP = 1_000_000


class HookCost(NamedTuple):
    """What a hook does with buckets of a certain size."""

    buckets: list[list[int]]  # positions of the parameters
    costs: list[BucketCost]


class _CollectiveLog(ByteCounter):
    """Notes each collective instead of adding it up."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[Collective, int]] = []

    def note(self, collective: Collective, nbytes: int, world_size: int) -> None:
        self.noted.append((collective, nbytes))


def measure_hooks(
    profile: BackwardProfile,
    hooks: Sequence[str],
    caps: Sequence[float],
    world_size: int,
    *,
    device: torch.device,
    first_bucket_mb: float = 1.0,
) -> dict[str, dict[float, HookCost]]:
    """Measure hooks, by name and by bucket size in MiB, in a simulated world of 2 or more ranks.

    There must be no process group, and no averager among the candidates that are named.
    """
    params = [
        torch.randn(shape, device=device).to(getattr(torch, dtype))
        for shape, dtype in zip(profile.shapes, profile.dtypes, strict=True)
    ]
    limits = {cap: [max(1, int(mb * MIB)) for mb in (min(first_bucket_mb, cap), cap)] for cap in caps}
    with _compat.simulated_world(world_size):
        return {
            name: {cap: _measure(CANDIDATES[name].hook, profile, params, limits[cap]) for cap in caps} for name in hooks
        }


def _measure(
    make: Callable[[], CommHook] | None, profile: BackwardProfile, params: Sequence[Tensor], limits: Sequence[int]
) -> HookCost:
    if make is None:  # the reducer scales in the copy, and sums: nothing is computed
        layouts = rebuilt_layout(params, profile.order, limits)
        plain = [BucketCost((Phase(0.0, "all_reduce", layout.nbytes),)) for layout in layouts]
        return HookCost([list(layout.indices) for layout in layouts], plain)
    world = comm.resolve_group(None)
    queue = CollectiveQueue(world, at_once=True)
    names, now = profile.names, _AFTER_EVERY_WARM_UP
    context = BindContext(control_group=world, names=names, params=params, step=lambda: now, subgroup=queue.subgroup)
    bound = make().bind(context)
    groups = [bound.group_of(name, param) for name, param in zip(names, params, strict=True)]
    layouts = rebuilt_layout(params, profile.order, limits, groups)
    storages = [Bucket(layout, params) for layout in layouts]
    costs = _time_rounds(bound, queue, storages, names)
    return HookCost([list(layout.indices) for layout in layouts], costs)


class _Stretch(NamedTuple):
    """What a hook computes up to its next collectives, which are issued together, or up to its end."""

    seconds: float
    issued: list[tuple[Collective, int]]


def _time_rounds(
    bound: BoundHook, queue: CollectiveQueue, storages: Sequence[Bucket], names: Sequence[str]
) -> list[BucketCost]:
    """Run the hook on all buckets, several times; the costs are medians."""
    gradients = [torch.randn_like(storage.buffer) for storage in storages]
    divisor = 1.0 if bound.takes_divided else float(comm.world_size())
    rounds: list[list[list[_Stretch]]] = []
    started = time.perf_counter()
    while len(rounds) <= _WARM_ROUNDS or (
        len(rounds) < _WARM_ROUNDS + _MAX_ROUNDS and time.perf_counter() - started <= _SECONDS_PER_HOOK
    ):
        rounds.append([])
        for index, (storage, gradient) in enumerate(zip(storages, gradients, strict=True)):
            storage.buffer.copy_(gradient)
            names_here = tuple(names[i] for i in storage.layout.indices)
            bucket = GradBucket(storage, index, index == len(storages) - 1, names_here, divisor)
            rounds[-1].append(_time_bucket(bound, queue, bucket, storage.buffer))
    return [_cost_of(timings) for timings in zip(*rounds[_WARM_ROUNDS:], strict=True)]


def _cost_of(timings: Sequence[list[_Stretch]]) -> BucketCost:
    *before, finish = [median(part.seconds for part in stretch) for stretch in zip(*timings, strict=True)]
    # Several collectives that are issued together: the computing comes before the first one.
    phases = [
        Phase(seconds if position == 0 else 0.0, collective, nbytes)
        for seconds, stretch in zip(before, timings[-1], strict=False)
        for position, (collective, nbytes) in enumerate(stretch.issued)
    ]
    return BucketCost(tuple(phases), finish)


@torch.no_grad()
def _time_bucket(bound: BoundHook, queue: CollectiveQueue, bucket: GradBucket, buffer: Tensor) -> list[_Stretch]:
    stretches: list[_Stretch] = []
    result, returned = None, None
    log = _CollectiveLog()
    traffic.count_bytes(log)
    try:
        synchronize(buffer.device)
        begin = time.perf_counter()
        phases = bound.reduce(bucket)
        while True:
            try:
                request = phases.send(result)
            except StopIteration as end:
                request, returned = None, end.value
            if isinstance(returned, Tensor) and returned.data_ptr() != buffer.data_ptr():
                buffer.copy_(returned.reshape(-1))  # as the reducer does
            synchronize(buffer.device)
            log.noted, seconds = [], time.perf_counter() - begin
            if request is not None:
                result = queue.issue(request, stage=0).result()
            stretches.append(_Stretch(seconds, log.noted))
            if request is None:
                return stretches
            begin = time.perf_counter()
    finally:
        traffic.count_bytes(None)
