"""To be removed: ask `CommHook.replicas_differ_from`, and the setting that `CommHook.delayed_by` names."""

import math

from lightning_ddp_hooks.hooks.contract import CommHook
from lightning_ddp_hooks.hooks.registry import parts_of


def alike_until(hook: CommHook | None) -> float:
    """Return the first step from which replicas may differ; infinity for never."""
    step = None if hook is None else hook.replicas_differ_from()
    return math.inf if step is None else step


def late_starts(hook: CommHook | None) -> list[tuple[str, str, int]]:
    """Return the parts of a declaration that are the plain mean at first: name, setting, and step where they begin."""
    named = [(part, part.delayed_by) for part in parts_of(hook) if part.delayed_by is not None]
    late = [(type(part).__name__, setting, getattr(part, setting, None)) for part, setting in named]
    return [(name, setting, start) for name, setting, start in late if isinstance(start, int) and start > 0]
