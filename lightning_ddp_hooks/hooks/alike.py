"""From which step on a hook does what it is for, and whether all ranks get the same result from it."""

from __future__ import annotations

import math
from collections.abc import Iterator

from lightning_ddp_hooks.hooks.allreduce import Noop
from lightning_ddp_hooks.hooks.contract import CommHook
from lightning_ddp_hooks.hooks.function_hook import TorchHook
from lightning_ddp_hooks.hooks.post_local_sgd import PostLocalSGD
from lightning_ddp_hooks.hooks.registry import resolve_hook


def alike_until(hook: CommHook | None) -> float:
    """Return the step from which on ranks may get different results; infinity if they always get the same.

    Of a function that a user wrote nothing is known: 0.
    """
    steps = [math.inf]
    for part in _parts(hook):
        if isinstance(part, (Noop, TorchHook)):
            steps.append(0)
        elif isinstance(part, PostLocalSGD):
            steps.append(part.start_local_sgd_iter)
    return min(steps)


def late_starts(hook: CommHook | None) -> list[tuple[str, str, int]]:
    """Return the parts of a declaration that are the plain mean at first: name, setting, and step where they begin."""
    return [
        (type(part).__name__, setting, getattr(part, setting))
        for part in _parts(hook)
        for setting in ("start_iter", "start_local_sgd_iter")
        if getattr(part, setting, 0) > 0
    ]


def _parts(hook: CommHook | None) -> Iterator[CommHook]:
    """Walk a declaration and those that it is composed of."""
    if hook is None:
        return
    yield hook
    inside = [getattr(hook, name, None) for name in ("inner", "default")]
    inside += [entry.hook for name in ("rules", "stages") for entry in getattr(hook, name, ())]
    for part in inside:
        yield from _parts(resolve_hook(part))
