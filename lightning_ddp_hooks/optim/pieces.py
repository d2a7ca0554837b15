"""Parts of parameters and the ranks that own them: arithmetic and views, without communication.

parameters of a bucket    [ weight            | bias | weight                    | bias ]
owners after `cut`        [ rank 0         | rank 1                | rank 2              ]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_ddp_hooks.reducer.bucket import covers_its_memory
from lightning_ddp_hooks.reducer.real_values import is_lazy

# Parameters are cut at multiples of so many elements: then the same ones are updated by vector instructions as in the
# whole parameter, and the same ones behind the last full vector, where rounding may differ.
UNIT = 64


class Piece(NamedTuple):
    """Elements of a parameter, in the order in which they lie in memory, and the rank that owns them."""

    owner: int
    start: int
    stop: int


def partition(sizes: Sequence[int], loads: Sequence[int]) -> list[int]:
    """Return a rank for each item, so that the ranks' loads are about the same; ``loads`` is what they carry already.

    The largest item goes first, each to the least loaded rank, so that the heaviest rank carries at most 4/3 of what it
    would in the best partition (Graham, "Bounds on multiprocessing timing anomalies", 1969). All ranks come to the
    same: equal items are taken in their order, and of equally loaded ranks the lowest.
    """
    carried = list(loads)
    ranks = [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        rank = min(range(len(carried)), key=carried.__getitem__)
        ranks[item] = rank
        carried[rank] += sizes[item]
    return ranks


def cut(numels: Sequence[int], loads: Sequence[int]) -> list[tuple[Piece, ...]]:
    """Cut parameters that lie one behind the other into one range for each rank, in the order of ranks.

    The ranges are as long as it takes for the loads to become equal.
    """
    total, last = sum(numels), len(loads) - 1
    level = (total + sum(loads)) / len(loads)
    wanted = [max(0.0, level - load) for load in loads]
    scale = total / sum(wanted) if total else 0.0
    ends = [scale * end for end in accumulate(wanted)]
    cuts, owner, begin = [], 0, 0
    for numel in numels:
        pieces, start = [], 0
        while True:
            end = numel if owner == last else min(numel, max(start, UNIT * round((ends[owner] - begin) / UNIT)))
            if end > start or not numel:
                pieces.append(Piece(owner, start, end))
            start = end
            if start == numel:
                break
            owner += 1
        cuts.append(tuple(pieces))
        begin += numel
    return cuts


def may_be_cut(param: Tensor) -> bool:
    """Tell whether a parameter's elements can be numbered as they lie in memory."""
    return not (param.is_complex() or is_lazy(param)) and covers_its_memory(param)


def in_memory_order(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return a flat view of a tensor that `may_be_cut`; with ``like``, in the order of that one, maybe a copy."""
    plain = tensor.detach()
    if like is not None and plain.stride() != like.stride():
        empty = torch.empty_strided(like.shape, like.stride(), dtype=plain.dtype, device=plain.device)
        plain = empty.copy_(plain)
    return plain.as_strided((plain.numel(),), (1,))


def stand_in(param: Tensor, piece: Piece) -> Tensor:
    """Return a piece of a parameter as a flat parameter that shares its memory, with its part of the gradient."""
    part = in_memory_order(param)[piece.start : piece.stop].requires_grad_()
    if param.grad is not None:
        part.grad = in_memory_order(param.grad, param)[piece.start : piece.stop]
    return part


def cut_state(state: Mapping[str, Any], param: Tensor, piece: Piece) -> dict[str, Any]:
    """Return a piece's part of a parameter's optimizer state; what has not the parameter's shape stays whole."""
    return {
        name: in_memory_order(value, param)[piece.start : piece.stop].clone() if _is_by_element(value, param) else value
        for name, value in state.items()
    }


def join_states(parts: Sequence[tuple[Piece, Mapping[str, Any]]], param: Tensor) -> dict[str, Any]:
    """Undo `cut_state`."""
    whole = {}
    for name, value in parts[0][1].items():
        whole[name] = value
        if all(isinstance(its[name], Tensor) and its[name].shape == (p.stop - p.start,) for p, its in parts):
            whole[name] = torch.empty_strided(param.shape, param.stride(), dtype=value.dtype, device=value.device)
            for piece, its in parts:
                in_memory_order(whole[name])[piece.start : piece.stop] = its[name]
    return whole


def _is_by_element(value: object, param: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == param.shape and value.dim() > 0
