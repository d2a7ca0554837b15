"""Sharded optimizer state, into the plain form that an unsharded optimizer has, and out of it.

That form is ``Optimizer.state_dict()``: ``{"state": {position of a parameter: {...}}, "param_groups": [...]}``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_ddp_hooks import comm

StateDict = dict[str, Any]


def gathered_state(
    optimizer: Optimizer, owned: Callable[[Tensor], bool], control_group: comm.ProcessGroup, to: int = 0
) -> StateDict:
    """Gather an optimizer's state, in plain form, on the host of rank ``to``, one owner after the other; collective.

    For each parameter one rank is ``owned`` to send its state. The other ranks get the form without state.
    """
    plain = optimizer.state_dict()
    own = part_of(plain, optimizer, owned)
    if comm.rank(control_group) != to:  # what belongs to no parameter is the same everywhere
        own = {key: value for key, value in own.items() if isinstance(key, int)}
    whole: dict[Any, Any] = {}
    for rank in range(comm.world_size(control_group)):
        here = rank == comm.rank(control_group)
        part = _on_host(own) if here else None
        if rank != to:
            part = comm.broadcast_object(part, control_group, rank)
        if comm.rank(control_group) == to:
            whole.update(part or {})
    return {**plain, "state": {key: whole[key] for key in sorted(whole, key=_by_position)}}


def part_of(plain: Mapping[str, Any], optimizer: Optimizer, wanted: Callable[[Tensor], bool]) -> dict[Any, Any]:
    """Return the state of the wanted parameters, and what belongs to no parameter, by their keys in plain form."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return {
        key: value
        for key, value in plain["state"].items()
        if not isinstance(key, int) or (key < len(params) and wanted(params[key]))
    }


def optimizer_text(optimizer: Optimizer, names: Mapping[int, str]) -> str:
    """Describe an optimizer in a text that is the same on ranks that have the same one.

    Parameters are named as ``names`` has them by ``id``; others are described by their shape.
    """
    groups = []
    for group in optimizer.param_groups:
        params = [names.get(id(param), f"{tuple(param.shape)} {param.dtype}") for param in group["params"]]
        values = {name: _plain(value) for name, value in group.items() if name not in ("params", "param_names")}
        groups.append((params, sorted(values.items())))
    return f"{type(optimizer).__name__} {groups}"


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value if isinstance(value, (int, float, str, bool, type(None))) else type(value).__name__


def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone() if value.is_cpu else value.detach().cpu()
    if isinstance(value, dict):
        return {key: _on_host(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_on_host, value))
    return value


def _by_position(key: Any) -> tuple[bool, Any]:
    return (not isinstance(key, int), key if isinstance(key, int) else str(key))
