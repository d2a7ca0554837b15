"""Which rank steps which parameter, how the others get it, and which hooks that goes with."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_hooks import _compat
from lightning_ddp_hooks.hooks.contract import CommHook, hook_name
from lightning_ddp_hooks.hooks.function_hook import TorchHook
from lightning_ddp_hooks.hooks.registry import resolve_hook
from lightning_ddp_hooks.hooks.workspace import Workspace
from lightning_ddp_hooks.reducer import requests
from lightning_ddp_hooks.reducer.real_values import as_real, is_lazy, write_real
from lightning_ddp_hooks.reducer.reducer import Reducer
from lightning_ddp_hooks.reducer.requests import Request

# From this size on a broadcast of its own costs less than copying the parameter into a flat buffer and out of it.
_DIRECT_NUMEL = 16384


def partition(sizes: Sequence[int], loads: Sequence[int]) -> list[int]:
    """Return a rank for each item, so that the ranks' loads are about the same; ``loads`` is what they carry already.

    The largest item goes first, each to the least loaded rank, so that the heaviest rank carries at most 4/3 of what it
    would in the best partition (Graham, "Bounds on multiprocessing timing anomalies", 1969). All ranks come to the
    same: equal items are taken in their order, and of equally loaded ranks the lowest.
    """
    carried = list(loads)
    ranks = [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        rank = min(range(len(carried)), key=carried.__getitem__)
        ranks[item] = rank
        carried[rank] += sizes[item]
    return ranks


class ShardAssignment:
    """The rank that owns each parameter; once assigned, it stays, since the optimizer state lies there.

    With a ``world_size`` of 1 each rank steps all parameters.
    """

    def __init__(self, world_size: int = 1, rank: int = 0) -> None:
        self.world_size = world_size
        self.rank = rank
        self._loads = [0] * world_size
        self._owners: dict[Tensor, int] = {}
        self.workspace = Workspace()  # for small parameters that are sent; may be cleared between two steps

    def has(self, param: Tensor) -> bool:
        """Tell whether the parameter has an owner."""
        return self.world_size == 1 or param in self._owners

    def owner(self, param: Tensor) -> int:
        """Return the rank that owns the parameter."""
        return 0 if self.world_size == 1 else self._owners[param]

    def is_own(self, param: Tensor) -> bool:
        """Tell whether the parameter has an owner, and this rank is it."""
        return self.has(param) and self.owner(param) == self.rank

    def assign(self, bundles: Iterable[Sequence[Tensor]]) -> list[Tensor]:
        """Give an owner to each parameter that has none, the same to a whole bundle; return those parameters."""
        if self.world_size == 1:
            return []
        fresh: list[list[Tensor]] = []
        seen = set(self._owners)
        for bundle in bundles:
            if new := [param for param in bundle if param not in seen]:
                seen.update(new)
                fresh.append(new)
        sizes = [sum(param.numel() for param in bundle) for bundle in fresh]
        for bundle, size, rank in zip(fresh, sizes, partition(sizes, self._loads), strict=True):
            self._loads[rank] += size
            self._owners.update(dict.fromkeys(bundle, rank))
        return [param for bundle in fresh for param in bundle]

    def send(self, params: Iterable[Tensor], key: Hashable) -> Generator[Request, Any, None]:
        """Request what brings each parameter from its owner to all others, if it has one; ``key`` names the exchange.

        Large parameters travel as they lie in memory; small ones of one owner and dtype travel together.
        """
        broadcasts: list[Request] = []
        received: list[tuple[list[Tensor], list[Tensor]]] = []
        small: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = {}
        with _compat.span("ldh::exchange_parameters"):
            for param in params if self.world_size > 1 else ():
                owner = self.owner(param)
                tensor = as_real(param)
                if tensor.numel() >= _DIRECT_NUMEL and tensor.is_contiguous() and not is_lazy(param):
                    broadcasts.append(requests.Broadcast(tensor, owner))
                elif tensor.numel():
                    small.setdefault((owner, tensor.dtype, tensor.device), []).append(param)
            for (owner, dtype, device), its_params in small.items():
                tensors = [as_real(param) for param in its_params]
                flat = self.workspace.get((key, owner), sum(t.numel() for t in tensors), dtype, device)
                parts = _compat.unflatten(flat, tensors)
                if owner == self.rank:
                    _compat.foreach_copy_(parts, tensors)
                else:
                    received.append((its_params, parts))
                broadcasts.append(requests.Broadcast(flat, owner))
        if broadcasts:
            yield requests.Together(broadcasts, purpose="parameters")
        for its_params, parts in received:
            write_real(its_params, parts)


def bucket_bundles(reducer: Reducer) -> Sequence[Sequence[Tensor]]:
    """Return the parameters of each bucket as it is laid out now; they are better owned by one rank."""
    layout = reducer.stats()["bucket_param_indices"]
    assert isinstance(layout, list)
    return [[reducer.params[index] for index in indices] for indices in layout]


def diverging_part(hook: CommHook | None) -> str | None:
    """Name a hook, or a part of it, that says that ranks may get different gradients from it; None without one."""
    return next((_name(part) for part in _diverging_parts(hook) if _says_so(part)), None)


def sharding_problem(hook: CommHook | None) -> str | None:
    """Say why a sharded optimizer does not go with a hook; None if it does."""
    parts = _diverging_parts(hook)
    if not parts:
        return None
    part, says_so = parts[0], _says_so(parts[0])
    text = (
        f"Communication hook {_name(part)} {'leaves' if says_so else 'may leave'} ranks with different gradients, but "
        "a sharded optimizer steps each parameter on one rank for all: use `OptimizerInHook(shard=False)`, or another "
        "hook."
    )
    if says_so:
        return text
    where = "a subclass of TorchHook for it" if isinstance(part, TorchHook) else "its class"
    return f"{text} If every rank gets the same result, override `replicas_differ_from` in {where} to return None."


def refuse_diverging(hook: CommHook | None) -> None:
    """Raise ValueError unless a hook, and each part of it, says that it gives all ranks the same gradients."""
    if (text := sharding_problem(hook)) is not None:
        raise ValueError(text)


def _diverging_parts(hook: CommHook | None) -> list[CommHook]:
    """Return the innermost parts from which ranks may get different results."""
    if hook is None or hook.replicas_differ_from() is None:
        return []
    return [part for inner in hook.inner_hooks() for part in _diverging_parts(resolve_hook(inner))] or [hook]


def _says_so(part: CommHook) -> bool:
    """Tell whether a hook is known to leave ranks with different gradients, and does not only not deny it."""
    if type(part) is TorchHook:
        return (getattr(part.hook, "__module__", None) or "").startswith(("lightning_ddp_hooks.", "torch."))
    ours = type(part).__module__.startswith("lightning_ddp_hooks.")
    return ours or type(part).replicas_differ_from is not CommHook.replicas_differ_from


def _name(part: CommHook) -> str:
    return hook_name(part.hook) if isinstance(part, TorchHook) else type(part).__name__
