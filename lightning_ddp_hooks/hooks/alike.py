"""From which step on a hook does what it is for, and whether all ranks get the same result from it."""

from __future__ import annotations

import math

from lightning_ddp_hooks.hooks.allreduce import Noop
from lightning_ddp_hooks.hooks.contract import CommHook
from lightning_ddp_hooks.hooks.function_hook import TorchHook
from lightning_ddp_hooks.hooks.parts import parts_of
from lightning_ddp_hooks.hooks.post_local_sgd import PostLocalSGD


def alike_until(hook: CommHook | None) -> float:
    """Return the step from which on ranks may get different results; infinity if they always get the same.

    Of a function that a user wrote nothing is known: 0.
    """
    steps = [math.inf]
    for part in parts_of(hook):
        if isinstance(part, (Noop, TorchHook)):
            steps.append(0)
        elif isinstance(part, PostLocalSGD):
            steps.append(part.start_local_sgd_iter)
    return min(steps)


def late_starts(hook: CommHook | None) -> list[tuple[str, str, int]]:
    """Return the parts of a declaration that are the plain mean at first: name, setting, and step where they begin."""
    named = [(part, part.delayed_by) for part in parts_of(hook) if part.delayed_by is not None]
    late = [(type(part).__name__, setting, getattr(part, setting, None)) for part, setting in named]
    return [(name, setting, start) for name, setting, start in late if isinstance(start, int) and start > 0]
