"""How gradients and model averaging go together: what happens to gradients.

comm_hook             before step warmup_steps      from there on
None, or any other    averaged (by the hook)        not exchanged
PostLocalSGD          averaged over all ranks       averaged within the subgroup (or as the hook says)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.averaging.averager import ModelAverager
from lightning_ddp_hooks.hooks.allreduce import Noop
from lightning_ddp_hooks.hooks.contract import CommHook, hook_name
from lightning_ddp_hooks.hooks.registry import parts_of


def contradiction(averager: ModelAverager, hook: CommHook | None) -> str | None:
    """Say why a hook (None for the plain mean) does not go with an averager; None if it does."""
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


def agree_on_found_inf(
    found: Sequence[Tensor], gradients: Iterable[Tensor | None], group: comm.ProcessGroup, device: torch.device
) -> None:
    """Make an Inf or NaN that one rank's GradScaler has found known to the scalers of all; collective.

    For ranks that train for themselves: without it only that rank would skip the step, and scales would drift apart.
    ``found`` holds the scaler's own flags, one per device, written in place. It is empty if the optimizer looks for Inf
    itself while it steps (fused optimizers); then an Inf is written into a gradient of every rank, for it to be found.
    """
    if found:
        for flag in found:
            comm.all_reduce(flag, group).wait()  # a count above 0 means the same as a flag
        return
    dense = [g for g in gradients if g is not None and g.layout is torch.strided and g.numel()]
    flag = torch.zeros((), dtype=torch.float32, device=device)
    if dense:
        flag = torch.stack([~torch.isfinite(g).all() for g in dense]).sum(dtype=torch.float32)
    comm.all_reduce(flag, group).wait()
    if dense:
        # The host is not asked. A product with the flag would not do: 0 times Inf is NaN.
        dense[0].masked_fill_(flag > 0, float("inf"))
