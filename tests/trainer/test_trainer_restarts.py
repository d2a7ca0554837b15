"""A run that is started again goes on by itself: from which checkpoint, and under torchrun, which starts it again."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from ranks import run_ranks
from trainer_runs import SAFELY, Net, State, assert_same, assert_trained, make_module, make_trainer, state_of
from trainer_runs import fit as fit_plainly

from lightning_ddp_hooks.averaging import DiLoCo
from lightning_ddp_hooks.optim import OptimizerInHook

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.trainer,
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks:UserWarning"),
]

HOOK = "powersgd"


def checkpoints(folder: Path, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, **options)


def resuming(folder: Path, epochs: int, **options: Any) -> Trainer:
    strategy = {"resume": "auto", "comm_hook": HOOK, **options}
    return make_trainer(strategy, max_epochs=epochs, enable_checkpointing=True, callbacks=[checkpoints(folder)])


def fit(folder: Path, epochs: int, **arguments: Any) -> tuple[State, int]:
    """Fit as a job does that has been started again; return the model, and the steps that were trained here."""
    steps = []

    class Counted(Net):
        def on_train_batch_start(self, *_: Any) -> None:
            steps.append(1)

    module = make_module(Counted)
    resuming(folder, epochs).fit(module, **arguments)
    return state_of(module), len(steps)


def _one_after_the_other(folder: Path) -> list[Any]:
    whole, steps = fit(folder / "undisturbed", 3)
    first, second = fit(folder / "again", 1), fit(folder / "again", 3)
    return [whole, steps, first[1], *second, fit(folder / "again", 3)]


def test_a_run_that_is_started_again_goes_on(tmp_path: Path) -> None:
    for whole, steps, before, state, after, (finished, none) in run_ranks(_one_after_the_other, tmp_path):
        assert (before, after, none) == (steps // 3, steps - steps // 3, 0)
        assert_same(state, whole)
        assert_same(finished, whole)


SETTINGS: dict[str, dict[str, Any]] = {
    "hook": {},
    "sharded": {"comm_hook": None, "optimizer_in_hook": OptimizerInHook(shard=True)},
    "averager": {"comm_hook": None, "averager": DiLoCo(period=2)},
}


def _epochs(folder: Path, epochs: int) -> dict[str, tuple[State | None, State]]:
    """Fit with each of the settings; return the model as training began, if there was a checkpoint, and as it ended."""
    found = {}
    for name, settings in SETTINGS.items():
        module, resumes = make_module(WithTest), (folder / name).exists()
        resuming(folder / name, epochs, **settings).fit(module)
        found[name] = (module.start if resumes else None, state_of(module))
    return found


def test_a_run_goes_on_with_fewer_ranks_and_with_more(tmp_path: Path) -> None:
    ended: dict[str, State] = {}
    for epochs, world_size in [(1, 3), (2, 2), (3, 3)]:
        per_rank = run_ranks(_epochs, tmp_path, epochs, world_size=world_size)
        for name in SETTINGS:
            for start, end in (found[name] for found in per_rank):
                if epochs > 1 and name != "averager":  # where ranks go on apart
                    assert start is not None
                    assert_same(start, ended[name])
                assert_same(end, per_rank[0][name][1])
            ended[name] = per_rank[0][name][1]
            assert_trained(ended[name])


def _leave_out(folder: Path) -> tuple[State, int]:
    fit(folder, 2)
    torch.distributed.barrier() if torch.distributed.is_initialized() else None
    if os.environ.get("RANK", "0") == "0":
        newest = folder / "epoch=1.ckpt"
        newest.write_bytes(newest.read_bytes()[:-2000])  # cut off
        weights = torch.load(folder / "epoch=0.ckpt", weights_only=True)
        del weights["optimizer_states"]
        torch.save(weights, folder / "weights.ckpt")
    return fit(folder, 3)


@pytest.mark.filterwarnings("ignore:.*is left out:UserWarning")
def test_what_is_damaged_or_holds_weights_alone_is_left_out(tmp_path: Path) -> None:
    ((state, steps),) = run_ranks(_leave_out, tmp_path / "damaged", world_size=1)
    ((whole, all_steps),) = run_ranks(fit, tmp_path / "whole", 3, world_size=1)

    assert steps == all_steps * 2 // 3
    assert_same(state, whole)


def _told_where(folder: Path) -> tuple[int, int]:
    fit(folder, 2)
    return fit(folder, 3, ckpt_path=str(folder / "epoch=0.ckpt"), **SAFELY)[1], fit(folder, 2)[1]


def test_a_fit_that_is_told_where_to_begin_begins_there(tmp_path: Path) -> None:
    ((steps, _),) = run_ranks(_told_where, tmp_path, world_size=1)

    assert steps == 8


def _fit_twice_and_test(folder: Path) -> tuple[bool, State, State]:
    module, trainer = make_module(WithTest), resuming(folder, 1)
    trainer.fit(module)
    trainer.fit_loop.max_epochs = 2
    with torch.no_grad():
        module.net[0].weight += 1  # by the user, between two fits
    moved = state_of(module)
    module.start = None
    trainer.fit(module)
    same = all(torch.equal(value, module.start[name]) for name, value in moved.items())
    trained = state_of(module)
    trainer.test(module)
    return same, trained, state_of(module)


class WithTest(Net):
    start: State | None = None

    def on_train_start(self) -> None:
        self.start = state_of(self)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)

    test_dataloader = Net.train_dataloader


@pytest.mark.filterwarnings("ignore:.*not recommended to test with:UserWarning", "ignore:.*DistributedSampler")
def test_only_the_first_fit_of_a_trainer_goes_back(tmp_path: Path) -> None:
    ((same, trained, tested),) = run_ranks(_fit_twice_and_test, tmp_path, world_size=1)

    assert same
    assert_same(tested, trained)


def _without_a_folder() -> str:
    trainer = make_trainer({"resume": "auto"}, enable_checkpointing=True)
    with pytest.raises(ValueError, match="set `ModelCheckpoint") as error:
        trainer.fit(make_module())
    return str(error.value)


def test_without_a_folder_of_its_own_all_ranks_raise() -> None:
    assert all("each start writes to a new one" in text for text in run_ranks(_without_a_folder))


SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from trainer_runs import Net, make_module, make_trainer, rank, state_of

folder, attempt = Path(sys.argv[1]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
killed = {0: (1, 6), 1: (0, 10)}  # by attempt: which rank, in which step

class Killed(Net):
    def on_train_batch_start(self, batch, batch_idx):
        if killed.get(attempt) == (rank(), self.trainer.global_step):
            os.kill(os.getpid(), signal.SIGKILL)

module = make_module(Killed)
saved = ModelCheckpoint(folder, save_top_k=1, monitor=None)
trainer = make_trainer({"resume": "auto"}, max_epochs=3, enable_checkpointing=True, callbacks=[saved])
trainer.fit(module)
torch.save((attempt, state_of(module)), folder / f"{rank()}.pt")
"""


@pytest.mark.timeout(300)
def test_torchrun_starts_a_run_again_and_it_goes_on(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1]), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [*command, str(script), str(tmp_path)], env=environment, capture_output=True, text=True, timeout=250
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    for rank, undisturbed in enumerate(run_ranks(fit_plainly, Net, {}, {"max_epochs": 3})):
        attempt, state = torch.load(tmp_path / f"{rank}.pt")
        assert attempt == 2
        assert_same(state, undisturbed)
