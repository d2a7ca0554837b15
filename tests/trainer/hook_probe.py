"""A module that keeps accounts of what a communication hook does to its gradients, and the hooks to try.

A `Probe` computes each rank's gradients a second time, without the reducer, and sums them in float64. What a hook has
handed to the optimizers over all steps must be the mean of those sums over the ranks:

    sum of reduced gradients + what the hook says it still owes = sum of exact means

For hooks with error feedback that holds to rounding, however much they compress; the others owe nothing and are within
their bound. What is owed is read from the hook's state, as a checkpoint would hold it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from trainer_runs import Net, State, state_of

from lightning_ddp_hooks.hooks import (
    AllReduce,
    BatchedPowerSGD,
    BlockQuantize,
    Cast,
    OneBit,
    PerParameter,
    PostLocalSGD,
    PowerSGD,
    QuantizePerChannel,
    Rule,
    Schedule,
    Stage,
    TopK,
)


class Probe(Net):
    """Knows what its gradients are without a hook, and what the optimizers were given."""

    accumulate = 1

    def __init__(self) -> None:
        super().__init__()
        self.exact: State = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in self.named_parameters()}
        self.reduced: State = {name: torch.zeros_like(total) for name, total in self.exact.items()}
        self.size = 0.0
        self.owed: State = {}
        self.stats: dict[str, Any] = {}

    def note(self, loss: Tensor) -> Tensor:
        """Add this rank's own gradients of ``loss``."""
        named = {name: p for name, p in self.named_parameters() if p.requires_grad}
        with torch.autocast("cpu", enabled=False):
            gradients = torch.autograd.grad(loss, list(named.values()), retain_graph=True, allow_unused=True)
        square = 0.0
        for name, gradient in zip(named, gradients, strict=True):
            if gradient is not None:
                self.exact[name] += gradient.double() / self.accumulate
                square += float(gradient.double().square().sum())
        self.size += square**0.5 / self.accumulate
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.note(self.loss(batch))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, param in self.named_parameters():
            if id(param) in own and param.grad is not None:
                self.reduced[name] += param.grad.double()

    def on_train_end(self) -> None:
        hook = self.trainer.strategy.run.hook
        owed: State = {}
        if hook.bound is not None:
            collect_residuals(hook.bound.state_dict(), owed)
            self.stats = hook.bound.stats()
        self.owed = {name: value.double() / hook.loss_scale for name, value in owed.items()}


def collect_residuals(state: Any, found: State) -> None:
    """Add up the residuals in a hook's state, however it is composed, by name of parameter."""
    for inner in state.get("hooks", []):
        collect_residuals(inner, found)
    for kind in ("error", "residuals", "workers", "servers"):
        for name, value in state.get(kind, {}).items():
            found[name] = found.get(name, 0) + value


@dataclass(frozen=True)
class Case:
    """A hook, and what its sums may be off by, relative to the size of all gradients.

    Attributes:
        hook: what the strategy takes.
        bound: of the relative error, once what is owed has been added.
        owes: whether it keeps what it did not send.
        dense_alone: whether it still sends less than the gradient in a world of one rank.
    """

    hook: Any
    bound: float
    owes: bool = False
    dense_alone: bool = False


ROUNDING = 1e-5
HALF, BRAIN = 2.0**-11, 2.0**-8
"""Relative error of one rounding; a sum of four ranks takes up to five."""

HOOKS: dict[str, Case] = {
    "allreduce": Case(Schedule([Stage(0, AllReduce())]), ROUNDING),
    "fp16": Case("fp16", 5 * HALF),
    "bf16": Case("bf16", 5 * BRAIN),
    "fp16, float32 sum": Case(Cast(dtype="float16", accumulate="float32"), 2 * HALF),
    "powersgd": Case(PowerSGD(rank=1, start_iter=1), ROUNDING, owes=True, dense_alone=True),
    "batched_powersgd": Case(BatchedPowerSGD(start_iter=1), ROUNDING, owes=True, dense_alone=True),
    "quantize_per_tensor": Case("quantize_per_tensor", 0.05),
    "quantize_per_channel": Case(QuantizePerChannel(bucket_size=32), 0.02),
    "int8": Case(BlockQuantize(block_size=64), ROUNDING, owes=True),
    "fp8": Case("fp8", ROUNDING, owes=True),
    "int8 without feedback": Case(BlockQuantize(error_feedback=False, block_size=64), 0.02),
    "onebit": Case(OneBit(start_iter=1, block_size=64), ROUNDING, owes=True),
    "topk": Case(TopK(ratio=0.1), ROUNDING, owes=True),
    "post_local_sgd": Case(PostLocalSGD(start_local_sgd_iter=1), ROUNDING),
    "torch's fp16": Case((None, default_hooks.fp16_compress_hook), 5 * HALF),
    "powersgd in bf16": Case(Cast(PowerSGD(rank=2, start_iter=0), "bfloat16"), 5 * BRAIN, owes=True, dense_alone=True),
    "per parameter": Case(
        PerParameter([Rule(PowerSGD(rank=1, start_iter=0), ndim=2), Rule("int8", pattern="net.2.*")], default="fp16"),
        5 * HALF,
        owes=True,
        dense_alone=True,
    ),
    "schedule": Case(Schedule([Stage(0, "fp16"), Stage(1, "int8"), Stage(3, TopK(ratio=0.1))]), 5 * HALF, owes=True),
}


@dataclass(frozen=True)
class Outcome:
    """What one fit came to, all relative to the size of all gradients."""

    error: float
    compression: float
    state: State
    norms: list[tuple[float, float]]
    stats: dict[str, Any]


def relative(sums: Mapping[str, Tensor], size: float) -> float:
    return float(torch.cat([value.flatten() for value in sums.values()]).norm()) / size


def account_for(module: Probe) -> Outcome:
    """Compare what a fitted probe was given with the mean over the ranks."""
    size = torch.tensor(module.size, dtype=torch.float64)
    for total in (size, *module.exact.values()):
        dist.all_reduce(total)
        total /= dist.get_world_size()
    missing = {name: (module.exact[name] - module.reduced[name]).view(-1) for name in module.exact}
    rest = {name: value - module.owed.get(name, torch.zeros(1)).view(-1) for name, value in missing.items()}
    return Outcome(
        error=relative(rest, float(size)),
        compression=relative(missing, float(size)),
        state=state_of(module.net),
        norms=getattr(module, "norms", []),
        stats=module.stats,
    )
