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

from lightning_ddp_hooks.join.samples import count_samples, is_list_of_samples

# Samplers of torch that yield as many indices as their length says.
_EXACT_SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)


def map_tensors(
    function: Callable[[Tensor], Tensor], value: Any, is_emptied: Callable[[Any], bool] | None = None
) -> Any:
    """Apply ``function`` to each tensor in nested mappings, sequences and dataclasses; all else stays what it is.

    Lists of which ``is_emptied`` says so become empty.
    """

    def mapped(item: Any) -> Any:
        return map_tensors(function, item, is_emptied)

    if isinstance(value, Tensor):
        return function(value)
    if is_emptied is not None and is_emptied(value):
        return type(value)()
    if isinstance(value, MutableMapping):
        result = copy.copy(value)
        for key, item in value.items():
            result[key] = mapped(item)
        return result
    if isinstance(value, Mapping):
        return type(value)({key: mapped(item) for key, item in value.items()})  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(mapped, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(mapped, value))
    if is_dataclass(value) and not isinstance(value, type):
        like: Any = copy.copy(value)
        for entry in fields(value):
            object.__setattr__(like, entry.name, mapped(getattr(value, entry.name)))
        return like
    return value


def emptied(value: Any) -> Any:
    """Return the same structure without samples: tensors have length 0, as do lists of samples; scalars are 0.

    Raises:
        TypeError: a tensor of a kind that cannot be empty.
    """
    try:
        samples = count_samples(value)
    except ValueError:
        samples = 0
    return map_tensors(_empty, value, (lambda part: is_list_of_samples(part, samples)) if samples else None)


def _empty(tensor: Tensor) -> Tensor:
    if not tensor.ndim:
        return torch.zeros_like(tensor)
    tensor, dtype, device = tensor.detach(), tensor.dtype, tensor.device
    try:
        if tensor.is_nested and tensor.layout == torch.jagged:
            offsets = torch.zeros(1, dtype=torch.int64, device=tensor.device)
            return torch.nested.nested_tensor_from_jagged(tensor.values()[:0], offsets, min_seqlen=0, max_seqlen=0)
        if tensor.is_nested:
            return torch.nested.nested_tensor([], dtype=dtype, device=device)
        if tensor.layout != torch.strided:
            return torch.zeros((0, *tensor.shape[1:]), layout=tensor.layout, dtype=dtype, device=device)
    except RuntimeError as error:
        raise TypeError(
            f"UnevenInputs cannot make an empty batch of a tensor with the layout {tensor.layout}: have the loader "
            f"yield dense tensors, or {torch.sparse_coo} ones, and convert them in the step. torch says: {error}"
        ) from error
    return tensor[:0]


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
