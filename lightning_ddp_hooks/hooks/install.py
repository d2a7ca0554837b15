"""Bind a declared hook to a reducer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.hooks.contract import BindContext, BoundHook, CommHook, declaration_text
from lightning_ddp_hooks.hooks.pipeline import HookComm
from lightning_ddp_hooks.reducer.reducer import Reducer
from lightning_ddp_hooks.reducer.verify import check_same_on_all_ranks


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
    made: list[comm.ProcessGroup] = []

    def new_group(parent: comm.ProcessGroup) -> comm.ProcessGroup:
        made.append(comm.new_group(parent, timeout=reducer.timeout))
        return made[-1]

    def split_group(parent: comm.ProcessGroup, parts: Sequence[Sequence[int]]) -> comm.ProcessGroup:
        made.append(comm.split_group(parent, parts, timeout=reducer.timeout))
        return made[-1]

    context = BindContext(
        group=reducer.group,
        control_group=reducer.control_group,
        names=reducer.names,
        params=reducer.params,
        step=step,
        new_group=new_group,
        split_group=split_group,
    )
    bound = hook.bind(context)
    reducer.set_comm(HookComm(bound, eager=any(param.is_cuda for param in reducer.params), groups=made))
    return bound
