"""A rank is harmed in a fit with checkpoints; all end, and what goes on from the last one is like a run never harmed.

The whole table of faults and settings is in ``benchmarks/soak_faults.py``. And: checkpoints that cannot be read.
"""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_runs import PLACES, SETTINGS, Fault, compare, fit, fit_each_setting, newest, resume_each
from faults import Ended, run_with_fault
from ranks import run_ranks
from teardown_runs import KINDS, fit_in_turn, grown
from trainer_runs import SAFELY, State

from lightning_ddp_hooks.health.failure_detector import EXIT_CODE

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.trainer,
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks:UserWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning"),
]

SOON = 10.0
"""Seconds within which all others have ended, on a machine that is busy with other tests."""

FAULTS: list[tuple[str, Fault, str]] = [
    ("sharded", Fault("hook", "kill"), "Rank 1 died or was stopped"),
    ("plain", Fault("write", "kill"), "Rank 0 (store host, "),
    ("diloco", Fault("average", "raise"), "Rank 1 failed at step"),
    ("powersgd", Fault("forward", "cut"), "Rank 1 died or was stopped"),
    ("uneven", Fault("write", "disk full"), "OSError: [Errno 27] The checkpoint could not be written (File too large)"),
]


@pytest.fixture(scope="module")
def harmed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[list[Ended], Path]]:
    """How the ranks of each of `FAULTS` have ended, and where the checkpoints are."""
    folders = [tmp_path_factory.mktemp("harmed") for _ in FAULTS]
    return [
        (run_with_fault(fit, name, str(folder), fault, world_size=2), folder)
        for (name, fault, _), folder in zip(FAULTS, folders, strict=True)
    ]


@pytest.mark.parametrize("number", range(len(FAULTS)), ids=[f"{f.harm} in {f.place}" for _, f, _ in FAULTS])
def test_all_end_and_say_why(harmed: list[tuple[list[Ended], Path]], number: int) -> None:
    (_, fault, told), (endings, folder) = FAULTS[number], harmed[number]
    other = endings[1 - fault.rank]
    assert other.code in (1, EXIT_CODE)
    assert other.seconds < SOON
    assert told in other.error
    if fault.harm != "kill":
        assert not [left.name for left in folder.iterdir() if left.name.startswith(".")]


def _fit_unharmed(names: list[str], cases: list[tuple[str, str]]) -> tuple[dict[str, State], list[State]]:
    return fit_each_setting(names), resume_each(cases)


def test_nothing_before_the_last_checkpoint_is_lost(harmed: list[tuple[list[Ended], Path]]) -> None:
    cases = []
    for (name, fault, _), (_, folder) in zip(FAULTS, harmed, strict=True):
        step, path = newest(folder)
        assert step == PLACES[fault.place][1]
        cases.append((name, str(path)))
    for unharmed, resumed in run_ranks(_fit_unharmed, list({name for name, _ in cases}), cases):
        for (name, _), state in zip(cases, resumed, strict=True):
            compare(state, unharmed[name], exact=SETTINGS[name].exact)


def _fit_late(name: str, fault: Fault) -> tuple[State, State]:
    return fit(name, None, fault), fit(name, None)


def test_a_rank_that_is_late_does_no_harm() -> None:
    for late, state in run_ranks(_fit_late, "plain", Fault("forward", "delay")):
        compare(late, state, exact=True)


# ---------------------------------------------------------------------- checkpoints that cannot be read


def _text_of_error(name: str, path: str | None) -> str:
    """Resume; return the error that this rank ends with. No failure reports: ranks must agree before they start."""
    try:
        fit(name, None, resume=path, failure_timeout=None)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _texts_of_errors(name: str, cases: list[dict[int, str | None]]) -> list[str]:
    """Resume each case, in which a rank may have another path than the others, which stand under -1."""
    rank = int(os.environ["RANK"])
    return [_text_of_error(name, case.get(rank, case[-1])) for case in cases]


def _fit_with_checkpoints(name: str, folder: str) -> None:
    fit(name, folder)


class _Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_no_rank_goes_on_alone_from_a_checkpoint(tmp_path: Path) -> None:
    run_ranks(_fit_with_checkpoints, "plain", str(tmp_path))
    good, older, other = (str(tmp_path / name) for name in ("step=4.ckpt", "step=2.ckpt", "other.ckpt"))
    shutil.copy(good, other)
    cut, code, foreign, folder = (tmp_path / name for name in ("cut.ckpt", "code.ckpt", "foreign.ckpt", "folder.ckpt"))
    cut.write_bytes(Path(good).read_bytes()[:9000])
    torch.save({**torch.load(good), "callbacks": _Runs(tmp_path / "ran")}, code)
    torch.save({"weight": torch.ones(2)}, foreign)
    folder.mkdir()
    cases: list[dict[int, str | None]] = [
        {-1: good, 1: str(tmp_path / "nothing.ckpt")},
        {-1: good, 0: str(cut)},
        {-1: good, 1: older},
        {-1: good, 1: None},
        {-1: None, 1: good},
        {-1: str(code)},
        {-1: str(foreign)},
        {-1: str(folder)},
        {-1: good, 1: other},
    ]
    first, second = run_ranks(_texts_of_errors, "plain", cases)
    assert first[0].startswith("RuntimeError: Rank 1 could not read the checkpoint")
    assert "nothing.ckpt" in first[0]
    assert second[0].startswith("FileNotFoundError: Checkpoint file not found")
    assert second[1].startswith(f"RuntimeError: Rank 0 could not read the checkpoint {str(cut)!r}")
    assert f"Could not read the checkpoint {str(cut)!r}" in first[1]
    for texts in (first, second):
        assert "rank 0: " in texts[2]
        assert "global step 4" in texts[2]
        assert f"rank 1: {older!r} (epoch 0, global step 2, training step 2)" in texts[2]
        assert "would not go on from the same checkpoint" in texts[3]
        assert "rank 1: none" in texts[3]
        assert "rank 0: none" in texts[4]
        if SAFELY:
            assert texts[5].startswith(f"UnpicklingError: Could not read the checkpoint {str(code)!r}")
        assert f"Expected a Trainer's checkpoint in {str(foreign)!r}" in texts[6]
        assert texts[7].startswith("IsADirectoryError")
        assert texts[8] == ""  # the same from another place
    assert not (tmp_path / "ran").exists()


_DAMAGE: dict[str, tuple[str, tuple[Any, ...], Callable[[Any], Any]]] = {
    "our entry is a list": ("powersgd", ("lightning_ddp_hooks",), lambda _: [1]),
    "a step in words": ("powersgd", ("lightning_ddp_hooks", "step"), lambda _: "four"),
    "a step beyond all numbers": ("powersgd", ("lightning_ddp_hooks", "step"), lambda _: 10**30),
    "a format in words": ("powersgd", ("lightning_ddp_hooks", "hook", "format"), lambda _: "one"),
    "no errors": ("powersgd", ("lightning_ddp_hooks", "hook", "error"), lambda _: None),
    "an error of another shape": (
        "powersgd",
        ("lightning_ddp_hooks", "hook", "error", "net.0.bias"),
        lambda _: torch.ones(3, 5),
    ),
    "an error of a petabyte": (
        "powersgd",
        ("lightning_ddp_hooks", "hook", "error", "net.0.bias"),
        lambda _: torch.ones(1).expand(1 << 50),
    ),
    "a factor that is sparse": (
        "powersgd",
        ("lightning_ddp_hooks", "hook", "right", "net.2.weight"),
        lambda _: torch.ones(4).to_sparse(),
    ),
    "an average in words": ("diloco", ("lightning_ddp_hooks.averaging", "averager", "outer"), lambda _: "a"),
    "a replica of another shape": (
        "diloco",
        ("lightning_ddp_hooks.averaging", "replicas", "ranks", 0, "params", "net.0.bias"),
        lambda _: torch.ones(3, 5),
    ),
    "a replica of a petabyte": (
        "diloco",
        ("lightning_ddp_hooks.averaging", "averager", "outer", "net.0.bias"),
        lambda _: torch.ones(1).expand(1 << 50),
    ),
    "an optimizer of nothing": ("sharded", ("optimizer_states", 0), lambda _: None),
    "a position in words": ("uneven", ("loops", "fit_loop", "state_dict", "combined_loader", 0, "ranks", 0), str),
}
_SAID = r"damaged|shape|elements|The checkpoint"


def _errors_of_crafted(folder: str) -> dict[str, str]:
    """Change one entry of a checkpoint at a time; return the errors."""
    errors = {}
    for name in dict.fromkeys(name for name, _, _ in _DAMAGE.values()):
        own = Path(folder) / name
        fit(name, str(own))
        for what, (setting, where, change) in _DAMAGE.items():
            if setting != name:
                continue
            checkpoint = torch.load(own / "step=4.ckpt", weights_only=True)
            entry = checkpoint
            for key in where[:-1]:
                entry = entry[key]
            entry[where[-1]] = change(entry[where[-1]])
            path = own / "crafted.ckpt"
            torch.save(checkpoint, path)
            errors[what] = _text_of_error(name, str(path))
    return errors


def test_a_crafted_entry_is_told(tmp_path: Path) -> None:
    # On one rank: it is the same on all, since they have read the same file.
    (errors,) = run_ranks(_errors_of_crafted, str(tmp_path), world_size=1)
    assert errors.keys() == _DAMAGE.keys()
    for what, text in errors.items():
        assert re.match(rf"ValueError: .*({_SAID})", text), (what, text)


# ---------------------------------------------------------------------- nothing stays behind


def test_fits_in_one_process_leave_nothing_behind() -> None:
    kinds = ["hook, averager", "sharded optimizer", "raises, averager", "raises, uneven"]
    assert set(kinds) <= set(KINDS)
    for found in run_ranks(fit_in_turn, kinds, 3):
        for kind in kinds:
            assert not grown(found[kind]), kind
            assert found[kind][-1]["hooks"] == 0
            assert found[kind][-1]["groups"] == 1
