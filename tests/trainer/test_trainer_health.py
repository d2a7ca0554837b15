"""One of four ranks fails, dies or is stopped in a fit: the others end within seconds and say who it was and where.

And ranks whose parameters or gradients are not what they should be.
"""

import ctypes
import inspect
import os
import re
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from faults import Ended, note_fault, run_with_fault, signal_self
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from ranks import run_ranks
from torch import Tensor
from trainer_runs import Manual, Net, make_module, make_trainer, rank
from uneven_runs import EXACT, UnevenNet, fit_uneven

from lightning_ddp_hooks import DDPHooksStrategy
from lightning_ddp_hooks.averaging import PeriodicModelAverager
from lightning_ddp_hooks.health.failure_detector import EXIT_CODE
from lightning_ddp_hooks.hooks import Noop, PostLocalSGD, PowerSGD
from lightning_ddp_hooks.optim import OptimizerInHook

pytestmark = [pytest.mark.ranks, pytest.mark.trainer]

TIMEOUT = 1.5
"""Seconds of silence after which a rank is given up: a step of these fits takes milliseconds."""
SOON = 10.0
"""Seconds within which all others have ended, on a machine that is busy with other tests."""


class Harmed(Net):
    """Does harm to one rank in step 3."""

    victim: ClassVar[int] = 0
    number: ClassVar[signal.Signals] = signal.SIGKILL

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_step == 3 and rank() == self.victim:
            signal_self(self.number)
        return super().training_step(batch, batch_idx)


class Killed0(Harmed):
    pass


class Killed2(Harmed):
    victim = 2


class Killed3(Harmed):
    victim = 3


class Stopped1(Harmed):
    victim, number = 1, signal.SIGSTOP


class RaisesInForward(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_step == 3 and rank() == 1:
            note_fault()
            raise ValueError("a bad sample")
        return super().training_step(batch, batch_idx)


class RaisesInBackward(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_step == 3 and rank() == 1:
            # The gradient of this parameter comes late, when later layers' may be on their way.
            self.net[0].weight.register_hook(_raise)
        return loss


def _raise(*_: Any) -> None:
    note_fault()
    raise ValueError("a bad sample")


class RaisingHook:
    """The mean, but for one rank in its fourth backward."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, state: Any, bucket: Any) -> Any:
        self.calls += bucket.is_last()
        if self.calls == 4 and rank() == 1:
            _raise()
        work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0] / 4)


class KilledInCheckpoint(Net):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.trainer.global_step == 3 and rank() == 2:
            signal_self(signal.SIGKILL)


class RaisesInSetup(Net):
    def setup(self, stage: str) -> None:
        if rank() == 1:
            note_fault()
            raise ValueError("a bad sample")


class KilledInConfigure(Net):
    def configure_optimizers(self) -> Any:
        if rank() == 1:
            signal_self(signal.SIGKILL)
        return super().configure_optimizers()


class Validated(Net):
    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and rank() == 1:
            signal_self(signal.SIGKILL)
        self.log("loss", self.loss(batch), sync_dist=True)


class KilledInTail(UnevenNet):
    counts = (9, 9, 2, 9)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == 4 and rank() == 3:
            signal_self(signal.SIGKILL)
        return super().training_step(batch, batch_idx)


def _strategy(**settings: Any) -> DDPHooksStrategy:
    return DDPHooksStrategy(
        **{"failure_timeout": TIMEOUT, "bucket_cap_mb": 0.001, "first_bucket_mb": 0.001, **settings}
    )


def _fit(module_class: type[LightningModule], settings: dict[str, Any], options: dict[str, Any]) -> None:
    make_trainer(_strategy(**settings), **{"max_epochs": 4, **options}).fit(make_module(module_class))


def _fit_with_checkpoints(
    module_class: type[LightningModule], folder: str, settings: dict[str, Any] | None = None
) -> None:
    checkpoints = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)
    _fit(module_class, settings or {}, {"callbacks": [checkpoints], "enable_checkpointing": True})


def _fit_uneven(module_class: type[LightningModule]) -> None:
    fit_uneven(module_class, _strategy(), {}, {})


def _others(endings: list[Ended], victim: int) -> list[Ended]:
    """Return how all but one ended, which must have been with an error and soon.

    Gloo tells only those whose connections broke. Whoever waits for one of these ends by an error as well, or, if that
    takes too long, by the watch.
    """
    others = [ended for index, ended in enumerate(endings) if index != victim]
    for ended in others:
        assert ended.code in (1, EXIT_CODE), ended
        assert ended.seconds < SOON, ended
    print("seconds:", max(ended.seconds for ended in others))  # for the table in docs/failures.md
    return others


def _own_place(ended: Ended) -> str:
    return ended.error.split("this one, was at ")[1].splitlines()[0]


@pytest.mark.parametrize(("module_class", "backend"), [(Killed2, "native"), (Killed3, "python")])
def test_a_rank_that_dies_is_named(module_class: type[Harmed], backend: str) -> None:
    endings = run_with_fault(_fit, module_class, {"reducer_backend": backend}, {})
    assert endings[module_class.victim].code == -signal.SIGKILL
    for ended in _others(endings, module_class.victim):
        assert f"Rank {module_class.victim} died or was stopped" in ended.error
        assert "step 3" in _own_place(ended)


def test_what_was_waited_for_is_named() -> None:
    others = _others(run_with_fault(_fit, Killed2, {"reducer_backend": "python"}, {}), 2)
    assert any("waiting for bucket 0 ('net.4." in _own_place(ended) for ended in others)


def test_a_rank_that_fails_before_there_is_a_reducer_is_told() -> None:
    for ended in _others(run_with_fault(_fit, RaisesInSetup, {}, {}, world_size=2), 1):
        assert "Rank 1 failed at step 0" in ended.error
        assert "ValueError: a bad sample" in ended.error
    settings = {"failure_timeout": TIMEOUT / 8}  # ten times as long is waited there
    for ended in _others(run_with_fault(_fit, KilledInConfigure, settings, {}, world_size=2), 1):
        assert "Rank 1 died or was stopped" in ended.error


def _validate() -> None:
    make_trainer(_strategy()).validate(make_module(Validated), verbose=False)


def test_a_rank_that_dies_without_a_fit_is_named() -> None:
    for ended in _others(run_with_fault(_validate, world_size=2), 1):
        assert "Rank 1 died or was stopped" in ended.error


class BusyInSetup(Net):
    """One call that lets no other thread run, on one rank, while the others wait."""

    def setup(self, stage: str) -> None:
        if rank() == 1:
            ctypes.PyDLL(None).usleep(int(3 * TIMEOUT * 1e6))


def _fit_busy() -> int:
    trainer = make_trainer(_strategy(), max_epochs=1)
    trainer.fit(make_module(BusyInSetup))
    return trainer.global_step


def test_a_rank_that_is_busy_before_the_fit_is_let_be() -> None:
    assert [ended.value for ended in run_with_fault(_fit_busy, world_size=2)] == [4, 4]


def test_the_death_of_the_rank_that_holds_the_store_is_told() -> None:
    for ended in _others(run_with_fault(_fit, Killed0, {}, {}), 0):
        assert "Rank 0 (store host, 127.0.0.1:" in ended.error


@pytest.mark.parametrize("backend", ["python", "native"])
def test_a_rank_that_is_stopped_is_given_up(backend: str) -> None:
    endings = run_with_fault(_fit, Stopped1, {"reducer_backend": backend}, {})
    assert endings[1].code is None
    for ended in _others(endings, 1):
        assert "Rank 1 died or was stopped" in ended.error


@pytest.mark.parametrize(
    ("module_class", "settings"),
    [(RaisesInForward, {}), (RaisesInBackward, {}), (Net, {"comm_hook": (None, RaisingHook())})],
    ids=["forward", "backward", "hook"],
)
def test_the_error_of_a_rank_is_told_by_all(module_class: type[Net], settings: dict[str, Any]) -> None:
    endings = run_with_fault(_fit, module_class, settings, {})
    assert "a bad sample" in endings[1].error
    assert "Rank 1" not in endings[1].error
    for ended in _others(endings, 1):
        assert "Rank 1 failed at step 3" in ended.error
        assert "ValueError: a bad sample" in ended.error
        if "comm_hook" in settings:  # raises at the last bucket, which so was not sent
            sent, buckets = re.findall(r"Rank 1 failed at .* (\d) of (\d) buckets sent", ended.error)[0]
            assert int(sent) == int(buckets) - 1


def test_a_death_in_a_joined_tail() -> None:
    for ended in _others(run_with_fault(_fit_uneven, KilledInTail), 3):
        assert "Rank 3 died or was stopped" in ended.error


class Uneven(UnevenNet):
    counts = (7, 5)

    def on_train_start(self) -> None:
        note_fault()


class UnevenValidated(Uneven):
    """The rank that is done validates, while the other goes on to train."""

    def val_dataloader(self) -> Any:
        return self.loader((2, 2))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.loss(batch), sync_dist=True)


class PartedWithUnevenInputs(Uneven):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == 2:
            torch.distributed.barrier() if rank() else self.log("loss", 1.0, sync_dist=True, on_step=True)
        return super().training_step(batch, batch_idx)


def _fit_uneven_without_callback(module_class: type[LightningModule]) -> None:
    _fit(module_class, {}, {**EXACT, "max_epochs": 1})


def test_dataloaders_of_different_lengths_are_named_as_a_likely_cause() -> None:
    advice = "dataloaders of different lengths on the ranks. The callback `UnevenInputs` handles them."
    ended, finished = run_with_fault(_fit_uneven_without_callback, Uneven, world_size=2)
    assert not finished.code
    assert "Rank 1 (finished)" in ended.error
    assert advice in ended.error
    endings = run_with_fault(_fit_uneven_without_callback, UnevenValidated, world_size=2)
    assert all(ended.code and "The ranks have parted ways" in ended.error for ended in endings)
    assert any(advice in ended.error for ended in endings)  # the other may take its word for it
    endings = run_with_fault(_fit_uneven, PartedWithUnevenInputs, world_size=2)
    assert any("The ranks have parted ways" in ended.error for ended in endings)
    assert not any("different lengths" in ended.error for ended in endings)


class Hangs(Net):
    """From step 3 on, rank 1 does not come back."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == 3 and rank():
            note_fault()
            self.hang()
        return super().training_step(batch, batch_idx)

    def hang(self) -> None:
        raise NotImplementedError


class Asleep(Hangs):
    def hang(self) -> None:
        time.sleep(1000)  # the line


class Loops(Hangs):
    def hang(self) -> None:
        while True:  # the line
            sum(range(100))  # the line


class SleepsInBackward(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_step == 3 and rank():
            loss.register_hook(self.sleep)
        return loss

    def sleep(self, gradient: Tensor) -> None:
        note_fault()
        time.sleep(1000)  # the line


class Loading(Net):
    def train_dataloader(self) -> Any:
        for number, batch in enumerate(super().train_dataloader()):
            if number == 3 and rank():
                note_fault()
                time.sleep(1000)  # the line
            yield batch


class PartedWays(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == 3 and rank():
            note_fault()
            torch.distributed.barrier()  # the line
        return super().training_step(batch, batch_idx)


def _hang(module_class: type[LightningModule], folder: str, settings: dict[str, Any]) -> None:
    os.chdir(folder)
    _fit(module_class, {**settings, "timeout": timedelta(seconds=60), "stall_timeout": 1}, {})


@pytest.mark.parametrize(
    ("module_class", "engine"),
    [(Asleep, "native"), (Loops, "python"), (SleepsInBackward, "native"), (Loading, "native"), (PartedWays, "python")],
)
def test_of_ranks_that_hang_each_tells_where_all_are(
    module_class: type[LightningModule], engine: str, tmp_path: Path
) -> None:
    lines = Path(__file__).read_text().splitlines()
    source, start = inspect.getsourcelines(module_class)
    marked = {start + n for n, text in enumerate(source) if "# the line" in text}
    if issubclass(module_class, Hangs):
        assert all("# the line" in lines[number - 1] for number in marked)

    endings = run_with_fault(_hang, module_class, str(tmp_path), {"reducer_backend": engine}, world_size=2)
    assert all(ended.code and ended.seconds < 2 * SOON for ended in endings), endings
    named = [f"(test_trainer_health.py:{number})" for number in marked]
    for ended in endings:
        assert any(name in ended.error for name in named) or "gave up" in ended.error, ended.error
    assert any(str(tmp_path / "ddp_hooks_stacks") in ended.error for ended in endings)
    for number in range(2):
        text = (tmp_path / "ddp_hooks_stacks" / f"rank-{number}.txt").read_text()
        assert "gloo:" in text or "Error" in text
        assert "trainer_runs.py" in text or "test_trainer_health.py" in text
    if not issubclass(module_class, PartedWays):
        assert any("Rank 1 has made no progress" in ended.error for ended in endings)


def test_long_work_of_one_rank_is_let_be_where_that_is_set(tmp_path: Path) -> None:
    assert run_ranks(_fit_with_long_work, world_size=2) == [True, True]


class Works(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == 3 and rank():
            time.sleep(3 * 0.5)
        return super().training_step(batch, batch_idx)


def _fit_with_long_work() -> bool:
    _fit(Works, {"failure_timeout": 0.5, "stall_timeout": 60}, {})
    return True


class SavesOnOneRank(Uneven):
    counts = (4, 4)

    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.global_step == 2 and not rank():
            self.trainer.save_checkpoint("never.ckpt")


def test_the_users_line_is_named_and_not_dataloaders_where_it_is_theirs() -> None:
    endings = run_with_fault(_fit_uneven_without_callback, SavesOnOneRank, world_size=2)
    text = "\n".join(ended.error for ended in endings)
    assert all(ended.code for ended in endings)
    assert " in `save_checkpoint` called by on_train_batch_end (test_trainer_health.py:" in text
    assert "not all ranks come to that line" in text
    assert "different lengths" not in text


def test_a_death_during_a_checkpoint(tmp_path: Path) -> None:
    for ended in _others(run_with_fault(_fit_with_checkpoints, KilledInCheckpoint, str(tmp_path)), 2):
        assert "Rank 2 died or was stopped" in ended.error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch=0-step=1.ckpt", "epoch=0-step=2.ckpt"]


# ---------------------------------------------------------------------- nothing happens in a fit that is well


def _threads_in_and_after_fits() -> list[list[str]]:
    class Looks(Net):
        def on_train_end(self) -> None:
            found.append(_names())

    found: list[list[str]] = []
    for timeout in (TIMEOUT, TIMEOUT, None):
        make_trainer(_strategy(failure_timeout=timeout)).fit(make_module(Looks))
        found.append(_names())
    return found


def _names() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("ldh-"))


def test_threads_end_with_the_fit() -> None:
    both = ["ldh-failure-detector", "ldh-heartbeat"]
    for found in run_ranks(_threads_in_and_after_fits):
        assert found == [both, [], both, [], [], []]


# ---------------------------------------------------------------------- parameters that drift apart


class Drifting(Net):
    """One rank changes a parameter after its second step."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == 2 and rank() == 1:
            with torch.no_grad():
                self.net[2].bias[3] += 1e-6


def _errors(cases: list[tuple[type[Net], dict[str, Any], dict[str, Any]]]) -> list[str]:
    """Fit each; return the errors. In a world where they come on all ranks alike."""
    errors = []
    for module_class, settings, options in cases:
        try:
            _fit(module_class, settings, {"max_epochs": 1, **options})
            errors.append("")
        except RuntimeError as error:
            errors.append(str(error))
    return errors


def test_drift_is_found_and_named_unless_it_is_meant() -> None:
    every: dict[str, Any] = {"check_replicas_every_n_steps": 1}
    averager = PeriodicModelAverager(period=2, warmup_steps=1)
    cases: list[Any] = [
        (Drifting, every, {}),
        (Drifting, {}, {}),
        (Net, every, {"max_epochs": 2}),
        (Net, {**every, "comm_hook": PowerSGD(rank=1, start_iter=2)}, {}),
        (Net, {**every, "optimizer_in_hook": OptimizerInHook(shard=True)}, {}),
        (Drifting, {**every, "averager": averager}, {}),
        (Drifting, {**every, "comm_hook": PostLocalSGD(start_local_sgd_iter=1, subgroup_size=1)}, {}),
        (Drifting, {**every, "comm_hook": Noop()}, {}),
    ]
    for errors in run_ranks(_errors, cases):
        assert "drifted apart by the end of step 2: 'net.2.bias' differs between rank 0 and rank 1" in errors[0]
        assert errors[1:] == [""] * (len(cases) - 1)


def _error_at_checkpoint(folder: str) -> tuple[str, list[str]]:
    try:
        _fit_with_checkpoints(Drifting, folder)
    except RuntimeError as error:
        return str(error), sorted(os.listdir(folder))
    return "", []


def _fit_unchecked(folder: str) -> None:
    _fit_with_checkpoints(Drifting, folder, {"check_replicas_every_n_steps": 0})


def test_the_check_before_a_checkpoint_can_be_switched_off(tmp_path: Path) -> None:
    run_ranks(_fit_unchecked, str(tmp_path))
    assert any("step=3" in path.name for path in tmp_path.iterdir())


def test_drift_is_found_before_a_checkpoint_is_written(tmp_path: Path) -> None:
    for error, files in run_ranks(_error_at_checkpoint, str(tmp_path)):
        assert "drifted apart before the checkpoint of step 3: 'net.2.bias'" in error
        assert not any("step=3" in name for name in files)


# ---------------------------------------------------------------------- gradients that are not finite


class Infinite(Net):
    """One rank's batch makes the gradients of some layers overflow."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_step == 1 and rank() == 1:
            self.net[2].weight.register_hook(lambda gradient: gradient / 0)
        return loss


class ManualInfinite(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and rank() == 1:
            batch = [part * float("inf") for part in batch]
        super().training_step(batch, batch_idx)


def test_a_gradient_that_is_not_finite_is_traced_to_its_rank() -> None:
    on: dict[str, Any] = {"detect_nonfinite": True}
    cases: list[Any] = [
        (Infinite, {**on, "reducer_backend": "python"}, {}),
        (Infinite, {**on, "reducer_backend": "native"}, {}),
        (Infinite, on, {"accumulate_grad_batches": 2}),
        (ManualInfinite, on, {}),
        (Net, on, {}),
        (Infinite, {}, {}),
    ]
    for errors in run_ranks(_errors, cases):
        for error in errors[:3]:
            assert "in step 1, before any exchange: rank 1: the gradient of 'net.2.weight'" in error
            assert "rank 0" not in error
        assert "in step 1, before any exchange: rank 1: the gradient of 'net.4." in errors[3]
        assert errors[4:] == ["", ""]
