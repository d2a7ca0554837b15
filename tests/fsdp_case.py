"""A small sharded model on 2 x 2 ranks, its data, and references in one process or without shards."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from lightning_ddp_hooks import traffic
from lightning_ddp_hooks.averaging.averager import ModelAverager, plain_context
from lightning_ddp_hooks.traffic import ByteCounter


class Block(nn.Module):
    """Two layers whose sizes do not divide by the number of shards."""

    def __init__(self, width: int, hidden: int, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width, bias=False)
        self.checkpointed = checkpointed

    def _run(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._run, x, use_reentrant=False) if self.checkpointed else self._run(x)


def make_model(dtype: torch.dtype = torch.float64, *, checkpointed: bool = False) -> nn.Sequential:
    torch.manual_seed(1)
    blocks = [Block(7, hidden, checkpointed=checkpointed) for hidden in (9, 5)]
    return nn.Sequential(*blocks, nn.Linear(7, 3)).to(dtype)


def shard(model: nn.Sequential, mesh: DeviceMesh, **options: Any) -> nn.Sequential:
    for part in model:
        fully_shard(part, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


@cache
def mesh_2d(replicas: int = 2, shards: int = 2) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


@cache
def mesh_1d() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))


def batch_of(rank: int, step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    batch = torch.randn(4, 7, generator=generator, dtype=torch.float64)
    target = torch.randn(4, 3, generator=generator, dtype=torch.float64) + rank
    return batch.to(dtype), target.to(dtype)


def loss_of(model: nn.Module, ranks: list[int], step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the mean loss over the batches of some ranks."""
    pairs = [batch_of(rank, step, dtype) for rank in ranks]
    losses = [(model(batch).to(dtype) - target).square().mean() for batch, target in pairs]
    return torch.stack(losses).mean()


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole parameters of this rank's replica."""
    return {name: _full(param).detach().clone() for name, param in model.named_parameters()}


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: _full(param.grad).clone() for name, param in model.named_parameters() if param.grad is not None}


def _full(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def train(model: nn.Module, steps: range, optimizer: torch.optim.Optimizer, **options: Any) -> list[dict[str, Tensor]]:
    """Train on this rank's own batches; return the whole model after each step."""
    history = []
    for step in steps:
        train_step(model, step, optimizer, **options)
        history.append(whole(model))
    return history


def train_step(
    model: Any,
    step: int,
    optimizer: torch.optim.Optimizer,
    *,
    micro: Callable[[Any, bool], None] | None = None,
    clip: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> None:
    """Take one step; ``micro(model, last)`` is called before each of its two backwards."""
    for number in range(1 if micro is None else 2):
        if micro is not None:
            micro(model, number == 1)
        loss_of(model, [dist.get_rank()], 2 * step + number, dtype).backward()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()


def reference(steps: range, *, micro: bool = False, clip: float | None = None) -> list[dict[str, Tensor]]:
    """Train in one process on the batches of all ranks."""
    model = make_model()
    optimizer = optimizer_of(model)
    history = []
    for step in steps:
        for number in range(1 + micro):
            loss_of(model, list(range(dist.get_world_size())), 2 * step + number).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        history.append(whole(model))
    return history


def unsharded_replicas(averager: ModelAverager, mesh: DeviceMesh, steps: range) -> list[dict[str, Tensor]]:
    """Train whole replicas, each on the batches of its ranks, with an averager; without FSDP."""
    model = make_model()
    optimizer = optimizer_of(model)
    first = 2 * mesh.get_local_rank("replicate")
    named = dict(model.named_parameters())
    context = plain_context(
        list(named), list(named.values()), optimizers=lambda: [optimizer], process_group=mesh["replicate"].get_group()
    )
    bound = averager.bind(context)
    history = []
    for step in steps:
        ranks = range(4) if bound.syncs_gradients(step) else range(first, first + 2)
        loss_of(model, list(ranks), 2 * step).backward()
        optimizer.step()
        optimizer.zero_grad()
        bound.average_parameters()
        history.append(whole(model))
    bound.close()
    return history


def largest_difference(one: list[dict[str, Tensor]], other: list[dict[str, Tensor]]) -> float:
    assert len(one) == len(other)
    return max(float((a[name] - b[name]).abs().max()) for a, b in zip(one, other, strict=True) for name in a | b)


def bytes_sent(run: Callable[[], object]) -> int:
    """Return the bytes that hooks send for gradients while something runs."""
    counter = ByteCounter()
    traffic.count_bytes(counter)
    run()
    traffic.stop_counting(counter)
    return counter.take().get("gradients", 0)
