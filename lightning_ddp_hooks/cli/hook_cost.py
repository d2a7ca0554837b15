"""Measures what a hook computes, sends and keeps for each bucket, as one rank of a world of any size.

The world is simulated: collectives are done at once and move nothing, so that only the hook's own work remains, and no
other machine is needed. A process of its own does it (`measure_hooks`), since it can be in no other world::

    advise  --- parameters, buckets, hooks, world size --->  python -m lightning_ddp_hooks.cli.hook_cost
            <-- seconds, collectives and bytes ------------
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_hooks import _compat, comm
from lightning_ddp_hooks.advisor.cost_model import BucketCost, Phase
from lightning_ddp_hooks.advisor.profile import BackwardProfile
from lightning_ddp_hooks.cli.candidates import CANDIDATES
from lightning_ddp_hooks.hooks.contract import BindContext, BoundHook, CommHook
from lightning_ddp_hooks.reducer.bucket import Bucket, GradBucket
from lightning_ddp_hooks.reducer.layout import BucketLayout, rebuilt_layout
from lightning_ddp_hooks.traffic import ByteCounter, Collective

MIB = 1 << 20
_WARM_ROUNDS = 2
_SECONDS_PER_HOOK = 3.0
_MAX_ROUNDS = 7
_PAST_EVERY_WARM_UP = 1_000_000


class _Log(ByteCounter):
    """Notes each collective instead of adding it up."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[Collective, int]] = []

    def note(self, collective: Collective, nbytes: int, world_size: int) -> None:
        self.noted.append((collective, nbytes))


# ---------------------------------------------------------------------- in the parent


def measure_hooks(
    profile: BackwardProfile,
    hooks: Sequence[str],
    caps: Sequence[float],
    world_size: int,
    *,
    device: torch.device,
    first_bucket_mb: float = 1.0,
) -> dict[str, dict[float, tuple[list[list[int]], list[BucketCost], int]]]:
    """Measure hooks in a process of its own; the plain mean, which has none, needs no measuring.

    Args:
        profile: whose parameters the gradients have.
        hooks: names of candidates that have a hook.
        caps: bucket sizes in MiB.
        world_size: of the simulated world, 2 or more.
        device: where the gradients lie.
        first_bucket_mb: size of the first bucket.

    Returns:
        For each hook and bucket size: the parameters' positions in each bucket, what is done for each bucket, and how
        many bytes the hook keeps.

    Raises:
        RuntimeError: the process failed; with its output.
    """
    plain = [name for name in hooks if name in CANDIDATES and CANDIDATES[name].hook is None]
    measured = {name: {cap: _plain_mean(profile, [first_bucket_mb, cap]) for cap in caps} for name in plain}
    if len(plain) == len(hooks):
        return measured
    job = {
        "profile": profile.as_dict(),
        "hooks": [name for name in hooks if name not in plain],
        "caps": list(caps),
        "first": first_bucket_mb,
        "world_size": world_size,
        "device": str(device),
        "threads": torch.get_num_threads(),
    }
    command = [sys.executable, "-m", "lightning_ddp_hooks.cli.hook_cost"]
    done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"Measuring the hooks failed:\n{done.stderr.strip()[-2000:]}")
    printed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured | {
        name: {float(cap): (found["buckets"], [_cost_of(entry) for entry in found["costs"]], found["memory"])
               for cap, found in by_cap.items()}
        for name, by_cap in printed.items()
    }  # fmt: skip


def _plain_mean(profile: BackwardProfile, limits_mb: Sequence[float]) -> tuple[list[list[int]], list[BucketCost], int]:
    """Return what the reducer does without a hook: it scales in the copy, and sums."""
    params = [
        torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        for shape, dtype in zip(profile.shapes, profile.dtypes, strict=True)
    ]
    layouts = rebuilt_layout(params, profile.order, _limits(limits_mb))
    costs = [BucketCost((Phase(0.0, "all_reduce", layout.nbytes),), 0.0) for layout in layouts]
    return [list(layout.indices) for layout in layouts], costs, 0


def _limits(limits_mb: Sequence[float]) -> list[int]:
    return [max(1, int(mb * MIB)) for mb in limits_mb]


def _cost_of(entry: dict[str, Any]) -> BucketCost:
    return BucketCost(tuple(Phase(compute, kind, nbytes) for compute, kind, nbytes in entry["phases"]), entry["finish"])


# ---------------------------------------------------------------------- in that process


def main() -> None:
    """Read a job from standard input, and print what was measured as the last line."""
    job = json.loads(sys.stdin.read())
    gc.freeze()  # what the imports have made is no hook's: `_held_bytes` need not look through it
    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)
    profile = BackwardProfile.from_dict(job["profile"])
    device = torch.device(job["device"])
    params = [
        torch.randn(shape, device=device).to(getattr(torch, dtype))
        for shape, dtype in zip(profile.shapes, profile.dtypes, strict=True)
    ]
    result: dict[str, dict[str, Any]] = {}
    with _compat.simulated_world(job["world_size"]):
        for name in job["hooks"]:
            make = CANDIDATES[name].hook
            assert make is not None
            result[name] = {str(cap): _measure(make(), profile, params, [job["first"], cap]) for cap in job["caps"]}
    print(json.dumps(result))


def _measure(
    hook: CommHook, profile: BackwardProfile, params: Sequence[Tensor], limits_mb: Sequence[float]
) -> dict[str, Any]:
    held_before = _held_bytes()
    bound = _bind(hook, profile, params)
    groups = [bound.group_of(n, p) for n, p in zip(profile.names, params, strict=True)]
    layouts = rebuilt_layout(params, profile.order, _limits(limits_mb), groups)
    buckets = [list(layout.indices) for layout in layouts]
    costs, storages = _time_rounds(bound, layouts, profile.names, params)
    in_buckets = sum(bucket.wire.untyped_storage().nbytes() for bucket in storages)
    memory = max(0, _held_bytes() - held_before - in_buckets)
    return {"buckets": buckets, "costs": costs, "memory": memory}


def _bind(hook: CommHook, profile: BackwardProfile, params: Sequence[Tensor]) -> BoundHook:
    world = comm.resolve_group(None)
    context = BindContext(
        group=world,
        control_group=world,
        names=profile.names,
        params=params,
        step=lambda: _PAST_EVERY_WARM_UP,
        new_group=lambda group: group,
    )
    return hook.bind(context)


def _time_rounds(
    bound: BoundHook, layouts: Sequence[BucketLayout], names: Sequence[str], params: Sequence[Tensor]
) -> tuple[list[dict[str, Any]], list[Bucket]]:
    """Run the hook on all buckets, several times; the costs are medians."""
    storages = [Bucket(layout, params) for layout in layouts]
    gradients = [torch.randn_like(storage.buffer) for storage in storages]
    rounds: list[list[tuple[list[float], list[list[tuple[Collective, int]]]]]] = []
    started = time.perf_counter()
    while len(rounds) < _WARM_ROUNDS + _MAX_ROUNDS:
        taken = []
        for index, (storage, gradient) in enumerate(zip(storages, gradients, strict=True)):
            storage.buffer.copy_(gradient)
            names_here = tuple(names[i] for i in storage.layout.indices)
            divisor = 1.0 if bound.takes_divided else float(comm.world_size())
            bucket = GradBucket(storage, index, index == len(storages) - 1, names_here, divisor)
            if getattr(bound, "carries_tail", False):
                bound.take_wire(index, storage.wire)
            taken.append(_time_bucket(bound, bucket, storage))
        rounds.append(taken)
        if len(rounds) > _WARM_ROUNDS and time.perf_counter() - started > _SECONDS_PER_HOOK:
            break
    measured = rounds[_WARM_ROUNDS:]
    costs = []
    for index in range(len(storages)):
        times = [median(column) for column in zip(*(taken[index][0] for taken in measured), strict=True)]
        phases: list[tuple[float, Collective, int]] = []
        for compute, collectives in zip(times, measured[-1][index][1], strict=False):
            # Several collectives that are issued together: the computing comes before the first one.
            phases += [(compute if n == 0 else 0.0, kind, nbytes) for n, (kind, nbytes) in enumerate(collectives)]
        costs.append({"phases": phases, "finish": times[-1]})
    return costs, storages


@torch.no_grad()
def _time_bucket(
    bound: BoundHook, bucket: GradBucket, storage: Bucket
) -> tuple[list[float], list[list[tuple[Collective, int]]]]:
    """Return the seconds of each stretch between collectives, and the collectives at the end of each but the last."""
    log = _Log()
    seconds: list[float] = []
    issued: list[list[tuple[Collective, int]]] = []
    device = storage.buffer.device
    comm.count_bytes(log)
    try:
        _settle(device)
        begin = time.perf_counter()
        phases = bound.reduce(bucket)
        while True:
            try:
                next(phases)
            except StopIteration as end:
                if isinstance(end.value, Tensor) and end.value.data_ptr() != storage.buffer.data_ptr():
                    storage.buffer.copy_(end.value.reshape(-1))  # as the reducer does
                break
            _settle(device)
            seconds.append(time.perf_counter() - begin)
            issued.append(log.noted)
            log.noted = []
            begin = time.perf_counter()
        _settle(device)
        seconds.append(time.perf_counter() - begin)
    finally:
        comm.count_bytes(None)
    return seconds, issued


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _held_bytes() -> int:
    """Return the memory of all tensors that Python holds and that were made by `main`, each storage once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        try:
            if isinstance(thing, Tensor) and thing.layout is torch.strided:
                storage = thing.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        except (ReferenceError, RuntimeError):  # a dead weak proxy, a tensor without storage
            continue
    return sum(storages.values())


if __name__ == "__main__":
    main()
