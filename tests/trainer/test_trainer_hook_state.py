"""Hooks in checkpoints of the Trainer: going on as if nothing had happened, in other worlds, and what cannot go on."""

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hook_probe import HOOKS, ROUNDING, Outcome, Probe, account_for, collect_residuals
from hook_tools import require_plain
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from ranks import run_ranks
from torch import Tensor
from trainer_runs import (
    EXACT,
    SAFELY,
    Net,
    State,
    assert_close,
    assert_same,
    assert_trained,
    fit,
    make_module,
    make_trainer,
    state_of,
)
from trainer_runs import rank as this_rank

from lightning_ddp_hooks.checkpoint import STATE_KEY
from lightning_ddp_hooks.hooks import Cast, OneBit, PerParameter, PowerSGD, Rule, Schedule, Stage, TopK

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.trainer,
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used:UserWarning"),
]

POWERSGD = PowerSGD(rank=1, start_iter=2)


def fit_saving(hook: Any, path: Path, module: Net, **options: Any) -> None:
    """Fit for an epoch and save its end as ``path``."""
    saver = ModelCheckpoint(path.parent, path.stem, every_n_epochs=1, save_on_train_epoch_end=True)
    options = {**options, "max_epochs": 1, "enable_checkpointing": True, "callbacks": [saver]}
    make_trainer({"comm_hook": hook}, **options).fit(module)


def go_on(hook: Any, path: Path, module: Net, **options: Any) -> None:
    make_trainer({"comm_hook": hook}, **{**options, "max_epochs": 2}).fit(module, ckpt_path=path, **SAFELY)


def entry(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)[STATE_KEY]


# ---------------------------------------------------------------------- the same world


# What these hand on depends on the sum over the ranks of what is owed only, or nothing is owed.
LINEAR: dict[str, Any] = {
    "powersgd": POWERSGD,
    "powersgd that begins later": PowerSGD(rank=1, start_iter=6),
    "per parameter": PerParameter([Rule(POWERSGD, pattern="net.0.*"), Rule(PowerSGD(rank=2, start_iter=0), ndim=2)]),
    "schedule": Schedule([Stage(0, None), Stage(2, POWERSGD), Stage(6, PowerSGD(rank=2, start_iter=7))]),
}
# How these round does not depend on the buckets, which are learned anew after a resume.
STATELESS = ("allreduce", "fp16", "bf16", "fp16, float32 sum", "post_local_sgd", "torch's fp16")


def stop_and_resume(folder: str) -> dict[str, tuple[State, State]]:
    pairs = {}
    for name, hook in [*LINEAR.items(), *((name, HOOKS[name].hook) for name in STATELESS)]:
        path = Path(folder, name, "end.ckpt")
        whole = fit(Net, {"comm_hook": hook}, {**EXACT, "max_epochs": 2})
        fit_saving(hook, path, make_module(), **EXACT)
        resumed = make_module().double()  # Lightning loads the weights before it converts the module
        go_on(hook, path, resumed, **EXACT)
        pairs[name] = whole, state_of(resumed)
    return pairs


def test_resuming_equals_not_stopping(tmp_path: Path) -> None:
    first, second = run_ranks(stop_and_resume, str(tmp_path))

    plain = fit(Net, "auto", EXACT | {"max_epochs": 2})
    for name, (whole, resumed) in first.items():
        assert_trained(whole)
        (assert_same if name in STATELESS else assert_close)(resumed, whole)
        assert_same(resumed, second[name][1])
        if name in LINEAR:
            assert any((whole[key] - plain[key]).abs().max() > 1e-4 for key in plain), f"{name} did not compress"


# ---------------------------------------------------------------------- any world


OWING = [name for name, case in HOOKS.items() if case.owes]


def save_each(folder: str, names: list[str]) -> None:
    for name in names:
        fit_saving(HOOKS[name].hook, Path(folder, name, "end.ckpt"), make_module(Probe))


def resume_each(folder: str, names: list[str]) -> dict[str, Outcome]:
    outcomes = {}
    for name in names:
        path = Path(folder, name, "end.ckpt")
        module = make_module(Probe)
        owed: State = {}
        collect_residuals(entry(path)["hook"] or {}, owed)
        for key, value in owed.items():  # what was owed is to be handed on by whoever comes after
            module.exact[key] += value.view_as(module.exact[key])
        go_on(HOOKS[name].hook, path, module)
        outcomes[name] = account_for(module)
    return outcomes


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Checkpoints of all hooks, written by two ranks."""
    folder = str(tmp_path_factory.mktemp("two"))
    run_ranks(save_each, folder, list(HOOKS))
    return folder


@pytest.fixture(scope="module")
def of_three_ranks(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Checkpoints of the hooks that owe something, written by three ranks."""
    folder = str(tmp_path_factory.mktemp("three"))
    run_ranks(save_each, folder, OWING, world_size=3)
    return folder


def assert_accounts_hold(ranks: list[dict[str, Outcome]], names: list[str]) -> None:
    for name in names:
        found = ranks[0][name]
        assert found.error <= HOOKS[name].bound, f"{name}: {found.error}"
        for other in ranks[1:]:
            assert_same(other[name].state, found.state)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_two_ranks_owed_is_handed_on_by_any_number(world_size: int, of_two_ranks: str) -> None:
    names = list(HOOKS) if world_size == 2 else OWING
    assert_accounts_hold(run_ranks(resume_each, of_two_ranks, names, world_size=world_size), names)


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_three_ranks_owed_is_handed_on_by_fewer(world_size: int, of_three_ranks: str) -> None:
    assert_accounts_hold(run_ranks(resume_each, of_three_ranks, OWING, world_size=world_size), OWING)


def test_state_is_plain_and_the_same_whatever_the_number_of_ranks(of_two_ranks: str, of_three_ranks: str) -> None:
    for name, case in HOOKS.items():
        two = entry(Path(of_two_ranks, name, "end.ckpt"))
        require_plain(two)
        assert two["step"] == 4
        if case.owes:
            assert shape_of(two["hook"]) == shape_of(entry(Path(of_three_ranks, name, "end.ckpt"))["hook"]), name
        owed: State = {}
        collect_residuals(two["hook"] or {}, owed)
        assert bool(owed) is case.owes, name


def shape_of(value: Any) -> Any:
    """Everything about a state but its numbers."""
    if isinstance(value, dict):
        return {key: shape_of(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape_of(item) for item in value]
    return tuple(value.shape) if isinstance(value, Tensor) else type(value)


# ---------------------------------------------------------------------- plain ddp, other precision


def through_plain_ddp(folder: str) -> tuple[int, int, list[str]]:
    path, plain = Path(folder, "ours.ckpt"), Path(folder, "plain.ckpt")
    fit_saving(POWERSGD, path, make_module())
    trainer = make_trainer("ddp", max_epochs=2)
    trainer.fit(make_module(), ckpt_path=str(path), **SAFELY)
    trainer.save_checkpoint(plain)
    resumed = make_trainer({"comm_hook": POWERSGD}, max_epochs=3)
    resumed.fit(make_module(), ckpt_path=str(plain))
    return trainer.global_step, resumed.global_step, list(torch.load(plain, weights_only=True))


def test_plain_ddp_and_hooks_read_each_others_checkpoints(tmp_path: Path) -> None:
    for steps, more_steps, keys in run_ranks(through_plain_ddp, str(tmp_path)):
        assert (steps, more_steps) == (8, 12)
        assert STATE_KEY not in keys


def scaled(**options: Any) -> dict[str, Any]:
    return {"plugins": MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", **options)), "precision": None}


def change_scale(folder: str) -> tuple[Outcome, float]:
    """Save with a loss scale of 64, and go on without one."""
    path = Path(folder, "scaled.ckpt")
    fit_saving(POWERSGD, path, make_module(Probe), **scaled(init_scale=64.0))
    module = make_module(Probe)
    owed: State = {}
    collect_residuals(entry(path)["hook"], owed)
    for key, value in owed.items():
        module.exact[key] += value.view_as(module.exact[key]) / 64
    go_on(POWERSGD, path, module)
    return account_for(module), entry(path)["loss_scale"]


def test_what_is_owed_under_a_loss_scale_is_handed_on_without_one(tmp_path: Path) -> None:
    for outcome, scale in run_ranks(change_scale, str(tmp_path)):
        assert scale == 64.0
        assert outcome.compression > 10 * ROUNDING
        assert outcome.error <= ROUNDING


# ---------------------------------------------------------------------- after the fit


def save_after_fit(folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    last, after = Path(folder, "last.ckpt"), Path(folder, "after.ckpt")
    hook = Cast(PerParameter([Rule(POWERSGD, ndim=2)], default="int8"), "bfloat16")
    saver = ModelCheckpoint(folder, "last", every_n_epochs=1, save_on_train_epoch_end=True)
    trainer = make_trainer({"comm_hook": hook}, enable_checkpointing=True, callbacks=[saver], max_epochs=1)
    trainer.fit(make_module())
    trainer.save_checkpoint(after)
    return entry(last), entry(after)


def test_checkpoint_saved_after_the_fit_holds_the_state(tmp_path: Path) -> None:
    (last, after), _ = run_ranks(save_after_fit, str(tmp_path))

    assert last["step"] == after["step"] == 4
    assert shape_of(last) == shape_of(after)
    before, later = {}, {}
    collect_residuals(last["hook"], before)
    collect_residuals(after["hook"], later)
    assert set(before) == {name for name, _ in Net().named_parameters()}
    assert any(value.any() for value in before.values())
    assert_same(later, before)


# ---------------------------------------------------------------------- after an error


class Breaks(Net):
    """Fails in its fourth step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3:
            self.wait()
            raise ZeroDivisionError("fourth step")
        return super().training_step(batch, batch_idx)

    def wait(self) -> None:
        pass


class BreaksAlone(Breaks):
    """Rank 1 takes part in nothing until rank 0 has written its checkpoint and is gone."""

    def wait(self) -> None:
        (saver,) = (c for c in self.trainer.callbacks if isinstance(c, OnExceptionCheckpoint))
        deadline = time.monotonic() + 20
        while this_rank() == 1 and not Path(saver.dirpath, "left").exists():
            assert time.monotonic() < deadline, "rank 0 waits for this rank"
            time.sleep(0.05)


def save_in_an_error(folder: str, module_class: type[Breaks]) -> list[str]:
    saver = OnExceptionCheckpoint(folder)
    trainer = make_trainer({"comm_hook": POWERSGD}, enable_checkpointing=True, callbacks=[saver])
    with pytest.raises(ZeroDivisionError):
        trainer.fit(make_module(module_class))
    Path(folder, "left").touch()
    dist.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        go_on(POWERSGD, Path(saver.ckpt_path), make_module())
    return [str(warning.message) for warning in caught if "lacks" in str(warning.message)]


@pytest.mark.filterwarnings("ignore:.*fit.ckpt_path=:UserWarning")  # that there is nothing to resume yet
@pytest.mark.parametrize("module_class", [Breaks, BreaksAlone])
def test_checkpoint_of_a_failed_run_is_written_alone_and_names_what_it_lacks(
    module_class: type[Breaks], tmp_path: Path
) -> None:
    messages, _ = run_ranks(save_in_an_error, str(tmp_path), module_class)

    saved = entry(tmp_path / "on_exception.ckpt")
    assert saved["missing"] == ["state of communication hook PowerSGD"]
    assert saved["hook"] is None
    assert saved["step"] == 3
    assert messages == ["The checkpoint was written after an error and lacks: state of communication hook PowerSGD."]


# ---------------------------------------------------------------------- what does not fit


# what to do to the entry of a checkpoint with PowerSGD's state, the hook to go on with, the error
UNFIT: dict[str, tuple[Callable[[dict[str, Any]], Any], Any, str]] = {
    "topk": (lambda entry: entry, TopK(), "state of communication hook 'TopK', found that of 'PowerSGD'"),
    "onebit": (lambda entry: entry, OneBit(), "'OneBit', found that of 'PowerSGD'"),
    "no state": (lambda entry: entry, "fp16", "has no state, but the checkpoint holds that of 'PowerSGD'"),
    "schedule": (lambda entry: entry, Schedule([Stage(0, POWERSGD)]), "'Schedule', found that of 'PowerSGD'"),
    "no dict": (lambda entry: "text", POWERSGD, "'lightning_ddp_hooks' is damaged"),
    "no step": (lambda entry: {"format": 1}, POWERSGD, "is damaged: expected a dict with `format` and `step`"),
    "later": (lambda entry: {**entry, "format": 99}, POWERSGD, "has format 99"),
    "hook of a later version": (
        lambda entry: {**entry, "hook": {**entry["hook"], "format": 99}},
        POWERSGD,
        "'PowerSGD' has format 99",
    ),
    "wrong type": (lambda entry: {**entry, "hook": []}, POWERSGD, "`hook` or `missing` has the wrong type"),
    "wrong scale": (lambda entry: {**entry, "loss_scale": 0}, POWERSGD, "found `loss_scale` 0"),
    "no error": (
        lambda entry: {**entry, "hook": {"hook": "PowerSGD", "format": 1}},
        POWERSGD,
        "state of communication hook PowerSGD is damaged: KeyError: 'error'",
    ),
    "no tensor": (
        lambda entry: {**entry, "hook": {**entry["hook"], "error": {"net.0.weight": 3}}},
        POWERSGD,
        "state of communication hook PowerSGD is damaged",
    ),
    "wrong size": (
        lambda entry: {**entry, "hook": {**entry["hook"], "error": {"net.0.weight": torch.zeros(3)}}},
        POWERSGD,
        "128 elements for parameter 'net.0.weight', found 3 in the checkpoint",
    ),
    "other number of hooks": (
        lambda entry: {**entry, "hook": {"hook": "Schedule", "format": 1, "hooks": [{}, {}]}},
        Schedule([Stage(0, "fp16")]),
        "state of 1 hooks of Schedule, found 2",
    ),
}


def resume_unfit(folder: str) -> dict[str, str]:
    path, changed = Path(folder, "good.ckpt"), Path(folder, f"changed-{this_rank()}.ckpt")
    fit_saving(POWERSGD, path, make_module())
    messages = {}
    for name, (change, hook, _) in UNFIT.items():
        checkpoint = torch.load(path, weights_only=True)
        checkpoint[STATE_KEY] = change(checkpoint[STATE_KEY])
        torch.save(checkpoint, changed)
        with pytest.raises((ValueError, RuntimeError)) as caught:
            go_on(hook, changed, make_module())
        messages[name] = str(caught.value)
        assert isinstance(caught.value, ValueError), name
    return messages


def test_state_that_does_not_fit_is_refused_on_every_rank(tmp_path: Path) -> None:
    for messages in run_ranks(resume_unfit, str(tmp_path)):
        for name, (_, _, expected) in UNFIT.items():
            assert expected in messages[name]


def resume_without_a_hook(folder: str) -> list[str]:
    path = Path(folder, "good.ckpt")
    fit_saving(POWERSGD, path, make_module())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        go_on(None, path, make_module())
    return [str(warning.message) for warning in caught if "communication hook" in str(warning.message)]


def test_going_on_without_the_hook_says_that_its_state_is_lost(tmp_path: Path) -> None:
    messages, _ = run_ranks(resume_without_a_hook, str(tmp_path))

    assert messages == ["The checkpoint holds the state of a communication hook, but this run has none."]
