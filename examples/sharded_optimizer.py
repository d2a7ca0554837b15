"""Share the optimizer's state among the processes, and see what each one holds.

    python examples/sharded_optimizer.py                # each process holds half of AdamW's state
    python examples/sharded_optimizer.py --no-shard     # each holds all of it; the result is the same to the last bit

The network is of three layers of equal size on scikit-learn's digits. The last line is the sum of its parameters, and
the kilobytes of optimizer state that each process holds.
"""

import argparse

import torch
import torch.distributed as dist
from digits import DigitsData
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_ddp_hooks import DDPHooksStrategy
from lightning_ddp_hooks.optim import OptimizerInHook


class Classifier(LightningModule):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        hidden = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), *hidden, nn.Linear(width, 10))
        self.state_kb: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return cross_entropy(self.net(batch[0]), batch[1])

    def on_train_end(self) -> None:
        state = self.optimizers().optimizer.state.values()  # of those parameters that this process steps
        held = sum(value.nbytes for entry in state for value in entry.values() if isinstance(value, Tensor))
        self.state_kb = [0.0] * self.trainer.world_size
        dist.all_gather_object(self.state_kb, held / 1e3)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shard", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    seed_everything(0)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=args.epochs,
        logger=False,
        enable_checkpointing=False,
        strategy=DDPHooksStrategy(optimizer_in_hook=OptimizerInHook(shard=args.shard)),
    )
    model, data = Classifier(), DigitsData()
    data.setup("fit")
    trainer.fit(model, data.train_dataloader())
    if trainer.is_global_zero:
        total = sum(parameter.double().sum().item() for parameter in model.parameters())
        print(f"parameters={total:.4f} state_kb={'+'.join(f'{held:.1f}' for held in model.state_kb)}", flush=True)
