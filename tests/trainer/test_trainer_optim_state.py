"""Sharded optimizers in checkpoints: plain in form, for any number of ranks and any strategy."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from optim_case import OPTIMIZERS, state_bytes
from ranks import run_ranks
from torch.utils.data import DataLoader, DistributedSampler
from trainer_runs import (
    EXACT,
    SAFELY,
    Net,
    State,
    assert_close,
    assert_same,
    dataset,
    make_module,
    make_trainer,
    rank,
    state_of,
)

from lightning_ddp_hooks.checkpoint import STATE_KEY
from lightning_ddp_hooks.optim import OptimizerInHook

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.trainer,
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*ckpt_path=.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before:UserWarning"),
]

SMALL = {"bucket_cap_mb": 0.001, "first_bucket_mb": 0.0005}
MODES = {
    "sharded": OptimizerInHook(shard=True),
    "sharded buckets": OptimizerInHook(shard=True, interleaved=False, shard_buckets=True),
    "two phases": OptimizerInHook(shard=True, overlap=False),
}
KINDS = ("adamw foreach", "adagrad", "lion")


class Adaptive(Net):
    """Sees the same samples in each step at 1, 2 and 3 ranks."""

    kind = "adamw foreach"

    def train_dataloader(self) -> Any:
        ranks = self.trainer.world_size
        sampler = DistributedSampler(dataset(48), ranks, self.trainer.global_rank, shuffle=False)
        return DataLoader(sampler.dataset, 12 // ranks, sampler=sampler)

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.kind](self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


def module_of(kind: str) -> Adaptive:
    module: Adaptive = make_module(Adaptive)
    module.kind = kind
    return module


def strategy_of(settings: OptimizerInHook | None) -> Any:
    return {"optimizer_in_hook": settings, **SMALL}


def save(folder: str, epochs: int = 1) -> None:
    """Fit for an epoch and save it, in each mode and with each optimizer."""
    for mode in ("plain", *MODES):
        save_mode(folder, mode, epochs)


def save_mode(folder: str, mode: str, epochs: int = 1) -> None:
    for kind in KINDS:
        path = Path(folder, mode, kind, "end.ckpt")
        saver = ModelCheckpoint(path.parent, path.stem, every_n_epochs=1, save_on_train_epoch_end=True)
        options = {**EXACT, "max_epochs": epochs, "enable_checkpointing": True, "callbacks": [saver]}
        make_trainer(strategy_of(MODES.get(mode)), **options).fit(module_of(kind))


def whole(kind: str) -> State:
    module = module_of(kind)
    make_trainer(strategy_of(None), **{**EXACT, "max_epochs": 2}).fit(module)
    return state_of(module)


def go_on(
    folder: str, saved_by: str, settings: OptimizerInHook | str | None, kinds: Sequence[str] = KINDS
) -> dict[str, tuple[State, int]]:
    """Resume each optimizer from what a mode saved."""
    results = {}
    for kind in kinds:
        module = module_of(kind).double()
        strategy = settings if isinstance(settings, str) else strategy_of(settings)
        trainer = make_trainer(strategy, **{**EXACT, "max_epochs": 2})
        trainer.fit(module, ckpt_path=Path(folder, saved_by, kind, "end.ckpt"), **SAFELY)
        results[kind] = state_of(module), state_bytes(trainer.optimizers[0])
    return results


def wholes() -> dict[str, State]:
    return {kind: whole(kind) for kind in KINDS}


def save_and_go_on(folder: str) -> dict[str, Any]:
    save(folder)
    ways = [
        ("sharded", "sharded"),
        ("sharded buckets", "two phases"),
        ("two phases", "sharded buckets"),
        ("two phases", "two phases"),
        ("plain", "sharded"),
        ("sharded", "plain"),
        ("sharded", "ddp"),
    ]
    resumed = {}
    for number, (mode, after) in enumerate(ways):
        kinds = KINDS if mode == after else (KINDS + KINDS)[number % 3 :][:2]  # two of the optimizers, in turns
        settings = MODES.get(after, after if after == "ddp" else None)
        resumed[f"{mode} -> {after}"] = go_on(folder, mode, settings, kinds)
    return {"whole": wholes(), "resumed": resumed}


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    """Checkpoints that two ranks wrote, and what came of going on with them."""
    folder = str(tmp_path_factory.mktemp("two"))
    return folder, run_ranks(save_and_go_on, folder, timeout=110)


def test_going_on_equals_not_stopping(of_two_ranks: tuple[str, list[dict[str, Any]]]) -> None:
    _, results = of_two_ranks
    for result in results:
        for way, fits in result["resumed"].items():
            for kind, (state, _) in fits.items():
                try:
                    assert_same(state, result["whole"][kind])
                except AssertionError as error:
                    raise AssertionError(f"{way}, {kind}: {error}") from error


def go_on_in_each_mode(folder: str) -> dict[str, dict[str, tuple[State, int]]]:
    return {mode: go_on(folder, mode, settings) for mode, settings in MODES.items()}


@pytest.mark.parametrize("world_size", [1, 3])
def test_going_on_at_another_number_of_ranks(of_two_ranks: tuple[str, list[dict[str, Any]]], world_size: int) -> None:
    folder, saved = of_two_ranks
    results = run_ranks(go_on_in_each_mode, folder, world_size=world_size)
    for mode in MODES:
        for kind in KINDS:
            assert_close(results[0][mode][kind][0], saved[0]["whole"][kind])
            held = [result[mode][kind][1] for result in results]
            if world_size == 3:
                assert max(held) < sum(held), "the state is not shared"


def go_on_both_ways(folder: str) -> dict[str, dict[str, tuple[State, int]]]:
    ways = {"plain": None, "sharded": MODES["sharded"]}
    return {way: go_on(folder, "sharded", settings) for way, settings in ways.items()}


def test_one_rank_goes_on_from_what_three_have_saved(
    of_two_ranks: tuple[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    run_ranks(save_mode, str(tmp_path), "sharded", world_size=3)
    (results,) = run_ranks(go_on_both_ways, str(tmp_path), world_size=1)
    for way in ("plain", "sharded"):
        for kind in KINDS:
            assert_close(results[way][kind][0], of_two_ranks[1][0]["whole"][kind])


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_that_of_the_plain_optimizer(of_two_ranks: tuple[str, list[dict[str, Any]]], kind: str) -> None:
    folder, _ = of_two_ranks
    plain = torch.load(Path(folder, "plain", kind, "end.ckpt"), weights_only=True)["optimizer_states"][0]
    optimizer = OPTIMIZERS[kind](module_of(kind).double().parameters())
    for mode in MODES:
        checkpoint = torch.load(Path(folder, mode, kind, "end.ckpt"), weights_only=True)
        assert checkpoint[STATE_KEY]["missing"] == []
        (state,) = checkpoint["optimizer_states"]
        assert state["param_groups"] == plain["param_groups"]
        assert list(state["state"]) == list(plain["state"])
        for position, entries in state["state"].items():
            assert entries.keys() == plain["state"][position].keys()
            assert all(value.device.type == "cpu" for value in entries.values())
            assert all(torch.equal(value, plain["state"][position][key]) for key, value in entries.items())
        optimizer.load_state_dict(state)


# ---------------------------------------------------------------------- odd moments


def save_afterwards(folder: str) -> list[str]:
    module = module_of("adamw foreach")
    trainer = make_trainer(strategy_of(MODES["sharded"]), **EXACT)
    trainer.fit(module)
    trainer.save_checkpoint(Path(folder, "after.ckpt"))
    checkpoint = torch.load(Path(folder, "after.ckpt"), weights_only=True)
    trainer.fit(module_of("adamw foreach"))  # and the strategy can be used again
    return [str(key) for key in checkpoint["optimizer_states"][0]["state"]] + checkpoint[STATE_KEY]["missing"]


def test_a_checkpoint_that_is_saved_after_the_fit_is_whole(tmp_path: Path) -> None:
    for keys in run_ranks(save_afterwards, str(tmp_path)):
        assert keys == ["0", "1", "2", "3", "4", "5"]


def resume_failed(folder: str) -> None:
    trainer = make_trainer(strategy_of(MODES["sharded"]), max_epochs=1)
    message = "written after an error and lacks: the other ranks' parts of the optimizer"
    with nullcontext() if rank() else pytest.warns(UserWarning, match=message):
        trainer.fit(module_of("adamw foreach"), ckpt_path=Path(folder, "failed-0.ckpt"), **SAFELY)


class FailingEverywhere(Adaptive):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            raise RuntimeError("stop here")
        return self.loss(batch)


def fail_everywhere(folder: str) -> list[str]:
    saver = OnExceptionCheckpoint(folder, "failed-0")
    trainer = make_trainer(strategy_of(MODES["sharded"]), callbacks=[saver], enable_checkpointing=True)
    with pytest.raises(RuntimeError, match="stop here"):
        trainer.fit(make_module(FailingEverywhere))
    if rank():
        return []
    missing: list[str] = torch.load(Path(folder, "failed-0.ckpt"), weights_only=True)[STATE_KEY]["missing"]
    return missing


def test_after_an_error_the_checkpoint_says_what_it_lacks(tmp_path: Path) -> None:
    missing, _ = run_ranks(fail_everywhere, str(tmp_path))
    assert missing == ["the other ranks' parts of the optimizer state"]
    run_ranks(resume_failed, str(tmp_path))


class SavedEarly(Adaptive):
    """Saves before its first step, in mid-epoch, and puts the first one back."""

    folder = ""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        trainer: Trainer = self.trainer
        if self.global_step == 4:
            trainer.save_checkpoint(Path(self.folder, "4.ckpt"))


def early(folder: str) -> tuple[State, State]:
    SavedEarly.folder = folder
    save_at = Path(folder, "start.ckpt")
    trainer = make_trainer(strategy_of(MODES["sharded"]), **{**EXACT, "max_epochs": 1})
    trainer.fit(make_module(SavedEarly))
    trainer.save_checkpoint(save_at)
    expected = make_module(SavedEarly).double()
    make_trainer(strategy_of(None), **{**EXACT, "max_epochs": 2}).fit(expected, ckpt_path=save_at, **SAFELY)
    again = make_module(SavedEarly).double()
    make_trainer(strategy_of(MODES["sharded"]), **{**EXACT, "max_epochs": 2}).fit(again, ckpt_path=save_at, **SAFELY)
    once_more = make_module(SavedEarly).double()  # from what was saved before the resumed run had made a step
    make_trainer(strategy_of(MODES["sharded"]), **{**EXACT, "max_epochs": 2}).fit(
        once_more, ckpt_path=Path(folder, "4.ckpt"), **SAFELY
    )
    assert_same(state_of(again), state_of(expected))
    return state_of(once_more), state_of(expected)


def test_a_state_that_was_loaded_and_not_yet_used_is_saved_again(tmp_path: Path) -> None:
    for found, expected in run_ranks(early, str(tmp_path)):
        assert_same(found, expected)
