"""The parts of failure detection, without other ranks: heartbeats, reports, and who is given up when."""

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.health.checks import NonfiniteGuard, check_replicas
from lightning_ddp_hooks.health.failure_detector import EXIT_CODE, FailureDetector
from lightning_ddp_hooks.health.heartbeat import (
    MAX_TEXT,
    Heartbeat,
    HeartbeatThread,
    PeerStatus,
    Progress,
    State,
    blocking_collective,
)
from lightning_ddp_hooks.health.logged import LoggedValues
from lightning_ddp_hooks.health.report import (
    LIKELY_CAUSE,
    deadlocked,
    failed_ranks,
    failure_report,
    lost_ranks,
    stalled_ranks,
)
from lightning_ddp_hooks.health.stacks import line_of
from lightning_ddp_hooks.hooks import Cast, Noop, PerParameter, PostLocalSGD, PowerSGD, Rule, Schedule, Stage
from lightning_ddp_hooks.hooks.registry import resolve_hook
from lightning_ddp_hooks.reducer.bucket import Bucket, GradBucket
from lightning_ddp_hooks.reducer.layout import BucketLayout

HERE = Progress(3, 3, 1, 2, "bucket 0 ('a', 'b')")
PERIOD = 0.05


def _heartbeat(state: State = State.RUNNING, text: str = "") -> Heartbeat:
    return Heartbeat(1, Progress(2), state, text)


def test_a_heartbeat_survives_the_store() -> None:
    heartbeat = Heartbeat(7, HERE, State.FAILED, "Traceback: ü")
    assert Heartbeat.decode(heartbeat.encode()) == heartbeat


def test_of_a_long_text_the_end_is_kept() -> None:
    assert Heartbeat.decode(_heartbeat(State.FAILED, "x" * 10 * MAX_TEXT + "end").encode()).text.endswith("xend")
    assert len(_heartbeat(State.FAILED, "x" * 10 * MAX_TEXT).encode()) < 2 * MAX_TEXT


def test_only_ranks_that_ought_to_write_are_lost() -> None:
    peers = {
        1: PeerStatus(_heartbeat(), 9),
        2: PeerStatus(_heartbeat(State.FINISHED), 9),
        3: PeerStatus(_heartbeat(), 1),
    }
    assert lost_ranks(peers, 5) == [1]
    assert failed_ranks({0: PeerStatus(_heartbeat(State.FAILED), 0), **peers}) == [0]


def test_the_report_names_ranks_places_and_errors() -> None:
    peers = {
        1: PeerStatus(_heartbeat(), 9.4),
        2: PeerStatus(_heartbeat(State.FAILED, "ValueError: bad\n"), 0),
        3: PeerStatus(_heartbeat(), 0),
    }
    assert failure_report(0, HERE, peers, silent_s=5) == (
        "Rank 2 failed at step 2, outside a backward.\n"
        "Rank 1 died or was stopped: no sign of life for 9 s; it was last seen at step 2, outside a backward.\n"
        "Rank 0, this one, was at step 3, in a backward with 1 of 2 buckets sent, waiting for bucket 0 ('a', 'b').\n"
        "The error of rank 2:\n"
        "  ValueError: bad\n"
        "In short: rank 2 failed: ValueError: bad"
    )


def test_the_report_names_the_host_of_a_store_that_is_gone() -> None:
    report = failure_report(1, HERE, {}, silent_s=5, store_host="node0:29500")
    assert report.startswith("Rank 0 (store host, node0:29500) is unreachable")


def test_the_report_says_where_all_are_if_none_failed() -> None:
    report = failure_report(0, HERE, {1: PeerStatus(_heartbeat(State.FINISHED), 0)}, silent_s=5)
    assert "did ranks part ways?\nRank 1 (finished): step 2, outside a backward." in report
    assert report.splitlines()[-2] == LIKELY_CAUSE


def test_a_likely_cause_is_told_only_if_none_failed() -> None:
    peers = {1: _waits("a decision")}
    report = failure_report(0, HERE, peers, silent_s=5, are_deadlocked=True, likely_cause="The moon.")
    assert report.startswith("The ranks have parted ways")
    assert report.splitlines()[-2] == "The moon."
    assert report.splitlines()[-1].startswith("In short: The ranks have parted ways")
    assert "The moon." not in failure_report(0, HERE, {1: PeerStatus(_heartbeat(State.FAILED), 0)}, silent_s=5)
    assert LIKELY_CAUSE not in failure_report(0, HERE, peers, silent_s=5, are_deadlocked=True, likely_cause="")
    for state in (State.FAILED, State.GAVE_UP):
        assert LIKELY_CAUSE not in failure_report(0, HERE, {1: PeerStatus(_heartbeat(state, "Why."), 0)}, silent_s=5)
    assert LIKELY_CAUSE not in failure_report(0, HERE, {1: PeerStatus(_heartbeat(), 9)}, silent_s=5)


def test_a_rank_that_knows_nothing_itself_takes_the_word_of_one_that_gave_up() -> None:
    peers = {1: PeerStatus(_heartbeat(State.GAVE_UP, "Rank 2 died or was stopped."), 0), 2: PeerStatus(_heartbeat(), 0)}
    report = failure_report(0, HERE, peers, silent_s=5)
    assert report.startswith("Rank 1 gave up: Rank 2 died or was stopped.\nRank 0, this one, was at step 3")


def _waits(
    what: str, *, buckets: int = 0, idle_s: float = 9, state: State = State.RUNNING, silent_s: float = 0
) -> PeerStatus:
    return PeerStatus(Heartbeat(1, Progress(2, 2, buckets, buckets, what), state), silent_s, idle_s)


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([_waits("a decision")], True),
        ([_waits("bucket 0", buckets=2)], True),
        ([_waits("a value")], False),  # the same as this rank: the network is slow
        ([_waits("")], False),  # it computes
        ([_waits("a decision", idle_s=1)], False),  # it has only just come there
        ([_waits("a decision", state=State.FINISHED)], False),
        ([_waits("a decision", silent_s=4)], False),  # it was stopped there, and may well have been on its way
        ([_waits("a decision"), _waits("")], False),
        ([_waits("a decision"), _waits("a value")], True),
        ([], False),  # nothing is known of them
    ],
)
def test_ranks_have_parted_only_if_all_wait_and_not_for_the_same(others: list[PeerStatus], expected: bool) -> None:
    here = Progress(2, waits_for="a value")
    assert deadlocked(here, dict(enumerate(others, 1)), max(2, 1 + len(others)), 5) is expected


def test_ranks_in_a_backward_wait_for_the_same() -> None:
    here = Progress(2, 2, 1, 2, "bucket 0")
    assert not deadlocked(here, {1: _waits("bucket 1", buckets=2)}, 2, 5)


SENDS = Progress(3, 3, 1, 2, "bucket 0 ('a')")


def _at(progress: Progress, *, idle_s: float = 9, state: State = State.RUNNING, silent_s: float = 0) -> PeerStatus:
    return PeerStatus(Heartbeat(1, progress, state), silent_s, idle_s)


@pytest.mark.parametrize(
    ("others", "stalled"),
    [
        ([_at(Progress(3))], [1]),  # in its forward, or anywhere
        ([_at(Progress(3, 2, 1, 2))], [1]),  # in its backward, and not waiting
        ([_at(Progress(3)), _at(SENDS)], [1]),
        ([_at(Progress(3)), _at(Progress(3))], [1, 2]),
        ([_at(SENDS)], []),  # a slow network
        ([_at(Progress(3), idle_s=1)], []),  # gets on
        ([_at(Progress(3), silent_s=4)], []),  # may be gone
        ([_at(Progress(3), state=State.FINISHED)], []),
        ([_at(Progress(3)), _at(Progress(3, waits_for="`barrier` called by fit"))], []),  # maybe for rank 1
    ],
)
def test_a_rank_is_stalled_only_while_all_others_wait_for_its_gradients(
    others: list[PeerStatus], stalled: list[int]
) -> None:
    peers = dict(enumerate(others, 1))
    assert stalled_ranks(SENDS, peers, len(peers) + 1, 5) == stalled
    assert stalled_ranks(SENDS, peers, len(peers) + 2, 5) == []
    assert stalled_ranks(Progress(3), peers, len(peers) + 1, 5) == []


def test_a_stalled_rank_is_named_with_its_line() -> None:
    peers = {1: PeerStatus(Heartbeat(1, Progress(3), line="`f` (a.py:3)"), 0, 31.0)}
    report = failure_report(0, SENDS, peers, silent_s=5, stalled=[1], line="`fit` (b.py:9) in `wait` (x.py:1)")
    assert report == (
        "Rank 1 has made no progress for 31 s, while others wait for its gradients: it is at step 3, outside a "
        "backward, in `f` (a.py:3). If it has work of its own that takes so long, set `stall_timeout`.\n"
        "Rank 0, this one, was at step 3, in a backward with 1 of 2 buckets sent, waiting for bucket 0 ('a'), in "
        "`fit` (b.py:9) in `wait` (x.py:1).\n"
        "In short: Rank 1 has made no progress for 31 s, while others wait for its gradients"
    )


def test_the_line_of_a_thread_is_the_users() -> None:
    assert line_of(threading.get_ident()).startswith("`test_the_line_of_a_thread_is_the_users` (test_health.py:")
    places: list[str] = []
    with torch.autograd.set_grad_enabled(True):
        x = torch.ones(1, requires_grad=True)
        x.register_hook(lambda grad: places.append(line_of(threading.get_ident())))
        x.sum().backward()
    assert "test_health.py" in places[0]
    assert line_of(-1) == ""


def _look_at_a_blocked_thread(size: int) -> str:
    tensor, found = torch.zeros(size), ""
    thread = threading.Thread(target=dist.broadcast, args=(tensor, 0))
    if dist.get_rank() == 0:
        time.sleep(0.4)
    thread.start()
    deadline = time.monotonic() + 0.3
    while dist.get_rank() and not found and time.monotonic() < deadline:
        assert thread.ident is not None
        found = blocking_collective(thread.ident)
    thread.join()
    return found


@pytest.mark.ranks
def test_the_collective_in_which_a_thread_is_blocked_is_found() -> None:
    root, other = run_ranks(_look_at_a_blocked_thread, 4)
    assert root == ""
    assert other.startswith("`broadcast` in run (threading.py:")
    assert run_ranks(_look_at_a_blocked_thread, 1 << 20) == ["", ""]  # it may be on its way


def test_no_collective_is_found_where_there_is_none() -> None:
    assert blocking_collective(threading.get_ident()) == ""


@pytest.mark.parametrize(
    ("module", "name", "waits"),
    [
        ("torch.distributed.distributed_c10d", "barrier", True),
        ("torch.distributed.distributed_c10d", "_object_to_tensor", False),
        ("torch.distributed.checkpoint.filesystem", "save", False),
    ],
)
def test_work_within_torchs_package_is_not_taken_for_a_wait(module: str, name: str, waits: bool) -> None:
    begun, over = threading.Event(), threading.Lock()
    space: dict[str, Any] = {"__name__": module, "begun": begun, "over": over}
    exec(f"def {name}():\n    begun.set()\n    over.acquire()\n", space)  # blocks in C, as fsync and gloo do
    with over:
        thread = threading.Thread(target=space[name], daemon=True)
        thread.start()
        begun.wait(5)
        time.sleep(0.05)
        assert thread.ident is not None
        assert bool(blocking_collective(thread.ident)) == waits
    thread.join(5)


# ---------------------------------------------------------------------- two ranks in one process


class Ranks:
    """A failure detector for rank 0, and a rank 1 that only sends heartbeats."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.exits: list[int] = []
        self.step = itertools.repeat(0)
        self.threads: list[HeartbeatThread] = []
        self.other = self.start_thread()
        self.detector = FailureDetector(
            self.store,
            0,
            2,
            lambda: Progress(next(self.step)),
            timeout=6 * PERIOD,
            store_host="here",
            exit_process=self.exits.append,
        )

    def start_thread(self) -> HeartbeatThread:
        thread = HeartbeatThread(self.store, 1, 2, lambda: Progress(5), PERIOD)
        thread.start()
        self.threads.append(thread)
        return thread


@pytest.fixture
def two() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.detector.stop()
    for thread in ranks.threads:
        thread.stop(5)


def _within(seconds: float, condition: Callable[[], object]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(PERIOD / 2)
    return bool(condition())


def test_nobody_is_given_up_while_all_live(two: Ranks) -> None:
    time.sleep(20 * PERIOD)
    assert not two.exits
    assert _aborts() == 0


def test_a_silent_rank_does_not_matter_while_this_one_makes_progress(two: Ranks) -> None:
    two.step = itertools.count()
    two.other.stop(5)
    time.sleep(20 * PERIOD)
    assert not two.exits


def test_a_process_that_does_not_come_back_is_ended_with_the_report(
    two: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    two.other.stop(5)
    assert _within(5, lambda: two.exits == [EXIT_CODE])
    assert "Rank 1 died or was stopped" in capsys.readouterr().err


def test_a_main_thread_that_comes_back_is_given_the_report(two: Ranks) -> None:
    two.other.send_last(State.FAILED, "ValueError: bad", 5)
    report = two.detector.explain(RuntimeError("gloo: Connection closed by peer"))
    assert report is not None
    assert "Rank 1 failed at step 5" in report
    assert "ValueError: bad" in report
    time.sleep(10 * PERIOD)
    assert not two.exits


def test_a_signal_whose_handler_raises_does_not_break_the_report_off(two: Ranks) -> None:
    def handler(*_: object) -> None:
        raise RuntimeError("a collective in a handler of signals")

    before = signal.signal(signal.SIGUSR2, handler)
    timer = threading.Timer(2 * PERIOD, os.kill, (os.getpid(), signal.SIGUSR2))
    two.other.stop(5)
    timer.start()
    try:
        report = two.detector.explain(RuntimeError("gloo: Connection closed by peer"))
    finally:
        timer.join()
        signal.signal(signal.SIGUSR2, before)
    assert report is not None
    assert "Rank 1 died or was stopped" in report


def test_an_error_of_ones_own_is_told_and_not_explained(two: Ranks) -> None:
    assert two.detector.explain(ValueError("mine")) is None
    two.other.reads_peers = True
    assert _within(5, lambda: failed_ranks(two.other.peers()) == [0])
    assert "ValueError: mine" in two.other.peers()[0].heartbeat.text


def test_a_rank_that_has_ended_is_not_lost(two: Ranks) -> None:
    two.other.send_last(State.FINISHED, "", 5)
    two.other.stop(5)
    time.sleep(20 * PERIOD)
    assert not two.exits


def _aborts() -> int:
    return sum(thread.name == "ldh-abort" for thread in threading.enumerate())


# ---------------------------------------------------------------------- checks over ranks


def _check(dtype: torch.dtype, differ: bool) -> str:
    group = comm.new_group(comm.resolve_group(None), cpu=True)
    params = [torch.ones(3, 4).to(dtype), torch.zeros(0).to(dtype), torch.ones(2, 2).to(dtype).t()]
    if differ and comm.rank() == 1:
        params[2][0, 1] = 2
    try:
        check_replicas(["a", "b", "c"], params, group, "now")
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64], ids=str)
def test_replicas_are_compared_bit_by_bit(dtype: torch.dtype) -> None:
    assert run_ranks(_check, dtype, False) == ["", ""]
    for text in run_ranks(_check, dtype, True, world_size=3):
        assert "apart now: 'c' differs between ranks 0, 2 and rank 1 (1 of 3 parameters differ)" in text


def _told(look: Callable[[NonfiniteGuard, float], None]) -> str:
    guard = NonfiniteGuard(comm.new_group(comm.resolve_group(None), cpu=True))
    look(guard, float("inf") if comm.rank() == 1 else 1.0)
    try:
        guard.check(4)
    except RuntimeError as error:
        guard.check(5)  # what was told is forgotten
        return str(error)
    return ""


def _bucket(*gradients: Tensor) -> GradBucket:
    params = [torch.zeros_like(gradient) for gradient in gradients]
    bucket = Bucket(BucketLayout.build(range(len(params)), params), params)
    for view, gradient in zip(bucket.views, gradients, strict=True):
        view.copy_(gradient)
    return GradBucket(bucket, 0, True, tuple("abcdef"[: len(params)]), 2.0)


def _look_at_buckets(guard: NonfiniteGuard, factor: float) -> None:
    whole, bad, pair = torch.ones(3), torch.tensor([[1.0, factor]]), torch.tensor([complex(1, factor - factor)])
    guard.look(_bucket(whole, bad, whole * factor))
    guard.look(_bucket(torch.full((9,), 60000.0, dtype=torch.float16)))  # finite, though a sum in half precision is not
    later = _bucket(pair)
    guard.look(later)
    later.buffer().zero_()  # reduced meanwhile


def _look_in_order(guard: NonfiniteGuard, factor: float) -> None:
    guard.order = ["c", "a", "b"]
    _look_at_buckets(guard, factor)


def _look_at_sparse(guard: NonfiniteGuard, factor: float) -> None:
    table = torch.nn.Embedding(3, 2, sparse=True)
    (table(torch.tensor([0, 0])).sum() * factor).backward()
    assert table.weight.grad is not None
    guard.look_at("table", table.weight.grad)


def _look_at_all(guard: NonfiniteGuard, factor: float) -> None:
    gradients = [torch.ones(2), None, torch.ones(1).half(), torch.full((2, 2), factor), torch.ones(0)]
    guard.look_at_all(zip("abcde", gradients, strict=True))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("look", "found"),
    [
        (_look_at_buckets, "'b' (and of 2 more parameters)"),
        (_look_in_order, "'c' (and of 2 more parameters)"),
        (_look_at_sparse, "'table'"),
        (_look_at_all, "'d'"),
    ],
)
def test_gradients_that_are_not_finite_are_told_by_all(
    look: Callable[[NonfiniteGuard, float], None], found: str
) -> None:
    for text in run_ranks(_told, look):
        assert f"in step 4, before any exchange: rank 1: the gradient of {found}. " in text


def _log_on_a_device_that_is_neither_cpu_nor_cuda() -> tuple[bool, float]:
    logged = LoggedValues(torch.device("xpu"), lambda: 0)
    with logged.entry("training_step", "loss"):
        value = float(logged.reduce(torch.tensor(float(comm.rank())), "mean"))
    return logged._device_group is logged._host_group, value


@pytest.mark.ranks
def test_values_of_any_device_and_of_the_host_have_groups_of_their_own() -> None:
    assert run_ranks(_log_on_a_device_that_is_neither_cpu_nor_cuda) == [(False, 0.5)] * 2


# ---------------------------------------------------------------------- what hooks make of replicas


def test_it_is_known_from_when_on_hooks_leave_replicas_different() -> None:
    local = PostLocalSGD(start_local_sgd_iter=7)
    assert PowerSGD(rank=2).replicas_differ_from() is Cast("powersgd", torch.bfloat16).replicas_differ_from() is None
    assert local.replicas_differ_from() == Cast(local, "float16").replicas_differ_from() == 7
    assert Noop().replicas_differ_from() == 0
    assert Schedule([Stage(5, "noop")]).replicas_differ_from() == 5
    assert PerParameter([Rule(local, min_numel=5)], default="fp16").replicas_differ_from() == 7
    unknown = resolve_hook((None, lambda state, bucket: bucket.buffer()))
    assert unknown is not None
    assert unknown.replicas_differ_from() == 0
