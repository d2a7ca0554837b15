"""What the Trainer tests share: a small model on fixed data, and one way to fit it.

The same module runs in a world of any size: a step takes `GLOBAL_BATCH` samples, which the ranks share, so that a fit
on two ranks and a fit in a single process see the same samples in each step.
"""

import copy
import inspect
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_ddp_hooks import DDPHooksStrategy

WIDTH = 8
SAMPLES = 32
GLOBAL_BATCH = 8
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": 2,
    "num_sanity_val_steps": 0,
}
EXACT = {**QUIET, "precision": "64-true"}
"""In float64 the order of a sum shows in the last digits only, so that worlds of different sizes can be compared."""

SAFELY = {"weights_only": True} if "weights_only" in inspect.signature(Trainer.fit).parameters else {}
"""Of `fit`, to load checkpoints without running what they say; older Lightning cannot be told."""

State = dict[str, Tensor]
StrategyLike = str | Strategy | Mapping[str, Any]


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def dataset(samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, WIDTH, generator=generator)
    return TensorDataset(x, x.sin().sum(1, keepdim=True))


class Net(LightningModule):
    """Fits a sum of sines; what the tests vary is a method or a class attribute."""

    optimizer = staticmethod(partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01))

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        x, y = batch
        return mse_loss(self.net(x), y)

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())

    def train_dataloader(self) -> Any:
        # The sampler that the Trainer would put in shuffles, differently in worlds of different sizes.
        world_size = self.trainer.world_size
        sampler = DistributedSampler(dataset(), world_size, self.trainer.global_rank, shuffle=False)
        return DataLoader(sampler.dataset, GLOBAL_BATCH // world_size, sampler=sampler)


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


def make_trainer(strategy: StrategyLike = "ddp_hooks", **options: Any) -> Trainer:
    """Make a quiet Trainer for this world; a mapping for ``strategy`` holds the arguments of ours."""
    if isinstance(strategy, Mapping):
        strategy = DDPHooksStrategy(**strategy)
    return Trainer(**{**QUIET, "devices": world_size(), "strategy": strategy, **options})


def state_of(module: nn.Module) -> State:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def make_module(module_class: type[nn.Module] = Net) -> Any:
    """Make a module whose weights differ over the ranks: that rank 0's are used is the strategy's doing."""
    torch.manual_seed(rank())
    return module_class()


def fit(module_class: type[LightningModule], strategy: StrategyLike, options: Mapping[str, Any]) -> State:
    """Fit a fresh module and return its state."""
    module = make_module(module_class)
    make_trainer(copy.deepcopy(strategy), **copy.deepcopy(dict(options))).fit(module)
    return state_of(module)


def fit_each(
    module_class: type[LightningModule], strategies: Sequence[StrategyLike], options: Mapping[str, Any]
) -> list[State]:
    """Fit with each strategy in turn; for `run_ranks`."""
    return [fit(module_class, strategy, options) for strategy in strategies]


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Compare to the last bit."""
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0, msg=lambda text, n=name: f"{n}: {text}")


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Compare up to the rounding of float64."""
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype in (torch.float64, torch.int64), "too coarse to compare"
        torch.testing.assert_close(
            tensor, expected[name], rtol=1e-9, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}"
        )


def assert_trained(state: Mapping[str, Tensor], module_class: type[nn.Module] = Net) -> None:
    """Some parameter has moved, and none has left the numbers."""
    start = state_of(make_module(module_class))
    assert any(not torch.equal(state[name].double(), tensor.double()) for name, tensor in start.items())
    assert all(tensor.isfinite().all() for tensor in state.values())
