"""Hooks written as functions, by torch's contract: torch's own, a user's, any callable."""

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
    describe,
    hook_name,
)
from lightning_ddp_hooks.hooks.values import require_types
from lightning_ddp_hooks.reducer.bucket import GradBucket

# Of torch's hooks and ours, those that issue one collective and none from a callback.
_KNOWN_SIMPLE = {"allreduce_hook", "fp16_compress_hook", "bf16_compress_hook", "noop_hook"}
# Ours only: torch's hooks of these names issue a second collective from a callback.
_OURS_SIMPLE = {"quantization_pertensor_hook", "quantization_perchannel_hook", "post_local_sgd_hook"}


@dataclass(frozen=True, kw_only=True)
class TorchHook(CommHook):
    """A function by torch's contract, ``hook(state, bucket) -> Future[Tensor] | Tensor``.

    The gradients in the bucket are not divided. The function may be a partial, a lambda, a method or a callable object.

    Args:
        hook: the function; see https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html.
        state: handed to each call untouched.
        one_at_a_time: start a bucket only when the one before it is done. None decides: False for those of torch's
            hooks that issue one collective, else True, since a hook that issues collectives from completion callbacks
            (torch's PowerSGD) mixes up ranks when several buckets are in flight.
        reads_divisor: whether the function divides by ``bucket.divisor`` and not by the number of ranks, which differ
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
        """Check that the hook can be called."""
        if not callable(self.hook):
            raise TypeError(f"Expected a callable hook(state, bucket), got {type(self.hook).__name__}.")
        require_types(self, flags=("one_at_a_time", "reads_divisor"))

    def replicas_differ_from(self) -> int | None:
        """Return 0 for functions that leave ranks apart, and for those of which nothing is known."""
        known = (getattr(self.hook, "__module__", None) or "").startswith(("lightning_ddp_hooks.", "torch."))
        local = hook_name(self.hook) in ("noop_hook", "post_local_sgd_hook", "post_localSGD_hook")
        return 0 if local or not known else None

    def bind(self, context: BindContext) -> BoundHook:
        """Wrap the function; its state is its own."""
        module, name = getattr(self.hook, "__module__", "") or "", getattr(self.hook, "__name__", "")
        serial = self.one_at_a_time
        if serial is None:
            ours = module.startswith("lightning_ddp_hooks.")
            simple = name in _KNOWN_SIMPLE and (ours or module.startswith("torch."))
            serial = not (simple or (ours and name in _OURS_SIMPLE))
        reads = self.reads_divisor
        if reads is None:
            reads = module.startswith("lightning_ddp_hooks.")
        return _BoundFunction(self.hook, self.state, serial, None if reads else float(context.world_size))


class _BoundFunction(BoundHook):
    def __init__(self, hook: HookFunction, state: Any, one_at_a_time: bool, divided_by: float | None) -> None:
        self.name = hook_name(hook)
        self.one_at_a_time = one_at_a_time
        self._hook = hook
        self._state = state
        self._divided_by = divided_by  # None: by the bucket's divisor, as it should be

    def reduce(self, bucket: GradBucket) -> Phases:
        returned = self._hook(self._state, bucket)
        if isinstance(returned, Tensor):
            return self._rescaled(bucket, check_result(self.name, bucket, returned))
        if not hasattr(returned, "wait") and not hasattr(returned, "value"):
            check_result(self.name, bucket, returned)  # raises
        handle = _Handle(returned)
        yield handle
        return self._rescaled(bucket, self._result(bucket, handle))

    def _rescaled(self, bucket: GradBucket, result: Tensor) -> Tensor:
        """Divide by what the bucket says, where the function has divided by the number of ranks."""
        if self._divided_by is not None and self._divided_by != bucket.divisor:
            result.mul_(self._divided_by / bucket.divisor)
        return result

    def _result(self, bucket: GradBucket, handle: "_Handle") -> Tensor:
        try:
            value = handle.value()
        except Exception as error:
            raise RuntimeError(f"Communication hook {self.name} failed on {describe(bucket)}: {error}") from error
        if value is True:  # a Work says only that it is done; the values are where it was given them
            return bucket.buffer()
        return check_result(self.name, bucket, value)


class _Handle:
    """A future, a work or any object with ``wait()`` or ``value()``, under one face."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._waited: Any = None

    def done(self) -> bool:
        ask = getattr(self._inner, "done", None) or getattr(self._inner, "is_completed", None)
        return bool(ask()) if callable(ask) else not hasattr(self._inner, "wait")

    def wait(self) -> object:
        if hasattr(self._inner, "wait"):
            self._waited = self._inner.wait()
        return self._waited

    def value(self) -> Any:
        if self._waited is None:
            self.wait()
        if self._waited is None and hasattr(self._inner, "value"):
            self._waited = self._inner.value()
        return self._waited
