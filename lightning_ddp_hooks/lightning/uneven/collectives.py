"""Collectives over the ranks that have something to say."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lightning_ddp_hooks import comm

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
