"""The mean over ranks of optimizer state: of each floating-point tensor that all of them have.

Counters ("step", scalars) and what only some ranks have (of a parameter that one has never used) stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.averaging.flat import FlatMean


def average_optimizer_state(optimizer: Optimizer, group: comm.ProcessGroup, control_group: comm.ProcessGroup) -> None:
    """Average an optimizer's state over ``group``, in place; collective over ``control_group``, a CPU group."""
    FlatMean(list(_shared(optimizer, control_group).values())).run(group)


def averaged_state_dict(
    optimizer: Optimizer, group: comm.ProcessGroup, control_group: comm.ProcessGroup
) -> dict[str, Any]:
    """Return the optimizer's ``state_dict`` with its state averaged over ``group``; the optimizer stays as it is."""
    shared = _shared(optimizer, control_group)
    means = [torch.empty_like(tensor) for tensor in shared.values()]
    FlatMean(list(shared.values())).run(group, means)
    result = optimizer.state_dict()
    # `state_dict` shares the inner dicts with the optimizer: copy before writing.
    result["state"] = {position: dict(entries) for position, entries in result["state"].items()}
    for (position, key), mean in zip(shared, means, strict=True):
        result["state"][position][key] = mean
    return result


def optimizer_params(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """Return the parameters in the order in which ``state_dict`` numbers them."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _shared(optimizer: Optimizer, control_group: comm.ProcessGroup) -> dict[tuple[int, str], Tensor]:
    """Find the tensors that all ranks have, by position of the parameter and name, in the same order on all."""
    own: dict[tuple[int, str], Tensor] = {
        (position, key): optimizer.state[param][key]
        for position, param in enumerate(optimizer_params(optimizer))
        for key in sorted(optimizer.state.get(param, {}), key=str)
        if _is_averaged(key, optimizer.state[param][key], param)
    }
    shapes = comm.all_gather_object({entry: list(tensor.shape) for entry, tensor in own.items()}, control_group)
    return {
        entry: tensor
        for entry, tensor in own.items()
        if all(theirs.get(entry) == list(tensor.shape) for theirs in shapes)
    }


def _is_averaged(key: str, value: object, param: Tensor) -> bool:
    if not isinstance(value, Tensor) or key == "step" or value.device != param.device:
        return False
    counts = value.dim() == 0 and param.dim() > 0
    return (value.is_floating_point() or value.is_complex()) and not counts
