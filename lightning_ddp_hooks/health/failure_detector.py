"""Notice that another rank is gone, and end this one with an error that says so.

    this rank makes no progress ---> read the heartbeats ---> one failed, or fell silent ---> abort the groups
                                                                                                    |
    main thread: the collective raises ---> `FailureDetector.explain` has the report <--------------+
                 ... or does not come back ---> the report goes to stderr, and the process ends

[Note: a thread that waits within a collective] No exception can be raised in it. A peer that died closes its
connections, so that gloo raises by itself. One that was stopped, or whose host is gone, does not, and gloo has no way
to break a wait off: there the process has to end. NCCL's collectives fail when their group is aborted.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.health import report as reports
from lightning_ddp_hooks.health.heartbeat import HeartbeatThread, Progress, State
from lightning_ddp_hooks.health.stacks import files_text, line_of, write_stacks

# A rank that sends no heartbeat for so many periods is gone, once it is known that something is wrong.
_MISSED = 4
# Factor on the timeout while data are read and models built, in calls that may let no other thread run for long.
_PATIENCE = 10
_LONG_WORK_S = 600.0  # one rank alone may well evaluate or write for minutes while the others wait
EXIT_CODE = 70


class FailureDetector:
    """Watches over the other ranks from the start of a fit to its end.

    Args:
        store: A connection that nobody else uses; all ranks' lead to the same store.
        progress: Returns how far this rank has come; called from any thread.
        timeout: Seconds of silence after which a rank is lost, if this one makes no progress meanwhile; also how long
            this rank's main thread has to come back once another rank has said that it failed.
        exit_process: Ends the process if the main thread does not come back.
        stall_timeout: Seconds that a rank may go without progress while others wait for its gradients, ten times as
            long before the first backward has ended; by default ten minutes, or ``timeout`` if that is longer.
        patient: Whether a rank may be silent ten times as long; can be changed at any time.
        likely_cause: Returns why ranks may be at different places though none has failed.
    """

    def __init__(
        self,
        store: comm.Store,
        rank: int,
        world_size: int,
        progress: Callable[[], Progress],
        *,
        timeout: float,
        store_host: str,
        exit_process: Callable[[int], object] = os._exit,
        stall_timeout: float | None = None,
        patient: bool = False,
        likely_cause: Callable[[], str] = lambda: reports.LIKELY_CAUSE,
    ) -> None:
        self.patient = patient
        self._rank = rank
        self._world_size = world_size
        self._progress = progress
        self._timeout = timeout
        self._stall_timeout = stall_timeout or max(timeout, _LONG_WORK_S)
        self._main_thread = threading.get_ident()
        self._period = min(1.0, timeout / 6)
        self._brief = _MISSED * self._period
        self._store_host = store_host
        self._exit_process = exit_process
        self._likely_cause = likely_cause
        self._over = threading.Event()
        self._fault: str | None = None
        self._heartbeats = HeartbeatThread(store, rank, world_size, progress, self._period, self._main_thread)
        self._thread = threading.Thread(target=self._run, name="ldh-failure-detector", daemon=True)
        self._heartbeats.start()
        self._thread.start()

    def explain(self, error: BaseException) -> str | None:
        """Note that this rank ends with an error, tell the others, and return a report if another rank caused it.

        [Note: a signal while a report is being made] Whoever has started the ranks may end the others once one has
        failed. A signal's handler runs in the main thread: what it raises must not interrupt the report (Lightning's
        for SIGTERM sends to ranks that may be gone), and if it does not return, the report has to come out all the
        same. So it is made in another thread.
        """
        self._over.set()
        found: list[str | None] = []
        made, taken = threading.Event(), threading.Event()

        def make() -> None:
            try:
                found.append(self._explain(error))
            finally:
                made.set()
            if not taken.wait(self._timeout):
                self._print_and_exit(found[0] or _text_of(error))

        thread = threading.Thread(target=make, name="ldh-failure-report", daemon=True)
        thread.start()
        while not made.is_set():
            with suppress(Exception):
                made.wait()
        taken.set()
        with suppress(Exception):  # until it ends it refers to the error, and so to all that was under way
            thread.join(self._timeout)
        return found[0] if found else None

    def _explain(self, error: BaseException) -> str | None:
        fault = self._fault
        if fault is None and not comm.is_collective_error(error):
            self._heartbeats.send_last(State.FAILED, _text_of(error), self._timeout)
        else:
            deadline = time.monotonic() + 2 * self._brief
            while fault is None and not self._found_fault(self._brief) and time.monotonic() < deadline:
                self._heartbeats.reads_peers = True
                time.sleep(self._period / 4)
            if fault is None:
                hangs = not self._found_fault(self._brief)
                fault = self._report(self._brief) + (f"\n{files_text()}" if hangs else "")
                write_stacks(self._rank, f"{fault}\n\n{_text_of(error)}")
                if hangs:
                    self._gather_stacks()
            self._heartbeats.send_last(State.GAVE_UP, fault.partition("\n")[0], self._timeout)
        self._let_others_learn()
        return fault

    def _let_others_learn(self) -> None:
        """Wait a little, on rank 0, with which the store may end, until the other ranks know how it ended."""
        beats, brief = self._heartbeats, self._brief
        if self._rank == 0:
            beats.wait_until(
                lambda: beats.informed + len(reports.lost_ranks(beats.peers(), brief)) >= self._world_size, brief
            )

    def stop(self) -> None:
        """End the watch: the fit is over."""
        heartbeats = self._heartbeats
        self._over.set()
        heartbeats.send_last(State.FINISHED, "", self._brief)
        if self._rank == 0 and self._fault is None and not heartbeats.alarms:
            heartbeats.wait_until(lambda: heartbeats.finished >= self._world_size, self._brief)
        heartbeats.stop(self._brief)
        self._thread.join(self._brief)

    def _run(self) -> None:
        progress, moved_at = self._progress(), time.monotonic()
        while not self._over.wait(self._period):
            now, before = time.monotonic(), progress
            progress = self._progress()
            if progress != before or progress.busy:
                moved_at = now
            idle_s = now - moved_at
            self._heartbeats.reads_peers = idle_s >= 2 * self._period
            # One that is silent may be busy with a call that lets no other thread run; one that failed is not.
            silent_s = _PATIENCE * self._timeout if self.patient else self._timeout
            stuck, alarmed = idle_s >= self._timeout, self._heartbeats.alarms and idle_s >= 2 * self._period
            found = stuck and self._found_fault(silent_s)
            # The others have been watched for less long than this rank has been idle.
            are_deadlocked = (
                stuck
                and not found
                and reports.deadlocked(progress, self._heartbeats.peers(), self._world_size, self._timeout / 2)
            )
            # A first backward may take long to come: code is compiled, kernels are chosen, caches are filled.
            limit = self._stall_timeout * (1 if progress.synced_backwards and not self.patient else _PATIENCE)
            stalled = self._stalled(progress, limit) if idle_s >= limit and not (found or are_deadlocked) else []
            hang = are_deadlocked or bool(stalled)
            found = found or (progress.busy and reports.is_blamed(self._rank, self._heartbeats.peers()))
            if found or hang or alarmed:
                self._fault = self._report(silent_s, are_deadlocked=are_deadlocked, stalled=stalled)
                if hang:
                    self._fault += f"\n{files_text()}"
                    self._gather_stacks()
                self._end(self._fault, self._brief if found or hang else self._timeout)
                return

    def _stalled(self, progress: Progress, limit: float) -> list[int]:
        # The others have been watched for less long than this rank has been idle.
        return reports.stalled_ranks(progress, self._heartbeats.peers(), self._world_size, limit - self._timeout / 2)

    def _gather_stacks(self) -> None:
        """Have all ranks write their stacks, and wait a little until they have."""
        beats = self._heartbeats
        beats.ask_for_stacks()
        beats.wait_until(lambda: beats.stacks_written >= self._world_size, self._brief)

    def _found_fault(self, silent_s: float) -> bool:
        peers = self._heartbeats.peers()
        known = reports.failed_ranks(peers) or reports.resignations(peers) or reports.lost_ranks(peers, silent_s)
        return bool(known) or self._store_lost(silent_s)

    def _store_lost(self, silent_s: float) -> bool:
        heartbeats = self._heartbeats
        host = heartbeats.peers().get(0)
        if host is not None and host.heartbeat.state is State.FINISHED:
            return False
        return heartbeats.broken is not None or time.monotonic() - heartbeats.answered_at >= silent_s + self._period

    def _report(self, silent_s: float, *, are_deadlocked: bool = False, stalled: Sequence[int] = ()) -> str:
        return reports.failure_report(
            self._rank,
            self._progress(),
            self._heartbeats.peers(),
            silent_s=silent_s,
            store_host=self._store_host if self._store_lost(silent_s) else None,
            are_deadlocked=are_deadlocked,
            stalled=stalled,
            line=line_of(self._main_thread),
            likely_cause=self._likely_cause(),
        )

    def _end(self, fault: str, grace_s: float) -> None:
        # Aborting may wait for the group's own threads.
        threading.Thread(target=comm.abort_groups, name="ldh-abort", daemon=True).start()
        if not self._over.wait(grace_s):
            self._heartbeats.send_last(State.GAVE_UP, fault.partition("\n")[0], self._brief)
            self._let_others_learn()
            self._print_and_exit(fault)

    def _print_and_exit(self, text: str) -> None:
        sys.stdout.flush()
        print(f"{text}\nRank {self._rank} did not come back from what it was doing.", file=sys.stderr, flush=True)
        self._exit_process(EXIT_CODE)


def _text_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))
