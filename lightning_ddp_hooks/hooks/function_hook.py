"""Hooks written as functions, by torch's contract: torch's own, a user's, any callable."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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

    The gradients in the bucket are not divided. The function may be a partial, a lambda, a method or a callable object.

    Args:
        hook: Function; see https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html.
        state: Object that is handed to each call untouched.
        one_at_a_time: Start a bucket only when the one before it is done. None decides: False for those of torch's
            hooks that issue one collective, else True, since collectives from completion callbacks (torch's PowerSGD)
            mix up ranks when several buckets are in flight.
        reads_divisor: Whether the function divides by ``bucket.divisor`` and not by the number of ranks, which differ
            under `DataParallel.join` only; the result of one that does not is rescaled then. None decides: True for our
            functions, else False.

    Raises:
        TypeError: ``hook`` is not callable.

    Example:
        >>> from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
        >>> DDPHooksStrategy(comm_hook=TorchHook(hook=fp16_compress_hook))
    """

    hook: HookFunction
    state: Any = None
    one_at_a_time: bool | None = None
    reads_divisor: bool | None = None

    def __post_init__(self) -> None:
        if not callable(self.hook):
            raise TypeError(f"Expected a callable hook(state, bucket), got {type(self.hook).__name__}.")
        require_types(self, flags=("one_at_a_time", "reads_divisor"))

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
        reads = ours if self.reads_divisor is None else self.reads_divisor
        bound = _BoundFunction(self.hook, self.state, serial, None if reads else float(context.world_size))
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
    def __init__(self, hook: HookFunction, state: Any, one_at_a_time: bool, divided_by: float | None) -> None:
        self.name = hook_name(hook)
        self.one_at_a_time = one_at_a_time
        self._hook = hook
        self._state = state
        self._divided_by = divided_by  # None: by the bucket's divisor, as it should be
        self.clock: Callable[[], int] | None = None  # what a state for post-local SGD is to count by

    def reduce(self, bucket: GradBucket) -> Phases:
        if self.clock is not None:
            self._state.iter = self.clock()
        returned = self._hook(self._state, bucket)
        if isinstance(returned, Tensor):
            return self._rescaled(bucket, check_result(self.name, bucket, returned))
        if not hasattr(returned, "wait") and not hasattr(returned, "value"):
            check_result(self.name, bucket, returned)  # raises
        handle = _Handle(returned)
        yield requests.Wait(handle)
        # A Work says only that it is done; the values are where it was given them.
        done = handle.value is True
        return self._rescaled(bucket, bucket.buffer() if done else check_result(self.name, bucket, handle.value))

    def _rescaled(self, bucket: GradBucket, result: Tensor) -> Tensor:
        """Divide by what the bucket says, where the function has divided by the number of ranks."""
        if self._divided_by is not None and self._divided_by != bucket.divisor:
            result.mul_(self._divided_by / bucket.divisor)
        return result


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
