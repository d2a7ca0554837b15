"""The watch in training loops of the user's own: a rank that is killed or sleeps ends the others, which name it."""

import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import note_fault, run_with_fault, signal_self
from torch import nn

import lightning_ddp_hooks as ldh
from lightning_ddp_hooks import comm

pytestmark = pytest.mark.ranks

FAILURE, STALL = 0.5, 2.0
SOON = 12.0  # seconds; collectives would take a minute to time out


def _sleep() -> None:
    note_fault()
    time.sleep(1000)  # the line


def _kill() -> None:
    signal_self(signal.SIGKILL)


FAULTS = {"killed": _kill, "asleep": _sleep}


def _loop(frontend: str, fault: str, folder: str) -> None:
    """Train; at the third step rank 0 works alone for longer than `FAILURE`, at the fifth rank 1 does the fault."""
    os.chdir(folder)
    timeouts: Any = {"failure_timeout": FAILURE, "stall_timeout": STALL}
    model: Any = nn.Linear(4, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if frontend == "fabric":
        from lightning.fabric import Fabric

        fabric = Fabric(strategy=ldh.FabricDDPHooksStrategy(**timeouts), accelerator="cpu", devices=comm.world_size())
        fabric.launch()
        model, optimizer = fabric.setup(model, optimizer)
        backward: Any = fabric.backward
    else:
        model, backward = ldh.DataParallel(model, **timeouts), torch.Tensor.backward
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ldh.DataParallel(nn.Linear(1, 1), failure_timeout=7)  # a second one joins the watch
        assert len(caught) == (comm.rank() == 0), caught
    for step in range(6):
        if step == 2 and comm.rank() == 0:
            time.sleep(2 * FAILURE)
        if step == 4 and comm.rank() == 1:
            FAULTS[fault]()
        backward(model(torch.ones(2, 4)).mean())
        optimizer.step()


def _loop_to_the_end_of_the_process(*args: Any) -> None:
    try:
        _loop(*args)
    except Exception as error:  # as Python does where nobody catches it
        sys.excepthook(type(error), error, error.__traceback__)
        raise


@pytest.mark.parametrize(
    ("frontend", "fault"), [("DataParallel", "killed"), ("DataParallel", "asleep"), ("fabric", "asleep")]
)
def test_a_rank_that_is_killed_or_sleeps_is_named_by_the_others(frontend: str, fault: str, tmp_path: Path) -> None:
    first, second = run_with_fault(_loop_to_the_end_of_the_process, frontend, fault, str(tmp_path), world_size=2)

    assert first.code
    assert first.seconds < SOON
    if fault == "killed":
        assert "Rank 1 died or was stopped" in first.error, first.error
        assert "step 4" in first.error
        return
    assert second.code
    assert "Rank 1 has made no progress" in first.error, first.error
    assert "`_sleep` (test_process_watch.py:" in first.error
    for rank in range(2):
        assert "test_process_watch.py" in (tmp_path / "ddp_hooks_stacks" / f"rank-{rank}.txt").read_text()
