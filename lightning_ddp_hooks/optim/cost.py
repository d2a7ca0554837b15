"""What the update of a parameter costs, by which whole parameters are shared out evenly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

# So many multiplications and additions take about as long as the update of one element by itself, which is bound by
# memory: on a CPU core some tens, on a GPU some hundreds.
_FLOPS_OF_AN_ELEMENT = 100


def cost_of_update(optimizer: Optimizer, group: Mapping[str, Any], param: Tensor) -> int:
    """Return the cost in updates of one element; that of Muon is mostly its Newton-Schulz iterations."""
    if param.dim() < 2 or not _is_muon(optimizer, group):
        return param.numel()
    rows = param.shape[0]
    short, long = sorted((rows, max(1, param.numel() // max(1, rows))))
    # X X^T, its square, and the product of both with X; each multiplication is followed by an addition.
    flops = int(group.get("ns_steps", 5)) * 2 * (2 * short * short * long + short**3)
    return param.numel() + flops // _FLOPS_OF_AN_ELEMENT


def _is_muon(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Tell by the values of a group, as several implementations name them, or else by the optimizer's name."""
    if "use_muon" in group:
        return bool(group["use_muon"])
    return "ns_steps" in group or "muon" in type(optimizer).__name__.lower()
