"""How gradients and model averaging go together.

What happens to gradients::

    comm_hook                            before step warmup_steps     from there on
    None, or one that never differs      averaged (by the hook)       not exchanged
    one that leaves replicas different   averaged over all ranks      as the hook says (PostLocalSGD: within subgroups)
    from step warmup_steps on
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.averaging.averager import ModelAverager
from lightning_ddp_hooks.hooks.contract import CommHook, hook_name
from lightning_ddp_hooks.hooks.function_hook import TorchHook
from lightning_ddp_hooks.hooks.parts import parts_of

if TYPE_CHECKING:
    from lightning_ddp_hooks.averaging.driver import Averaging


def contradiction(averager: ModelAverager, hook: CommHook | None) -> str | None:
    """Say why a hook (None for the plain mean) does not go with an averager; None if it does."""
    start, name = _differs_from(hook), type(averager).__name__
    hook_is = hook_name(getattr(hook, "hook", hook))  # of a function its own name
    if start is None or start == averager.warmup_steps:
        return None
    if start == 0:
        return (
            f"`warmup_steps={averager.warmup_steps}` of {name} means that gradients are averaged up to that step, but "
            f"the hook {hook_is} never does: set `warmup_steps=0`, or leave out the hook."
        )
    return (
        f"{name} averages the model from step {averager.warmup_steps} on (`warmup_steps`), but the hook "
        f"{hook_is} leaves the global mean of gradients at step {start}: set both alike."
    )


def hook_follows_schedule(averager: ModelAverager, hook: CommHook | None) -> bool:
    """Tell whether gradients go through the hook at every step, since it knows itself when averaging takes over.

    Raises:
        ValueError: Hook and averager name different steps.
    """
    if (text := contradiction(averager, hook)) is not None:
        raise ValueError(text)
    return _differs_from(hook) is not None


def replicas_should_be_identical(
    step: int, hook: CommHook | None, averaging: Averaging | None, *, asked_for: bool
) -> bool:
    """Tell whether a difference between ranks is a fault.

    Args:
        step: The step that comes next.
        hook: Hook that reduces gradients; None for the mean.
        averaging: Averager at work, if any.
        asked_for: Whether the user wants ranks compared, and so knows what a hook that is a function gives them.
    """
    if averaging is not None and not averaging.broadcasts_buffers():
        return False
    start = _differs_from(hook)
    return (asked_for or not _holds_function(hook)) if start is None else step <= start


def _differs_from(hook: CommHook | None) -> int | None:
    """Return the first step at which a hook gives ranks different gradients; None if never, or if nothing is known."""
    if hook is None or not _holds_function(hook):
        return None if hook is None else hook.replicas_differ_from()
    # Of a function only its state may tell: that of post-local SGD does, in our spelling or torch's.
    states = [part.state for part in parts_of(hook) if isinstance(part, TorchHook)]
    names = ("start_local_sgd_iter", "start_localSGD_iter")
    starts = [getattr(state, name, None) for state in states for name in names]
    return min((start for start in starts if isinstance(start, int)), default=None)


def _holds_function(hook: CommHook | None) -> bool:
    return any(isinstance(part, TorchHook) for part in parts_of(hook))


def agree_on_found_inf(
    found: Sequence[Tensor], gradients: Iterable[Tensor | None], group: comm.ProcessGroup, device: torch.device
) -> None:
    """Make an Inf or NaN that one rank's GradScaler has found known to the scalers of all; collective.

    For ranks that train for themselves: without it only that rank would skip the step, and scales would drift apart.

    Args:
        found: The scaler's own flags, one per device, written in place. Empty if the optimizer looks for Inf itself
            while it steps (fused optimizers); then an Inf is written into a gradient of every rank, for it to be found.
        gradients: Gradients of the optimizer's parameters.
        group: Ranks that agree.
        device: Device of the model; a rank without gradients takes part all the same.
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
