"""Two processes with shards of very different size: no sample is dropped or repeated, and nobody waits forever.

    python examples/uneven_shards.py
    python examples/uneven_shards.py --policy stop      # ends each epoch with the smaller shard
    python examples/uneven_shards.py --policy error     # raises on both before the first uneven step

The data are scikit-learn's handwritten digits. Process 0 reads 300 of the training images, process 1 the other 1,197,
as streams without a length. The last line says how many images an epoch had, and the accuracy on images not seen.
"""

import argparse
from collections.abc import Iterator

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import SumMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_ddp_hooks.callbacks import UnevenInputs

SHARDS = {"train": [(0, 300), (300, 1497)], "test": [(1497, 1700), (1700, 1797)]}


class Shard(IterableDataset):
    """A process's part of the images, as a stream."""

    def __init__(self, stage: str, rank: int) -> None:
        begin, end = SHARDS[stage][rank]
        images, labels = load_digits(return_X_y=True)
        self.images = torch.tensor(images[begin:end], dtype=torch.float32) / 16
        self.labels = torch.tensor(labels[begin:end])

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.images, self.labels, strict=True)


class Digits(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")
        self.trained_on = SumMetric()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        self.trained_on.update(len(images))
        self.log("trained_on", self.trained_on, on_step=False, on_epoch=True)
        return cross_entropy(self.net(images), labels)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.accuracy.update(self.net(batch[0]), batch[1])
        self.log("test_acc", self.accuracy)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Shard("train", self.global_rank), batch_size=32)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(Shard("test", self.global_rank), batch_size=32)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", choices=["join", "stop", "error"], default="join")
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()
    seed_everything(0)
    callbacks = [UnevenInputs(args.policy, divisor="samples")]
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp_hooks", max_epochs=args.epochs, callbacks=callbacks)
    model = Digits()
    trainer.fit(model)
    images = int(trainer.callback_metrics["trained_on"])
    trainer.test(model)
    if trainer.is_global_zero:
        print(f"images_per_epoch={images} test_acc={trainer.callback_metrics['test_acc']:.4f}", flush=True)
