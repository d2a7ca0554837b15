"""Averagers over the replicas of a sharded model, and the state of hooks and averagers in distributed checkpoints."""

import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_case import (
    largest_difference,
    make_model,
    mesh_2d,
    optimizer_of,
    shard,
    train,
    unsharded_replicas,
    whole,
)
from ranks import run_ranks
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import lightning_ddp_hooks as ldh
from lightning_ddp_hooks.averaging import DiLoCo, ModelAverager, PeriodicModelAverager, SlowMo
from lightning_ddp_hooks.hooks import PowerSGD

pytestmark = pytest.mark.ranks

STEPS = range(8)
AVERAGERS: dict[str, ModelAverager] = {
    "periodic": PeriodicModelAverager(period=3, warmup_steps=2, optimizer_state="averaged"),
    "slowmo": SlowMo(period=2, warmup_steps=1, slowmo_lr=0.9),
    "diloco": DiLoCo(period=3),
    "streaming diloco": DiLoCo(period=4, fragments=2, delay=1, blending=0.3, warmup_steps=1),
    "diloco int8": DiLoCo(period=2, comm_hook="int8"),
    "diloco adam": DiLoCo(period=2, outer_optimizer=partial(torch.optim.Adam, lr=0.02)),
}

# Both average at step 3, after which runs are saved: all replicas are alike.
PERIODIC = PeriodicModelAverager(period=4, warmup_steps=3, optimizer_state="averaged")
DILOCO = DiLoCo(period=3, outer_momentum=0.5, optimizer_state="averaged")


def _averager_case(averager: ModelAverager) -> dict[str, float]:
    mesh = mesh_2d()
    model = shard(make_model(), mesh)
    optimizer = optimizer_of(model)
    hooks = ldh.fsdp.apply(model, averager=averager, optimizers=optimizer)
    expected = unsharded_replicas(averager, mesh, STEPS)
    difference = largest_difference(train(model, STEPS, optimizer), expected)
    before = whole(model)
    with hooks.averaged(optimizers=True):
        during = whole(model)
        apart = _over_replicas(during, mesh)
    put_back = largest_difference([before], [whole(model)])
    hooks.finish()
    final = _over_replicas(whole(model), mesh)
    hooks.close()
    return {"difference": difference, "averaged": apart, "put back": put_back, "final": final}


def _over_replicas(state: dict[str, Tensor], mesh: Any) -> float:
    """Return how much the replicas' models differ."""
    group = mesh["replicate"].get_group()
    worst = 0.0
    for value in state.values():
        parts = [torch.empty_like(value) for _ in range(2)]
        dist.all_gather(parts, value, group=group)
        worst = max(worst, float((parts[0] - parts[1]).abs().max()))
    return worst


def _averagers() -> dict[str, dict[str, float]]:
    return {name: _averager_case(averager) for name, averager in AVERAGERS.items()}


# ---------------------------------------------------------------------- state


def _start(mesh: Any, **settings: Any) -> tuple[Any, torch.optim.Optimizer, ldh.fsdp.FSDPHooks]:
    model = shard(make_model(), mesh)
    optimizer = optimizer_of(model)
    return model, optimizer, ldh.fsdp.apply(model, optimizers=optimizer, **settings)


def _save(path: str, model: Any, optimizer: torch.optim.Optimizer, hooks: ldh.fsdp.FSDPHooks) -> None:
    with hooks.averaged(optimizers=True):
        state, optim = get_state_dict(model, optimizer)
        checkpoint.save({"model": state, "optimizer": optim, "hooks": hooks.state_dict()}, checkpoint_id=path)


def _load(path: str, model: Any, optimizer: torch.optim.Optimizer, hooks: ldh.fsdp.FSDPHooks) -> None:
    state, optim = get_state_dict(model, optimizer)
    wanted = {"model": state, "optimizer": optim}
    checkpoint.load(wanted, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=wanted["model"], optim_state_dict=wanted["optimizer"])
    hooks.load_from(path, "hooks")


def _resumed(path: str, **settings: Any) -> float:
    """Compare a run with one that was saved and resumed in the middle."""
    mesh = mesh_2d()
    model, optimizer, hooks = _start(mesh, **settings)
    train(model, range(4), optimizer)
    _save(path, model, optimizer, hooks)
    expected = train(model, range(4, 8), optimizer)
    hooks.close()
    model, optimizer, hooks = _start(mesh, **settings)
    _load(path, model, optimizer, hooks)
    assert hooks.step == 4
    return largest_difference(train(model, range(4, 8), optimizer), expected)


def _on_another_mesh(path: str) -> dict[str, Any]:
    """Save residuals on 2 x 2 ranks, read them on one replica of four shards' worth: 4 x 1 and 2 x 2 alike."""
    model, optimizer, hooks = _start(mesh_2d(), comm_hook=PowerSGD(rank=1, start_iter=0, min_compression_rate=0.5))
    train(model, range(2), optimizer)
    _save(path, model, optimizer, hooks)
    errors = _whole_errors(hooks, 2)
    hooks.close()
    hook = PowerSGD(rank=1, start_iter=0, min_compression_rate=0.5)
    model, optimizer, hooks = _start(mesh_2d(4, 1), comm_hook=hook)
    _load(path, model, optimizer, hooks)
    found = _whole_errors(hooks, 1)
    result = {"errors": largest_difference([errors], [found]), "largest": max(e.abs().max() for e in errors.values())}
    result["step"] = hooks.step
    train(model, range(2, 4), optimizer)  # it goes on
    hooks.check_replicas()
    result["other hook"] = _message(lambda: _start(mesh_2d(), comm_hook="int8")[2].load_from(path, "hooks"))
    result["no entry"] = _message(lambda: hooks.load_from(path, "of_hooks"))
    return result


def _whole_errors(hooks: ldh.fsdp.FSDPHooks, shards: int) -> dict[str, Tensor]:
    """Return the residuals put together from all shards, without their padding."""
    assert hooks.hook is not None
    own = hooks.hook.state_dict()["error"]
    gathered: list[Any] = [None] * 4
    dist.all_gather_object(gathered, own)
    sizes = {name: param.numel() for name, param in make_model().named_parameters()}
    return {name: torch.cat([part[name] for part in gathered[:shards]])[: sizes[name]] for name in own}


def _message(call: Callable[[], object]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def _all(folder: str) -> dict[str, Any]:
    path = Path(folder)
    return {
        "averagers": _averagers(),
        "periodic": _resumed(str(path / "a"), averager=PERIODIC),
        "diloco": _resumed(str(path / "b"), averager=DILOCO),
        "powersgd": _resumed(str(path / "c"), comm_hook=PowerSGD(rank=1, start_iter=0)),
        "mesh": _on_another_mesh(str(path / "d")),
    }


@cache
def _results() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(_all, folder, world_size=4, timeout=110)


def test_averaging_shards_equals_averaging_replicas_that_are_not_sharded() -> None:
    for result in _results():
        for name, found in result["averagers"].items():
            # Blocks of int8 lie elsewhere in shards.
            assert found["difference"] < (0.05 if "int8" in name else 1e-12), name
            assert found["averaged"] == found["put back"] == found["final"] == 0.0, name


def test_a_resumed_run_goes_on_as_if_nothing_had_happened() -> None:
    for result in _results():
        # PowerSGD starts from the mean of the residuals, which is exact for a linear compressor.
        for name in ("periodic", "diloco", "powersgd"):
            assert result[name] < 1e-12, name


def test_state_is_read_on_another_mesh() -> None:
    for result in _results():
        mesh = result["mesh"]
        assert mesh["errors"] < 1e-15 < mesh["largest"]
        assert mesh["step"] == 2
        assert (
            "Expected the state of communication hook 'BlockQuantize', found that of 'PowerSGD'" in mesh["other hook"]
        )
        assert "has no entry 'of_hooks' that `FSDPHooks.state_dict` was saved as" in mesh["no entry"]
