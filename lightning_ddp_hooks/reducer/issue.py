"""How a single request becomes a collective on a process group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.reducer import requests
from lightning_ddp_hooks.reducer.bucket import Bucket
from lightning_ddp_hooks.reducer.requests import Request, Subgroup


class Issued(NamedTuple):
    """Collectives in flight, and what returns their result once they are done."""

    handles: list[Any]
    result: Callable[[], Any]


def takes_along(request: Request, storage: Bucket | None) -> bool:
    """Tell whether a request sums a whole bucket that has a status behind it."""
    if storage is None or storage.status_slot is None or not isinstance(request, requests.AllReduce):
        return False
    return request.subgroup is None and is_same_memory(request.tensor, storage.buffer)


def issue_collective(request: Request, group: comm.ProcessGroup, storage: Bucket | None) -> Issued:
    """Issue one collective; a sum of the whole bucket takes the status behind it along.

    Raises:
        TypeError: Not a request for a collective, or not of a tensor.
        ValueError: The tensor is not contiguous, or its size, the output or the source does not fit.
    """
    size = group.size()
    _check(request, size)
    if isinstance(request, requests.AllReduce):
        tensor = request.tensor
        if storage is not None and takes_along(request, storage):
            return Issued([comm.all_reduce(storage.comm_buffer, group)], lambda: tensor)
        return Issued([comm.all_reduce(tensor, group)], lambda: tensor)
    if isinstance(request, requests.Broadcast):
        tensor = request.tensor
        return Issued([comm.broadcast(tensor, group, request.source)], lambda: tensor)
    if isinstance(request, requests.AllToAll):
        tensor, numel = request.tensor, _all_to_all_output(request)
        output = tensor.new_empty(numel) if request.output is None else request.output
        return Issued([comm.start_all_to_all(output, tensor, group, request.sizes)], lambda: output)
    if isinstance(request, requests.AllGather):
        tensor = request.tensor
        gathered = tensor.new_empty(size * tensor.numel()) if request.output is None else request.output
        return Issued([comm.start_all_gather(gathered, tensor, group)], lambda: gathered)
    if isinstance(request, requests.ReduceScatter):
        return _reduce_scatter(request, group)
    raise TypeError(f"Expected a request for a collective, got {type(request).__name__}.")


def _check(request: Request, size: int) -> None:
    """Refuse what a backend would carry out wrongly without a word, or fail on where nobody knows whose it is."""
    name, tensor = type(request).__name__, getattr(request, "tensor", None)
    if not hasattr(request, "tensor"):
        return  # no collective; refused by the caller
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}.")
    _check_contiguous(name, "tensor", tensor)
    sizes = getattr(request, "sizes", None)
    if sizes is not None and (list(map(len, sizes)) != [size, size] or sum(sizes[0]) != tensor.numel()):
        raise ValueError(
            f"{name}: expected sizes of {size} parts to send, {tensor.numel()} elements in all, and of {size} to get; "
            f"got {sizes}."
        )
    if sizes is None and isinstance(request, (requests.AllToAll, requests.ReduceScatter)) and tensor.numel() % size:
        raise ValueError(
            f"{name}: {tensor.numel()} elements cannot be split into {size} equal parts, one for each rank."
        )
    if isinstance(request, requests.Broadcast) and not 0 <= request.source < size:
        raise ValueError(f"{name}: expected a source from 0 to {size - 1}, got {request.source}.")
    output = getattr(request, "output", None)
    if output is not None:
        _check_contiguous(name, "output", output)
        if isinstance(request, requests.AllToAll):
            expected = _all_to_all_output(request)
        else:
            expected = tensor.numel() * size if isinstance(request, requests.AllGather) else tensor.numel() // size
        if output.numel() != expected or output.dtype != tensor.dtype:
            raise ValueError(
                f"{name}: expected an output of {expected} elements in {tensor.dtype}, got {output.numel()} in "
                f"{output.dtype}."
            )


def _all_to_all_output(request: requests.AllToAll) -> int:
    return request.tensor.numel() if request.sizes is None else sum(request.sizes[1])


def _check_contiguous(name: str, what: str, tensor: Tensor) -> None:
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a dense, contiguous {what}; pass its `.contiguous()`.")


def _reduce_scatter(request: requests.ReduceScatter, group: comm.ProcessGroup) -> Issued:
    """Issue a reduce-scatter; over gloo as an all-to-all and a sum, which sends half of what gloo's own does."""
    tensor, size = request.tensor, group.size()
    part = tensor.new_empty(tensor.numel() // size) if request.output is None else request.output
    if comm.backend_name(group) != "gloo":
        return Issued([comm.start_reduce_scatter(part, tensor, group)], lambda: part)
    received = torch.empty_like(tensor)
    work = comm.start_all_to_all(received, tensor, group)
    wide = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype

    def sum_parts() -> Tensor:
        return part.copy_(received.view(size, -1).sum(dim=0, dtype=wide))

    return Issued([work], sum_parts)


def is_same_memory(result: Tensor, buffer: Tensor) -> bool:
    """Tell whether a flat result lies where the buffer is."""
    return result.data_ptr() == buffer.data_ptr() and result.dtype == buffer.dtype and result.numel() == buffer.numel()


def subgroups_of(request: Request) -> Iterator[Subgroup | None]:
    """Return the ranks that the collectives of a request are limited to."""
    if isinstance(request, requests.Together):
        for part in request.requests:
            if not isinstance(part, requests.Wait):
                yield from subgroups_of(part)
    else:
        yield getattr(request, "subgroup", None)


def describe_request(request: Request | None) -> str:
    """Describe a request by what must be the same on all ranks: amounts may differ over parts of the ranks."""
    name = type(request).__name__
    if isinstance(request, requests.Together):
        return f"{name} [{', '.join(map(describe_request, request.requests))}]"
    tensor = getattr(request, "tensor", None)
    uneven = getattr(request, "sizes", None) is not None
    if not isinstance(tensor, Tensor) or uneven or getattr(request, "subgroup", None) is not None:
        return name
    source = f" from {request.source}" if isinstance(request, requests.Broadcast) else ""
    return f"{name} of {tensor.numel()} elements in {tensor.dtype}{source}"


def is_done(handle: Any) -> bool:
    """Tell whether something in flight is done; False if there is no way to tell."""
    done = getattr(handle, "done", None) or getattr(handle, "is_completed", None)
    return bool(done()) if callable(done) else False
