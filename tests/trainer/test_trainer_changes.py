"""A LightningModule that changes once its hooks run: converted, given an adapter, or new parameters."""

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from trainer_runs import Net, make_module, make_trainer

from lightning_ddp_hooks import DDPHooksStrategy, comm

pytestmark = [pytest.mark.ranks, pytest.mark.trainer]


class Converted(Net):
    """Changes its dtype after the strategy has been set up."""

    def on_train_start(self) -> None:
        self.float()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([part.float() if part.is_floating_point() else part for part in batch], batch_idx)


class Adapted(Net):
    """Freezes what it has and trains an adapter on top of it."""

    def on_fit_start(self) -> None:
        self.requires_grad_(False)
        self.adapter = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.trainer.optimizers[0].add_param_group({"params": [self.adapter]})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + self.adapter)


class Replaced(Net):
    """Loads parameters as new tensors."""

    def on_train_start(self) -> None:
        self.load_state_dict({name: value.clone() for name, value in self.state_dict().items()}, assign=True)
        for group in self.trainer.optimizers[0].param_groups:
            group["params"] = list(self.parameters())


def _moved_and_apart(module_class: type[Net], backend: str) -> tuple[float, float]:
    """Fit; return by how much the parameters have moved, and by how much the ranks differ."""
    module = make_module(module_class)
    before = {name: value.detach().clone().double() for name, value in module.named_parameters()}
    make_trainer(DDPHooksStrategy(reducer_backend=backend)).fit(module)  # type: ignore[arg-type]
    after = {name: value.detach().double() for name, value in module.named_parameters()}
    start = {**{name: torch.zeros_like(value) for name, value in after.items()}, **before}
    moved = max((after[name] - start[name]).abs().max().item() for name in after)
    flat = torch.cat([value.reshape(-1) for value in after.values()])
    ranks = comm.all_gather(flat, comm.resolve_group(None))
    return moved, (ranks[0] - ranks[-1]).abs().max().item()


@pytest.mark.parametrize("backend", ["python", "native"])
@pytest.mark.parametrize("module_class", [Converted, Adapted, Replaced])
def test_a_module_that_changes_at_the_start_is_trained_alike_on_all_ranks(
    module_class: type[Net], backend: str
) -> None:
    for moved, apart in run_ranks(_moved_and_apart, module_class, backend):
        assert moved > 1e-4
        assert apart == 0
