"""Plain all-reduce over the ranks, and no exchange at all."""

# No postponed annotations: torch's DDP looks at those of the functions when it is given one.
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.hooks.contract import BindContext, BoundHook, CommHook, Phases, ReplicatingHook
from lightning_ddp_hooks.hooks.registry import SHORT_NAMES
from lightning_ddp_hooks.hooks.workspace import PerBucket, Workspace
from lightning_ddp_hooks.reducer import requests
from lightning_ddp_hooks.reducer.bucket import GradBucket
from lightning_ddp_hooks.short_names import add_short_name

OptionalGroup = comm.ProcessGroup | None
TensorFuture = torch.futures.Future[torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class AllReduce(ReplicatingHook):
    """The mean of the gradients over the ranks: what the reducer does without a hook, to the last bit.

    It is of use as a part of composed hooks. Values are divided before they are summed, so that float16 cannot overflow
    in the sum. Sends 4 bytes per element of a float32 gradient (times 2 (n - 1) / n for n ranks, as in any ring).

    Example:
        >>> PerParameter([Rule(PowerSGD(rank=2), ndim=2)], default=AllReduce())
    """

    is_plain_mean = True

    def bind(self, context: BindContext) -> BoundHook:
        """Bind the hook."""
        return Mean(context.comm_dtype)


class Mean(BoundHook):
    """Averages buckets in place, sent in ``comm_dtype`` if that is narrower than the gradients."""

    name = "AllReduce"
    casts_itself = True
    takes_divided = True

    def __init__(self, comm_dtype: torch.dtype | None = None) -> None:
        self._comm_dtype = comm_dtype
        self._workspaces = PerBucket(lambda _: Workspace())

    def reduce(self, bucket: GradBucket) -> Phases:
        """Average ``bucket.buffer()`` in place; one collective."""
        buffer = bucket.buffer()
        dtype = narrower(buffer.dtype, self._comm_dtype)
        if dtype is buffer.dtype:
            if bucket.divisor != 1.0:
                buffer.mul_(1.0 / bucket.divisor)
            yield requests.AllReduce(buffer)
        else:
            narrow = self._workspaces.of(bucket).get("narrow", buffer.numel(), dtype, buffer.device)
            scale_into(narrow, buffer, 1.0 / bucket.divisor)
            yield requests.AllReduce(narrow)
            buffer.copy_(narrow)
        return None


def narrower(gradient: torch.dtype, comm_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype to send a gradient in: ``comm_dtype`` if that saves anything, else the gradient's own."""
    if comm_dtype is None or not gradient.is_floating_point or comm_dtype.itemsize >= gradient.itemsize:
        return gradient
    return comm_dtype


def scale_into(out: Tensor, tensor: Tensor, factor: float) -> None:
    """Write ``tensor * factor`` into ``out`` of another dtype, rounding once; overwrites ``tensor`` on the CPU."""
    if tensor.device.type != "cpu":
        torch.mul(tensor, factor, out=out)  # one kernel
    else:
        out.copy_(tensor if factor == 1.0 else tensor.mul_(factor))  # the mixed-dtype loop is slower than two passes


def divisor_of(bucket: Any, group: comm.ProcessGroup) -> float:
    """Return what a sum is to be divided by: our buckets say so, torch's do not."""
    return float(getattr(bucket, "divisor", 0) or comm.world_size(group))


def done(value: Tensor) -> TensorFuture:
    """Return a future that is done."""
    future: TensorFuture = torch.futures.Future()
    future.set_result(value)
    return future


@dataclass(frozen=True, kw_only=True)
class Noop(CommHook):
    """No communication: every rank keeps its own gradients.

    **For headroom analysis only.** The difference between a step with this hook and one with another is all that faster
    communication could ever gain. The replicas drift apart, so the model that comes out is of no use.

    Example:
        >>> Trainer(strategy=DDPHooksStrategy(comm_hook="noop"), max_steps=50)  # how long does a step take without?
    """

    def bind(self, context: BindContext) -> BoundHook:
        """Bind the hook."""
        return _BoundNoop()


class _BoundNoop(BoundHook):
    name = "Noop"

    def reduce(self, bucket: GradBucket) -> Phases:
        return None
        yield  # makes this a generator


def allreduce_hook(process_group: OptionalGroup, bucket: comm.TorchGradBucket) -> TensorFuture:
    """Average the bucket over the ranks of the group (None: all); by torch's contract.

    Example:
        >>> ddp_model.register_comm_hook(None, allreduce_hook)
    """
    group = comm.resolve_group(process_group)
    buffer = bucket.buffer().div_(divisor_of(bucket, group))
    return comm.all_reduce(buffer, group).get_future().then(lambda future: future.value()[0])


def noop_hook(_: object, bucket: comm.TorchGradBucket) -> TensorFuture:
    """Leave the gradients as they are, each rank its own. **For headroom analysis only**; see `Noop`.

    Example:
        >>> ddp_model.register_comm_hook(None, noop_hook)
    """
    return done(bucket.buffer())


add_short_name(SHORT_NAMES, "allreduce", AllReduce)
add_short_name(SHORT_NAMES, "noop", Noop)
