"""An averager's schedule goes on where the run stands, whatever the checkpoint holds that the run goes on from."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fabric_runs import make_fabric, make_model, sgd
from fabric_runs import train as train_in_fabric
from ranks import run_ranks
from torch import nn
from trainer_runs import QUIET, Net, make_module, make_trainer

from lightning_ddp_hooks.averaging import (
    DiLoCo,
    HierarchicalModelAverager,
    ModelAverager,
    PeriodicModelAverager,
    SlowMo,
)
from lightning_ddp_hooks.callbacks import ModelAveraging

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.trainer,
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of a checkpoint that lacks our state, or in mid-epoch
]

BEFORE, STEPS = 5, 13
EVERY = {"warmup_steps": 3}
AVERAGERS: dict[str, ModelAverager] = {
    "periodic": PeriodicModelAverager(period=4, **EVERY),
    "hierarchical": HierarchicalModelAverager(period_group_size_dict={4: 2}, **EVERY),
    "slowmo": SlowMo(period=4, **EVERY),
    "diloco": DiLoCo(period=4, **EVERY),
}


def are_equal(module: nn.Module) -> bool:
    """Tell whether all ranks hold the same parameters."""
    own = torch.cat([param.detach().flatten() for param in module.parameters()])
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return all(torch.equal(one, found[0]) for one in found)


class Watched(Net):
    def __init__(self) -> None:
        super().__init__()
        self.equal_after: dict[int, bool] = {}

    def on_train_batch_end(self, *_: Any) -> None:
        self.equal_after[self.trainer.global_step] = are_equal(self.net)


def fit(
    strategy: str | Mapping[str, Any], steps: int, start: Path | None = None, **options: Any
) -> tuple[Any, dict[int, bool]]:
    module = make_module(Watched)
    trainer = make_trainer(strategy, **{**QUIET, "max_epochs": -1, "max_steps": steps, **options})
    trainer.fit(module, ckpt_path=start)
    return trainer, module.equal_after


def resume_in_a_trainer(path: Path) -> dict[str, list[dict[int, bool]]]:
    found: dict[str, list[dict[int, bool]]] = {}
    for source in ("ddp_hooks", "ddp"):
        fit(source, BEFORE)[0].save_checkpoint(path / source)
    for name, averager in AVERAGERS.items():
        whole = fit({"averager": averager}, STEPS)[1]
        found[name] = [{step: equal for step, equal in whole.items() if step > BEFORE}]
        for source in ("ddp_hooks", "ddp"):
            found[name].append(fit({"averager": averager}, STEPS, path / source)[1])
        by_callback = {"callbacks": [ModelAveraging(averager)]}
        found[name].append(fit("ddp", STEPS, path / "ddp", **by_callback)[1])
    return found


@pytest.mark.timeout(200)
def test_a_trainers_averager_goes_on_at_the_step_of_the_checkpoint(tmp_path: Path) -> None:
    for found in run_ranks(resume_in_a_trainer, tmp_path, timeout=150):
        for name, (whole, *resumed) in found.items():
            assert set(whole.values()) == {True, False}, name
            assert resumed == [whole, whole, whole], name


def train(averager: ModelAverager | None, steps: int, load: Path | None = None) -> tuple[Any, ...]:
    """Train a model step by step; return what there is, and after which steps ranks were equal."""
    fabric = make_fabric({"averager": averager})
    model, optimizer = fabric.setup(module := make_model(), sgd(module.parameters()))
    if load is not None:
        fabric.load(load, {"model": model, "optimizer": optimizer})
    found: dict[int, bool] = {}
    for step in range(fabric.strategy.step(), steps):
        train_in_fabric(fabric, model, optimizer, 1, start=step)
        found[fabric.strategy.step()] = are_equal(module)
    return fabric, model, optimizer, found


def resume_in_fabric(path: Path) -> dict[str, list[dict[int, bool]]]:
    fabric, model, optimizer, _ = train(None, BEFORE)
    fabric.save(path / "ddp_hooks", {"model": model, "optimizer": optimizer})
    plain = make_fabric("ddp")
    model, optimizer = plain.setup(module := make_model(), sgd(module.parameters()))
    plain.save(path / "ddp", {"model": model, "optimizer": optimizer})
    found = {}
    for name, averager in AVERAGERS.items():
        whole = train(averager, STEPS)[3]
        late = {step: equal for step, equal in whole.items() if step > BEFORE}
        resumed, begun = (train(averager, STEPS, path / source)[3] for source in ("ddp_hooks", "ddp"))
        found[name] = [late, resumed, whole, begun]
    return found


@pytest.mark.timeout(200)
def test_fabrics_averager_goes_on_at_the_step_of_the_checkpoint_or_of_the_run(tmp_path: Path) -> None:
    first, second = run_ranks(resume_in_fabric, tmp_path, timeout=150)
    assert first == second
    for name, (late, resumed, whole, begun) in first.items():
        assert set(late.values()) == {True, False}, name
        assert resumed == late, name
        # Of another strategy no step is known: run and averager begin together.
        assert begun == whole, name
