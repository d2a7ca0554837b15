"""Backwards outside of the step stay on their rank; parameters swapped in each step; a checkpointed Fabric model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from trainer_runs import Net, State, assert_same, make_module, make_trainer, rank, state_of

from lightning_ddp_hooks import DDPHooksStrategy, hooks

pytestmark = [pytest.mark.ranks, pytest.mark.trainer]

PLACES = ["on_train_batch_start", "on_train_batch_end", "on_validation_batch_start"]


class Elsewhere(Callback):
    """Runs a backward of its own, with other numbers on each rank, and clears what it leaves."""

    def __init__(self, place: str, ranks: tuple[int, ...]) -> None:
        self.ran = 0
        if rank() in ranks:
            setattr(self, place, self._probe)

    def _probe(self, trainer: Any, module: LightningModule, *_: Any) -> None:
        kept = [param.grad for param in module.parameters()]
        with torch.enable_grad():
            sum((100.0 + rank()) * param.sum() for param in module.parameters()).backward()  # type: ignore[union-attr]
        for param, gradient in zip(module.parameters(), kept, strict=True):
            param.grad = gradient
        self.ran += 1


class Validated(Net):
    """Has something to validate."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


class ByHand(Validated):
    """Calls backward itself, once past the strategy."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        if batch_idx % 2:
            self.manual_backward(loss)
        else:
            loss.backward()
        optimizer.step()


def _fit(module_class: type[Net], place: str, ranks: tuple[int, ...], hook: Any) -> tuple[State, int]:
    module, probe = make_module(module_class), Elsewhere(place, ranks)
    strategy = DDPHooksStrategy(comm_hook=hook, failure_timeout=10)
    make_trainer(strategy, callbacks=[probe], inference_mode=False, limit_val_batches=2).fit(module)
    return state_of(module), probe.ran


@pytest.mark.parametrize(
    ("module_class", "place"),
    [*((Validated, place) for place in [*PLACES, "on_before_backward"]), *((ByHand, place) for place in PLACES)],
)
@pytest.mark.parametrize("ranks", [(0,), (0, 1)], ids=["one rank", "all ranks"])
def test_a_backward_outside_of_the_step_stays_on_its_rank(
    module_class: type[Net], place: str, ranks: tuple[int, ...]
) -> None:
    hook = hooks.TopK(ratio=0.3)  # its memory would show the gradients of others
    plain = run_ranks(_fit, module_class, place, (), hook)
    found = run_ranks(_fit, module_class, place, ranks, hook)
    for (state, _), (wanted, _) in zip(found, plain, strict=True):
        assert_same(state, wanted)
    assert [bool(ran) for _, ran in found] == [r in ranks for r in (0, 1)]


class Swapped(LightningModule):
    """Trains one of two weights in each step, and says so only in the step."""

    def __init__(self, backward: str) -> None:
        super().__init__()
        self.weights = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(2))
        self.automatic_optimization = backward == "automatic"
        self.by_hand = backward == "by hand"
        self.found: list[list[float | None]] = []
        self.choose(0)

    def choose(self, step: int) -> None:
        for index, layer in enumerate(self.weights):
            layer.requires_grad_(index == step % 2)

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        self.choose(batch_idx)
        loss = sum(layer(x) for layer in self.weights).sum()  # type: ignore[union-attr]
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            if self.by_hand:
                loss.backward()
            else:
                self.manual_backward(loss)
            optimizer.step()
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [layer.weight.grad for layer in self.weights]
        self.found.append([None if gradient is None else gradient.item() for gradient in gradients])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit_swapped(backward: str, settings: dict[str, Any]) -> list[list[float | None]]:
    module = Swapped(backward)
    batches = torch.utils.data.DataLoader([torch.full((1, 1), 1.0 + rank())] * 6, batch_size=None)  # type: ignore[arg-type]
    make_trainer(DDPHooksStrategy(**settings), max_epochs=1, use_distributed_sampler=False).fit(module, batches)
    return module.found


@pytest.mark.parametrize("settings", [{}, {"find_unused_parameters": True}], ids=str)
@pytest.mark.parametrize("backward", ["automatic", "manual", "by hand"])
def test_parameters_may_be_swapped_within_each_step(backward: str, settings: dict[str, Any]) -> None:
    assert run_ranks(_fit_swapped, backward, settings) == [[[1.5, None], [None, 1.5]] * 3] * 2


def _checkpointed_in_fabric(call: Callable[..., Tensor]) -> list[float]:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp_hooks")
    fabric.launch()
    net = nn.Linear(1, 1, bias=False)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    x = torch.full((1, 1), 1.0 + rank(), requires_grad=True)
    found = []
    for _ in range(3):
        fabric.backward(call(model, x).sum())
        found.append(net.weight.grad.item())  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return found


def _reentrant(model: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(model, x, use_reentrant=True)  # type: ignore[no-any-return]


def test_a_model_of_fabric_inside_a_reentrant_checkpoint_is_reduced() -> None:
    assert run_ranks(_checkpointed_in_fabric, _reentrant) == [[1.5] * 3] * 2
