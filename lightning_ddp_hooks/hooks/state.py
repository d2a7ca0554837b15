"""The form that hook state has in a checkpoint.

[Note: state of hooks] A hook's state consists of tensors, str, int, float, bool, None, list and dict only, so that it
loads with ``weights_only=True``. It is the same on all ranks and does not depend on their number or on the buckets:
what a rank has for itself (residuals) is saved once, as the mean over the ranks by name of parameter, and each
rank starts from the mean. For a linear compressor that changes nothing: only the sum over the ranks counts there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_hooks import comm

_FORMAT = 1  # version of the form; a checkpoint of a later version is refused

# As many elements go through one collective, so that a save needs no second copy of a large model.
_CHUNK_NUMEL = 1 << 24

# Bytes that a tensor may take beyond those of its storage, whose elements it repeats then.
_SLACK_BYTES = 1 << 28


def tagged(hook: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a hook's state with the hook's name and the version of the form on it."""
    return {"hook": hook, "format": _FORMAT, **content}


def untagged(hook: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """Check that ``state`` was written by ``hook`` in a form that this version reads; return its content."""
    found = state.get("hook")
    if found != hook:
        raise ValueError(
            f"Expected the state of communication hook {hook!r}, found that of {found!r}: continue with the hook that "
            "the checkpoint was written with, or delete its state from the checkpoint."
        )
    if whole_number(state.get("format", 0)) > _FORMAT:
        raise ValueError(
            f"The state of communication hook {hook!r} has format {state['format']}; this version of "
            f"lightning_ddp_hooks reads formats up to {_FORMAT}."
        )
    return {key: value for key, value in state.items() if key not in ("hook", "format")}


def mean_over_ranks(tensors: Mapping[str, Tensor], group: comm.ProcessGroup | None) -> dict[str, Tensor]:
    """Return the mean over the ranks of each tensor, on the CPU; collective on a CPU group, with the same names.

    Without a group this rank's own.
    """
    means = copy_to_cpu({name: tensors[name] for name in sorted(tensors)})
    for chunk in _chunks(means) if group is not None else ():
        flat = torch.cat([mean.view(-1) for mean in chunk])
        assert group is not None
        comm.all_reduce(flat, group).wait()
        flat.div_(comm.world_size(group))
        for mean, part in zip(chunk, torch.split(flat, [mean.numel() for mean in chunk]), strict=True):
            mean.view(-1).copy_(part)
    return means


def _chunks(tensors: Mapping[str, Tensor]) -> Iterator[list[Tensor]]:
    """Put tensors together that go through one collective: of one dtype, and not too many elements."""
    chunk: list[Tensor] = []
    for tensor in tensors.values():
        size = sum(other.numel() for other in chunk)
        if chunk and (tensor.dtype != chunk[0].dtype or size + tensor.numel() > _CHUNK_NUMEL):
            yield chunk
            chunk = []
        chunk.append(tensor)
    if chunk:
        yield chunk


def copy_to_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of tensors on the CPU."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def whole_number(value: object) -> int:
    """Return a number from a checkpoint; raise unless it can count something."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 53:
        raise TypeError(f"expected a whole number from 0 up, found {value!r:.50}")
    return value


def require_sound(value: object, where: str) -> None:
    """Raise for tensors in a file's content that could not have been written there, or would fill the memory."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            require_sound(item, f"{where}[{key!r:.80}]")
    elif isinstance(value, (list, tuple)):
        for position, item in enumerate(value):
            require_sound(item, f"{where}[{position}]")
    elif isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise ValueError(f"The checkpoint is damaged: {where} is a tensor of layout {value.layout}.")
        stored = value.untyped_storage().nbytes()
        if value.numel() * value.element_size() > stored + _SLACK_BYTES:
            raise ValueError(
                f"The checkpoint is damaged: {where} claims {value.numel()} elements of {value.element_size()} bytes, "
                f"but holds {stored} bytes."
            )
