"""Hooks written as functions, by torch's contract: torch's own, a user's, any callable."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_hooks.hooks.contract import (
    BindContext,
    BoundHook,
    CommHook,
    HookFunction,
    Phases,
    check_result,
    hook_name,
    require_types,
)
from lightning_ddp_hooks.reducer import requests
from lightning_ddp_hooks.reducer.bucket import GradBucket

# Of torch's hooks and ours, those that issue one collective and none from a callback.
_ONE_COLLECTIVE = {"allreduce_hook", "fp16_compress_hook", "bf16_compress_hook", "noop_hook"}
_QUANTIZATION = {"quantization_pertensor_hook", "quantization_perchannel_hook"}
_POWERSGD = {"powersgd_hook", "powerSGD_hook", "batched_powersgd_hook", "batched_powerSGD_hook"}
# Of a state for post-local SGD, ours or torch's: the setting for the step from which gradients are local.
_LOCAL_FROM = ("start_local_sgd_iter", "start_localSGD_iter")
_STATELESS = _ONE_COLLECTIVE | _QUANTIZATION


@dataclass(frozen=True, kw_only=True)
class TorchHook(CommHook):
    """A function by torch's contract, ``hook(state, bucket) -> Future[Tensor] | Tensor``.

    The gradients in the bucket are to be divided by the number of ranks, which is ``bucket.divisor`` too: where fewer
    ranks share a sum (`DataParallel.join`), they come multiplied accordingly. The function may be a partial, a lambda,
    a method or a callable object.

    Args:
        hook: Function; see https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html.
        state: Object that is handed to each call untouched.
        one_at_a_time: Start a bucket only when the one before it is done. None decides: False for those of torch's
            hooks that issue one collective, else True, since collectives from completion callbacks (torch's PowerSGD)
            mix up ranks when several buckets are in flight.

    Raises:
        TypeError: ``hook`` is not callable.

    Example:
        >>> from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
        >>> DDPHooksStrategy(comm_hook=TorchHook(hook=fp16_compress_hook))
    """

    hook: HookFunction
    state: Any = None
    one_at_a_time: bool | None = None

    def __post_init__(self) -> None:
        if not callable(self.hook):
            raise TypeError(f"Expected a callable hook(state, bucket), got {type(self.hook).__name__}.")
        require_types(self, flags=("one_at_a_time",))

    def replicas_differ_from(self) -> int | None:
        """Return None for functions of torch and of this package that give all ranks the same; 0 for unknown ones."""
        for setting in _LOCAL_FROM:
            if hasattr(self.state, setting):
                return int(getattr(self.state, setting))
        return None if self._is_named(*(_STATELESS - {"noop_hook"}), *_POWERSGD) else 0

    def bind(self, context: BindContext) -> BoundHook:
        """Wrap the function; its state is its own."""
        serial, ours = self.one_at_a_time, self._is_from("lightning_ddp_hooks")
        if serial is None:  # torch's hooks of the other names issue a second collective from a callback
            serial = not self._is_named(*_ONE_COLLECTIVE, *((*_QUANTIZATION, "post_local_sgd_hook") if ours else ()))
        bound = _BoundFunction(self.hook, self.state, serial, float(context.world_size))
        bound.keeps_state = not self._is_named(*_STATELESS)
        if any(hasattr(self.state, name) for name in _LOCAL_FROM) and hasattr(self.state, "iter"):
            bound.clock = context.step
        return bound

    def _is_from(self, package: str) -> bool:
        return (getattr(self.hook, "__module__", "") or "").startswith(f"{package}.")

    def _is_named(self, *names: str) -> bool:
        """Tell whether it is a function of torch or of this package with one of these names."""
        known = self._is_from("lightning_ddp_hooks") or self._is_from("torch")
        return known and getattr(self.hook, "__name__", "") in names


class _BoundFunction(BoundHook):
    def __init__(self, hook: HookFunction, state: Any, one_at_a_time: bool, world_size: float) -> None:
        self.name = hook_name(hook)
        self.one_at_a_time = one_at_a_time
        # Where a user's function that is being compiled runs the backward, Dynamo would compile the hook, too.
        self._call = torch.compiler.disable(lambda bucket: hook(state, bucket))
        self._world_size = world_size
        self._state = state
        self.clock: Callable[[], int] | None = None  # what a state for post-local SGD is to count by

    def reduce(self, bucket: GradBucket) -> Phases:
        if bucket.divisor != self._world_size:  # functions of torch divide by the number of ranks, whatever it says
            bucket.buffer().mul_(self._world_size / bucket.divisor)
            bucket.divisor = self._world_size
        if self.clock is not None:
            self._state.iter = self.clock()
        returned = self._call(bucket)
        if isinstance(returned, Tensor):
            return check_result(self.name, bucket, returned)
        if not hasattr(returned, "wait") and not hasattr(returned, "value"):
            check_result(self.name, bucket, returned)  # raises
        handle = _Handle(returned)
        yield requests.Wait(handle)
        # A Work says only that it is done; the values are where it was given them.
        done = handle.value is True
        return bucket.buffer() if done else check_result(self.name, bucket, handle.value)


class _Handle:
    """Wraps a future, a work or any object with ``wait()`` or ``value()``."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.value: Any = None

    def done(self) -> bool:
        ask = getattr(self._inner, "done", None) or getattr(self._inner, "is_completed", None)
        return bool(ask()) if callable(ask) else not hasattr(self._inner, "wait")

    def wait(self) -> None:
        self.value = self._inner.wait() if hasattr(self._inner, "wait") else None
        if self.value is None and hasattr(self._inner, "value"):
            self.value = self._inner.value()
