"""The failure detector of a process that runs a training loop of the user's own, under Fabric or without Lightning.

    start            when the first model is set up
    uncaught error   sys.excepthook
    stop             exit of the process: such a loop has no end that anybody is told of

[Note: work of the user's own] A loop may do on rank 0 alone what takes minutes, while other ranks are done and gone. So
only a rank that is in a backward, a step or a collective waits for the others; any other is on its way somewhere, and
does not judge them. If all others wait for its gradients for very long, they end, and name its line.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any, Protocol
from weakref import WeakSet, ref

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.health.failure_detector import FailureDetector
from lightning_ddp_hooks.health.heartbeat import Progress, blocking_collective
from lightning_ddp_hooks.health.report import LIKELY_CAUSE, attach_report

_LONG_WORK_S = 1200.0  # an evaluation on rank 0 alone, say; less than collectives may take by default
_current: ProcessWatch | None = None


class WatchedRun(Protocol):
    """What is watched of a model in training."""

    closed: bool

    def progress(self) -> Progress:
        """Tell how far it has come."""

    @property
    def may_wait(self) -> bool:
        """Whether it may be waiting for other ranks."""


def start_detector(
    name: str,
    group: comm.ProcessGroup,
    timeout: float,
    where: Callable[[], Progress],
    *,
    warn: Callable[[str], object],
    launcher: Callable[[], Any] = lambda: None,
    **options: Any,
) -> FailureDetector | None:
    """Start to watch over the ranks of a group; on all ranks. ``launcher`` returns what has started others."""
    try:
        store = comm.connect_store(f"ldh-health/{name}", timedelta(seconds=timeout))
    except (RuntimeError, NotImplementedError) as error:
        warn(f"No failure reports: the store cannot be connected to a second time: {error}")
        return None

    def exit_process(code: int) -> None:
        """End this process and those that it has started: one that was stopped would stay forever."""
        if children := getattr(launcher(), "procs", None):
            time.sleep(1)  # they may be writing their reports
            for child in children:
                child.kill()
        os._exit(code)

    options |= {"timeout": timeout, "store_host": comm.store_host(), "exit_process": exit_process}
    return FailureDetector(store, comm.rank(group), comm.world_size(group), where, **options)


def explain(detector: FailureDetector, error: BaseException) -> None:
    """Tell the others of an error that this rank ends with; if it is their doing, have it say whose."""
    if (report := detector.explain(error)) is not None:  # whoever raises this very exception again shows it
        attach_report(error, report)


class ProcessWatch:
    """A `FailureDetector` over the ranks of a group that ends with the process, or with its process groups."""

    def __init__(
        self, group: comm.ProcessGroup, timeout: float, stall_timeout: float | None, cause: str, **options: Any
    ) -> None:
        self.world = ref(comm.resolve_group(None))  # the user may destroy it and make another
        self.timeouts = timeout, stall_timeout
        self.runs: WeakSet[Any] = WeakSet()
        self._thread = threading.get_ident()  # the one that trains
        self._explained = self._stopped = False
        options |= {"stall_timeout": stall_timeout or max(timeout, _LONG_WORK_S), "likely_cause": lambda: cause}
        self._detector = start_detector(comm.group_name(group), group, timeout, self._where, **options)
        if self._detector is None:
            return
        self._hook_before = sys.excepthook
        sys.excepthook = self._uncaught
        # The first for a script, while its groups still are there; the second for processes of `multiprocessing`, which
        # may end without calling what is registered with `atexit`.
        atexit.register(self.stop)
        Finalize(None, self._process_ends, exitpriority=0)

    def _where(self) -> Progress:
        places = [(run.progress(), run.may_wait) for run in list(self.runs) if not run.closed]
        # The model that is being trained now, or else the one that has come furthest.
        place, waits = max(places, key=lambda place: (place[1], place[0].step), default=(Progress(0), False))
        if not comm.is_initialized():  # there is nobody to wait for
            return replace(place, busy=True)
        if waits_for := blocking_collective(self._thread):  # maybe one of the user's own
            return Progress(place.step, place.synced_backwards, waits_for=waits_for)
        return replace(place, busy=not waits)

    def _uncaught(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        try:
            if not isinstance(error, KeyboardInterrupt):
                self._explain(error)
        finally:
            self._hook_before(kind, error, traceback)

    def _explain(self, error: BaseException) -> None:
        if self._detector is not None and not (self._explained or self._stopped):
            self._explained = True
            explain(self._detector, error)

    def _process_ends(self) -> None:
        # torch ends a process in which the user's function has failed by `sys.exit`.
        ending = sys.exc_info()[1]
        if isinstance(ending, SystemExit) and ending.code and ending.__context__ is not None:
            self._explain(ending.__context__)
        self.stop()

    def stop(self) -> None:
        """End the watch: this rank has finished."""
        if self._stopped or self._detector is None:
            return
        self._stopped = True
        atexit.unregister(self.stop)
        if sys.excepthook == self._uncaught:
            sys.excepthook = self._hook_before
        self._detector.stop()


def watch_run(
    run: WatchedRun,
    group: comm.ProcessGroup,
    timeout: float | None,
    stall_timeout: float | None,
    *,
    warn: Callable[[str], object],
    cause: str = LIKELY_CAUSE,
    **options: Any,
) -> None:
    """Watch over the ranks that train a model, until the process ends; on all ranks.

    The first model of a process begins the watch, over ``group``, which no earlier watch has used. Further ones, which
    are set up while the same ranks are connected, join it.
    """
    global _current
    if timeout is None or comm.world_size(group) == 1:
        return
    warn = warn if comm.rank(group) == 0 else str
    if _current is None or _current.world() is not comm.resolve_group(None):
        stop_watching_process()
        _current = ProcessWatch(group, timeout, stall_timeout, cause, warn=warn, **options)
    elif _current.timeouts != (timeout, stall_timeout):
        first = "`failure_timeout={}` and `stall_timeout={}`".format(*_current.timeouts)
        warn(f"The whole process has the time-outs of the first model that was set up: {first}.")
    _current.runs.add(run)


def stop_watching_process() -> None:
    """End the watch of this process, if there is one; on all ranks."""
    global _current
    if _current is not None:
        _current.stop()
        _current = None
