"""What ``fabric.save`` writes and ``fabric.load`` reads: a run that stops and goes on is one that did not stop."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fabric_runs import (
    STEPS,
    Norm,
    adamw,
    close,
    equal,
    make_fabric,
    make_model,
    optimizer_tensors,
    sgd,
    train,
)
from ranks import run_ranks
from test_fabric import Gan
from trainer_runs import SAFELY, State, rank, state_of

from lightning_ddp_hooks import averaging, hooks, optim

SHARD = optim.OptimizerInHook(shard=True)
TWO_PHASES = optim.OptimizerInHook(shard=True, overlap=False)


def set_up(strategy: Any, make_optimizer: Any = sgd) -> tuple[Any, Any, Any]:
    fabric = make_fabric(strategy)
    model = make_model(Norm)
    return fabric, *fabric.setup(model, make_optimizer(model.parameters()))


def at_once(strategy: Any, make_optimizer: Any, steps: int = STEPS) -> State:
    fabric, model, optimizer = set_up(strategy, make_optimizer)
    train(fabric, model, optimizer, steps)
    return state_of(model)


def in_two_parts(path: Path, strategy: Any, make_optimizer: Any, *, second: Any = None) -> tuple[State, dict[str, Any]]:
    """Stop after half of the steps; go on from the checkpoint, maybe with other settings."""
    fabric, model, optimizer = set_up(strategy, make_optimizer)
    train(fabric, model, optimizer, STEPS // 2)
    fabric.save(path, {"model": model, "optimizer": optimizer, "epoch": 3})
    fabric, model, optimizer = set_up(strategy if second is None else second, make_optimizer)
    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    remainder = fabric.load(path, state, **SAFELY)
    assert state["epoch"] == 3
    train(fabric, model, optimizer, STEPS // 2, STEPS // 2)
    return state_of(model), remainder


RESUMED: dict[str, tuple[dict[str, Any], Any]] = {
    "SGD": ({}, sgd),
    "PowerSGD": ({"comm_hook": hooks.PowerSGD(rank=1, start_iter=2)}, sgd),
    "periodic": ({"averager": averaging.PeriodicModelAverager(period=3, warmup_steps=2)}, sgd),
    "DiLoCo": ({"averager": averaging.DiLoCo(period=3, warmup_steps=1)}, adamw),
    "steps in the hook": ({"optimizer_in_hook": optim.OptimizerInHook()}, adamw),
    "shards": ({"optimizer_in_hook": SHARD}, adamw),
    "two phases": ({"optimizer_in_hook": TWO_PHASES}, adamw),
    "a hook, and shards": ({"optimizer_in_hook": SHARD, "comm_hook": hooks.PowerSGD(rank=1, start_iter=2)}, sgd),
}


def resume(path: Path) -> dict[str, bool]:
    same = {}
    for name, (strategy, make_optimizer) in RESUMED.items():
        stopped, remainder = in_two_parts(path / f"{name}.ckpt", strategy, make_optimizer)
        # Of error memories the mean over the ranks is saved, which is the same but for rounding.
        compare = close if "comm_hook" in strategy else equal
        same[name] = compare(stopped, at_once(strategy, make_optimizer)) and not remainder
    # A GAN of two models, each with a state of its own, or of one that two optimizers train.
    strategy = {"comm_hook": hooks.PowerSGD(rank=1, start_iter=2, error_feedback=False)}
    for one_module in (False, True):
        whole = Gan(strategy, one_module=one_module)
        expected = whole.train()
        first = Gan(strategy, one_module=one_module)
        first.train(4)
        first.fabric.save(path / "gan.ckpt", gan_state(first))
        second = Gan(strategy, one_module=one_module)
        second.fabric.load(path / "gan.ckpt", gan_state(second), **SAFELY)
        second.noise.set_state(first.noise.get_state())
        same[f"GAN, one module: {one_module}"] = equal(second.train(4, 4), expected)
    return same


def gan_state(gan: Gan) -> dict[str, Any]:
    models = {"whole": gan.whole} if hasattr(gan, "whole") else {"generator": gan.generator, "critic": gan.critic}
    return {**models, "first": gan.optimizers[0], "second": gan.optimizers[1]}


@pytest.mark.ranks
@pytest.mark.trainer
def test_going_on_from_a_checkpoint_is_the_same_as_not_stopping_to_the_last_bit(tmp_path: Path) -> None:
    for same in run_ranks(resume, tmp_path):
        assert all(same.values()), [name for name, value in same.items() if not value]


# ---------------------------------------------------------------------- with plain "ddp"


def exchange_with_ddp(path: Path) -> dict[str, bool]:
    found = {}
    expected = at_once("ddp", adamw)
    for name, setting in {"plain": {}, "sharded": {"optimizer_in_hook": SHARD}}.items():
        ours_first, remainder = in_two_parts(path / f"{name}.ckpt", setting, adamw, second="ddp")
        found[f"{name}, then ddp"] = equal(ours_first, expected)
        found[f"{name}, then ddp: the rest"] = list(remainder) == ["lightning_ddp_hooks.fabric"]
        ddp_first, remainder = in_two_parts(path / "ddp.ckpt", "ddp", adamw, second=setting)
        found[f"ddp, then {name}"] = equal(ddp_first, expected) and not remainder
    return found


@pytest.mark.ranks
@pytest.mark.trainer
def test_checkpoints_go_from_and_to_plain_ddp(tmp_path: Path) -> None:
    for found in run_ranks(exchange_with_ddp, tmp_path):
        assert all(found.values()), [name for name, value in found.items() if not value]
    plain = torch.load(tmp_path / "ddp.ckpt", weights_only=True)
    for name in ("plain", "sharded"):
        ours = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)
        assert set(ours) == {*plain, "lightning_ddp_hooks.fabric"}
        assert ours["lightning_ddp_hooks.fabric"]["model"]["step"] == STEPS // 2
        assert equal(ours["model"], plain["model"])
        expected = optimizer_tensors(plain["optimizer"])
        found = optimizer_tensors(ours["optimizer"])
        assert len(found) == len(expected) > 0
        assert all(map(torch.equal, found, expected))


# ---------------------------------------------------------------------- what is saved


def save_parts(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    averager = averaging.DiLoCo(period=4)
    fabric, model, optimizer = set_up({"averager": averager})
    train(fabric, model, optimizer, 6)
    own = state_of(model)
    with fabric.strategy.averaged_model():
        averaged = state_of(model)
    fabric.save(path / "all.ckpt", {"model": model, "optimizer": optimizer})
    fabric.save(path / "weights.ckpt", {"model": model}, filter={"model": lambda name, _: "bias" in name})
    found["back"] = equal(state_of(model), own)

    # Weights that come without the averager's state are not pulled back to where it was: nothing moves at a rate of 0.
    for load in (lambda: model.load_state_dict(averaged), lambda: fabric.load(path / "all.ckpt", {"model": model})):
        train(fabric, model, optimizer, 6)
        load()
        optimizer.param_groups[0]["lr"] = 0.0
        train(fabric, model, optimizer, 8)
        with fabric.strategy.averaged_model():
            weights = {name: param.detach().clone() for name, param in model.module.named_parameters()}
        found[f"loaded at {fabric.strategy.step()}"] = equal(weights, {name: averaged[name] for name in weights})
        optimizer.param_groups[0]["lr"] = 0.05

    # A sharded optimizer's state is whole on the first rank, and `load_raw` shares it out.
    fabric, model, optimizer = set_up({"optimizer_in_hook": TWO_PHASES}, adamw)
    train(fabric, model, optimizer, 2)
    state = optimizer.state_dict()
    if rank() == 0:
        torch.save(state, path / "optimizer.ckpt")
    fabric.barrier()
    held = optimizer_tensors(optimizer.optimizer.state_dict())
    found["share"] = len(held) < len(optimizer_tensors(torch.load(path / "optimizer.ckpt", weights_only=True)))
    before = [tensor.clone() for tensor in held]
    fabric.load_raw(path / "optimizer.ckpt", optimizer)
    after = optimizer_tensors(optimizer.optimizer.state_dict())
    found["shared out"] = len(before) == len(after) and all(map(torch.equal, before, after))
    found["averaged"] = averaged
    return found


@pytest.mark.ranks
@pytest.mark.trainer
def test_checkpoints_hold_the_averaged_model_and_only_what_is_asked_for(tmp_path: Path) -> None:
    first, second = run_ranks(save_parts, tmp_path)
    averaged = first.pop("averaged")
    assert equal(averaged, second.pop("averaged"))
    assert equal(torch.load(tmp_path / "all.ckpt", weights_only=True)["model"], averaged)
    assert all(first.values()), first
    assert all(second.values()), second
    weights = torch.load(tmp_path / "weights.ckpt", weights_only=True)
    assert set(weights) == {"model"}
    assert all("bias" in name for name in weights["model"])
