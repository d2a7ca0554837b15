"""The failure detector of a process: when it begins and ends, under a Trainer and in a training loop of the user's own.

                     Trainer                                  Fabric
    start            once the ranks have met                  when the first model is set up
    uncaught error   Strategy.on_exception                    sys.excepthook
    stop             teardown                                 exit of the process: Fabric has no end of training

[Note: work of the user's own] A loop may do on rank 0 alone what takes minutes, while other ranks are done and gone. So
only a rank that is in a backward, a step or a collective waits for the others; any other is on its way somewhere, and
is let be.
"""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.config import Settings
from lightning_ddp_hooks.health.failure_detector import FailureDetector
from lightning_ddp_hooks.health.heartbeat import Progress, blocking_collective
from lightning_ddp_hooks.health.report import LIKELY_CAUSE, attach_report
from lightning_ddp_hooks.lightning.uneven.inputs import Inputs

_runs = itertools.count()
_current: ProcessWatch | None = None


def start_detector(
    name: str,
    group: comm.ProcessGroup,
    timeout: float,
    where: Callable[[], Progress],
    launcher: Callable[[], Any],
    **options: Any,
) -> FailureDetector | None:
    """Start to watch over the ranks of a group; on all ranks. ``launcher`` returns what has started others."""
    try:
        store = comm.connect_store(f"ldh-health/{name}", timedelta(seconds=timeout))
    except (RuntimeError, NotImplementedError) as error:
        rank_zero_warn(f"No failure reports: the store cannot be connected to a second time: {error}")
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


class TrainerWatch:
    """A `FailureDetector` from the meeting of the ranks to the teardown of a Trainer's run."""

    def __init__(self) -> None:
        self._detector: FailureDetector | None = None

    def start(
        self,
        settings: Settings,
        progress: Callable[[], tuple[Progress, str]],
        inputs: Inputs,
        launcher: Callable[[], Any],
    ) -> None:
        """Start to watch over the other ranks; on all ranks, as soon as they have met.

        ``progress`` returns how far this rank has come, and what it is known to wait for, in words.
        """
        timeout = settings.failure_timeout
        if comm.world_size() == 1 or timeout is None:
            return
        thread = threading.get_ident()  # the one that trains

        def where() -> Progress:
            place, waits_for = progress()
            collectives = comm.collectives_begun() if comm.is_initialized() else 0
            if waits_for := waits_for or blocking_collective(thread):
                return Progress(place.step, place.synced_backwards, waits_for=waits_for, collectives=collectives)
            return replace(place, collectives=collectives)

        name, world = f"run-{next(_runs)}", comm.resolve_group(None)  # all ranks begin the same runs
        cause = f"{LIKELY_CAUSE} The callback `UnevenInputs` handles them."
        options = {
            "patient": True,
            "stall_timeout": settings.stall_timeout,
            "likely_cause": lambda: "" if inputs.uneven else cause,
        }
        self._detector = start_detector(name, world, timeout, where, launcher, **options)

    def set_up(self) -> None:
        """Take note that data are read and models built, so that there is less to wait for."""
        if self._detector is not None:
            self._detector.patient = False

    def explain(self, error: BaseException) -> None:
        """Tell the others of an error that this rank ends with; if it is their doing, have it say whose."""
        if self._detector is not None:
            explain(self._detector, error)

    def stop(self) -> None:
        """End the watch, while the reducer still is there."""
        if self._detector is not None:
            self._detector.stop()
            self._detector = None


class ProcessWatch:
    """A `FailureDetector` that ends with the process."""

    def __init__(self, detector: FailureDetector) -> None:
        self._detector = detector
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
            explain(self._detector, error)

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
        self._detector.stop()


def watch_process(
    group: comm.ProcessGroup, timeout: float, where: Callable[[], tuple[Progress, bool]], launcher: Callable[[], Any]
) -> None:
    """Watch over the ranks of a group, one used for no earlier watch, until the process ends; on all ranks.

    ``where`` tells how far this rank has come, and whether it may wait for others; see [Note: work of the user's own].
    """
    global _current
    stop_watching_process()
    ticks, thread = itertools.count(), threading.get_ident()

    def moving_or_waiting() -> Progress:
        place, waits = where()
        there = comm.is_initialized()  # otherwise there is nobody to wait for
        if there and (waits_for := blocking_collective(thread)):  # maybe one of the user's own
            return Progress(place.step, place.synced_backwards, waits_for=waits_for)
        return place if waits and there else replace(place, synced_backwards=next(ticks))

    detector = start_detector(comm.group_name(group), group, timeout, moving_or_waiting, launcher)
    _current = None if detector is None else ProcessWatch(detector)


def stop_watching_process() -> None:
    """End the watch of this process, if there is one; on all ranks."""
    global _current
    if _current is not None:
        _current.stop()
        _current = None
