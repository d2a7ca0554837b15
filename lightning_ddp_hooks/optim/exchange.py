"""Sends updated parameters from their owners to all ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

import torch
from torch import Tensor

from lightning_ddp_hooks import _compat, comm
from lightning_ddp_hooks.hooks.contract import is_done
from lightning_ddp_hooks.hooks.workspace import Workspace

# From this size on a broadcast of its own costs less than copying the parameter into a flat buffer and out of it.
_DIRECT_NUMEL = 16384


class ParametersInFlight:
    """Broadcasts under way; `wait` ends them all."""

    def __init__(self, works: Sequence[comm.Work], unpack: Sequence[Callable[[], None]]) -> None:
        self._works = works
        self._unpack = unpack

    def done(self) -> bool:
        """Tell whether everything has arrived."""
        return all(is_done(work) for work in self._works)

    def wait(self) -> None:
        """Wait until everything has arrived, and put it in place."""
        for work in self._works:
            work.wait()
        for unpack in self._unpack:
            unpack()
        self._works, self._unpack = (), ()


class ParameterExchange:
    """Broadcasts parameters on a group of its own.

    Large parameters travel as they lie in memory; small ones of one owner and dtype travel together.

    Args:
        parent: the ranks; making the exchange is collective.
    """

    def __init__(self, parent: comm.ProcessGroup) -> None:
        self.group = comm.new_group(parent)
        self.world_size = comm.world_size(self.group)
        self.rank = comm.rank(self.group)
        self._workspace = Workspace()
        self._flying: list[ParametersInFlight] = []

    @torch.no_grad()
    def start(self, params: Iterable[Tensor], owner_of: Callable[[Tensor], int], key: Hashable) -> ParametersInFlight:
        """Begin to send each parameter from its owner to all others; the same call on all ranks.

        Args:
            params: in the same order on all ranks.
            owner_of: returns the sending rank.
            key: tells exchanges apart that are under way at the same time.
        """
        works: list[comm.Work] = []
        unpack: list[Callable[[], None]] = []
        together: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = {}
        with _compat.span("ldh::exchange_parameters"), comm.counted_as("parameters"):
            for param in params:
                tensor = torch.view_as_real(param.detach()) if param.is_complex() else param.detach()
                if tensor.numel() >= _DIRECT_NUMEL and tensor.is_contiguous():
                    works.append(comm.broadcast(tensor, self.group, owner_of(param)))
                elif tensor.numel():
                    together.setdefault((owner_of(param), tensor.dtype, tensor.device), []).append(tensor)
            for (owner, dtype, device), tensors in together.items():
                flat = self._workspace.get((key, owner), sum(t.numel() for t in tensors), dtype, device)
                parts = _compat.unflatten(flat, tensors)
                if owner == self.rank:
                    _compat.foreach_copy_(parts, tensors)
                else:
                    unpack.append(_copier(tensors, parts))
                works.append(comm.broadcast(flat, self.group, owner))
        flight = ParametersInFlight(works, unpack)
        self._flying = [*(other for other in self._flying if not other.done()), flight]
        return flight

    def close(self, *, failed: bool = False) -> None:
        """Free the group; after an error if that can be done."""
        self._workspace.clear()
        if failed:
            comm.free_after_error([self.group], any(not flight.done() for flight in self._flying))
        else:
            comm.destroy_group(self.group)
        self._flying.clear()


def _copier(tensors: list[Tensor], parts: list[Tensor]) -> Callable[[], None]:
    return lambda: _compat.foreach_copy_(tensors, parts)
