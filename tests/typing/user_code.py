"""What a user who checks types strictly writes; mypy reads it, nobody runs it."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from typing_extensions import assert_type

import lightning_ddp_hooks as ldh
from lightning_ddp_hooks import DataParallel, DDPHooksStrategy, GradBucket, averaging, callbacks, hooks, join, optim

strategies: list[DDPHooksStrategy] = [
    DDPHooksStrategy(),
    DDPHooksStrategy(comm_hook="powersgd", bucket_cap_mb="auto", check_replicas_every_n_steps=100),
    DDPHooksStrategy(comm_hook=hooks.Cast(hooks.PowerSGD(rank=2), torch.bfloat16), failure_timeout=None),
    DDPHooksStrategy(
        comm_hook=hooks.PerParameter([hooks.Rule(hooks.BlockQuantize(dtype="int8"), min_numel=1000)], default="fp16")
    ),
    DDPHooksStrategy(comm_hook=hooks.Schedule([hooks.Stage(0, None), hooks.Stage(100, "onebit")])),
    DDPHooksStrategy(averager=averaging.PeriodicModelAverager(period=8, warmup_steps=500)),
    DDPHooksStrategy(averager=averaging.DiLoCo(period=50)),
    DDPHooksStrategy(optimizer_in_hook=optim.OptimizerInHook(shard=True, interleaved=True)),
    DDPHooksStrategy(gradient_weighting="samples", skip_missing_loss="all", reducer_backend="python"),
]

trainer = Trainer(
    strategy=strategies[0],
    callbacks=[callbacks.UnevenInputs(policy="join"), callbacks.CommMonitor()],
)
cli = LightningCLI(LightningModule, run=False)
assert_type(strategies[0].stats(), dict[str, object])
assert_type(ldh.__version__, str)


def sign_hook(state: dict[str, int], bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Compress by torch's contract."""
    state["calls"] += 1
    assert_type(bucket.buffer(), Tensor)
    assert_type(bucket.is_last(), bool)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer().sign())
    return future


DDPHooksStrategy(comm_hook=({"calls": 0}, sign_hook))
strategies[1].register_comm_hook({"calls": 0}, sign_hook)


class Module(LightningModule):
    """Talks to the strategy in a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        strategy = self.trainer.strategy
        assert isinstance(strategy, DDPHooksStrategy)
        strategy.active_group()
        return torch.zeros((), requires_grad=True)


def plain_pytorch(module: nn.Module, batch: Tensor) -> None:
    """Train without a Trainer."""
    model = DataParallel(module, comm_hook=hooks.TopK(ratio=0.01), find_unused_parameters=True)
    optimizer = optim.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    with join.Join([model, optimizer]):
        model(batch).sum().backward()
        optimizer.step()
    with model.no_sync():
        model(batch).sum().backward()
    assert_type(model.detach(), nn.Module)
