"""The arguments of torch's DistributedDataParallel that are no settings here: taken where they are harmless."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lightning_ddp_hooks import comm

_LAID_OUT_BY_USE = "Leave out `{}`: buckets are laid out in the order in which gradients come."
_INSTEAD = {
    "bucket_cap_mb_list": "Leave out `{}`: set `bucket_cap_mb` and `first_bucket_mb`.",
    "delay_all_reduce_named_params": _LAID_OUT_BY_USE,
    "param_to_hook_all_reduce": _LAID_OUT_BY_USE,
    "mixed_precision": 'Leave out `{}`: run the forward under `torch.autocast`; `comm_hook="bf16"` sends 16 bits.',
}
"""What to do instead of the arguments that cannot be taken."""


def check_torch_only(arguments: Mapping[str, Any]) -> None:
    """Raise if an argument is set that has no place here, or another one to a value of the wrong type."""
    if wrong := [text.format(name) for name, text in _INSTEAD.items() if arguments[name] is not None]:
        raise TypeError("Some arguments of torch's DistributedDataParallel are not for this one. " + " ".join(wrong))
    for name in ("init_sync", "check_reduction", "batched_grad_copy", "skip_all_reduce_unused_params"):
        if not isinstance(arguments[name], bool):
            raise TypeError(f"Expected True or False for `{name}`, got {arguments[name]!r}.")
    if not isinstance(arguments["forward_sync_buffers"], (bool, type(None))):
        raise TypeError(
            f"Expected True, False or None for `forward_sync_buffers`, got {arguments['forward_sync_buffers']!r}."
        )
    if arguments["dim"] != 0:
        raise ValueError(f"Expected `dim` to be 0, got {arguments['dim']!r}: each process runs its own batch, unsplit.")


def group_from(process_group: comm.ProcessGroup | None, device_mesh: Any) -> comm.ProcessGroup | None:
    """Return the ranks that a group or a mesh of one dimension names; None for all."""
    if device_mesh is None:
        return process_group
    if process_group is not None:
        raise ValueError("Set `process_group` or `device_mesh`, not both.")
    if not hasattr(device_mesh, "get_group"):
        raise TypeError(f"Expected a DeviceMesh of one dimension or None for `device_mesh`, got {device_mesh!r}.")
    if device_mesh.ndim != 1:
        raise ValueError(
            f'Expected a `device_mesh` of one dimension, got {device_mesh}: pass a part of it, as in `mesh["dp"]`.'
        )
    group: comm.ProcessGroup = device_mesh.get_group()
    return group


def device_named(
    module: nn.Module, device_ids: Sequence[int | torch.device | str] | None, output_device: Any
) -> torch.device | None:
    """Return the device that ``device_ids`` names, to which inputs are moved; None without it.

    Raises:
        TypeError: It is no list.
        ValueError: It names another device than the module's, or more than one.
    """
    if device_ids is not None and not isinstance(device_ids, (list, tuple)):
        raise TypeError(f"Expected a list with one device for `device_ids`, got {device_ids!r}.")
    if not device_ids and output_device is None:
        return None
    devices = {param.device for param in module.parameters()}
    device = next(iter(devices)) if len(devices) == 1 else None
    outputs = () if output_device is None else (output_device,)
    for name, value, named in (
        ("device_ids", device_ids, device_ids or ()),
        ("output_device", output_device, outputs),
    ):
        if named and (device is None or device.type == "cpu" or [_index(one) for one in named] != [device.index]):
            where = ", ".join(sorted(map(str, devices))) or "no device"
            raise ValueError(
                f"Expected `{name}` to name the one device of the module, got {value!r} for a module on {where}. Move "
                "it before, as in `module.to(device)`; on the CPU and on several devices leave the argument out."
            )
    return device if device_ids else None


def _index(device: int | torch.device | str) -> int | None:
    return device if isinstance(device, int) else torch.device(device).index


def as_logging_data(facts: Mapping[str, object], module: nn.Module) -> dict[str, str | int]:
    """Return facts in the form of torch's DDP logging data: strings and ints, lists as text."""
    data = {name: int(value) if isinstance(value, int) else _text(value) for name, value in facts.items()}
    return {**data, "module_name": type(module).__name__}


def _text(value: object) -> str:
    if not isinstance(value, list):
        return str(value)
    return ", ".join(" ".join(map(str, one)) if isinstance(one, list) else str(one) for one in value)
