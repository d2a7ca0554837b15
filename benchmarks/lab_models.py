"""The modules that `advice.py` asks about, as LightningModules: functions without arguments, for the command line."""

import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule
from models import MODELS, Batch
from torch import Tensor
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from digits import DigitsData, DigitsModel
from language_model import LanguageModel, StandardLibrary


class Benchmark(LightningModule):
    """A model of models.py."""

    def __init__(self, name: str) -> None:
        super().__init__()
        model = MODELS[name]
        self.net, self.loss, self.lr = model.make_module(), model.loss, model.learning_rate

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.loss(self.net(batch.inputs), batch.target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def text_module() -> LightningModule:
    return LanguageModel(width=256, depth=4)


def text() -> StandardLibrary:
    return StandardLibrary(batch_size=4)


def digits_module() -> LightningModule:
    return DigitsModel()


def digits() -> DigitsData:
    return DigitsData(batch_size=16)


def resnet_module() -> LightningModule:
    return Benchmark("resnet")


def resnet_batch() -> Batch:
    return MODELS["resnet"].make_batch(torch.Generator().manual_seed(0))


def mlp_module() -> LightningModule:
    return Benchmark("mlp")


def mlp_batch() -> Batch:
    return MODELS["mlp"].make_batch(torch.Generator().manual_seed(0))


def transformer() -> tuple[LightningModule, DataLoader]:
    batch = MODELS["transformer"].make_batch(torch.Generator().manual_seed(0))
    return Benchmark("transformer"), DataLoader([batch] * 1000, batch_size=None)
