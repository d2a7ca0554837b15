"""What the Fabric tests share: a small model on fixed data, and a training loop as users of Fabric write it."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from lightning.fabric.strategies.strategy import Strategy
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from trainer_runs import GLOBAL_BATCH, WIDTH, State, dataset, rank, state_of, world_size

from lightning_ddp_hooks import FabricDDPHooksStrategy

STEPS = 8

NO_SETTINGS: Mapping[str, Any] = MappingProxyType({})

StrategyLike = str | Strategy | Mapping[str, Any]

# Lightning has no such precision on the CPU. The scale is too high at first, so that some steps are skipped.
SCALED = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**17, growth_interval=2))

sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01)
adamw = partial(torch.optim.AdamW, lr=0.01)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return mse_loss(self(x), y)


class Norm(Net):
    """Has buffers that each rank's batches move."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))


def make_fabric(strategy: StrategyLike = NO_SETTINGS, **options: Any) -> Fabric:
    """Make and launch a Fabric for this world; a mapping for ``strategy`` holds the arguments of ours."""
    if isinstance(strategy, Mapping):
        # The watch over other ranks has tests of its own; to begin and to end it takes longer than these trainings.
        strategy = FabricDDPHooksStrategy(**{"failure_timeout": None, **strategy})
    options = {"accelerator": "cpu", "devices": world_size(), **options}
    fabric = Fabric(strategy=copy.deepcopy(strategy), **copy.deepcopy(options))
    fabric.launch()
    return fabric


def make_model(model_class: type[nn.Module] = Net, dtype: torch.dtype = torch.float64) -> Any:
    """Make a model whose weights differ over the ranks: that rank 0's are used is the strategy's doing."""
    torch.manual_seed(rank())
    return model_class().to(dtype)  # Fabric's "64-true" would round what a model returns to float32


def batches(steps: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's share of each step's batch, from one step on; the union is the same in worlds of any size."""
    x, y = (tensor.double() for tensor in dataset().tensors)
    for step in range(start, start + steps):
        first = step * GLOBAL_BATCH % len(x)
        share = slice(first + rank(), first + GLOBAL_BATCH, world_size())
        yield x[share], y[share]


def train(fabric: Fabric, model: Any, optimizer: Any, steps: int = STEPS, start: int = 0) -> None:
    """Train as a user would."""
    for x, y in batches(steps, start):
        optimizer.zero_grad()
        fabric.backward(mse_loss(model(x), y))
        optimizer.step()


def train_anew(
    strategy: StrategyLike,
    make_optimizer: Callable[..., Any] = sgd,
    loop: Callable[..., Any] = train,
    model_class: type[nn.Module] = Net,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> State:
    """Train a fresh model and return its state."""
    fabric = make_fabric(strategy, **options)
    model = make_model(model_class, dtype)
    model, optimizer = fabric.setup(model, make_optimizer(model.parameters()))
    loop(fabric, model, optimizer)
    return state_of(model)


def equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    """Compare to the last bit."""
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    """Compare up to the rounding of float64."""
    same = found.keys() == expected.keys()
    return same and all(
        torch.allclose(found[name].double(), expected[name].double(), rtol=1e-9, atol=1e-11) for name in expected
    )


def optimizer_tensors(state: Mapping[str, Any]) -> Sequence[Tensor]:
    """List the tensors of an optimizer's state_dict."""
    return [value for entry in state["state"].values() for value in entry.values() if isinstance(value, Tensor)]
