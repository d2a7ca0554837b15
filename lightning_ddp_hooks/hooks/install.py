"""Bind a declared hook to a reducer."""

from __future__ import annotations

from collections.abc import Callable

from lightning_ddp_hooks.hooks.contract import BindContext, BoundHook, CommHook, declaration_text
from lightning_ddp_hooks.reducer.module_sync import check_same_on_all_ranks
from lightning_ddp_hooks.reducer.reducer import Reducer


def install_hook(reducer: Reducer, hook: CommHook, step: Callable[[], int]) -> BoundHook:
    """Have the reducer run the hook for each bucket; collective, since binding may make groups.

    Args:
        reducer: whose buckets are to be reduced.
        hook: what the user declared.
        step: returns the current training step.

    Raises:
        RuntimeError: a hook is registered already, or a backward has run.
    """
    check_same_on_all_ranks([], {"comm_hook": declaration_text(hook)}, reducer.control_group)
    context = BindContext(
        control_group=reducer.control_group,
        names=reducer.names,
        params=reducer.params,
        step=step,
        subgroup=reducer.queue.subgroup,
    )
    bound = hook.bind(context)
    reducer.set_hook(bound)
    return bound
