"""Train a byte-level transformer on Python's own source code with two processes on the CPU.

    python examples/language_model.py fit
    python examples/language_model.py fit --trainer.limit_train_batches=1000 --model.depth=6

The text is the standard library of the running Python. After fitting, the model is validated on files it has not
seen; the last line is its loss in nats per byte, ``val_loss=2.xxx``. A uniform guess is at 5.545.
"""

import sysconfig
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import lightning_ddp_hooks  # noqa: F401  which registers "ddp_hooks"


class Windows(Dataset):
    """All windows of ``length`` bytes, side by side, each with the byte that follows."""

    def __init__(self, files: list[Path], length: int) -> None:
        self.text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
        self.length = length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.length
        return self.text[start : start + self.length + 1].long()


class StandardLibrary(LightningDataModule):
    """The standard library's top-level modules in alphabetical order; every tenth file is for validation."""

    def __init__(self, length: int = 128, batch_size: int = 16) -> None:
        super().__init__()
        self.length = length
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        self.train = Windows([file for i, file in enumerate(files) if i % 10 != 0], self.length)
        self.val = Windows(files[::10], self.length)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size)


class LanguageModel(LightningModule):
    """A decoder-only transformer over bytes, of 1.5 million parameters by default."""

    def __init__(self, width: int = 192, depth: int = 3, heads: int = 4, length: int = 128, lr: float = 3e-3) -> None:
        super().__init__()
        self.lr = lr
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(length, width)
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, depth, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        for embedding in (self.bytes, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        length = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=text.device)
        x = self.bytes(text) + self.positions.weight[:length]
        return self.head(self.blocks(x, mask=mask, is_causal=True))

    def loss(self, batch: Tensor) -> Tensor:
        return cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=self.lr, total_steps=steps, pct_start=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class LanguageModelCLI(LightningCLI):
    """The length of a window is one setting; ``fit`` ends with the validation loss, printed by one process only."""

    def add_arguments_to_parser(self, parser) -> None:
        parser.link_arguments("data.length", "model.length")

    def after_fit(self) -> None:
        if self.trainer.is_global_zero:
            print(f"val_loss={self.trainer.callback_metrics['val_loss']:.4f}", flush=True)


if __name__ == "__main__":
    LanguageModelCLI(
        LanguageModel,
        StandardLibrary,
        seed_everything_default=0,
        trainer_defaults={
            "strategy": "ddp_hooks",
            "accelerator": "cpu",
            "devices": 2,
            "max_epochs": 1,
            "limit_train_batches": 300,
            "limit_val_batches": 50,
            "log_every_n_steps": 10,
        },
        save_config_kwargs={"overwrite": True},
    )
