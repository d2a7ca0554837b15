"""What a strategy does so that a fit does not hang when a rank is gone, nor go on when ranks have drifted apart.

Like its neighbours a class between Lightning's `DDPStrategy` and ours.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.arguments import require_check_interval, require_flag
from lightning_ddp_hooks.averaging.gradients import replicas_should_be_identical
from lightning_ddp_hooks.health.blocked import blocking_collective
from lightning_ddp_hooks.health.failure_detector import FailureDetector
from lightning_ddp_hooks.health.heartbeat import Progress
from lightning_ddp_hooks.health.nonfinite import NonfiniteGuard
from lightning_ddp_hooks.health.replicas import check_replicas
from lightning_ddp_hooks.health.report import LIKELY_CAUSE, attach_report
from lightning_ddp_hooks.hooks.contract import CommHook
from lightning_ddp_hooks.reducer.reducer import Reducer
from lightning_ddp_hooks.strategy.logs import LogsStrategy

if TYPE_CHECKING:
    import lightning.pytorch as pl


_runs = itertools.count()
_REMEDY = " The callback `UnevenInputs` handles them."


class HealthStrategy(LogsStrategy):
    """A `DDPStrategy` that ends with a report when another rank fails, or ranks are not what they should be."""

    _failure_timeout: float | None = None
    _watch: FailureDetector | None = None
    _step: int = 0
    _hook: CommHook | None = None
    _fit_hook: CommHook | None = None
    _check_replicas_every: int | None = None
    _detects_nonfinite: bool = False
    _nonfinite: NonfiniteGuard | None = None

    # ------------------------------------------------------------------ ranks that fail

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._start_watch()

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        if self._watch is not None:
            self._watch.patient = False

    def _start_watch(self) -> None:
        """Begin a run; on all ranks, as soon as they have met."""
        if self._failure_timeout is None or comm.world_size() == 1:
            return
        # A name that is this run's own: all ranks begin the same runs.
        prefix = f"ldh-health/run-{next(_runs)}"
        try:
            store = comm.connect_store(prefix, timedelta(seconds=self._failure_timeout))
        except (RuntimeError, NotImplementedError) as error:
            rank_zero_warn(f"No failure reports: the store cannot be connected to a second time: {error}")
            return
        thread = threading.get_ident()  # this one is watched by others
        self._watch = FailureDetector(
            store,
            self.global_rank,
            comm.world_size(),
            lambda: self._whereabouts(thread),
            timeout=self._failure_timeout,
            store_host=comm.store_host(),
            exit_process=self._exit_process,
            patient=True,
            likely_cause=lambda: LIKELY_CAUSE + _REMEDY if self._uneven is None else "",
        )

    def _whereabouts(self, thread: int) -> Progress:
        """Say how far this rank has come; from any thread.

        Args:
            thread: the one that trains.
        """
        reducer, logged = self._reducer, self._logged
        collectives = comm.collectives_begun() if comm.is_initialized() else 0
        waits_for = (logged.waits_for if logged is not None else "") or blocking_collective(thread)
        if reducer is None or waits_for:
            passes = 0 if reducer is None else reducer.synced_backwards
            return Progress(self._step, passes, waits_for=waits_for, collectives=collectives)
        place = reducer.aborted_at or (*reducer.progress(), reducer.waits_for())
        return Progress(self._step, *place, collectives)

    def _exit_process(self, code: int) -> None:
        """End this process and those that it has started: one that was stopped would stay for ever."""
        kill = getattr(self.launcher, "kill", None)
        if callable(kill):
            time.sleep(1)  # they may be writing their reports
            kill(signal.SIGKILL)
        os._exit(code)

    def _stop_watch(self) -> None:
        """End a run; while the reducer still is there."""
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._watch is None:
            return
        report = self._watch.explain(exception)
        if report is not None:  # the Trainer raises this very exception again, once all is torn down
            attach_report(exception, report)

    # ------------------------------------------------------------------ ranks that drift apart

    def _health_settings(self) -> dict[str, object]:
        """Return what must be the same on all ranks, by name."""
        return {
            "failure_timeout": self._failure_timeout,
            "check_replicas_every_n_steps": self._check_replicas_every,
            "detect_nonfinite": self._detects_nonfinite,
        }

    def _use_checks(self, replicas_every: int | None, detect_nonfinite: bool) -> None:
        require_check_interval(replicas_every)
        require_flag("detect_nonfinite", detect_nonfinite)
        self._check_replicas_every = replicas_every
        self._detects_nonfinite = detect_nonfinite

    @property
    def _replicas_are_alike(self) -> bool:
        """Whether all ranks are meant to have the same parameters now."""
        hook = self._hook if self._fit_hook is None else self._fit_hook
        asked_for = bool(self._check_replicas_every)
        return replicas_should_be_identical(self._step, hook, self._averaging, asked_for=asked_for)

    def _check_replicas(self, when: str) -> None:
        """Compare the parameters of all ranks, where they are meant to be the same; a collective call."""
        reducer = self._reducer
        if reducer is None or reducer.world_size == 1 or not self._replicas_are_alike:
            return
        named = [(n, p) for n, p in zip(reducer.names, reducer.params, strict=True) if p.requires_grad]
        check_replicas([n for n, _ in named], [p for _, p in named], reducer.control_group, when)

    def _check_replicas_before_checkpoint(self) -> None:
        if self._check_replicas_every != 0 and self._may_communicate:
            self._check_replicas(f"before the checkpoint of step {self._step}")

    def _check_replicas_after_step(self) -> None:
        if self._check_replicas_every and self._step % self._check_replicas_every == 0:
            self._check_replicas(f"by the end of step {self._step - 1}")

    # ------------------------------------------------------------------ gradients that are not finite

    def _start_nonfinite(self, reducer: Reducer) -> None:
        # A GradScaler makes gradients infinite on purpose, and skips such steps.
        if self._detects_nonfinite and getattr(self.precision_plugin, "scaler", None) is None:
            self._nonfinite = reducer.nonfinite = NonfiniteGuard(reducer.control_group)

    def _stop_nonfinite(self) -> None:
        self._nonfinite = None

    def _look_at_gradients(self) -> None:
        """Look at gradients that are used without being reduced."""
        if self._nonfinite is not None:
            assert self._reducer is not None
            named = zip(reversed(self._reducer.names), reversed(self._reducer.params), strict=True)
            self._nonfinite.look_at_all((name, param.grad) for name, param in named)

    def _check_gradients(self) -> None:
        """Raise on all ranks if a gradient of the passes that have just ended was not finite; a collective call."""
        if self._nonfinite is not None:
            self._nonfinite.check(self._step)
