"""Gradients travel in 16 bits: the mean, or any other hook, in float16 or bfloat16."""

# No postponed annotations: torch's DDP looks at those of the functions when it is given one.
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.hooks.allreduce import (
    AllReduce,
    OptionalGroup,
    TensorFuture,
    divisor_of,
    done,
    narrower,
    scale_into,
)
from lightning_ddp_hooks.hooks.contract import (
    BindContext,
    BoundHook,
    CommHook,
    HookFunction,
    Phases,
    hook_name,
    phases_of,
)
from lightning_ddp_hooks.hooks.registry import SHORT_NAMES, HookLike, first_difference, resolve_hook
from lightning_ddp_hooks.hooks.workspace import PerBucket, Workspace
from lightning_ddp_hooks.reducer import requests
from lightning_ddp_hooks.reducer.bucket import GradBucket
from lightning_ddp_hooks.short_names import add_short_name

_DTYPES = dict.fromkeys(("float16", "fp16", "half"), torch.float16) | dict.fromkeys(
    ("bfloat16", "bf16"), torch.bfloat16
)


@dataclass(frozen=True)
class Cast(CommHook):
    """Send in 16 bits what another hook sends in 32.

    The mean (no ``inner``) divides before it casts, so that float16 cannot overflow in the sum. `PowerSGD` sends its
    factors in 16 bits and keeps what the rounding lost in its residuals; any other hook is handed a bucket in 16
    bits. Gradients that have 16 bits already are left as they are. Sends half of what ``inner`` would.

    Args:
        inner: Hook to cast for: a short name, a `CommHook`, a pair ``(state, hook)``, or None for the mean.
        dtype: ``"float16"``, ``"bfloat16"`` or the ``torch.dtype``. float16 rounds to 11 bits and overflows at 65504,
            bfloat16 to 8 bits with float32's range.
        accumulate: ``"wire"`` sums in ``dtype``, which rounds once for each rank. ``"float32"`` sends each part to one
            rank, which sums in float32, and gathers the results: two roundings in all, for any number of ranks, and the
            same volume. For the mean only.

    Raises:
        TypeError: ``inner`` is nothing that can be a hook, or ``dtype`` is neither name nor dtype.
        ValueError: Another dtype, another value of ``accumulate``, or ``accumulate="float32"`` with an inner hook.

    Example:
        >>> Trainer(strategy=DDPHooksStrategy(comm_hook=Cast(PowerSGD(rank=2), "bfloat16")))
    """

    inner: HookLike | None = None
    dtype: str | torch.dtype = "bfloat16"
    accumulate: Literal["wire", "float32"] = field(default="wire", kw_only=True)

    def __post_init__(self) -> None:
        _comm_dtype(self.dtype)
        declared = resolve_hook(self.inner)
        if self.accumulate not in ("wire", "float32"):
            raise ValueError(f"Expected `accumulate` to be 'wire' or 'float32', got {self.accumulate!r}.")
        if self.accumulate == "float32" and declared is not None:  # the mean is None
            raise ValueError(
                f"accumulate='float32' replaces the sum of the mean; {type(declared).__name__} has sums of its own. "
                "Leave `accumulate` at 'wire', or leave out `inner`."
            )

    @property
    def comm_dtype(self) -> torch.dtype:
        """Dtype in which values are sent."""
        return _comm_dtype(self.dtype)

    def inner_hooks(self) -> Sequence[HookLike | None]:
        """Return the inner hook."""
        return [self.inner]

    def replicas_differ_from(self) -> int | None:
        """Return what the inner hook says."""
        return first_difference([self.inner])

    def bind(self, context: BindContext) -> BoundHook:
        """Bind the inner hook, and cast around it if it does not do so itself."""
        dtype = _comm_dtype(self.dtype)
        if self.accumulate == "float32":
            return _BoundFloat32Sum(context, dtype)
        return bind_with_cast(resolve_hook(self.inner) or AllReduce(), replace(context, comm_dtype=dtype))


def bind_with_cast(hook: CommHook, context: BindContext) -> BoundHook:
    """Bind a hook so that it sends in ``context.comm_dtype``: by itself, or with a cast around it."""
    bound = hook.bind(context)
    if context.comm_dtype is None or bound.casts_itself:
        return bound
    return _BoundCast(bound, context.comm_dtype)


def _comm_dtype(dtype: object) -> torch.dtype:
    if not isinstance(dtype, (str, torch.dtype)):
        raise TypeError(f"Expected `dtype` to be a name or a torch.dtype, got {type(dtype).__name__}.")
    found = _DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if found is None or found not in _DTYPES.values():
        raise ValueError(f"Expected `dtype` to be 'float16' or 'bfloat16', got {dtype!r}.")
    return found


class _BoundCast(BoundHook):
    """Hands a bucket in 16 bits to a hook that knows nothing of it; the state is the inner hook's."""

    def __init__(self, inner: BoundHook, dtype: torch.dtype) -> None:
        self.name = inner.name
        self.one_at_a_time = inner.one_at_a_time
        self.takes_divided = inner.takes_divided
        self.keeps_state = inner.keeps_state
        self._inner = inner
        self._dtype = dtype
        self._workspaces = PerBucket(lambda _: Workspace())

    def reduce(self, bucket: GradBucket) -> Phases:
        buffer = bucket.buffer()
        dtype = narrower(buffer.dtype, self._dtype)
        if dtype is buffer.dtype:
            return (yield from phases_of(self._inner, bucket))
        narrow = self._workspaces.of(bucket).get("narrow", buffer.numel(), dtype, buffer.device).copy_(buffer)
        bucket.set_buffer(narrow)
        result = yield from phases_of(self._inner, bucket)
        buffer.copy_(bucket.buffer() if result is None else result.view(-1))
        return buffer

    def group_of(self, name: str, param: Tensor) -> Hashable:
        return self._inner.group_of(name, param)

    def hook_of(self, name: str, param: Tensor) -> BoundHook:
        return self._inner.hook_of(name, param)

    def error_memory(self) -> Mapping[str, Tensor]:
        return self._inner.error_memory()

    def stats(self) -> dict[str, Any]:
        return self._inner.stats()

    def rescale(self, factor: float) -> None:
        self._inner.rescale(factor)

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._inner.load_state_dict(state)


class _BoundFloat32Sum(BoundHook):
    """The mean with messages of 16 bits and sums of 32.

    all ranks' part i --all-to-all--> rank i: sum in float32, divide, round --all-gather--> all ranks
    """

    name = "Cast"

    def __init__(self, context: BindContext, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._world_size = context.world_size
        self._workspaces = PerBucket(lambda _: Workspace())

    def reduce(self, bucket: GradBucket) -> Phases:
        buffer, world_size, workspace = bucket.buffer(), self._world_size, self._workspaces.of(bucket)
        numel, device, dtype = buffer.numel(), buffer.device, narrower(buffer.dtype, self._dtype)
        part = -(-numel // world_size)
        sent = workspace.get("sent", part * world_size, dtype, device)
        received = workspace.get("received", part * world_size, dtype, device)
        sent[:numel].copy_(buffer)  # undivided: nothing is summed in 16 bits, and small values keep their place
        sent[numel:].zero_()
        yield requests.AllToAll(sent, received)
        total = workspace.get("sum", part, torch.promote_types(dtype, torch.float32), device)
        rows = received.view(world_size, part)
        total.copy_(rows[0])
        for row in rows[1:]:
            total.add_(row)
        mean = workspace.get("mean", part, dtype, device)
        scale_into(mean, total, 1.0 / bucket.divisor)
        yield requests.AllGather(mean, sent)
        buffer.copy_(sent[:numel])
        return None


def fp16_compress_hook(process_group: OptionalGroup, bucket: comm.TorchGradBucket) -> TensorFuture:
    """Average over the ranks of the group (None: all) in float16, divided before the cast; by torch's contract.

    Example:
        >>> ddp_model.register_comm_hook(None, fp16_compress_hook)
    """
    return _mean_in(torch.float16, process_group, bucket)


def bf16_compress_hook(process_group: OptionalGroup, bucket: comm.TorchGradBucket) -> TensorFuture:
    """Average in bfloat16, as `fp16_compress_hook`; torch's DDP refuses hooks of this name on gloo.

    Example:
        >>> model.register_comm_hook(None, bf16_compress_hook)
    """
    return _mean_in(torch.bfloat16, process_group, bucket)


def _mean_in(dtype: torch.dtype, process_group: OptionalGroup, bucket: Any) -> TensorFuture:
    group, buffer = comm.resolve_group(process_group), bucket.buffer()
    narrow = torch.empty_like(buffer, dtype=narrower(buffer.dtype, dtype))
    scale_into(narrow, buffer, 1.0 / divisor_of(bucket, group))
    return comm.all_reduce(narrow, group).get_future().then(lambda future: buffer.copy_(future.value()[0]))


def fp16_compress_wrapper(hook: HookFunction) -> HookFunction:
    """Return ``hook`` with a bucket in float16 around it; by torch's contract.

    Example:
        >>> ddp_model.register_comm_hook(PowerSGDState(None), fp16_compress_wrapper(powersgd_hook))
    """
    return _wrapper(hook, torch.float16)


def bf16_compress_wrapper(hook: HookFunction) -> HookFunction:
    """Return ``hook`` with a bucket in bfloat16 around it; by torch's contract.

    Example:
        >>> ddp_model.register_comm_hook(PowerSGDState(None), bf16_compress_wrapper(powersgd_hook))
    """
    return _wrapper(hook, torch.bfloat16)


def _wrapper(hook: HookFunction, dtype: torch.dtype) -> HookFunction:
    def wrapped(state: object, bucket: comm.TorchGradBucket) -> TensorFuture:
        buffer = bucket.buffer()
        bucket.set_buffer(buffer.to(narrower(buffer.dtype, dtype)))
        returned = hook(state, bucket)
        if isinstance(returned, Tensor):
            return done(buffer.copy_(returned.view(-1)))
        then: Callable[..., TensorFuture] = returned.then

        def copy_back(future: torch.futures.Future[Any]) -> Tensor:
            value = future.value()
            reduced: Tensor = value[0] if isinstance(value, (list, tuple)) else value
            return buffer.copy_(reduced.view(-1))

        return then(copy_back)

    shown = str(dtype).removeprefix("torch.")
    wrapped.__name__ = f"{shown}_{getattr(hook, '__name__', 'hook')}"
    wrapped.__qualname__ = f"{shown}({hook_name(hook)})"
    return wrapped


add_short_name(SHORT_NAMES, "fp16", Cast, dtype="float16")
add_short_name(SHORT_NAMES, "bf16", Cast, dtype="bfloat16")
