"""What an asynchronous device leaves pending is settled where ranks meet and the host waits anyway."""

from pathlib import Path
from typing import Any

import pytest
from fabric_runs import make_fabric, make_model, sgd
from fabric_runs import train as train_in_fabric
from ranks import run_ranks
from torch.utils.data import DataLoader
from trainer_runs import QUIET, Net, dataset, make_module, make_trainer

from lightning_ddp_hooks.reducer.reducer import Reducer

pytestmark = [pytest.mark.ranks, pytest.mark.trainer]


class Steps(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def val_dataloader(self) -> Any:
        return DataLoader(dataset(4), 2)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append("validation")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen.append("saving")  # after which the strategy writes


def settled_in_a_trainer(path: Path) -> list[str]:
    module = make_module(Steps)
    Reducer.settle_status = lambda self: module.seen.append("settled")  # type: ignore[method-assign]
    options = {**QUIET, "max_epochs": 1, "use_distributed_sampler": False, "limit_val_batches": 1}
    trainer = make_trainer(**options)
    module.on_validation_end = lambda: trainer.save_checkpoint(path / "here.ckpt")
    trainer.fit(module)
    return module.seen


def test_a_trainer_settles_before_validation_and_checkpoint_and_at_the_end(tmp_path: Path) -> None:
    for seen in run_ranks(settled_in_a_trainer, tmp_path):
        assert seen == ["settled", "validation", "saving", "settled", "settled"]


def settled_in_fabric(path: Path) -> list[int]:
    calls: list[str] = []
    Reducer.settle_status = lambda self: calls.append("settled")  # type: ignore[method-assign]
    fabric = make_fabric()
    model, optimizer = fabric.setup(module := make_model(), sgd(module.parameters()))
    train_in_fabric(fabric, model, optimizer, 2)
    counts = [len(calls)]
    fabric.save(path / "here.ckpt", {"model": model, "optimizer": optimizer})
    counts.append(len(calls))
    with fabric.strategy.averaged_model(model):
        counts.append(len(calls))
    fabric.strategy.finish_averaging(model)
    return [*counts, len(calls)]


def test_fabric_settles_when_it_saves_evaluates_and_finishes(tmp_path: Path) -> None:
    assert run_ranks(settled_in_fabric, tmp_path) == [[0, 1, 2, 3], [0, 1, 2, 3]]
