"""What the tests of sharded and overlapped optimizers share: a model, data by rank and step, and optimizers."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

WIDTH = 24
BUCKETS = {"bucket_cap_mb": 0.003, "first_bucket_mb": 0.001}  # several buckets, some of several parameters


class Lion(Optimizer):
    """A stand-in for optimizers from elsewhere: Chen et al., 2023, with the values that such classes keep in groups."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: Any = (0.9, 0.99), wd: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "wd": wd, "k": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            first, second = group["betas"]
            warm = min(1.0, (group["k"] + 1) / 4)  # a schedule of its own, by steps
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["momentum"] = torch.zeros_like(param)
                update = (state["momentum"] * first + param.grad * (1 - first)).sign_()
                param.mul_(1 - group["lr"] * group["wd"]).add_(update, alpha=-group["lr"] * warm)
                state["momentum"].lerp_(param.grad, 1 - second)
            group["k"] += 1
        return loss


OPTIMIZERS: dict[str, Callable[[Iterable[Any]], Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": partial(torch.optim.Adam, lr=0.01),
    "adamw fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "adamw foreach": partial(torch.optim.AdamW, lr=0.01, foreach=True, amsgrad=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.02, initial_accumulator_value=0.1),
    "lion": Lion,
}


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 3)).to(dtype)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups with values of their own: matrices, and all else."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "lr": 0.02},
        {"params": [p for p in params if p.dim() <= 1]},
    ]


def loss_of(model: nn.Module, step: int, rank: int | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + (dist.get_rank() if rank is None else rank))
    x = torch.randn(5, WIDTH, generator=generator).to(next(model.parameters()).dtype)
    return (model(x) - x[:, :3].sin()).square().mean()


def state_bytes(optimizer: Optimizer) -> int:
    """Return how many bytes of state an optimizer holds on this rank."""
    entries = [entry for state in optimizer.state.values() for entry in state.values()]
    return sum(entry.nbytes for entry in entries if isinstance(entry, Tensor))


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_bitwise(found: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other), f"parameter {index}: off by {(one - other).abs().max()}"
