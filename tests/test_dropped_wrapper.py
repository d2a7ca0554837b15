"""A wrapper goes with its last reference, without a garbage collection: hooks, buckets, groups and claims with it."""

import gc
import weakref
from typing import Any

import torch
import torch.distributed as dist
from backends import backend_fixture  # noqa: F401
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from lightning_ddp_hooks import DataParallel
from lightning_ddp_hooks.hooks import Cast, PerParameter, PostLocalSGD, PowerSGD, Rule, Schedule, Stage

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "copies": {"gradient_as_bucket_view": False},
    "torch": {"comm_hook": (None, allreduce_hook)},
    "PowerSGD": {"comm_hook": Cast(PowerSGD(rank=1, start_iter=0, min_compression_rate=0.1), "bfloat16")},
    "int8": {"comm_hook": "int8"},
    "composed": {
        "comm_hook": PerParameter([Rule("topk", ndim=2)], default=Schedule([Stage(0, "bf16"), Stage(2, "onebit")]))
    },
    "subgroups": {"comm_hook": PostLocalSGD(start_local_sgd_iter=1, subgroup_size=1)},
}


def train(module: nn.Module, settings: dict[str, Any], *, joins: bool) -> tuple[list[weakref.ref[Any]], Tensor]:
    model = DataParallel(module, bucket_cap_mb=1e-4, **settings)
    x = torch.ones(2, 3) * (dist.get_rank() + 1)
    for _ in range(3):
        module.zero_grad()
        loss = model(x).sum()
        loss.backward()
    if joins:
        with model.join(divide_by_initial_world_size=False):
            for _ in range(1 + dist.get_rank()):
                loss = model(x).sum()
                loss.backward()
    reducer: Any = model.reducer
    parts = (model, model._run, reducer, reducer.queue, reducer._in_flight.buckets[0], reducer._parameters)
    return [weakref.ref(part) for part in parts], loss


def run(backend: str) -> dict[str, int]:
    alive = {}
    for number, (name, settings) in enumerate(SETTINGS.items()):
        joins = (number % 2 == 0) == (backend == "python")  # the other one in the other engine
        module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        gc.collect()
        gc.disable()
        for _ in range(2):  # the second time, the module must be free
            parts, loss = train(module, {"reducer_backend": backend, **settings}, joins=joins)
            alive[f"{name} {joins}"] = sum(part() is not None for part in parts)
        if dist.get_rank() == 0:  # on one rank: nothing communicates any more
            module(torch.ones(2, 3)).sum().backward()
        gone = weakref.ref(module)
        del module, loss
        alive[f"{name} {joins} module"] = int(gone() is not None)
        gc.enable()
    return alive


def test_dropping_the_last_reference_detaches(backend: str) -> None:
    for alive in run_ranks(run, backend):
        assert {name: count for name, count in alive.items() if count} == {}


def raise_within() -> int:
    module = nn.Linear(1, 1)
    model = DataParallel(module)
    try:
        with model.join():
            model(torch.ones(1, 1)).sum().backward()
            raise KeyError("a user's")
    except KeyError:
        pass
    gone = weakref.ref(model)
    gc.disable()
    del model
    alive = int(gone() is not None)
    DataParallel(module)
    return alive


def test_a_join_context_that_an_exception_has_left_does_not_hold_the_wrapper() -> None:
    assert run_ranks(raise_within) == [0, 0]
