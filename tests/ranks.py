"""Run a function on several gloo ranks; bring results, skips and failures back to pytest.

Data flow: ``run_ranks`` starts one process per rank -> ``_rank_main`` joins the world, calls the function and sends
one ``_Outcome`` down its pipe -> ``_collect`` gathers them -> ``run_ranks`` returns the values or fails the test.
The ranks meet through a store of the parent, on a port that the system chooses: through a file they would wait for
its next look at it, each time that a group is made.
"""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, cast

import pytest
import torch
import torch.distributed as dist

# A fork server that has already imported the slow modules starts a rank in a fraction of a second; ``spawn`` would
# import them again in every rank of every test.
_MP = multiprocessing.get_context("forkserver")
_MP.set_forkserver_preload(["torch.distributed", "lightning.pytorch", "lightning_ddp_hooks", "pytest"])

# Once one rank has failed, how long the others get to report what they saw.
_GRACE_S = 2.0

# The kinds of outcome that fail a test, the likeliest culprit first.
_BAD = ("died", "failed")


@dataclass(frozen=True)
class _Job:
    """What every rank is to do, and the state of the parent that it is to do it in."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    world_size: int
    timeout: float
    environ: dict[str, str]
    warning_filters: list[tuple[Any, ...]]


@dataclass(frozen=True)
class _Outcome:
    """How one rank ended: its function's value, its reason to skip, its traceback, or how its process died."""

    kind: Literal["returned", "skipped", "failed", "died"]
    payload: Any
    at: float = field(default_factory=time.monotonic)  # one clock for all processes of a machine


def run_ranks(fn: Callable[..., Any], *args: Any, world_size: int = 2, timeout: float = 60.0) -> list[Any]:
    """Run ``fn(*args)`` on every rank of a fresh gloo world and return the results in rank order.

    Inside ``fn`` the process group is initialized and the environment is that of torchrun, so that a Trainer joins
    this world instead of launching one. The environment variables, working directory and warning filters of the
    calling test hold there too. ``LDH_TEST_BACKEND`` names another backend than gloo. Random numbers start from the
    same seed on each rank.

    The test fails if any rank fails; the report starts with the rank that failed first. A rank that is still running
    after ``timeout`` seconds is reported with its stack. Ranks that skip, skip the test.

    Args:
        fn: A module-level function. It is pickled by name, and its value by copy.
        *args: Its arguments, the same on every rank.
        world_size: How many ranks to run.
        timeout: Seconds that all ranks together may take.
    """
    job = _Job(fn, args, world_size, timeout, dict(os.environ), list(warnings.filters))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory(prefix="ranks-") as tmp:
        ranks: list[_Rank] = []
        try:
            ranks += (_Rank(job, index, store.port, Path(tmp)) for index in range(world_size))
            outcomes = _collect(ranks, timeout)
            _raise_unless_all_returned(ranks, outcomes)
        finally:
            for rank in ranks:
                rank.close()
    return [outcomes[rank.index].payload for rank in ranks]


class _Rank:
    """The parent's end of one rank: its process, its pipe, and the file that its stack goes to."""

    def __init__(self, job: _Job, index: int, port: int, tmp: Path) -> None:
        self.index = index
        self._stack_file = tmp / f"stack-{index}"
        self.conn, child_conn = _MP.Pipe(duplex=False)
        # Not a daemon: daemons may not start processes, and a rank may want DataLoader workers.
        self._process = _MP.Process(
            target=_rank_main, args=(job, index, port, self._stack_file, child_conn), daemon=False
        )
        self._process.start()
        child_conn.close()  # else the pipe of a dead rank would never read as closed

    def receive(self) -> _Outcome:
        """Read what the rank sent, or find out how it died."""
        try:
            outcome = pickle.loads(self.conn.recv_bytes())
        except EOFError:
            self._process.join()
            return _Outcome("died", _describe_exit(self._process.exitcode))
        return cast("_Outcome", outcome)

    def stack(self) -> str:
        """Ask the running rank for its Python stack; works even while it is blocked in C++."""
        if not self._stack_file.exists():
            return "not started yet: it is still importing the test module"
        assert self._process.pid is not None
        try:
            os.kill(self._process.pid, signal.SIGUSR1)
        except ProcessLookupError:
            return "it has ended since"
        # faulthandler gives no sign that it is done: read until the stack stops growing.
        written, stack = -1, ""
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and not (stack and len(stack) == written):
            written = len(stack)
            time.sleep(0.1)
            stack = self._stack_file.read_text()
        return stack or "it does not answer"

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self.conn.close()


def _collect(ranks: list[_Rank], timeout: float) -> dict[int, _Outcome]:
    """Gather outcomes until all are there, the time is up, or one has failed and the others had their chance."""
    outcomes: dict[int, _Outcome] = {}
    waiting = {rank.conn: rank for rank in ranks}
    deadline = time.monotonic() + timeout
    while waiting and (left := deadline - time.monotonic()) > 0:
        for conn in cast("list[Connection]", wait(list(waiting), timeout=left)):
            rank = waiting.pop(conn)
            outcomes[rank.index] = rank.receive()
            if outcomes[rank.index].kind in _BAD:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    return outcomes


def _raise_unless_all_returned(ranks: list[_Rank], outcomes: dict[int, _Outcome]) -> None:
    # The first to raise made the others fail. A death is noticed later than the complaints about it; but peers never
    # make a process die, so deaths go first.
    bad = sorted(
        (_BAD.index(outcome.kind), outcome.at, index) for index, outcome in outcomes.items() if outcome.kind in _BAD
    )
    report = [f"rank {index} {outcomes[index].kind}:\n{outcomes[index].payload}" for _, _, index in bad]
    report += [f"rank {rank.index} was still running:\n{rank.stack()}" for rank in ranks if rank.index not in outcomes]
    if report:
        pytest.fail("\n".join(report), pytrace=False)
    for outcome in outcomes.values():
        if outcome.kind == "skipped":
            pytest.skip(outcome.payload)


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"


def _rank_main(job: _Job, index: int, port: int, stack_file: Path, conn: Connection) -> None:
    """Be rank ``index``: the function that runs in the rank's own process."""
    with stack_file.open("w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack)
        try:
            _adopt_state(job, index)
            outcome = _run_in_world(job, index, port)
            # A plain pickle copies tensors. ``conn.send`` would share their memory, which fails when this process is
            # gone before the parent looks.
            message = pickle.dumps(outcome)
        except BaseException:
            conn.send_bytes(pickle.dumps(_Outcome("failed", traceback.format_exc())))
            os._exit(1)  # tearing the world down would wait for peers that are stuck in a collective
        conn.send_bytes(message)


def _adopt_state(job: _Job, index: int) -> None:
    """Take over the parent's environment and warning filters, and add what torchrun would set."""
    os.environ.clear()
    os.environ.update(
        job.environ,
        RANK=str(index),
        LOCAL_RANK=str(index),
        WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",  # never dialled: the world exists before anybody looks for it
        TORCHELASTIC_RUN_ID="ranks",
        GLOO_SOCKET_IFNAME="lo" if sys.platform == "linux" else "lo0",
    )
    warnings.resetwarnings()
    for action, message, category, module, line in reversed(job.warning_filters):
        # Filters hold a compiled pattern, or a plain string, or None for "any".
        patterns = [getattr(part, "pattern", part) or "" for part in (message, module)]
        warnings.filterwarnings(action, patterns[0], category, patterns[1], line)
    torch.set_num_threads(1)  # ranks share the machine's few cores
    torch.manual_seed(0)


def backend() -> str:
    """Return the backend of the world, of which the package may be the maker."""
    import lightning_ddp_hooks  # noqa: F401

    return os.environ.get("LDH_TEST_BACKEND", "gloo")


def _run_in_world(job: _Job, index: int, port: int) -> _Outcome:
    timeout = timedelta(seconds=job.timeout)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timeout)  # type: ignore[attr-defined]
    dist.init_process_group(backend(), store=store, rank=index, world_size=job.world_size, timeout=timeout)
    dist.barrier()  # a rank that leaves early must not break one that is still connecting
    try:
        outcome = _Outcome("returned", job.fn(*job.args))
    except pytest.skip.Exception as skipped:
        outcome = _Outcome("skipped", str(skipped))
    if dist.is_initialized():  # unless the function has destroyed it
        dist.barrier()
        dist.destroy_process_group()
    return outcome
