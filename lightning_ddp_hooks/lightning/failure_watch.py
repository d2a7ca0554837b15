"""The failure detector of a Trainer's run, from the meeting of its ranks to its teardown."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.config import Settings
from lightning_ddp_hooks.health.failure_detector import FailureDetector
from lightning_ddp_hooks.health.heartbeat import Progress, blocking_collective
from lightning_ddp_hooks.health.process_watch import explain, start_detector
from lightning_ddp_hooks.health.report import LIKELY_CAUSE
from lightning_ddp_hooks.lightning.uneven.inputs import Inputs

_runs = itertools.count()


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
        self._detector = start_detector(
            name,
            world,
            timeout,
            where,
            warn=rank_zero_warn,
            launcher=launcher,
            patient=True,
            stall_timeout=settings.stall_timeout,
            likely_cause=lambda: "" if inputs.uneven else cause,
        )

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
