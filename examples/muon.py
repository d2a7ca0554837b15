"""Muon for the matrices and AdamW for the rest, each process making its share of the steps.

    python examples/muon.py                # each process orthogonalizes half of the matrices
    python examples/muon.py --no-shard     # each does it for all of them; the result is the same to the last bit

Under plain DDP all processes repeat the same Newton-Schulz iterations. Sharded, each makes those of its own matrices,
shared out by what they cost, and sends the result to the others. With two optimizers Lightning wants manual
optimization, so the steps follow the backward (`overlap=False`). The last line is the sum of the parameters.
"""

import argparse

import torch
from digits import DigitsData
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_ddp_hooks import DDPHooksStrategy
from lightning_ddp_hooks.optim import OptimizerInHook


class Classifier(LightningModule):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.automatic_optimization = False
        hidden = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), *hidden)
        self.head = nn.Linear(width, 10)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        loss = cross_entropy(self.head(self.body(batch[0])), batch[1])
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        matrices = [param for param in self.body.parameters() if param.dim() == 2]
        others = [param for param in self.body.parameters() if param.dim() < 2] + list(self.head.parameters())
        return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=1e-3)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shard", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    seed_everything(0)
    sharded = OptimizerInHook(shard=True, overlap=False) if args.shard else None
    strategy = DDPHooksStrategy(optimizer_in_hook=sharded)
    quiet = {"logger": False, "enable_checkpointing": False}
    trainer = Trainer(accelerator="cpu", devices=2, max_epochs=args.epochs, strategy=strategy, **quiet)
    model, data = Classifier(), DigitsData()
    data.setup("fit")
    trainer.fit(model, data.train_dataloader())
    if trainer.is_global_zero:
        print(f"parameters={sum(param.double().sum().item() for param in model.parameters()):.6f}", flush=True)
