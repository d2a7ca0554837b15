"""State of hooks and averagers in a distributed checkpoint.

What they keep is nested, and holds tensors for this rank's shards. In a checkpoint it is flat:

    "shard/averager/outer/layers.0.weight"   a DTensor, sharded as the parameter is: another mesh reads its part of it
    "flat/averager/hook/..."                 the same of a tensor that is flat here
    "padded/hook/error/..."                  the same of one with the padding of a bucket, which is left out
    "rest/1 of 2"                            all else of shard 1, as bytes; read if there are as many shards
    "rest/1 of 2, 0 of 4"                    the same with tensor parallelism, whose shards are others

Of another number of shards only plain values of the rest are taken up, with scalars; factors of PowerSGD, which belong
to a shard as a whole, begin anew.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_hooks._compat import of_fsdp
from lightning_ddp_hooks._compat.of_fsdp import ShardedParam
from lightning_ddp_hooks.hooks.state import require_sound

_SEPARATOR = "/"
_REST = "rest/"
Path = tuple[str, ...]


def sharded_state(state: Any, params: Sequence[ShardedParam]) -> dict[str, Any]:
    """Return this rank's state in the form of a checkpoint."""
    by_name = {param.name: param for param in params}
    found: dict[str, Any] = {}

    def take(path: Path, value: Tensor) -> Tensor | None:
        param = _param_of(path, by_name)
        if param is None or _SEPARATOR.join(path).split(_SEPARATOR) != list(path):
            return value
        local = param.local()
        if path[0] == "hook":  # of shards that are filled up, alike on all ranks
            if value.dim() != 1 or value.numel() != param.padded_shape.numel():
                return value
            part = value.view(param.padded_shape).narrow(param.dim, 0, _length(param, local))
            found[_key("padded", path)] = param.with_local(part.contiguous().view(local.shape))
        elif value.shape == local.shape:
            found[_key("shard", path)] = param.with_local(value.contiguous())
        elif value.dim() == 1 and value.numel() == local.numel():
            found[_key("flat", path)] = param.with_local(value.contiguous().view(local.shape))
        else:
            return value
        return None

    rest = _walk(state, (), take)
    stream = io.BytesIO()
    torch.save(rest, stream)
    found[_rest_of(params)] = torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)
    return found


def read_state(path: str, entry: str, params: Sequence[ShardedParam]) -> dict[str, Any]:
    """Return this rank's state from a checkpoint that may have been written on another mesh; collective."""
    saved = {
        name.removeprefix(f"{entry}."): kind
        for name, kind in of_fsdp.saved_tensors(path).items()
        if name.startswith(f"{entry}.")
    }
    rests = sorted(name for name in saved if name.startswith(_REST))
    if not rests:
        raise ValueError(f"The checkpoint {path!r} has no entry {entry!r} that `FSDPHooks.state_dict` was saved as.")
    own = _rest_of(params)
    same_shards = own in rests
    by_name = {param.name: param for param in params}
    wanted: dict[str, Any] = {}
    for name, (shape, dtype) in saved.items():
        kind, *parts = name.split(_SEPARATOR)
        if kind in ("shard", "flat", "padded"):
            param = _param_of(tuple(parts), by_name)
            if param is None or param.param.shape != shape:
                raise ValueError(
                    f"The checkpoint {path!r} holds {name!r} of shape {list(shape)}, of which the model has no such "
                    "parameter."
                )
            wanted[name] = param.with_local(torch.zeros_like(param.local(), dtype=dtype))
    chosen = own if same_shards else rests[0]
    wanted[chosen] = torch.empty(saved[chosen][0], dtype=torch.uint8)
    of_fsdp.load_sharded({f"{entry}.{name}": value for name, value in wanted.items()}, path)

    state = torch.load(io.BytesIO(wanted.pop(chosen).numpy().tobytes()), weights_only=True)
    if not same_shards:
        state = _walk(state, (), lambda _, value: value if value.dim() == 0 else None)
    for name, value in wanted.items():
        kind, *parts = name.split(_SEPARATOR)
        param = by_name[next(part for part in reversed(parts) if part in by_name)]
        local = of_fsdp.local_tensor(value)
        assert isinstance(local, Tensor)
        values = _padded(param, local) if kind == "padded" else local.reshape(-1) if kind == "flat" else local
        _put(state, parts, values)
    require_sound(state, entry)
    return dict(state)


def _rest_of(params: Sequence[ShardedParam]) -> str:
    """Return the name of what cannot be sharded, which replicas share."""
    places = max((param.places() for param in params), key=len)  # some have no tensor parallelism
    return _REST + ", ".join(f"{place} of {size}" for place, size in places)


def _param_of(path: Path, by_name: Mapping[str, ShardedParam]) -> ShardedParam | None:
    return next((by_name[part] for part in reversed(path) if part in by_name), None)


def _key(kind: str, path: Path) -> str:
    return _SEPARATOR.join((kind, *path))


def _length(param: ShardedParam, local: Tensor) -> int:
    """Return how much of the sharded dimension is this rank's; a shard without elements has any shape."""
    return local.shape[param.dim] if local.dim() == len(param.padded_shape) and local.numel() else 0


def _padded(param: ShardedParam, local: Tensor) -> Tensor:
    flat = torch.zeros(param.padded_shape, dtype=local.dtype, device=local.device)
    if local.numel():
        flat.narrow(param.dim, 0, local.shape[param.dim]).copy_(local)
    return flat.view(-1)


def _walk(value: Any, path: Path, take: Callable[[Path, Tensor], Tensor | None]) -> Any:
    """Copy a nested state, with tensors replaced by what ``take`` returns for them, or left out for None."""
    if isinstance(value, Tensor):
        return take(path, value)
    if isinstance(value, Mapping):
        return dict(_kept(((key, item, (*path, str(key))) for key, item in value.items()), take))
    if isinstance(value, (list, tuple)):
        return [_walk(item, (*path, str(place)), take) for place, item in enumerate(value)]
    return value


def _kept(
    items: Iterator[tuple[Any, Any, Path]], take: Callable[[Path, Tensor], Tensor | None]
) -> Iterator[tuple[Any, Any]]:
    for key, item, path in items:
        copied = _walk(item, path, take)
        if copied is not None or item is None:
            yield key, copied


def _put(state: Any, path: Sequence[str], value: Tensor) -> None:
    """Put a tensor back where it was."""
    *parents, last = path
    for part in parents:
        state = state[int(part)] if isinstance(state, list) else state.setdefault(part, {})
    state[last] = value
