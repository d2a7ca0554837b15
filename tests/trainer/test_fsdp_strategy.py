"""The strategy for sharded models in a Trainer: the mean, hooks and averagers, checkpoints and what is refused."""

import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler
from trainer_runs import GLOBAL_BATCH, QUIET, SAFELY, Net, State, dataset, state_of

from lightning_ddp_hooks import DDPHooksStrategy, FSDPHooksStrategy
from lightning_ddp_hooks.averaging import DiLoCo, PeriodicModelAverager
from lightning_ddp_hooks.hooks import BlockQuantize, PowerSGD

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.trainer,
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used:UserWarning"),
]

MEAN = PeriodicModelAverager(period=2, warmup_steps=99)
WITHIN, ACROSS = "data_parallel", ("replicate", "data_parallel")


class Double(Net):
    """In float64, since Lightning does not offer that precision for sharded models."""

    def __init__(self) -> None:
        super().__init__()
        self.double()

    def loss(self, batch: Any) -> Any:
        return super().loss([tensor.double() for tensor in batch])


class ShardedNet(Double):
    mesh_dims: str | tuple[str, ...] = WITHIN
    layers: tuple[int, ...] = (0, 2, 4)  # sharded by themselves

    def configure_model(self) -> None:
        mesh = self.device_mesh[self.mesh_dims]
        for layer in self.layers:
            fully_shard(self.net[layer], mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def train_dataloader(self) -> Any:
        kwargs = self.trainer.strategy.distributed_sampler_kwargs
        sampler = DistributedSampler(dataset(), **kwargs, shuffle=False)
        return DataLoader(sampler.dataset, GLOBAL_BATCH // kwargs["num_replicas"], sampler=sampler)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


class TensorParallelNet(ShardedNet):
    layers = (4,)  # FSDP2 warns of outputs that are views, as those of parallel layers are

    def configure_model(self) -> None:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)
        super().configure_model()


def _fit(
    strategy: Any, *, across: bool = False, ckpt: str | None = None, parallel: bool = False, **options: Any
) -> tuple[State, Trainer]:
    torch.manual_seed(0)
    sharded = isinstance(strategy, ModelParallelStrategy)
    module = TensorParallelNet() if parallel else ShardedNet() if sharded else Double()
    if across:
        module.mesh_dims = ACROSS
    options = {**QUIET, "devices": 4, "max_epochs": 1, **options}
    trainer = Trainer(strategy=strategy, **options)
    trainer.fit(module, ckpt_path=ckpt, **(SAFELY if ckpt else {}))
    return whole_state(module), trainer


def whole_state(module: nn.Module) -> State:
    state = state_of(module)
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}


def _difference(one: State, other: State) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one | other)


def _means() -> dict[str, float]:
    expected, _ = _fit(DDPHooksStrategy())
    forms = {
        "one replica": (FSDPHooksStrategy(4, 1), {}),
        "within": (FSDPHooksStrategy(replicas=2, check_replicas_every_n_steps=2), {}),
        "across": (FSDPHooksStrategy(replicas=2), {"across": True}),
        "averager in its warm-up": (FSDPHooksStrategy(replicas=2, averager=MEAN), {}),
    }
    parallel = FSDPHooksStrategy(tensor_parallel_size=2, replicas=2, comm_hook=PowerSGD(start_iter=99))
    forms["tensor parallel"] = (parallel, {"parallel": True})
    found = {name: _difference(_fit(strategy, **options)[0], expected) for name, (strategy, options) in forms.items()}
    clipping = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
    clipped, _ = _fit(FSDPHooksStrategy(replicas=2), **clipping)
    found["clipped, accumulated"] = _difference(clipped, _fit(DDPHooksStrategy(), **clipping)[0])
    return found


def _hooks() -> dict[str, Any]:
    within, _ = _fit(FSDPHooksStrategy(replicas=2, comm_hook=PowerSGD(start_iter=2)))
    across, _ = _fit(FSDPHooksStrategy(replicas=2, comm_hook=PowerSGD(start_iter=2)), across=True)
    exact, _ = _fit(FSDPHooksStrategy(replicas=2))
    scattered, _ = _fit(FSDPHooksStrategy(4, 1, comm_hook=BlockQuantize(error_feedback=False)))
    return {
        "forms": _difference(within, across),
        "effect": _difference(within, exact),
        "scatter": _difference(scattered, exact),
    }


def _checkpoints(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    settings = {
        "diloco": lambda: FSDPHooksStrategy(replicas=2, averager=DiLoCo(period=3, optimizer_state="averaged")),
        "powersgd": lambda: FSDPHooksStrategy(replicas=2, comm_hook=PowerSGD(start_iter=0, rank=1)),
        "tensor parallel": lambda: FSDPHooksStrategy(1, 2, replicas=2, comm_hook=PowerSGD(start_iter=0, rank=1)),
    }
    for name, make in settings.items():
        parallel = name == "tensor parallel"
        path = Path(folder) / name
        saving = ModelCheckpoint(path, every_n_epochs=1, save_top_k=-1, filename="{epoch}")
        options = {"enable_checkpointing": True, "callbacks": [saving], "num_sanity_val_steps": 1, "max_epochs": 2}
        expected, trainer = _fit(make(), parallel=parallel, **options)
        first = path / "epoch=0.ckpt"
        resumed, again = _fit(make(), ckpt=str(first), max_epochs=2, parallel=parallel)
        found[name] = _difference(resumed, expected)
        found[f"{name} val_loss"] = abs(
            float(trainer.callback_metrics["val_loss"] - again.callback_metrics["val_loss"])
        )
        found[f"{name} files"] = sorted(os.listdir(first))
        # The averaged model, in a strategy that knows nothing of it, and which has nothing left to train.
        stock, _ = _fit(ModelParallelStrategy(4, 1), ckpt=str(first))
        found[f"{name} in stock"] = _difference(stock, _fit(make(), parallel=parallel)[0])
    stock_path = Path(folder) / "stock"
    saving = ModelCheckpoint(stock_path, every_n_epochs=1, filename="last")
    options = {"enable_checkpointing": True, "callbacks": [saving]}
    _fit(ModelParallelStrategy(4, 1), **options)
    strategy = FSDPHooksStrategy(replicas=2, comm_hook="int8")
    steps: list[int] = []
    strategy.on_train_end = lambda: steps.append(strategy.hooks.step)  # type: ignore[method-assign]
    _fit(strategy, ckpt=str(stock_path / "last.ckpt"), max_epochs=2)
    found["steps after stock"] = steps
    return found


def _message(call: Callable[[], object]) -> str:
    try:
        call()
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _refusals() -> dict[str, str]:
    whole = {"save_distributed_checkpoint": False, "replicas": 2}
    eight_bits = BlockQuantize(error_feedback=False)
    return {
        "sizes": _message(lambda: _fit(FSDPHooksStrategy(replicas=3))),
        "not whole": _message(lambda: _fit(FSDPHooksStrategy(**whole, comm_hook="int8"))),
        "shared": _message(lambda: _fit(FSDPHooksStrategy(2, 2, comm_hook=eight_bits), parallel=True)),
        "shared, within": _message(lambda: _fit(FSDPHooksStrategy(1, 2, replicas=2, comm_hook="topk"), parallel=True)),
        "shared, averager": _message(
            lambda: _fit(
                FSDPHooksStrategy(1, 2, replicas=2, averager=DiLoCo(period=2, comm_hook="int8")), parallel=True
            )
        ),
        "scatter": _message(lambda: _fit(FSDPHooksStrategy(4, 1, comm_hook="topk"))),
    }


def _all(folder: str) -> dict[str, Any]:
    return {"means": _means(), "hooks": _hooks(), "checkpoints": _checkpoints(folder), "refusals": _refusals()}


@cache
def _results() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(_all, folder, world_size=4, timeout=110)


def test_the_mean_is_that_of_data_parallel_training() -> None:
    for result in _results():
        for name, difference in result["means"].items():
            assert difference < 1e-12, name


def test_hooks_work_on_either_mesh() -> None:
    for result in _results():
        found = result["hooks"]
        assert found["forms"] == 0.0
        assert found["effect"] > 1e-6
        assert 1e-8 < found["scatter"] < 1e-2


def test_checkpoints_resume_and_load_in_lightnings_strategy() -> None:
    for result in _results():
        found = result["checkpoints"]
        for name in ("diloco", "powersgd", "tensor parallel"):
            assert found[name] < 1e-12, name
            assert found[f"{name} val_loss"] < 1e-12, name
            assert "lightning_ddp_hooks" in found[f"{name} files"]
            assert found[f"{name} in stock"] < 1e-12, name
        assert found["steps after stock"] == [8]


def test_what_does_not_fit_the_ranks_or_the_model_raises() -> None:
    for result in _results():
        refusals = result["refusals"]
        assert refusals["sizes"].startswith("ValueError: Expected `replicas` x `data_parallel_size`")
        assert refusals["not whole"].startswith("ValueError: The state of the hook or averager lies on all ranks")
        for name, hook in {"": "BlockQuantize", ", within": "TopK", ", averager": "BlockQuantize"}.items():
            expected = f"ValueError: {hook} cannot work on 'net.2.bias', which tensor-parallel ranks share"
            assert refusals[f"shared{name}"].startswith(expected), refusals[f"shared{name}"]
        assert refusals["scatter"].startswith("ValueError: TopK makes an all-reduce, which plain FSDP has none of")


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"replicas": 0}, ValueError, "Expected `replicas` of at least 1, got 0"),
        ({"replicas": True}, TypeError, "Expected a whole number for `replicas`, got True"),
        ({"averager": DiLoCo(period=2)}, ValueError, "the model has only one"),
        ({"replicas": 2, "average_before_eval": False}, ValueError, "`average_before_eval` has no effect"),
        ({"replicas": 2, "average_before_eval": 1}, TypeError, "Expected True or False for `average_before_eval`"),
        ({"replicas": 2, "comm_hook": "int9"}, ValueError, "Unknown communication hook 'int9'"),
    ],
    ids=lambda value: None,
)
def test_wrong_values_raise_at_once(arguments: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        FSDPHooksStrategy(**arguments)


def test_it_has_a_name() -> None:
    assert type(StrategyRegistry.get("fsdp_hooks")) is FSDPHooksStrategy
