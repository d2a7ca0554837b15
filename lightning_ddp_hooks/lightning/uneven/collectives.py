"""Collectives and groups of a step in the tail: only ranks that have data take part, and means are over those.

Where a collective is called from decides (see `UnevenRun.place`):
  * in the user's step: active ranks use their own group; joined ranks, if they replay a step, communicate nothing;
  * in batch hooks and callbacks: all ranks come by, so all take part, and joined ones bring the neutral element;
  * anywhere else (epoch ends, checkpoints): nothing is special, all ranks have something to say.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.join.agreement import Step, active_text

BATCH_HOOKS = frozenset(
    {
        *("on_train_batch_start", "on_before_zero_grad", "optimizer_zero_grad", "backward", "on_before_backward"),
        *("on_after_backward", "on_before_optimizer_step", "optimizer_step", "configure_gradient_clipping"),
        *("lr_scheduler_step", "on_train_batch_end", "on_validation_batch_start", "on_validation_batch_end"),
        *("on_test_batch_start", "on_test_batch_end"),
    }
)

Op = Literal["sum", "max", "min", "product", "mean"]


def op_name(op: Any) -> Op:
    """Return the name of a reduction as Lightning or torch give it; None is a sum."""
    name = "sum" if op is None else str(op).rpartition(".")[2].lower()
    name = "mean" if name == "avg" else name
    if name not in get_args(Op):
        raise ValueError(f"Expected a sum, mean, max, min or product for `reduce_op`, got {op!r}.")
    return name  # type: ignore[return-value]


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
    if not (out.is_floating_point() or out.is_complex()):
        out = out.double()  # Lightning's epoch means divide by a mean of integers, which must not be cut off
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


class ActiveGroups:
    """A group for each set of active ranks that comes up: at most W - 1 in an epoch, and for fixed shards in all."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, ...], comm.ProcessGroup] = {}
        self._solo: comm.ProcessGroup | None = None

    def prepare(self, ranks: tuple[int, ...]) -> None:
        """Make the group of these ranks if there is none; collective over all ranks of the world, joined ones too."""
        if ranks not in self._groups:
            self._groups[ranks] = comm.new_subgroup(ranks)

    def for_step(self, step: Step, wanted: Any = None) -> Any:
        """Return the group to use in a step in the tail where ``wanted`` was asked for; None stands for all ranks."""
        if step.joined:  # it replays the step without the others
            if self._solo is None:
                self._solo = comm.solo_group()
            return self._solo
        if wanted is None or len(comm.global_ranks(wanted)) == len(step.active):
            return self._groups[step.ranks]
        if set(comm.global_ranks(wanted)) <= set(step.ranks):
            return wanted
        raise RuntimeError(
            f"A process group with ranks {comm.global_ranks(wanted)} is used in a step in which "
            f"{active_text(step.ranks)}. Use `self.trainer.strategy.active_group()`."
        )

    def close(self, *, failed: bool = False) -> None:
        """Free the groups; after an error those that can be."""
        if failed:
            comm.free_after_error(group for ranks, group in self._groups.items() if comm.rank() in ranks)
        else:
            for group in self._groups.values():
                comm.destroy_group(group)
        if self._solo is not None:
            comm.destroy_group(self._solo)
        self._groups.clear()
        self._solo = None
