"""What uneven inputs ask of the user's batches, samplers and loaders."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

# Samplers of torch that yield as many indices as their length says.
_EXACT_SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply ``function`` to each tensor in nested mappings, sequences and dataclasses; all else stays what it is."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, MutableMapping):
        result = copy.copy(value)
        for key, item in value.items():
            result[key] = map_tensors(function, item)
        return result
    if isinstance(value, Mapping):
        return type(value)({key: map_tensors(function, item) for key, item in value.items()})  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(function, item) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        like: Any = copy.copy(value)
        for entry in fields(value):
            object.__setattr__(like, entry.name, map_tensors(function, getattr(value, entry.name)))
        return like
    return value


def emptied(value: Any) -> Any:
    """Return the same structure without samples: tensors have length 0, scalars are 0."""
    return map_tensors(lambda tensor: tensor.detach()[:0] if tensor.ndim else torch.zeros_like(tensor), value)


def on_cpu(value: Any) -> Any:
    """Return the same structure with tensors in host memory and without graph, to be sent to another rank."""
    return map_tensors(lambda tensor: tensor.detach().cpu(), value)


def remove_padding(loader: Any) -> None:
    """Have a loader's `DistributedSampler` yield each index once, instead of repeating some to make shares equal.

    With ``drop_last=True`` the user asked for equal shares, and the sampler stays as it is.
    """
    for holder in (loader, getattr(loader, "batch_sampler", None)):
        sampler = getattr(holder, "sampler", None)
        if isinstance(sampler, DistributedSampler) and not sampler.drop_last:
            sampler.total_size = len(sampler.dataset)  # type: ignore[arg-type]
            sampler.num_samples = len(range(sampler.rank, sampler.total_size, sampler.num_replicas))


def certain_length(loader: object) -> int | None:
    """Return a loader's length if it is exact; not that of streams, nor of the user's own samplers and loaders."""
    exact = (
        type(loader) is DataLoader
        and not isinstance(loader.dataset, IterableDataset)
        and type(loader.batch_sampler) in (BatchSampler, type(None))
        and type(loader.sampler) in _EXACT_SAMPLERS
    )
    return len(loader) if exact else None  # type: ignore[arg-type]
