"""Communication hooks that step a sharded optimizer, by the names that torch gives them."""

# No postponed annotations: torch's DDP looks at those of the functions when it is given one.
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_hooks import _compat, comm
from lightning_ddp_hooks.hooks.allreduce import allreduce_hook
from lightning_ddp_hooks.hooks.contract import CommHook, hook_name
from lightning_ddp_hooks.hooks.function_hook import TorchHook
from lightning_ddp_hooks.hooks.on_torch import TorchDDPState, run_on_torch_ddp
from lightning_ddp_hooks.hooks.registry import HookLike, resolve_hook
from lightning_ddp_hooks.optim.in_hook import OptimizerInHook, _StepInHook
from lightning_ddp_hooks.optim.sharded_optimizer import ShardedOptimizer
from lightning_ddp_hooks.optim.sharded_step import ShardedStep
from lightning_ddp_hooks.optim.sharding import bucket_params, refuse_diverging
from lightning_ddp_hooks.reducer.bucket import GradBucket
from lightning_ddp_hooks.reducer.reducer import Reducer

ZeroHook = Callable[[Any, Any], Any]
_Declare = Callable[[Any], CommHook | None]


def hook_with_zero_step(
    hook: HookLike | ZeroHook | None, ddp: nn.Module, zero: ShardedOptimizer, shard_buckets: bool = False
) -> ZeroHook:
    """Have ``hook`` followed by the optimizer's step; the steps follow the backward.

    They overlap with the reductions that are still under way, which suits networks that are slow beside the
    computation. With plain all-reduce, gradients go to the owners of their parameters alone; see `OptimizerInHook`.
    Every iteration updates, also the first. Register the result with the wrapper that was given; each synchronized
    backward is a step then.

    Args:
        hook: Reduces the gradients: a function by torch's contract, or whatever ``comm_hook`` takes.
        ddp: The `DataParallel` that trains the model, or torch's own DDP. There, by its contract, all phases of a
            bucket run within one call, so that less overlaps.
        zero: Optimizer that was made with ``overlap_with_ddp=True``.
        shard_buckets: torch's argument; every bucket is shared among all ranks, whether or not it is set.

    Returns:
        The hook to register.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: ``zero`` was made without ``overlap_with_ddp=True``, has a hook already or other ranks than ``ddp``;
            the hook leaves ranks with different gradients; torch's DDP looks for unused parameters, which it does not
            tell hooks of.

    Example:
        >>> ddp = DataParallel(model)
        >>> zero = ShardedOptimizer(model.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=1e-3)
        >>> ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, zero))
    """
    return _zero_hook(hook, ddp, zero, OptimizerInHook(shard=True, interleaved=False, shard_buckets=shard_buckets))


def hook_with_zero_step_interleaved(
    hook: HookLike | ZeroHook | None, ddp: nn.Module, zero: ShardedOptimizer, shard_buckets: bool = False
) -> ZeroHook:
    """Have ``hook`` followed by the optimizer's step, for each bucket as soon as it is reduced.

    Reductions and exchanges of parameters take turns, which suits networks that are fast beside the computation.
    Arguments, result and errors are those of `hook_with_zero_step`.

    Example:
        >>> ddp.register_comm_hook(None, hook_with_zero_step_interleaved(allreduce_hook, ddp, zero))
    """
    return _zero_hook(hook, ddp, zero, OptimizerInHook(shard=True, shard_buckets=shard_buckets))


def _zero_hook(hook: Any, ddp: Any, zero: Any, settings: OptimizerInHook) -> ZeroHook:
    if not isinstance(zero, ShardedOptimizer):
        raise TypeError(f"Expected a ShardedOptimizer for `zero`, got {type(zero).__name__}.")
    reducer = getattr(ddp, "reducer", None)
    if not isinstance(reducer, Reducer) and not isinstance(ddp, DistributedDataParallel):
        raise TypeError(
            f"Expected a DataParallel or torch's DistributedDataParallel for `ddp`, got {type(ddp).__name__}."
        )
    if not zero.overlap_with_ddp:
        raise ValueError(
            "Expected a ShardedOptimizer made with `overlap_with_ddp=True`: this one makes its steps in `step()`."
        )
    if zero.has_hook:
        raise ValueError("This ShardedOptimizer has a hook already; make another one for another hook.")
    parent = reducer.parent_group if isinstance(reducer, Reducer) else ddp.process_group
    if comm.global_ranks(parent) != comm.global_ranks(zero.process_group):
        raise ValueError("`ddp` and `zero` have different process groups: give both the same.")
    is_function = callable(hook) and not isinstance(hook, (CommHook, type))
    declared = None if is_function else resolve_hook(hook)

    def declare(state: Any) -> CommHook | None:
        if state is None and _is_plain_mean(hook):
            return None
        return TorchHook(hook=hook, state=state) if is_function else declared

    refuse_diverging(declare(None))
    if isinstance(reducer, Reducer):
        made = _on_our_reducer(declare, ddp, reducer, zero, settings)
    else:
        made = _on_torch_ddp(declare, ddp, zero, settings)
    zero.has_hook = True
    return made


def _is_plain_mean(hook: Any) -> bool:
    """Tell whether a hook is torch's function for the mean, or ours; that is made for owners of parameters alone."""
    torchs = (getattr(hook, "__module__", None) or "").startswith("torch.")
    return hook is allreduce_hook or (torchs and hook_name(hook) == "allreduce_hook")


def _on_our_reducer(
    declare: _Declare, ddp: Any, reducer: Reducer, zero: ShardedOptimizer, settings: OptimizerInHook
) -> ZeroHook:
    zero.sharded_step.buckets = lambda: bucket_params(reducer)
    ending = _Ending(ddp, reducer, zero)

    def as_comm_hook(state: Any) -> CommHook:
        return _StepInHook(
            inner=declare(state),
            settings=settings,
            step=ending.next_step,
            backwards=lambda: reducer.synced_backwards,
            bucket_done=lambda bucket: ending.schedule(),
        )

    def zero_step_hook(state: Any, bucket: Any) -> Any:
        raise RuntimeError("This hook works only in the DataParallel that it was made for: `ddp.register_comm_hook`.")

    zero_step_hook.as_comm_hook = as_comm_hook  # type: ignore[attr-defined]
    return zero_step_hook


class _Ending:
    """Ends each step once the reducer is done: what went through no bucket is stepped then."""

    def __init__(self, ddp: Any, reducer: Reducer, zero: ShardedOptimizer) -> None:
        self._ddp = ddp
        self._reducer = reducer
        self._zero = zero
        self._scheduled = False
        self._backward = -1

    def next_step(self) -> ShardedStep:
        step = self._zero.sharded_step
        if step.begun and self._backward != self._reducer.synced_backwards and step.left():
            raise RuntimeError(
                "The last backward ended where the rest of its step could not be made (some parameters lay in no "
                "bucket): call `step()` of the ShardedOptimizer after each backward."
            )
        self._backward = self._reducer.synced_backwards
        self._zero.driven = True
        return step

    def schedule(self) -> None:
        if not self._scheduled and _compat.current_backward_id() != -1:
            self._scheduled = True
            _compat.queue_end_of_backward(self._end)

    def _end(self) -> None:
        self._scheduled = False
        step = self._zero.sharded_step
        # In a Join context ranks without data have to be told, which `step()` does. A nested backward ends nothing.
        if not step.begun or self._zero.in_join or self._reducer.synced_backwards == self._backward:
            return
        if getattr(self._ddp, "_join", None) is not None and step.left():
            raise RuntimeError(
                "Some parameters lay in no bucket, and ranks without data do not know: enter "
                "`Join([model, optimizer])` instead of `model.join()`, and call `optimizer.step()` after each backward."
            )
        step.rest()


def _on_torch_ddp(
    declare: _Declare, ddp: DistributedDataParallel, zero: ShardedOptimizer, settings: OptimizerInHook
) -> ZeroHook:
    if ddp.find_unused_parameters:
        raise ValueError(
            "torch's DDP does not tell hooks which parameters nobody used, so that they would be stepped with zero "
            "gradients: make it with `find_unused_parameters=False`, or use lightning_ddp_hooks.DataParallel."
        )
    states: list[TorchDDPState] = []

    def next_step() -> ShardedStep:
        zero.driven = True
        return zero.sharded_step

    def bucket_done(bucket: GradBucket) -> None:
        if bucket.is_last():
            zero.sharded_step.rest()

    def zero_step_hook(state: Any, bucket: comm.TorchGradBucket) -> torch.futures.Future[torch.Tensor]:
        if not states:
            hook = _StepInHook(
                inner=declare(state),
                settings=settings,
                step=next_step,
                backwards=lambda: states[0].steps,
                on_torch_ddp=True,
                bucket_done=bucket_done,
            )
            states.append(TorchDDPState(hook, ddp.process_group, module=ddp.module))
        return run_on_torch_ddp(states[0], bucket)

    return zero_step_hook
