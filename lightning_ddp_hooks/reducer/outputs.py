"""The tensors in what a module returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass

from torch import Tensor


def tensors_in(value: object) -> Iterator[Tensor]:
    """Find the tensors in a module's output, also in nested mappings, sequences and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for entry in fields(value):
            yield from tensors_in(getattr(value, entry.name))


def roots_in(value: object) -> list[Tensor]:
    """Return those of the tensors through which a backward comes into the module."""
    return [tensor for tensor in tensors_in(value) if tensor.requires_grad and not tensor.is_leaf]
