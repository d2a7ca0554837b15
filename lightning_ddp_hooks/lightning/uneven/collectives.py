"""Collectives of a step in the tail: only ranks that have data take part, and means are over those.

Where a collective is called from decides (see `UnevenRun.place`):
  * in the user's step: active ranks use their own group; joined ranks, if they replay a step, communicate nothing;
  * in batch hooks and callbacks: all ranks come by, so all take part, and joined ones bring the neutral element;
  * anywhere else (epoch ends, checkpoints): nothing is special, all ranks have something to say.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.join.steps import Step
from lightning_ddp_hooks.reducer.agreement import ranks_text

BATCH_HOOKS = frozenset(
    {
        "on_train_batch_start",
        "on_before_zero_grad",
        "optimizer_zero_grad",
        "backward",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "optimizer_step",
        "configure_gradient_clipping",
        "lr_scheduler_step",
        "on_train_batch_end",
        "on_validation_batch_start",
        "on_validation_batch_end",
        "on_test_batch_start",
        "on_test_batch_end",
    }
)

Op = Literal["sum", "max", "min", "product", "mean"]


def op_name(op: Any) -> Op:
    """Return the name of a reduction as Lightning or torch give it; None is a sum.

    Raises:
        ValueError: one that is not known here.
    """
    name = "sum" if op is None else str(op).rpartition(".")[2].lower()
    name = {"avg": "mean"}.get(name, name)
    if name not in ("sum", "max", "min", "product", "mean"):
        raise ValueError(f"Expected a sum, mean, max, min or product for `reduce_op`, got {op!r}.")
    return name  # type: ignore[return-value]


def neutral(tensor: Tensor, op: Op) -> Tensor:
    """Return what changes nothing in a reduction, in the shape of ``tensor``."""
    if op in ("max", "min"):
        limits = torch.finfo(tensor.dtype) if tensor.is_floating_point() else torch.iinfo(tensor.dtype)
        return torch.full_like(tensor, limits.min if op == "max" else limits.max)
    return torch.full_like(tensor, 1 if op == "product" else 0)


def reduced(tensor: Tensor, op: Op, group: comm.ProcessGroup, count: int) -> Tensor:
    """Return the reduction over a group; ``tensor`` stays as it is.

    A mean of integers is not cut off to an integer, as Lightning's is; its epoch means divide by such a one.
    """
    mean = op == "mean"
    out = tensor.detach().clone()
    if mean and not out.is_floating_point() and not out.is_complex():
        out = out.double()
    comm.reduce_in_place(out, "sum" if op == "mean" else op, group)
    return out / count if mean else out


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


def describe(step: Step) -> str:
    """Name the active ranks in a message."""
    return f"only {ranks_text(step.ranks)} still {'has' if len(step.ranks) == 1 else 'have'} data"
