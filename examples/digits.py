r"""Classify scikit-learn's handwritten digits with two processes on the CPU.

    python examples/digits.py fit
    python examples/digits.py fit --trainer.max_epochs=3 --model.lr=0.01
    python examples/digits.py fit --trainer.strategy=lightning_ddp_hooks.DDPHooksStrategy \
        --trainer.strategy.bucket_cap_mb=2

After fitting, the model is tested on images it has not seen; the last line is its accuracy, ``test_acc=0.9xxx``.
"""

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

import lightning_ddp_hooks  # noqa: F401  which registers "ddp_hooks"


class DigitsData(LightningDataModule):
    """1,797 images of 8 x 8 pixels, split once and for all into training, validation and test sets."""

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        images, labels = load_digits(return_X_y=True)
        dataset = TensorDataset(
            torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16.0,  # pixels are 0 to 16
            torch.tensor(labels, dtype=torch.long),
        )
        # The held-out sets divide evenly by 2, 3 and 4: no process is given a repeated image to fill up its share.
        sizes = [len(dataset) - 600, 240, 360]
        self.train, self.val, self.test = random_split(dataset, sizes, torch.Generator().manual_seed(0))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.test, self.batch_size)


class DigitsModel(LightningModule):
    """A small convolutional network."""

    def __init__(self, width: int = 32, lr: float = 3e-3) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * width * 16, 10),
        )
        # Metrics are modules: the counts of all processes are summed before the accuracy is computed.
        self.val_acc = MulticlassAccuracy(num_classes=10, average="micro")
        self.test_acc = MulticlassAccuracy(num_classes=10, average="micro")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = cross_entropy(self.net(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.val_acc(self.net(images), labels)
        self.log("val_acc", self.val_acc, prog_bar=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.test_acc(self.net(images), labels)
        self.log("test_acc", self.test_acc)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class DigitsCLI(LightningCLI):
    """``fit`` is followed by a test; both commands end with the accuracy, printed by one process only."""

    def after_fit(self) -> None:
        self.trainer.test(self.model, datamodule=self.datamodule)
        self.after_test()

    def after_test(self) -> None:
        if self.trainer.is_global_zero:
            print(f"test_acc={self.trainer.callback_metrics['test_acc']:.4f}", flush=True)


if __name__ == "__main__":
    DigitsCLI(
        DigitsModel,
        DigitsData,
        seed_everything_default=0,
        trainer_defaults={
            "strategy": "ddp_hooks",
            "accelerator": "cpu",
            "devices": 2,
            "max_epochs": 10,
            "log_every_n_steps": 10,
        },
        save_config_kwargs={"overwrite": True},
    )
