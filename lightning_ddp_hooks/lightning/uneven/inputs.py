"""What a strategy does under `UnevenInputs`; without the callback each call passes straight through.

Where a collective is called from decides who takes part in it in the tail (see `UnevenRun.place`):
  * in the user's step: active ranks use their own group; joined ranks, if they replay a step, communicate nothing;
  * in batch hooks and callbacks: all ranks come by, so all take part, and joined ones bring the neutral element;
  * anywhere else (epoch ends, checkpoints): nothing is special, all ranks have something to say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.lightning.logged_values import LoggingCheck, Op, op_name
from lightning_ddp_hooks.lightning.uneven.run import UnevenRun, UnevenSettings

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_ddp_hooks.join.agreement import Step


def neutral(tensor: Tensor, op: Op) -> Tensor:
    """Return the neutral element of a reduction, in the shape of ``tensor``."""
    if op in ("max", "min"):
        limits = torch.finfo(tensor.dtype) if tensor.is_floating_point() else torch.iinfo(tensor.dtype)
        return torch.full_like(tensor, limits.min if op == "max" else limits.max)
    return torch.full_like(tensor, 1 if op == "product" else 0)


def reduced(tensor: Tensor, op: Op, group: comm.ProcessGroup, count: int) -> Tensor:
    """Return the reduction over a group; ``tensor`` stays as it is."""
    out = tensor.detach().clone()
    if op != "mean":
        return comm.reduce_in_place(out, op, group)
    return comm.reduce_in_place(out, "sum", group) / count


def gathered(tensor: Tensor, group: comm.ProcessGroup, *, sync_grads: bool) -> Tensor:
    """Return the tensors of all ranks of the group, stacked; with ``sync_grads`` it is part of the graph."""
    with torch.set_grad_enabled(torch.is_grad_enabled() and sync_grads):
        out: Tensor = _Gather.apply(tensor, group)  # type: ignore[no-untyped-call]
        return out


class _Gather(torch.autograd.Function):
    """torch's own, `torch.distributed.nn.functional.all_gather`, fails in gloo groups of some ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: comm.ProcessGroup) -> Tensor:
        ctx.group = group
        return torch.stack(comm.all_gather(tensor.contiguous(), group))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = comm.reduce_in_place(gradient.contiguous().clone(), "sum", ctx.group)
        return total[comm.rank(ctx.group)], None


class Inputs:
    """The inputs of a run: as many batches on all ranks, or not."""

    def __init__(self) -> None:
        self.uneven: UnevenRun | None = None
        self.logging: LoggingCheck | None = None
        self._failed = False

    def start(self, settings: UnevenSettings, trainer: pl.Trainer) -> None:
        """Begin a run with uneven inputs; collective."""
        self.uneven = UnevenRun(settings, trainer)

    def facts(self) -> dict[str, Any]:
        """Return what the callback adds to the settings; see `FitSettings`."""
        settings = None if self.uneven is None else self.uneven.settings
        return {} if settings is None else {"policy": settings.policy, "divisor": settings.divisor}

    def text(self) -> str | None:
        """Describe the callback's settings; None without it."""
        return ", ".join(f"{name}={value!r}" for name, value in self.facts().items()) or None

    @property
    def tail(self) -> Step | None:
        """The step now at hand if some rank has no batch in it."""
        return None if self.uneven is None else self.uneven.tail

    def active_group(self) -> comm.ProcessGroup | None:
        """Return the ranks that run the current step; None means all."""
        return None if self.uneven is None else self.uneven.active_group()

    def wrap(self, loader: Any) -> Any:
        """Wrap a loader that Lightning has prepared; collective."""
        return loader if self.uneven is None else self.uneven.wrap(loader)

    def run_step(
        self, name: str, step: Callable[..., Any], args: Any, kwargs: Any, to_device: Callable[[Any], Any]
    ) -> Any:
        """Run the user's step of a name, as it is, not at all, or in a replay of a batch brought ``to_device``."""
        if self.uneven is None:
            return step(*args, **kwargs)
        return self.uneven.run_step(name, step, args, kwargs, to_device)

    def batch_to_device(self, batch: Any, device: torch.device, to_device: Callable[[], Any]) -> Any:
        """Turn to the step of a batch, and move it to the device, as ``to_device`` does if this rank has data."""
        step = None if self.uneven is None else self.uneven.begin_batch()
        if self.uneven is None or step is None or not step.joined:
            return to_device()
        return move_data_to_device(batch, device)  # an emptied one, without the user's transfer hooks

    def reduce(self, default: Callable[..., Any], tensor: Any, group: Any, reduce_op: Any) -> Any:
        """Return the reduction over the ranks that have something to say; see `Strategy.reduce`."""
        run = self.uneven
        if self.logging is not None and self.tail is None and self.logging.takes(tensor):
            return self.logging.reduce(tensor, group, reduce_op)
        if not isinstance(tensor, Tensor):
            return default(tensor, group, reduce_op)
        op = op_name(reduce_op)
        if op == "mean" and not tensor.is_floating_point():
            # Lightning cuts off the mean of integers, and divides the mean of an epoch by such a one.
            tensor = tensor.to(torch.get_default_dtype())
        if run is None:
            return default(tensor, group, reduce_op)
        tail = run.tail
        if tail is not None and run.place() == "step":
            active = run.group_for(tail, group)
            return reduced(tensor, op, active, comm.world_size(active))
        whole = comm.resolve_group(group)
        count = comm.world_size(whole)
        if tail is not None and count == len(tail.active) and run.place() == "batch hook":
            count = len(tail.ranks)
            tensor = neutral(tensor, op) if tail.joined else tensor
        return reduced(tensor, op, whole, count)

    def decide(self, default: Callable[..., bool], decision: bool, all_of_them: bool, device: torch.device) -> bool:
        """Return what all or any of the ranks decide, whether they have data or not; in a step, the active ones."""
        if self.uneven is None:
            return default(decision, all_of_them)
        group = comm.resolve_group(self.active_group())
        votes = int(reduced(torch.tensor(int(decision), device=device), "sum", group, 1))
        return votes == comm.world_size(group) if all_of_them else votes > 0

    def all_gather(self, default: Callable[..., Tensor], tensor: Tensor, group: Any, sync_grads: bool) -> Tensor:
        """Return the tensors of the ranks that run the step, stacked; see `Strategy.all_gather`."""
        run = self.uneven
        if run is None:
            return default(tensor, group=group, sync_grads=sync_grads)
        tail = run.tail if run.place() == "step" else None
        if tail is not None and tail.joined:  # a replay, whose values are thrown away: only the shape matters
            return torch.stack([tensor] * len(tail.ranks))
        whole = comm.resolve_group(group) if tail is None else run.group_for(tail, group)
        return gathered(tensor, whole, sync_grads=sync_grads)

    def barrier(self, default: Callable[[], None]) -> None:
        """Wait for the ranks that run the step."""
        if (active := self.active_group()) is None:
            default()
        else:
            comm.barrier(active)

    def broadcast(self, default: Callable[..., Any], obj: Any, src: int) -> Any:
        """Return the object of a rank, or in a step that it does not run, of the first one that does."""
        active = self.active_group()
        if active is None:
            return default(obj, src)
        ranks = comm.global_ranks(active)
        return comm.broadcast_object(obj, active, ranks.index(src) if src in ranks else 0)

    def fail(self, *, broken: bool) -> None:
        """Take note that this rank ends with an error; ``broken`` if groups may wait for anything."""
        self._failed = True
        if self.uneven is not None:
            self.uneven.failed, self.uneven.broken = True, broken

    def close(self) -> None:
        """End the run."""
        if self.logging is not None:
            self.logging.close(failed=self._failed)
        if self.uneven is not None:
            self.uneven.close()
        self.logging, self.uneven, self._failed = None, None, False
