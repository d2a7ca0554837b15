"""The plain mean over the ranks, and no mean at all."""

# No postponed annotations: torch's DDP looks at those of the functions when it is given one.
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.hooks.contract import BindContext, BoundHook, CommHook, Phases, Waitable
from lightning_ddp_hooks.hooks.registry import SHORT_NAMES
from lightning_ddp_hooks.hooks.workspace import Workspace
from lightning_ddp_hooks.reducer.bucket import GradBucket


@dataclass(frozen=True, kw_only=True)
class AllReduce(CommHook):
    """The mean of the gradients over the ranks: what the reducer does without a hook, to the last bit.

    It is of use as a part of composed hooks; alone it is the same as no hook. Values are divided before they are
    summed, so that float16 cannot overflow in the sum.

    Wire: 4 bytes per element of a float32 gradient (times 2 (n - 1) / n for n ranks, as in any ring).

    Example:
        >>> PerParameter([Rule(PowerSGD(rank=2), ndim=2)], default=AllReduce())
    """

    is_plain_mean = True

    def bind(self, context: BindContext) -> BoundHook:
        """Take the reducer's group."""
        return _BoundAllReduce(context)


class _BoundAllReduce(BoundHook):
    name = "AllReduce"
    casts_itself = True
    takes_divided = True

    def __init__(self, context: BindContext) -> None:
        self._mean = Mean(context.group, context.wire_dtype)

    def reduce(self, bucket: GradBucket) -> Phases:
        yield from self._mean.phases(bucket)
        return None


class Mean:
    """The phase that averages a bucket in place, as a part of other hooks.

    Args:
        group: the ranks.
        wire_dtype: in what to send, if it is narrower than the gradients; None for their dtype.
    """

    def __init__(self, group: comm.ProcessGroup, wire_dtype: torch.dtype | None = None) -> None:
        self._group = group
        self._wire_dtype = wire_dtype
        self._workspace = Workspace()

    def phases(self, bucket: GradBucket) -> Generator[Waitable, None, None]:
        """Average ``bucket.buffer()`` in place; one collective."""
        buffer = bucket.buffer()
        dtype = narrower(buffer.dtype, self._wire_dtype)
        if dtype is buffer.dtype:
            if bucket.divisor != 1.0:
                buffer.mul_(1.0 / bucket.divisor)
            yield comm.all_reduce(buffer, self._group)
            return
        wire = self._workspace.get(bucket.index(), buffer.numel(), dtype, buffer.device)
        scale_into(wire, buffer, 1.0 / bucket.divisor)
        yield comm.all_reduce(wire, self._group)
        buffer.copy_(wire)


def narrower(gradient: torch.dtype, wire: torch.dtype | None) -> torch.dtype:
    """Return the dtype to send a gradient in: ``wire`` if that saves anything, else the gradient's own."""
    if wire is None or not gradient.is_floating_point or wire.itemsize >= gradient.itemsize:
        return gradient
    return wire


def scale_into(out: Tensor, tensor: Tensor, factor: float) -> None:
    """Write ``tensor * factor`` into ``out`` of another dtype, rounding once; overwrites ``tensor`` on the CPU."""
    if tensor.is_cuda:
        torch.mul(tensor, factor, out=out)  # one kernel
    else:
        out.copy_(tensor if factor == 1.0 else tensor.mul_(factor))  # the mixed-dtype loop is slower than two passes


@dataclass(frozen=True, kw_only=True)
class Noop(CommHook):
    """No communication: every rank keeps its own gradients.

    **For headroom analysis only.** The difference between a step with this hook and one with another is all that faster
    communication could ever gain. The replicas drift apart, so the model that comes out is of no use.

    Wire: 0 bytes per element.

    Example:
        >>> Trainer(strategy=DDPHooksStrategy(comm_hook="noop"), max_steps=50)  # how long does a step take without?
    """

    def bind(self, context: BindContext) -> BoundHook:
        """Need nothing."""
        return _BoundNoop()

    def replicas_differ_from(self) -> int | None:
        """Return the first step: each rank keeps its own gradients."""
        return 0


class _BoundNoop(BoundHook):
    name = "Noop"

    def reduce(self, bucket: GradBucket) -> Phases:
        return None
        yield  # makes this a generator


def allreduce_hook(
    process_group: comm.ProcessGroup | None, bucket: comm.TorchGradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket over the ranks; by torch's contract, for torch's DDP and for our reducer.

    Args:
        process_group: the ranks; None for all.
        bucket: the gradients, not divided.

    Example:
        >>> ddp_model.register_comm_hook(None, allreduce_hook)
    """
    group = comm.resolve_group(process_group)
    buffer = bucket.buffer().div_(_divisor(bucket, group))
    return comm.all_reduce(buffer, group).get_future().then(lambda future: future.value()[0])


def noop_hook(_: object, bucket: comm.TorchGradBucket) -> torch.futures.Future[torch.Tensor]:
    """Leave the gradients as they are, each rank its own. **For headroom analysis only**; see `Noop`.

    Example:
        >>> ddp_model.register_comm_hook(None, noop_hook)
    """
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _divisor(bucket: Any, group: comm.ProcessGroup) -> float:
    """Return what the sum is to be divided by: our buckets say so, torch's do not."""
    return float(getattr(bucket, "divisor", 0) or comm.world_size(group))


SHORT_NAMES["noop"] = Noop
