"""Tensors as collectives take them: real numbers in memory.

Of a lazily conjugated or negated tensor (``torch.conj``, ``torch.imag`` of one) the memory does not hold the values: it
cannot be viewed as real, and batched operations cannot write it. Its values are resolved into a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_ddp_hooks import _compat


def is_lazy(tensor: Tensor) -> bool:
    """Tell whether a tensor is conjugated or negated by a flag."""
    return tensor.is_conj() or tensor.is_neg()


def as_real(tensor: Tensor) -> Tensor:
    """Return the values without autograd, complex ones as pairs of reals; a view, unless the tensor `is_lazy`."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return torch.view_as_real(plain) if plain.is_complex() else plain


def write_real(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Write values, as `as_real` returns them, into tensors in place."""
    reals = [as_real(target) for target in targets]
    _compat.foreach_copy_(reals, values)
    for target, real in zip(targets, reals, strict=True):
        if is_lazy(target):
            target.detach().copy_(torch.view_as_complex(real) if target.is_complex() else real)
