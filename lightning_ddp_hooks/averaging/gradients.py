"""How gradients and model averaging go together: one coherent setting, or an error.

What happens to gradients::

    comm_hook             before step warmup_steps      from there on
    None, or any other    averaged (by the hook)        not exchanged
    PostLocalSGD          averaged over all ranks       averaged within the subgroup (or as the hook says)
"""

from __future__ import annotations

from lightning_ddp_hooks.averaging.averager import ModelAverager
from lightning_ddp_hooks.hooks.allreduce import Noop
from lightning_ddp_hooks.hooks.contract import CommHook


def contradiction(averager: ModelAverager, hook: CommHook | None) -> str | None:
    """Say why a hook does not go with an averager; None if it does.

    Args:
        averager: what averages the model.
        hook: what averages the gradients; None for the plain mean.
    """
    start = _local_start(hook)
    if start is not None and start != averager.warmup_steps:
        return (
            f"{type(averager).__name__} averages the model from step {averager.warmup_steps} on (`warmup_steps`), but "
            f"the post-local-SGD hook leaves the global mean of gradients at step {start}: set both alike."
        )
    if start is None and isinstance(hook, Noop) and averager.warmup_steps:
        return (
            f"`warmup_steps={averager.warmup_steps}` of {type(averager).__name__} means that gradients are averaged up "
            "to that step, but the hook Noop never does: set `warmup_steps=0`, or leave out the hook (from "
            "`warmup_steps` on gradients are not exchanged anyway)."
        )
    return None


def hook_follows_schedule(averager: ModelAverager, hook: CommHook | None) -> bool:
    """Tell whether the hook itself turns to subgroups, so that gradients go through it at every step.

    Args:
        averager: what averages the model.
        hook: what averages the gradients; None for the plain mean.

    Raises:
        ValueError: hook and averager name different steps, or the hook never averages during the warm-up.
    """
    if (text := contradiction(averager, hook)) is not None:
        raise ValueError(text)
    return _local_start(hook) is not None


def _local_start(hook: object) -> int | None:
    """Find the step at which a post-local-SGD hook, ours or torch's, maybe within another one, turns to subgroups."""
    seen: set[int] = set()
    while hook is not None and id(hook) not in seen:
        seen.add(id(hook))
        # Ours carries the step itself, torch's function hook in its state (and in torch's spelling).
        for holder in (hook, getattr(hook, "state", None)):
            for name in ("start_local_sgd_iter", "start_localSGD_iter"):
                value = getattr(holder, name, None)
                if isinstance(value, int):
                    return value
        hook = getattr(hook, "inner", None)
    return None
