"""Gather the states of a torchmetrics metric exactly, whatever number of entries each rank has.

torchmetrics gathers entry by entry, and so waits forever, or takes one entry's shape for another's, where ranks were
updated a different number of times. Here ranks first tell each other what they have, and then send it in one piece:

    rank 0   preds = [a, c, e]                          all ranks   preds = [a, b, c, d, e]    without a reduction
    rank 1   preds = [b, d]                                         preds = [a, c, e, b, d]    "cat"
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_ddp_hooks import _compat, comm
from lightning_ddp_hooks.reducer.agreement import ranks_text


class _Entry(NamedTuple):
    """One entry of a state: a tensor, whose values follow, or another object."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    value: Any = None


class _Facts(NamedTuple):
    """What a rank says of its metric."""

    kind: str
    states: dict[str, str]  # what must be the same on all ranks to be reduced
    entries: dict[str, list[_Entry]]


def gather_states(metric: Any, group: comm.ProcessGroup | None) -> None:
    """Replace the states of a metric by those of all ranks, as ``Metric._sync_dist`` does; collective.

    Raises:
        RuntimeError: on all ranks, if their metrics are of different classes, or states differ in type or shape.
    """
    group = comm.resolve_group(group)
    states = _compat.metric_states(metric)
    own = {name: value if isinstance(value, list) else [value] for name, (value, _) in states.items()}
    facts = comm.all_gather_object(_describe(metric, own), group)
    _raise_if_different(facts, comm.global_ranks(group))
    device = metric.device  # of the group too, though entries may be kept on the CPU
    tensors = [entry.detach() for entries in own.values() for entry in entries if isinstance(entry, Tensor)]
    sent = torch.cat([torch.empty(0, dtype=torch.uint8, device=device), *(_to_bytes(t).to(device) for t in tensors)])
    received = comm.all_gather_padded(sent, group)
    of_ranks = [_read(rank.entries, part) for rank, part in zip(facts, received, strict=True)]
    of_ranks[comm.rank(group)] = own  # with its graph
    for name, (value, reduce) in states.items():
        lists = [entries[name] for entries in of_ranks]
        if isinstance(value, Tensor):
            merged: Any = torch.stack([entry.to(value.device) for (entry,) in lists])
        elif _compat.concatenates(reduce):
            merged = [entry for entries in lists for entry in entries]
        else:
            merged = [entry for step in zip_longest(*lists, fillvalue=_NONE) for entry in step if entry is not _NONE]
        # Entries stay a list, as in one process: not all metrics can compute from what torchmetrics concatenates.
        if reduce is not None and not (isinstance(merged, list) and (not merged or _compat.concatenates(reduce))):
            merged = reduce(merged)
        setattr(metric, name, merged)


_NONE = object()


def _describe(metric: Any, entries: dict[str, list[Any]]) -> _Facts:
    states = {
        name: "a list" if isinstance(value, list) else f"{value.dtype} of shape {tuple(value.shape)}"
        for name, (value, _) in _compat.metric_states(metric).items()
    }
    described = {
        name: [
            _Entry(value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else _Entry(None, (), value)
            for value in values
        ]
        for name, values in entries.items()
    }
    return _Facts(type(metric).__name__, states, described)


def _raise_if_different(facts: list[_Facts], ranks: list[int]) -> None:
    said = [{"class": rank.kind} | {f"state {name!r}": text for name, text in rank.states.items()} for rank in facts]
    what = next((key for key in {k: None for one in said for k in one} if len({one.get(key) for one in said}) > 1), "")
    if what:
        raise RuntimeError(
            f"The metric {facts[0].kind} is not the same on all ranks: its {what} is "
            f"{sides([one.get(what, 'missing') for one in said], ranks)}. Its states cannot be reduced: construct it "
            "with the same arguments on all ranks."
        )


def sides(of_ranks: list[str], ranks: list[int]) -> str:
    """Say which ranks say what."""
    found: dict[str, list[int]] = {}
    for rank, text in zip(ranks, of_ranks, strict=True):
        found.setdefault(text, []).append(rank)
    return ", ".join(f"{text} on {ranks_text(ranks)}" for text, ranks in found.items())


def _to_bytes(tensor: Tensor) -> Tensor:
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return tensor.resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _read(entries: dict[str, list[_Entry]], data: Tensor) -> dict[str, list[Any]]:
    """Return a rank's states from what it said of them, and what it sent."""
    position = 0
    read: dict[str, list[Any]] = {name: [] for name in entries}
    for name, described in entries.items():
        for entry in described:
            value = entry.value
            if entry.dtype is not None:
                value = torch.empty(entry.shape, dtype=entry.dtype, device=data.device)
                value.copy_(data[position : position + value.nbytes].clone().view(entry.dtype).view(entry.shape))
                position += value.nbytes
            read[name].append(value)
    return read
