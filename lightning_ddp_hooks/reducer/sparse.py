"""Mean of sparse gradients: ranks gather each other's indices and values, and no dense form is ever made."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.reducer.bucket import Bucket
from lightning_ddp_hooks.reducer.layout import BucketLayout


def expects_sparse_gradient(module: nn.Module) -> set[int]:
    """Return the ids of parameters that torch's embeddings will give a sparse gradient."""
    return {
        id(layer.weight)
        for layer in module.modules()
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse
    }


@torch.no_grad()
def mean_sparse(gradient: Tensor | None, like: Tensor, divisor: float, group: comm.ProcessGroup) -> Tensor:
    """Return the sum of all ranks' sparse gradients over ``divisor``, coalesced; a collective call."""
    if gradient is None:
        gradient = torch.sparse_coo_tensor(
            torch.empty((1, 0), dtype=torch.int64),
            torch.empty((0, *like.shape[1:]), dtype=torch.float32),
            like.shape,
            check_invariants=False,
        ).to(device=like.device, dtype=like.dtype)
    gradient = gradient.coalesce()
    indices = comm.all_gather_padded(gradient.indices().t().contiguous(), group)
    values = comm.all_gather_padded(gradient.values() * (1.0 / divisor), group)
    return torch.sparse_coo_tensor(
        torch.cat(indices).t(), torch.cat(values), like.shape, check_invariants=False
    ).coalesce()


@torch.no_grad()
def mean_sparse_or_dense(
    gradient: Tensor | None, like: Tensor, divisor: float, group: comm.ProcessGroup, *, sparse: bool
) -> Tensor:
    """Return the sum of all ranks' gradients of one parameter over ``divisor``, by itself; a collective call."""
    if sparse:
        return mean_sparse(gradient, like, divisor, group)
    bucket = Bucket(BucketLayout.build([0], [like]), [like])
    if gradient is None:
        gradient = torch.zeros_like(like)
    torch.mul(gradient, 1.0 / divisor, out=bucket.views[0])
    comm.all_reduce(bucket.comm_buffer, group).wait()
    return gradient.copy_(bucket.views[0])
