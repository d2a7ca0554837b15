"""Notice that another rank is gone, and end this one with an error that says so.

    this rank makes no progress ---> read the others' notes ---> one failed, or fell silent ---> abort the groups
                                                                                                       |
    main thread: the collective raises ---> `FailureDetector.explain` has the report <---------------------------+
                 ... or does not come back ---> the report goes to stderr, and the process ends

[Note: a thread that waits within a collective] It cannot be raised into. A peer that died closes its connections, so
that gloo raises by itself. One that was stopped, or whose host is gone, does not, and gloo has no way to break a wait
off: there the process has to end. NCCL's collectives fail when their group is aborted.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.health.heartbeat import Progress, State
from lightning_ddp_hooks.health.heartbeat_thread import HeartbeatThread
from lightning_ddp_hooks.health.report import (
    LIKELY_CAUSE,
    accounts,
    deadlocked,
    failed_ranks,
    failure_report,
    lost_ranks,
)

# A rank whose note stays the same for so many periods is gone, once it is known that something is wrong.
_MISSED = 4
# While data are read and models built, in calls that may let no other thread run for long.
_PATIENCE = 10
EXIT_CODE = 70


class FailureDetector:
    """Watches over the other ranks from the start of a fit to its end.

    Args:
        store: a connection that nobody else uses; all ranks' lead to the same store.
        rank: this rank.
        world_size: the number of ranks.
        where: tells how far this rank has come; called from any thread, every ``period`` seconds.
        timeout: a rank that is silent for so many seconds is lost, if this one makes no progress meanwhile; and how
            long this rank's main thread has to come back once another rank has said that it failed.
        store_host: where the store is, in words.
        exit_process: ends the process if the main thread does not come back; for tests.
        patient: whether a rank may be silent ten times as long, until the attribute of this name says otherwise.
        likely_cause: says why ranks may be at different places though none has failed; called when a report is made.
    """

    def __init__(
        self,
        store: comm.Store,
        rank: int,
        world_size: int,
        where: Callable[[], Progress],
        *,
        timeout: float,
        store_host: str,
        exit_process: Callable[[int], object] = os._exit,
        patient: bool = False,
        likely_cause: Callable[[], str] = lambda: LIKELY_CAUSE,
    ) -> None:
        self.patient = patient
        self._rank = rank
        self._world_size = world_size
        self._where = where
        self._timeout = timeout
        self._period = min(1.0, timeout / 6)
        self._store_host = store_host
        self._exit_process = exit_process
        self._likely_cause = likely_cause
        self._over = threading.Event()
        self._fault: str | None = None
        self._post = HeartbeatThread(store, rank, world_size, where, self._period)
        self._thread = threading.Thread(target=self._run, name="ldh-health-watch", daemon=True)
        self._post.start()
        self._thread.start()

    # ------------------------------------------------------------------ what the main thread calls

    def explain(self, error: BaseException) -> str | None:
        """Take note that this rank ends with an error; return a report if it is another rank's doing.

        Tells the other ranks. Waits a few periods where that is needed to learn who failed, or to let others learn of
        it from a store that this process holds.

        [Note: a signal while a report is being made] Whoever has started the ranks may end the others once one has
        failed. A signal's handler runs in the main thread: what it raises must not break the report off (Lightning's
        for SIGTERM sends to ranks that may be gone), and if it does not return, the report has to come out all the
        same. So it is made in another thread.
        """
        self._over.set()
        reports: list[str | None] = []
        made, taken = threading.Event(), threading.Event()

        def make() -> None:
            try:
                reports.append(self._explain(error))
            finally:
                made.set()
            if not taken.wait(self._timeout):
                self._print_and_exit(reports[0] or _text_of(error))

        threading.Thread(target=make, name="ldh-health-report", daemon=True).start()
        while not made.is_set():
            with suppress(Exception):
                made.wait()
        taken.set()
        return reports[0] if reports else None

    def _explain(self, error: BaseException) -> str | None:
        fault, patience = self._fault, _MISSED * self._period
        if fault is None and not comm.is_collective_error(error):
            self._post.send_last(State.FAILED, _text_of(error), self._timeout)
            self._inform_others()
            return None
        if fault is None:
            deadline = time.monotonic() + 2 * patience
            while not self._found(patience) and time.monotonic() < deadline:
                self._post.wants_notes = True
                time.sleep(self._period / 4)
            fault = self._report(patience)
        self._post.send_last(State.GAVE_UP, _first_line(fault), self._timeout)
        self._inform_others()
        return fault

    def _inform_others(self) -> None:
        if self._rank == 0:  # the store may end with this process
            post, patience = self._post, _MISSED * self._period
            post.wait_until(
                lambda: post.informed + len(lost_ranks(post.seen(), patience)) >= self._world_size, patience
            )

    def stop(self) -> None:
        """End the watch: the fit is over."""
        self._over.set()
        self._post.send_last(State.FINISHED, "", _MISSED * self._period)
        if self._rank == 0 and self._fault is None and not self._post.alarms:
            self._post.wait_until(lambda: self._post.finished >= self._world_size, _MISSED * self._period)
        self._post.stop(_MISSED * self._period)
        self._thread.join(_MISSED * self._period)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        progress, moved_at = self._where(), time.monotonic()
        while not self._over.wait(self._period):
            now, before = time.monotonic(), progress
            progress = self._where()
            if progress != before:
                moved_at = now
            idle_s = now - moved_at
            self._post.wants_notes = idle_s >= 2 * self._period
            # Whoever failed will not come back, while one that is silent may be busy with a call that lets no other
            # thread run.
            if idle_s >= self._timeout and self._found(self._tolerated_s):
                self._end(grace_s=_MISSED * self._period)
                return
            if idle_s >= self._timeout and self._deadlocked():
                self._end(grace_s=_MISSED * self._period, are_deadlocked=True)
                return
            if self._post.alarms and idle_s >= 2 * self._period:
                self._end(grace_s=self._timeout)
                return

    @property
    def _tolerated_s(self) -> float:
        """For how long a rank may be silent before it counts as lost."""
        return _PATIENCE * self._timeout if self.patient else self._timeout

    def _found(self, silent_s: float) -> bool:
        seen = self._post.seen()
        return bool(failed_ranks(seen) or accounts(seen) or lost_ranks(seen, silent_s) or self._store_lost(silent_s))

    def _deadlocked(self) -> bool:
        # The others have been looked at for less long than this rank has been idle.
        return deadlocked(self._where(), self._post.seen(), self._world_size, self._timeout / 2)

    def _store_lost(self, silent_s: float) -> bool:
        host = self._post.seen().get(0)
        if host is not None and host.note.state is State.FINISHED:
            return False
        return self._post.broken is not None or time.monotonic() - self._post.answered_at >= silent_s + self._period

    def _report(self, silent_s: float, *, are_deadlocked: bool = False) -> str:
        host = self._store_host if self._store_lost(silent_s) else None
        return failure_report(
            self._rank,
            self._where(),
            self._post.seen(),
            silent_s=silent_s,
            store_host=host,
            are_deadlocked=are_deadlocked,
            likely_cause=self._likely_cause(),
        )

    def _end(self, grace_s: float, *, are_deadlocked: bool = False) -> None:
        self._fault = self._report(self._tolerated_s, are_deadlocked=are_deadlocked)
        # Aborting may wait for the group's own threads.
        threading.Thread(target=comm.abort_groups, name="ldh-health-abort", daemon=True).start()
        if not self._over.wait(grace_s):
            self._post.send_last(State.GAVE_UP, _first_line(self._fault), _MISSED * self._period)
            self._print_and_exit(self._fault)

    def _print_and_exit(self, text: str) -> None:
        print(f"{text}\nRank {self._rank} did not come back from what it was doing.", file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._exit_process(EXIT_CODE)


def _text_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


def _first_line(report: str) -> str:
    return report.partition("\n")[0]
