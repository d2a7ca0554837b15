"""A training loop of one's own, with Lightning Fabric: two processes, a communication hook, and a checkpoint.

    python examples/fabric_digits.py
    python examples/fabric_digits.py --hook int8             # the names are in docs/hooks.md
    python examples/fabric_digits.py --epochs=3 --save digits.ckpt
    python examples/fabric_digits.py --resume digits.ckpt    # goes on, hook and all, where the other run ended

The data are scikit-learn's handwritten digits; the last line is the accuracy on images that were not trained on.
"""

import argparse

import torch
from lightning.fabric import Fabric, seed_everything
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lightning_ddp_hooks import FabricDDPHooksStrategy


def load(training: bool) -> DataLoader:
    images, labels = load_digits(return_X_y=True)
    part = slice(0, 1437) if training else slice(1437, None)
    dataset = TensorDataset(torch.tensor(images[part], dtype=torch.float32) / 16, torch.tensor(labels[part]))
    return DataLoader(dataset, batch_size=32, shuffle=training)


def train(fabric: Fabric, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader) -> None:
    for images, labels in loader:
        optimizer.zero_grad()
        fabric.backward(cross_entropy(model(images), labels))
        optimizer.step()  # this is what hooks and averagers count as a training step


@torch.no_grad()
def accuracy(fabric: Fabric, model: nn.Module, loader: DataLoader) -> float:
    counts = torch.zeros(2)
    for images, labels in loader:
        counts += torch.tensor([(model(images).argmax(1) == labels).sum(), len(labels)])
    right, total = fabric.all_reduce(counts, reduce_op="sum")
    return float(right / total)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hook", default="allreduce")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--save", help="write a checkpoint here at the end")
    parser.add_argument("--resume", help="begin with this checkpoint")
    args = parser.parse_args()

    fabric = Fabric(accelerator="cpu", devices=2, strategy=FabricDDPHooksStrategy(comm_hook=args.hook))
    fabric.launch()
    seed_everything(0, verbose=False)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    train_loader, test_loader = fabric.setup_dataloaders(load(training=True), load(training=False))
    if args.resume:
        fabric.load(args.resume, {"model": model, "optimizer": optimizer})
    for _ in range(args.epochs):
        train(fabric, model, optimizer, train_loader)
    if args.save:
        fabric.save(args.save, {"model": model, "optimizer": optimizer})
    test_acc = accuracy(fabric, model, test_loader)
    if fabric.is_global_zero:
        print(f"steps={fabric.strategy.step()} test_acc={test_acc:.4f}", flush=True)
