"""What a step with a communication hook sends: counted in one step, and said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.hooks.alike import late_starts
from lightning_ddp_hooks.hooks.contract import CommHook
from lightning_ddp_hooks.strategy.summary import mib
from lightning_ddp_hooks.traffic import Traffic, sent_by_rank

# In the first steps buckets are learnt, and hooks begin.
_STEPS_BEFORE = 3


class SentInAStep:
    """Counts what this rank sends in the first step in which all parts of a hook do what they are for.

    Nothing is counted if somebody else counts already, such as `CommMonitor`, which tells more.

    Args:
        hook: what is counted.
        facts: what `Reducer.stats` says.
    """

    def __init__(self, hook: CommHook, facts: Mapping[str, Any]) -> None:
        self._begin = max((start + 1 for *_, start in late_starts(hook)), default=0)
        self._steps_before = _STEPS_BEFORE
        self._plain = sent_by_rank("all_reduce", facts["total_parameter_size_bytes"], facts["world_size"])
        self._traffic: Traffic | None = None
        self._done = False

    def step_ended(self, step: int) -> str | None:
        """Begin to count, or say what was sent.

        Args:
            step: the number of the step that comes next.

        Returns:
            The line to show, once.
        """
        if self._done:
            return None
        if self._traffic is not None:
            sent = sum(self._traffic.take().values())
            self.close()
            return (
                f"lightning_ddp_hooks: in step {step - 1} each rank sent about {mib(sent)}; "
                f"the plain mean would send {mib(self._plain)}"
            )
        self._steps_before -= 1
        if self._steps_before <= 0 and step >= self._begin:
            if comm.current_tally() is not None:
                self._done = True
                return None
            self._traffic = Traffic()
            comm.count_traffic(self._traffic)
        return None

    def close(self) -> None:
        """Count no more."""
        self._done = True
        if self._traffic is not None:
            comm.count_traffic(None)
            self._traffic = None
