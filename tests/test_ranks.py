"""The rank harness itself: what a test gets back when ranks return, skip, fail, die or hang."""

import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

pytestmark = pytest.mark.ranks


def _report(fn: Any, *args: Any, **kwargs: Any) -> str:
    """The message with which ``run_ranks`` fails the test."""
    with pytest.raises(pytest.fail.Exception) as failure:
        run_ranks(fn, *args, **kwargs)
    return str(failure.value)


def _sum_of_ranks(scale: float) -> torch.Tensor:
    total = torch.tensor([scale * dist.get_rank()])
    dist.all_reduce(total)
    return torch.cat([torch.tensor([float(dist.get_rank())]), total])


def test_results_come_back_in_rank_order() -> None:
    results = run_ranks(_sum_of_ranks, 10.0, world_size=3)

    assert [result.tolist() for result in results] == [[0.0, 30.0], [1.0, 30.0], [2.0, 30.0]]


def _environment() -> tuple[str, ...]:
    return (*(os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OF_THE_TEST")), str(Path.cwd()))


def test_ranks_see_torchrun_variables_and_the_state_of_the_test(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OF_THE_TEST", "yes")
    monkeypatch.chdir(tmp_path)

    assert run_ranks(_environment) == [(str(rank), str(rank), "2", "yes", str(tmp_path)) for rank in range(2)]


def _draw() -> float:
    return torch.rand(()).item()


def test_every_rank_starts_from_the_same_seed() -> None:
    first, second = run_ranks(_draw)

    assert first == second


def _warn_then_return() -> str:
    warnings.warn("just a word", UserWarning, stacklevel=1)
    return "went on"


@pytest.mark.filterwarnings("error:just a word:UserWarning")
def test_warnings_are_errors_on_ranks_too() -> None:
    assert "UserWarning: just a word" in _report(_warn_then_return)


@pytest.mark.filterwarnings("ignore:just a word:UserWarning")
def test_the_filters_of_a_test_hold_on_its_ranks() -> None:
    assert run_ranks(_warn_then_return) == ["went on", "went on"]


def _destroy_the_group() -> str:
    dist.destroy_process_group()
    return "done"


def test_the_function_may_destroy_the_process_group() -> None:
    assert run_ranks(_destroy_the_group) == ["done", "done"]


def _skip() -> None:
    pytest.skip("not on this machine")


def test_a_skip_on_the_ranks_skips_the_test() -> None:
    with pytest.raises(pytest.skip.Exception, match="not on this machine"):
        run_ranks(_skip)


def _fail_on(culprit: int) -> None:
    if dist.get_rank() == culprit:
        raise ValueError("the cause")
    dist.barrier()


def test_the_traceback_of_the_failing_rank_comes_first() -> None:
    report = _report(_fail_on, 1)

    assert report.startswith("rank 1 failed:\nTraceback")
    assert "ValueError: the cause" in report
    assert report.index("the cause") < report.index("rank 0")


def _unpicklable() -> Any:
    return lambda: None


def test_a_value_that_cannot_be_pickled_is_reported() -> None:
    assert "pickle" in _report(_unpicklable)


def _hang_on(culprit: int) -> None:
    if dist.get_rank() == culprit:
        _sleep_for_long()


def _sleep_for_long() -> None:
    time.sleep(600)


def test_a_hung_rank_reports_its_stack() -> None:
    start = time.monotonic()
    report = _report(_hang_on, 1, timeout=3)

    assert time.monotonic() - start < 30
    assert "rank 1 was still running:" in report
    assert "in _sleep_for_long" in report
    assert "in _hang_on" in report


def _kill_on(culprit: int) -> None:
    if dist.get_rank() == culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_killed_rank_is_reported_first() -> None:
    assert _report(_kill_on, 0).startswith("rank 0 died:\nkilled by SIGKILL")


def _exit_on(culprit: int) -> None:
    if dist.get_rank() == culprit:
        os._exit(3)
    dist.barrier()


def test_a_rank_that_exits_is_reported_with_its_code() -> None:
    assert _report(_exit_on, 1).startswith("rank 1 died:\nexited with code 3")


def _pid() -> int:
    return os.getpid()


def test_no_process_outlives_the_call() -> None:
    for pid in run_ranks(_pid):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
