"""A fit whose ranks talk through memory."""

import os
import socket
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from backends import require
from lightning.fabric import Fabric
from ranks import run_ranks
from trainer_runs import Net, assert_same, assert_trained, make_module, make_trainer, state_of

from lightning_ddp_hooks import DDPHooksStrategy, FabricDDPHooksStrategy, comm
from lightning_ddp_hooks.reducer import shm_backend

pytestmark = [pytest.mark.ranks, pytest.mark.trainer, pytest.mark.timeout(900)]


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        free = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in free:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in free]


def _leave_world(ports: list[int]) -> None:
    """Destroy the world; the next one has another port, so that no rank meets the store of the last one."""
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(ports.pop())


def _fit(backend: str | None) -> tuple[str, Any]:
    """Fit; return the backend that gradients took, and the model."""
    strategy = DDPHooksStrategy(process_group_backend=backend, bucket_cap_mb=0.0001, first_bucket_mb=0.0001)
    facts: dict[str, object] = {}

    class Told(Net):
        def on_train_end(self) -> None:
            facts.update(strategy.stats())

    module = make_module(Told)
    make_trainer(strategy).fit(module)
    return str(facts["comm_backend"]), state_of(module)


def _world() -> str:
    return comm.backend_name(comm.resolve_group(None))


def _fits(ports: list[int]) -> list[Any]:
    assert _fit(None)[0] == "gloo"  # the world exists, and somebody has named its backend
    states = []
    for named, world, taken in [("gloo", "gloo", "gloo"), ("shm", "shm", "shm"), (None, "gloo", "shm")]:
        _leave_world(ports)
        backend, state = _fit(named)
        assert (_world(), backend) == (world, taken)
        states.append(state)
    assert _fit(None)[0] == "shm"  # the second fit of a world

    fabric = Fabric(accelerator="cpu", devices=2, strategy=FabricDDPHooksStrategy())
    fabric.launch()
    model = fabric.setup_module(torch.nn.Linear(2, 2))
    assert fabric.strategy.stats()["comm_backend"] == "shm"  # type: ignore[attr-defined]
    fabric.backward(model(torch.ones(1, 2)).sum())

    _leave_world(ports)
    if os.environ["RANK"] == "1":
        shm_backend.build.is_built = lambda: False  # as on a host where nothing was compiled
    assert _fit(None)[0] == "gloo"
    return states


def test_gradients_go_through_memory_unless_a_backend_is_named() -> None:
    require("native")
    for over_gloo, over_shm, by_itself in run_ranks(_fits, _free_ports(4), timeout=120):
        assert_trained(over_gloo)
        assert_same(over_gloo, over_shm)
        assert_same(over_gloo, by_itself)


def _cannot_share(ports: list[int]) -> str:
    _leave_world(ports)
    if os.environ["RANK"] == "1":

        def load() -> ModuleType:
            raise ImportError("cut short")

        shm_backend.build.load = load
    return _fit(None)[0]


def test_ranks_that_cannot_share_memory_talk_over_gloo() -> None:
    require("native")
    assert run_ranks(_cannot_share, _free_ports(1)) == ["gloo"] * 2
