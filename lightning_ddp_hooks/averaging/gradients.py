"""How gradients and model averaging go together: what happens to gradients.

comm_hook             before step warmup_steps      from there on
None, or any other    averaged (by the hook)        not exchanged
PostLocalSGD          averaged over all ranks       averaged within the subgroup (or as the hook says)
"""

from __future__ import annotations

from lightning_ddp_hooks.averaging.averager import ModelAverager
from lightning_ddp_hooks.hooks.allreduce import Noop
from lightning_ddp_hooks.hooks.contract import CommHook, hook_name
from lightning_ddp_hooks.hooks.registry import parts_of


def contradiction(averager: ModelAverager, hook: CommHook | None) -> str | None:
    """Say why a hook (None for plain all-reduce) does not go with an averager; None if it does."""
    start, name = _local_from(hook), type(averager).__name__
    if start is not None and start != averager.warmup_steps:
        return (
            f"{name} averages the model from step {averager.warmup_steps} on (`warmup_steps`), but the hook "
            f"{hook_name(getattr(hook, 'hook', hook))} leaves the global mean of gradients at step {start}: set both "
            "alike."
        )
    if isinstance(hook, Noop) and averager.warmup_steps:
        return (
            f"`warmup_steps={averager.warmup_steps}` of {name} means that gradients are averaged up to that step, but "
            "the hook Noop never does: set `warmup_steps=0`, or leave out the hook (from `warmup_steps` on gradients "
            "are not exchanged anyway)."
        )
    return None


def hook_follows_schedule(averager: ModelAverager, hook: CommHook | None) -> bool:
    """Tell whether the hook itself turns to local gradients, so that they go through it at every step."""
    if (text := contradiction(averager, hook)) is not None:
        raise ValueError(text)
    return _local_from(hook) is not None


def _local_from(hook: CommHook | None) -> int | None:
    """Return the step at which a hook turns from the global mean to local gradients; None if never, or not known."""
    start = None if hook is None else hook.replicas_differ_from()
    # 0 may also mean that nothing is known of the hook, unless a part of it has a setting for that step.
    return None if start == 0 and not any(map(_has_start, parts_of(hook))) else start


def _has_start(hook: CommHook) -> bool:
    state = getattr(hook, "state", None)  # of a function, ours or torch's
    own = hook.delayed_by is not None or hasattr(state, "start_local_sgd_iter") or hasattr(state, "start_localSGD_iter")
    return own and hook.replicas_differ_from() == 0
