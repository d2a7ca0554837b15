"""Do harm to one rank of several, and see how the others end.

Like ``ranks.py``, but here a rank's death is what is wanted: nothing fails the test, all endings are returned. The
ranks meet through a TCP store that rank 0 holds, as in a real run, so that the store dies with it.
"""

import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from ranks import _MP, _adopt_state, _Job, backend

_FAULT_FILE = "LDH_TEST_FAULT_FILE"
_PATIENCE = "LDH_TEST_PATIENCE"


@dataclass(frozen=True)
class Ended:
    """How a rank ended.

    Attributes:
        code: of the process; negative for a signal, None if it had to be killed in the end.
        error: the error with its traceback, or else what it wrote to stderr.
        value: what the function returned.
        seconds: from the fault to the end of the process.
    """

    code: int | None
    error: str
    value: Any
    seconds: float


def note_fault() -> None:
    """Note that the fault happens now."""
    if _FAULT_FILE not in os.environ:  # nobody asks for the time
        return
    with Path(os.environ[_FAULT_FILE]).open("a") as file:
        file.write(f"{time.monotonic()}\n")


def signal_self(number: signal.Signals) -> None:
    """Kill or stop this rank."""
    note_fault()
    os.kill(os.getpid(), number)


def run_with_fault(
    fn: Callable[..., Any], *args: Any, world_size: int = 4, timeout: float = 30.0, patience: float = 60.0
) -> list[Ended]:
    """Run ``fn(*args)`` on every rank, until all have ended but those that were stopped; return how, by rank.

    Args:
        fn: a module-level function; one of its ranks calls `note_fault` or `signal_self`.
        *args: its arguments.
        world_size: how many ranks to run.
        timeout: seconds that all may take; what runs longer is killed.
        patience: seconds that a collective on the default group may take.
    """
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        tmp = Path(name)
        environ = {**os.environ, _FAULT_FILE: str(tmp / "fault"), _PATIENCE: str(patience)}
        job = _Job(fn, args, world_size, timeout, environ, [])
        pipes = [_MP.Pipe(duplex=False) for _ in range(world_size)]
        processes = [_MP.Process(target=_main, args=(job, index, tmp, pipes[index][1])) for index in range(world_size)]
        try:
            for process in processes:
                process.start()
            for _, sender in pipes:
                sender.close()
            return _collect(processes, [receiver for receiver, _ in pipes], tmp / "fault", timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
                process.close()
            for receiver, _ in pipes:
                receiver.close()


def _collect(processes: list[Any], receivers: list[Connection], fault: Path, timeout: float) -> list[Ended]:
    deadline, ended_at = time.monotonic() + timeout, {}
    running = {process.sentinel: index for index, process in enumerate(processes)}
    while running and (left := deadline - time.monotonic()) > 0:
        for sentinel in cast("list[int]", wait(list(running), timeout=min(left, 0.2))):
            ended_at[running.pop(sentinel)] = time.monotonic()
        if all(_is_stopped(processes[index].pid) for index in running.values()):
            break
    start = float(fault.read_text().split()[0]) if fault.exists() else deadline - timeout
    endings = []
    for index, process in enumerate(processes):
        error, value = "", None
        if receivers[index].poll():
            with suppress(EOFError):
                error, value = pickle.loads(receivers[index].recv_bytes())
        code = process.exitcode if index in ended_at else None
        error = error or (fault.parent / f"stderr-{index}").read_text()
        endings.append(Ended(code, error, value, ended_at.get(index, time.monotonic()) - start))
    return endings


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def _main(job: _Job, index: int, tmp: Path, conn: Connection) -> None:
    """Be rank ``index``."""
    error, value, code = "", None, 0
    try:
        with (tmp / f"stderr-{index}").open("w") as stderr:
            os.dup2(stderr.fileno(), sys.stderr.fileno())
        _adopt_state(job, index)
        _join_world(index, job.world_size, tmp / "port")
        value = job.fn(*job.args)
    except BaseException:
        error, code = traceback.format_exc(), 1
    conn.send_bytes(pickle.dumps((error, value)))
    os._exit(code)


def _join_world(index: int, world_size: int, port_file: Path) -> None:
    if index == 0:
        store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
        (port_file.parent / "part").write_text(str(store.port))
        (port_file.parent / "part").rename(port_file)
    else:
        while not port_file.exists():
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int(port_file.read_text()), world_size, wait_for_workers=False)
    patience = timedelta(seconds=float(os.environ[_PATIENCE]))
    dist.init_process_group(backend(), store=store, rank=index, world_size=world_size, timeout=patience)
    dist.barrier()
