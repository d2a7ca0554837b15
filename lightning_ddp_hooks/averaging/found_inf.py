"""Ranks that train for themselves agree on a gradient that is not finite, so that all of them skip the step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_ddp_hooks import comm


def agree_on_found_inf(
    found: Sequence[Tensor], gradients: Iterable[Tensor | None], group: comm.ProcessGroup, device: torch.device
) -> None:
    """Make an Inf or NaN that one rank's GradScaler has found known to the scalers of all; collective.

    Without it only that rank would skip the step and lower its scale, and scales would drift apart.

    Args:
        found: the scaler's own flags, one per device, written in place. Empty if the optimizer looks for Inf itself
            while it steps (fused optimizers); then an Inf is written into a gradient of every rank, for it to be found.
        gradients: the gradients of the optimizer's parameters.
        group: the ranks.
        device: of the model; a rank without gradients takes part all the same.
    """
    if found:
        for flag in found:
            comm.all_reduce(flag, group).wait()  # a count above 0 means the same as a flag
        return
    dense = [g for g in gradients if g is not None and g.layout is torch.strided and g.numel()]
    if dense:
        flag = torch.stack([~torch.isfinite(g).all() for g in dense]).sum(dtype=torch.float32)
    else:
        flag = torch.zeros((), dtype=torch.float32, device=device)
    comm.all_reduce(flag, group).wait()
    if dense:
        # The host is not asked. A product with the flag would not do: 0 times Inf is NaN.
        dense[0].masked_fill_(flag > 0, float("inf"))
