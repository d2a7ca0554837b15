"""Compiled models under the Trainer and Fabric: trained as by "ddp", with buckets launched between the graphs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_graphs import LAYERS, WIDTH, Layers, note_sent
from fabric_runs import make_fabric
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from ranks import run_ranks
from torch import Tensor
from torch.utils.data import DataLoader
from trainer_runs import State, assert_same, make_trainer, rank, state_of

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.trainer,
    pytest.mark.timeout(300),
    # Of torch's compiler's own doing.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.* is deprecated"),
]

STEPS = 3
ONE_EACH = list(range(LAYERS))  # buckets sent as the graphs' backwards begin, if each layer is a graph and a bucket

compiled: Any = torch.compile(backend="aot_eager")


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank())
    return [torch.randn(3, WIDTH, generator=generator) for _ in range(STEPS)]


class Fitted(LightningModule):
    def __init__(self, *, manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Layers()
        self.automatic_optimization = not manual
        self.sent: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss = self.net(batch).square().mean()
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def on_before_backward(self, loss: Tensor) -> None:
        self.sent.clear()
        if not isinstance(self.trainer.strategy.model, torch.nn.parallel.DistributedDataParallel):
            note_sent(loss, self.trainer.strategy.reducer.progress, self.sent)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


# ---------------------------------------------------------------------- Trainer


def compile_it(module: Fitted) -> Any:
    return compiled(module)


def compile_in_place(module: Fitted) -> Any:
    module.compile(backend="aot_eager")
    return module


def compile_a_part(module: Fitted) -> Any:
    module.net.compile(backend="aot_eager")
    return module


def fit_both(way: Callable[[Fitted], Any], manual: bool) -> tuple[State, State, list[int]]:
    def fit(strategy: Any) -> Fitted:
        torch.compiler.reset()
        module = Fitted(manual=manual)
        trainer = make_trainer(strategy, max_epochs=1, use_distributed_sampler=False)
        trainer.fit(way(module), DataLoader(batches(), batch_size=None))  # type: ignore[arg-type]
        return module

    ours, theirs = fit({"bucket_cap_mb": 1}), fit(DDPStrategy(bucket_cap_mb=1))
    return state_of(ours), state_of(theirs), ours.sent


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize("way", [compile_it, compile_in_place, compile_a_part])
def test_a_fit_ends_as_under_ddp_and_launches_between_the_graphs(way: Any, manual: bool) -> None:
    for ours, theirs, sent in run_ranks(fit_both, way, manual, timeout=200):
        assert_same(ours, theirs)
        assert sent == ONE_EACH


def fit_twice() -> tuple[int, int]:
    compiled_graphs = []
    module = Fitted()
    for _ in range(2):
        torch._dynamo.utils.counters.clear()
        trainer = make_trainer({"bucket_cap_mb": 1}, max_epochs=1, use_distributed_sampler=False)
        trainer.fit(compiled(module), DataLoader(batches(), batch_size=None))  # type: ignore[arg-type]
        compiled_graphs.append(torch._dynamo.utils.counters["aot_autograd"]["total"])
    return compiled_graphs[0], compiled_graphs[1]


def test_a_second_fit_compiles_nothing_anew() -> None:
    assert run_ranks(fit_twice, timeout=200) == [(LAYERS, 0)] * 2


# ---------------------------------------------------------------------- Fabric


def set_up_compiled(fabric: Any, model: Any, optimizer: Any) -> tuple[Any, Any]:
    return fabric.setup(compiled(model), optimizer)  # type: ignore[no-any-return]


def set_up_compiled_inside(fabric: Any, model: Any, optimizer: Any) -> tuple[Any, Any]:
    return fabric.setup(compiled(model), optimizer, _reapply_compile=False)  # type: ignore[no-any-return]


def set_up_compiled_in_place(fabric: Any, model: Any, optimizer: Any) -> tuple[Any, Any]:
    model.compile(backend="aot_eager")
    return fabric.setup(model, optimizer)  # type: ignore[no-any-return]


def compile_what_was_set_up(fabric: Any, model: Any, optimizer: Any) -> tuple[Any, Any]:
    model, optimizer = fabric.setup(model, optimizer)
    return compiled(model), optimizer


WAYS = [set_up_compiled, set_up_compiled_inside, set_up_compiled_in_place, compile_what_was_set_up]


def train_in_each_way() -> dict[str, tuple[bool, list[int]]]:
    def train(strategy: Any, way: Callable[..., tuple[Any, Any]]) -> tuple[State, list[int]]:
        torch.compiler.reset()
        torch.manual_seed(0)
        fabric, net, sent = make_fabric(strategy), Layers(), list[int]()
        model, optimizer = way(fabric, net, torch.optim.SGD(net.parameters(), lr=0.1))
        for batch in batches():
            sent.clear()
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            if not isinstance(strategy, str):
                note_sent(loss, fabric.strategy._runs[0].reducer.progress, sent)
            fabric.backward(loss)
            optimizer.step()
        return state_of(net), sent

    found = {}
    for way in WAYS:
        ours, sent = train({"bucket_cap_mb": 1}, way)
        theirs, _ = train("ddp", way)
        found[way.__name__] = all(torch.equal(ours[name], theirs[name]) for name in theirs), sent
    return found


def test_fabric_ends_as_under_ddp_and_launches_between_the_graphs() -> None:
    for found in run_ranks(train_in_each_way, timeout=200):
        assert found == {way.__name__: (True, ONE_EACH) for way in WAYS}
