"""Batches as nested collections of tensors: empty them, keep their structure."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor


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
    return map_tensors(_emptied_tensor, value)


def _emptied_tensor(tensor: Tensor) -> Tensor:
    return tensor.detach()[:0] if tensor.ndim else torch.zeros_like(tensor)


def on_cpu(value: Any) -> Any:
    """Return the same structure with tensors in host memory and without graph, to be sent to another rank."""
    return map_tensors(lambda tensor: tensor.detach().cpu(), value)
