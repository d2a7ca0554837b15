"""What the tests on the simulated device share: a small model in several buckets, and its batches."""

from typing import Any

import torch
from torch import Tensor, nn

import lightning_ddp_hooks as ldh


class Net(nn.Module):
    """Five layers in as many buckets, the first of them full long before the backward ends, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(12, 1)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, batch: Tensor) -> Tensor:
        self.seen += 1
        return self.head(self.layers(batch))  # type: ignore[no-any-return]


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 12, generator=torch.Generator().manual_seed(100 * step + rank))


def wrap(net: nn.Module, **settings: Any) -> ldh.DataParallel:
    return ldh.DataParallel(net, **{"bucket_cap_mb": 0.001, "first_bucket_mb": 0.0005, **settings})


def moved(module: nn.Module, device: torch.device) -> nn.Module:
    """Move a module, which keeps its parameters as on CUDA: else tied weights would be tied no longer."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return module.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
