"""Buffers move when those of strategy="ddp" do: in training, sanity check, validation, test and prediction."""

from typing import Any

import pytest
import torch
from fabric_runs import make_fabric
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader
from trainer_runs import QUIET, WIDTH, Net, dataset, make_module, make_trainer, rank

pytestmark = [pytest.mark.ranks, pytest.mark.trainer]

Seen = list[tuple[str, float]]


class Probe(Net):
    """Notes in each step the buffer that it sees; training moves it, on each rank by another amount."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(1))
        self.total: Tensor
        self.seen: Seen = []

    def note(self, stage: str) -> None:
        self.seen.append((stage, self.total.item()))

    def on_fit_start(self) -> None:
        self.total += rank()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.note("train")
        self.total += 1 + rank()
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.note("sanity" if self.trainer.sanity_checking else str(self.trainer.state.stage))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.note("predict")
        return self.net(batch[0])

    def val_dataloader(self) -> Any:
        return DataLoader(dataset(8), batch_size=2)

    test_dataloader = predict_dataloader = val_dataloader


def see(strategy: str, options: dict[str, Any]) -> Seen:
    module: Any = make_module(Probe)
    trainer = make_trainer(strategy, **{**QUIET, "max_epochs": 3, **options})
    trainer.fit(module)
    for run in (trainer.validate, trainer.test, trainer.predict):
        module.total += rank()
        run(module)
    seen: Seen = module.seen
    return seen


OPTIONS = (
    {"num_sanity_val_steps": 2},
    {"num_sanity_val_steps": 0},
    {"num_sanity_val_steps": 1, "accumulate_grad_batches": 3},
    {"val_check_interval": 2},
)


def see_under_both() -> list[tuple[Seen, Seen]]:
    return [(see("ddp_hooks", options), see("ddp", options)) for options in OPTIONS]


def test_under_a_trainer() -> None:
    for pairs in run_ranks(see_under_both, timeout=120):
        for ours, theirs in pairs:
            assert {stage for stage, _ in ours} >= {"train", "predict"}
            assert ours == theirs


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1)
        self.register_buffer("total", torch.zeros(1))
        self.total: Tensor
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.total.item())
        if self.training:
            self.total += 1 + rank()
        return self.linear(x)  # type: ignore[no-any-return]


def see_in_fabric(strategy: Any) -> list[float]:
    fabric = make_fabric(strategy)
    module = Counting()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    module.total += rank()
    x = torch.ones(2, WIDTH)
    for step in range(6):
        with fabric.no_backward_sync(model, enabled=step % 3 == 1):
            fabric.backward(model(x).sum())
        optimizer.step()
        model.eval()
        with torch.no_grad():
            for _ in range(2):
                model(x)
        model.train()
    return module.seen


def see_in_both() -> tuple[list[float], list[float]]:
    return see_in_fabric("ddp_hooks"), see_in_fabric("ddp")


def test_under_fabric() -> None:
    for ours, theirs in run_ranks(see_in_both):
        assert ours == theirs
