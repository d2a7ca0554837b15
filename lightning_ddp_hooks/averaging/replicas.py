"""What each replica has for itself: inner optimizer state, averaged over the ranks, or all of it for a checkpoint.

[Note: averaged state] Averaged is each floating-point tensor of optimizer state that all ranks have. Counters ("step",
scalars) and what only some ranks have (of a parameter that one has never used) stay as they are.

Replicas are gathered on the first rank in a form that loads with ``weights_only=True``:

    {"world_size": 2,
     "ranks": [{"params": {name: tensor}, "buffers": {name: tensor}, "optimizers": [{position: {key: value}}]}, ...]}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from operator import getitem
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.averaging.flat import FlatMean

# So much of each replica is sent at a time, since pickling doubles what it works on.
_BATCH_BYTES = 32 << 20

# Path in a replica, size (the same on all ranks), value.
_Item = tuple[tuple[Any, ...], int, Any]


def gather_replicas(
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    optimizers: Sequence[Optimizer],
    control_group: comm.ProcessGroup,
    own_value: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> dict[str, Any] | None:
    """Return all replicas on the first rank of a CPU group, None elsewhere; collective.

    The names of parameters and buffers are the same on all ranks; ``own_value`` maps one to the replica's value of it.
    """
    items: list[_Item] = []
    for kind, tensors in (("params", params), ("buffers", buffers)):
        items += [((kind, name), tensor.nbytes, own_value(tensor)) for name, tensor in tensors.items()]
    for number, optimizer in enumerate(optimizers):
        state = optimizer.state_dict()["state"]
        for position, param in enumerate(optimizer_params(optimizer)):
            # Twice the parameter is what Adam keeps; ranks must agree on the size, so it is not looked up.
            items.append((("optimizers", number, position), 2 * param.nbytes, state.get(position)))

    first = comm.rank(control_group) == 0
    ranks: list[dict[str, Any]] = [
        {"params": {}, "buffers": {}, "optimizers": [{} for _ in optimizers]}
        for _ in range(comm.world_size(control_group) if first else 0)
    ]
    for batch in _batches(items):
        gathered = comm.gather_object([(path, copy_to_cpu(value)) for path, _, value in batch], control_group)
        for replica, pieces in zip(ranks, gathered or (), strict=True):
            for (*parents, last), value in pieces:
                if value is not None:  # else this rank's optimizer has no state for this parameter
                    reduce(getitem, parents, replica)[last] = value
    return {"world_size": len(ranks), "ranks": ranks} if first else None


@torch.no_grad()
def restore_replica(
    replica: Mapping[str, Any],
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    optimizers: Sequence[Optimizer],
) -> None:
    """Make this rank continue as the given replica; raise ValueError if names, shapes or optimizers differ."""
    for kind, live in (("params", params), ("buffers", buffers)):
        for name, value in replica[kind].items():
            if name not in live or live[name].shape != value.shape:
                found = list(live[name].shape) if name in live else "nothing"
                raise ValueError(
                    f"The checkpoint's replica holds {name!r} of shape {list(value.shape)}; the model has {found}."
                )
            live[name].copy_(value)
    if len(replica["optimizers"]) != len(optimizers):
        raise ValueError(
            f"The checkpoint's replica has {len(replica['optimizers'])} optimizers, this run has {len(optimizers)}."
        )
    for optimizer, state in zip(optimizers, replica["optimizers"], strict=True):
        # Copies: the optimizer writes into them. It brings them to the device and dtype of their parameter.
        optimizer.load_state_dict({**optimizer.state_dict(), "state": copy_to_cpu(state)})


def _batches(items: Sequence[_Item]) -> Iterator[list[_Item]]:
    batch: list[_Item] = []
    size = 0
    for item in items:
        batch.append(item)
        size += item[1]
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def copy_to_cpu(value: Any) -> Any:
    """Copy the tensors in a nested state to the CPU; tuples become lists."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: copy_to_cpu(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [copy_to_cpu(item) for item in value]
    return value


def average_optimizer_state(optimizer: Optimizer, group: comm.ProcessGroup, control_group: comm.ProcessGroup) -> None:
    """Average an optimizer's state over ``group``, in place; collective. See [Note: averaged state]."""
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
    """Return an optimizer's parameters in the order in which its ``state_dict`` numbers them."""
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
    is_counter = value.dim() == 0 and param.dim() > 0
    return (value.is_floating_point() or value.is_complex()) and not is_counter
