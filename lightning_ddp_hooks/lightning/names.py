"""The names that Trainer and Fabric know the strategies by, and Lightning's names for settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities import rank_zero_warn

from lightning_ddp_hooks._lightning_package import refuse_in_other_package
from lightning_ddp_hooks.averaging.names import AveragerLike
from lightning_ddp_hooks.averaging.periodic import PeriodicModelAverager
from lightning_ddp_hooks.hooks.registry import HookLike
from lightning_ddp_hooks.short_names import add_short_name

PASSED_ON: tuple[str, ...] = ("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io")
PASSED_ON += ("process_group_backend", "timeout", "start_method")
"""Arguments of both strategies that Lightning's own take."""
_LAUNCHERS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
_FORMS: dict[str, dict[str, bool]] = {
    "": {},
    "_find_unused_parameters_true": {"find_unused_parameters": True},
    "_find_unused_parameters_false": {"find_unused_parameters": False},
}
# Lightning's 4 is the line that warns; above it are the strategy's constructor and its caller.
_USERS_LINE = 6


def register_names(strategy: Any, registry: Any) -> None:
    """Register ``ddp_hooks``, its launchers, and its forms that find unused parameters."""
    name = strategy.__name__.lower()
    for path in (name, f"lightning_ddp_hooks.{name}"):  # a command line takes a class without arguments for a name
        registry.register(path, strategy, description=f"The class {strategy.__name__}", override=True)
    for suffix, start_method in _LAUNCHERS.items():
        for form, settings in _FORMS.items():
            registry.register(
                f"ddp_hooks{suffix}{form}",
                strategy,
                description=f"Data parallel with communication hooks, started by {start_method}",
                override=True,
                start_method=start_method,
                **settings,
            )


def register(of_trainer: Any, sharded: Any, of_fabric: Any) -> None:
    """Make the strategies known to Trainer and Fabric by name."""
    add_short_name({}, "ddp_hooks", of_trainer)  # so that on a command line settings may follow
    of_trainer.register_strategies(StrategyRegistry)
    sharded.register_strategies(StrategyRegistry)
    of_fabric.register_strategies(STRATEGY_REGISTRY)
    refuse_in_other_package("ddp_hooks")


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
    averager: AveragerLike | None, period: int | None, state: object | None
) -> AveragerLike | None:
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
