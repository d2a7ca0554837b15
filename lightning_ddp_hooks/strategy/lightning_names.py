"""What Lightning's `DDPStrategy` calls its settings, taken with a warning that tells our name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lightning_ddp_hooks.averaging.averager import ModelAverager
from lightning_ddp_hooks.averaging.periodic import PeriodicModelAverager
from lightning_ddp_hooks.hooks.registry import HookLike

# Lightning's 4 is the line that warns; above it are the strategy's constructor and its caller.
_USERS_LINE = 6


def hook_by_lightnings_names(
    hook: HookLike | None, state: object | None, function: Callable[..., Any] | None, wrapper: Callable[..., Any] | None
) -> HookLike | None:
    """Return ``hook``, or the one that was given by ``ddp_comm_state``, ``ddp_comm_hook`` and ``ddp_comm_wrapper``."""
    if function is None:
        if state is not None or wrapper is not None:
            raise ValueError("`ddp_comm_state` and `ddp_comm_wrapper` need `ddp_comm_hook`; or use `comm_hook`.")
        return hook
    if hook is not None:
        raise ValueError("Set `comm_hook` or `ddp_comm_hook`, not both.")
    if wrapper is not None and not callable(wrapper):
        raise TypeError(f"Expected a callable for `ddp_comm_wrapper`, got {wrapper!r}.")
    rank_zero_warn("`ddp_comm_hook` is Lightning's name: use `comm_hook=(state, hook)`.", stacklevel=_USERS_LINE)
    return (state, function if wrapper is None else wrapper(function))


def averager_by_lightnings_names(
    averager: ModelAverager | None, period: int | None, state: object | None
) -> ModelAverager | None:
    """Return ``averager``, or the one that was given by ``model_averaging_period`` and ``ddp_comm_state``."""
    if period is None:
        return averager
    if averager is not None:
        raise ValueError("Set `averager` or `model_averaging_period`, not both.")
    start = getattr(state, "start_localSGD_iter", None)
    if start is None:
        raise ValueError(
            "`model_averaging_period` needs a PostLocalSGDState as `ddp_comm_state`; or use "
            "`averager=PeriodicModelAverager(period=..., warmup_steps=...)`."
        )
    rank_zero_warn(
        "`model_averaging_period` is Lightning's name: use `averager=PeriodicModelAverager(period=..., "
        "warmup_steps=...)`.",
        stacklevel=_USERS_LINE,
    )
    return PeriodicModelAverager(period=period, warmup_steps=start)
