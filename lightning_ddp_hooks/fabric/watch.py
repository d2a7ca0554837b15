"""The watch over other ranks in a process whose training loop is the user's own: when it begins and ends.

    first model set up   start(...)
    uncaught exception   sys.excepthook: tell the others; if it is their doing, say whose
    exit                 stop(): tell the others that this rank has finished

There is one watch in a process, since it ends with the process: Fabric has no end of training.

[Note: work of the user's own] A loop may do on rank 0 alone what takes minutes, while other ranks are done and gone. So
only a rank that is in a backward or a step waits for the others; any other is on its way somewhere, and is let be.
"""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from multiprocessing.util import Finalize
from types import TracebackType

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.health.failure_detector import FailureDetector
from lightning_ddp_hooks.health.heartbeat import Progress
from lightning_ddp_hooks.health.report import attach_report

_current: FabricWatch | None = None


class FabricWatch:
    """A `FailureDetector` that ends with the process.

    Args:
        watch: the watch.
    """

    def __init__(self, watch: FailureDetector) -> None:
        self._watch = watch
        self._explained = self._stopped = False
        self._hook_before = sys.excepthook
        sys.excepthook = self._uncaught
        # The first for a script, while its groups still are there; the second for processes of `multiprocessing`, which
        # may end without calling what is registered with `atexit`.
        atexit.register(self.stop)
        Finalize(None, self._process_ends, exitpriority=0)

    def _uncaught(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        try:
            if not isinstance(error, KeyboardInterrupt):
                self._explain(error)
        finally:
            self._hook_before(kind, error, traceback)

    def _explain(self, error: BaseException) -> None:
        if not (self._explained or self._stopped):
            self._explained = True
            report = self._watch.explain(error)
            if report is not None:
                attach_report(error, report)

    def _process_ends(self) -> None:
        # torch ends a process in which the user's function has failed by `sys.exit`.
        ending = sys.exc_info()[1]
        if isinstance(ending, SystemExit) and ending.code and ending.__context__ is not None:
            self._explain(ending.__context__)
        self.stop()

    def stop(self) -> None:
        """End the watch: this rank has finished."""
        if self._stopped:
            return
        self._stopped = True
        atexit.unregister(self.stop)
        if sys.excepthook == self._uncaught:
            sys.excepthook = self._hook_before
        self._watch.stop()


def start(
    group: comm.ProcessGroup,
    timeout: float,
    where: Callable[[], tuple[Progress, bool]],
    exit_process: Callable[[int], object] = os._exit,
) -> str | None:
    """Watch over the ranks of a group from now on, in the place of a watch that is there already; on all ranks.

    Args:
        group: made for this purpose or another one, but used for no earlier watch.
        timeout: seconds of silence after which a rank is given up.
        where: tells how far this rank has come, and whether it is where it may wait for others; see [Note: work of the
            user's own].
        exit_process: ends a process that does not come back from a collective.

    Returns:
        Why there can be no watch, or None.
    """
    global _current
    stop()
    try:
        store = comm.connect_store(f"ldh-health/{comm.group_name(group)}", timedelta(seconds=timeout))
    except (RuntimeError, NotImplementedError) as error:
        return f"No failure reports: the store cannot be connected to a second time: {error}"
    ticks = itertools.count()

    def moving_or_waiting() -> Progress:
        place, waits = where()
        # Without groups there is nobody to wait for.
        return place if waits and comm.is_initialized() else replace(place, synced_backwards=next(ticks))

    watch = FailureDetector(
        store,
        comm.rank(group),
        comm.world_size(group),
        moving_or_waiting,
        timeout=timeout,
        store_host=comm.store_host(),
        exit_process=exit_process,
    )
    _current = FabricWatch(watch)
    return None


def stop() -> None:
    """End the watch of this process, if there is one; on all ranks."""
    global _current
    if _current is not None:
        _current.stop()
        _current = None


def kill_children(children: object) -> None:
    """End the processes that a launcher has started, once they have had time to write their reports."""
    if isinstance(children, list) and children:
        time.sleep(1)
        for child in children:
            child.kill()
