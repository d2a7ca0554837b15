"""Whether all ranks are meant to hold the same parameters at a step."""

from __future__ import annotations

from lightning_ddp_hooks.averaging.driver import Averaging
from lightning_ddp_hooks.hooks.alike import alike_until
from lightning_ddp_hooks.hooks.contract import CommHook
from lightning_ddp_hooks.hooks.function_hook import TorchHook


def replicas_meant_alike(step: int, hook: CommHook | None, averaging: Averaging | None, *, asked_for: bool) -> bool:
    """Tell whether a difference between ranks is a fault.

    Args:
        step: the step that comes next.
        hook: what reduces gradients; None for the mean.
        averaging: the averager at work, if any.
        asked_for: whether the user wants ranks compared; whoever does knows what a hook that is a function gives them.
    """
    if averaging is not None and not averaging.bound.syncs_gradients(averaging.bound.step):
        return False
    return (asked_for and isinstance(hook, TorchHook)) or step <= alike_until(hook)
