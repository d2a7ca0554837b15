"""The line that says what a step with a hook sends: its bytes are those of the hook's formula, and it comes once."""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fabric_runs import make_fabric, make_model, sgd, train
from hook_tools import block_hook_bytes
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from ranks import run_ranks
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from trainer_runs import QUIET, Net, make_module, make_trainer

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.averaging import DiLoCo, PeriodicModelAverager
from lightning_ddp_hooks.callbacks import CommMonitor
from lightning_ddp_hooks.hooks import BlockQuantize, Cast, PowerSGD, Schedule, Stage

pytestmark = [pytest.mark.ranks, pytest.mark.trainer]

CONTROL = 64  # bytes that ranks agree with, at most


def lines_of(action: Callable[[], Any]) -> list[str]:
    """Return the lines about a step that an action logs."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    loggers = [logging.getLogger(f"lightning.{name}.utilities.rank_zero") for name in ("pytorch", "fabric")]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    action()
    for logger in loggers:
        logger.removeHandler(handler)
    assert comm.current_total() is None, "somebody counts on"
    return [line for line in lines if "rank 0 sent" in line]


def fit_with(strategy: dict[str, Any], **options: Any) -> list[str]:
    return lines_of(lambda: make_trainer(strategy, **{**QUIET, **options}).fit(make_module(Net)))


class RaisesInBackward(Net):
    def on_after_backward(self) -> None:
        if self.global_step == 3:
            raise ValueError("in the counted step")


def fit_that_raises() -> None:
    with pytest.raises(ValueError, match="in the counted step"):
        make_trainer({"comm_hook": "int8"}, **QUIET).fit(make_module(RaisesInBackward))


class WithRate(Net):
    lr = 0.01


def fit_with_a_finder(tmp_path: Path) -> None:
    """Fit within a fit, which ends after the steps that are not counted, and count with a monitor then."""
    trainer = make_trainer(
        {"comm_hook": "int8"},
        **{**QUIET, "enable_checkpointing": True, "default_root_dir": tmp_path},
        callbacks=[LearningRateFinder(num_training_steps=3), CommMonitor(dirpath=tmp_path)],
    )
    trainer.fit(make_module(WithRate))


def in_trainers(tmp_path: Path) -> dict[str, list[str]]:
    return {
        "mean": fit_with({}),
        "int8": fit_with({"comm_hook": "int8"}),
        "half": fit_with({"comm_hook": Cast(None, torch.float16)}),
        "late": fit_with({"comm_hook": PowerSGD(rank=1, start_iter=5, min_compression_rate=1.0)}),
        "too late": fit_with({"comm_hook": PowerSGD(rank=1, start_iter=1000)}),
        "stages": fit_with({"comm_hook": Schedule([Stage(0, "fp16"), Stage(5, "int8")])}),
        "accumulating": fit_with({"comm_hook": "int8"}, accumulate_grad_batches=2, max_epochs=4),
        "ends meanwhile": fit_with({"comm_hook": "int8"}, max_steps=3),
        "function": fit_with({"comm_hook": (None, fp16_compress_hook)}),
        "noop": fit_with({"comm_hook": "noop"}),
        "averager": fit_with({"averager": DiLoCo(period=2, comm_hook="int8")}),
        "checkpoint": fit_with(
            {"comm_hook": "int8", "averager": PeriodicModelAverager(period=2, warmup_steps=100)},
            enable_checkpointing=True,
            callbacks=[ModelCheckpoint(tmp_path / "here", every_n_train_steps=3)],
        ),
        "raises": lines_of(fit_that_raises),
        "finder, monitor": lines_of(lambda: fit_with_a_finder(tmp_path)),
        "monitor": fit_with({"comm_hook": "int8"}, callbacks=[CommMonitor(dirpath=tmp_path)]),
    }


def test_a_trainer_says_once_what_a_step_sends(tmp_path: Path) -> None:
    first, second = run_ranks(in_trainers, tmp_path)
    assert not any(second.values())
    params = [param.numel() for param in make_module(Net).parameters()]

    def bytes_in(name: str) -> tuple[int, float]:
        (line,) = first[name]
        said = r"lightning_ddp_hooks: in the backward of step (\d+) rank 0 sent ([\d.]+) (KiB|MiB); .* would send (.*)"
        found = re.fullmatch(said, line)
        assert found is not None
        step, sent, unit, plain = found.groups()
        assert plain == f"{4 * sum(params) / 1024:.2f} KiB"
        return int(step), float(sent) * {"KiB": 1 << 10, "MiB": 1 << 20}[unit]

    int8 = block_hook_bytes(BlockQuantize(), sum(params), 2)
    silent = ("mean", "too late", "ends meanwhile", "monitor", "function", "noop", "averager", "raises")
    assert {name: first[name] for name in silent} == {name: [] for name in silent}
    for name, at, expected in (
        ("int8", 3, int8),
        ("accumulating", 3, int8),
        ("checkpoint", 3, int8),
        ("half", 3, 2 * sum(params)),
        ("stages", 3, 2 * sum(params)),
    ):
        step, sent = bytes_in(name)
        assert step == at
        assert expected - 11 <= sent <= expected + CONTROL, name
    step, sent = bytes_in("late")
    assert step == 6
    assert sent < 4 * sum(params)


def in_fabric() -> list[str]:
    def run() -> None:
        fabric = make_fabric({"comm_hook": "int8"})
        model = make_model()
        model, optimizer = fabric.setup(model, sgd(model.parameters()))
        train(fabric, model, optimizer, 6)

    return lines_of(run)


def test_fabric_says_it_too() -> None:
    first, second = run_ranks(in_fabric)
    assert second == []
    assert len(first) == 1
    assert first[0].startswith("lightning_ddp_hooks: in the backward of step 3 rank 0 sent ")
