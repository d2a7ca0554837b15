"""Bind a declared hook to a reducer."""

from __future__ import annotations

from collections.abc import Callable

from lightning_ddp_hooks.hooks.contract import BindContext, BoundHook, CommHook
from lightning_ddp_hooks.hooks.pipeline import HookComm
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
    context = BindContext(
        group=reducer.group,
        control_group=reducer.control_group,
        names=reducer.names,
        params=reducer.params,
        step=step,
    )
    bound = hook.bind(context)
    reducer.set_comm(HookComm(bound, eager=any(param.is_cuda for param in reducer.params)))
    return bound
