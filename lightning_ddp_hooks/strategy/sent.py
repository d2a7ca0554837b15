"""What a backward with a communication hook sends: counted once, and said."""

from __future__ import annotations

from lightning_ddp_hooks.hooks.alike import late_starts
from lightning_ddp_hooks.hooks.allreduce import Noop
from lightning_ddp_hooks.hooks.contract import CommHook
from lightning_ddp_hooks.hooks.function_hook import TorchHook
from lightning_ddp_hooks.hooks.parts import parts_of
from lightning_ddp_hooks.reducer.reducer import Reducer
from lightning_ddp_hooks.strategy.summary import mib
from lightning_ddp_hooks.traffic import sent_by_rank

# In the first steps buckets are learnt, and hooks begin.
_STEPS_BEFORE = 3


class SentOnce:
    """Has the reducer count what this rank sends in a backward, once no part of a hook is the plain mean any more.

    Nothing is said of hooks that are not of this package, which may send what nobody counts; nor if somebody else
    counts already, such as `CommMonitor`, which tells more.

    Args:
        hook: what is counted; None for the plain mean, which has nothing to tell.
        reducer: whose backwards are counted.
    """

    def __init__(self, hook: CommHook | None, reducer: Reducer) -> None:
        self._begin = max((start + 1 for *_, start in late_starts(hook)), default=0)
        self._steps_before = _STEPS_BEFORE
        self._reducer = reducer
        parts = list(parts_of(hook))
        self._asked = self._done = not parts or reducer.world_size == 1 or not all(map(_is_counted, parts))

    def step_ended(self, step: int) -> str | None:
        """Have the next backward counted when it is time, and say what was sent.

        Args:
            step: the number of the step that comes next.

        Returns:
            The line to show, once.
        """
        if self._done:
            return None
        sent = self._reducer.sent_in_pass
        if self._asked and sent is not None:
            self._done = True
            nbytes = sum(param.numel() * param.element_size() for param in self._reducer.params)
            plain = sent_by_rank("all_reduce", nbytes, self._reducer.world_size)
            return (
                f"lightning_ddp_hooks: in the backward of step {step - 1} rank 0 sent {mib(sent)}; "
                f"the plain mean would send {mib(plain)}"
            )
        self._steps_before -= 1
        if not self._asked and self._steps_before <= 0 and step >= self._begin:
            self._asked = True
            self._reducer.count_next_pass()
        return None


def _is_counted(part: CommHook) -> bool:
    ours = type(part).__module__.partition(".")[0] == __name__.partition(".")[0]
    return ours and not isinstance(part, (Noop, TorchHook))
