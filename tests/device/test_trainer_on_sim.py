"""Fits under a Trainer, and averagers and sharded optimizers beside it, on an asynchronous device: the CPU's values."""

import warnings
from functools import partial
from typing import Any

import pytest
import sim
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from on_sim import Net, batch, wrap
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_ddp_hooks as ldh

pytestmark = [pytest.mark.ranks, pytest.mark.trainer]

SETTINGS: dict[str, dict[str, Any]] = {
    "mean": {},
    "powersgd": {"comm_hook": ldh.hooks.PowerSGD(rank=1, start_iter=2)},
    "optimizer in the hook": {"optimizer_in_hook": ldh.optim.OptimizerInHook()},
    "sharded": {"optimizer_in_hook": ldh.optim.OptimizerInHook(shard=True, interleaved=True)},
    "averager": {"averager": ldh.averaging.DiLoCo(period=2)},
}


class SimAccelerator(Accelerator):
    """What Lightning asks of a device; both ranks have the same."""

    def setup_device(self, device: torch.device) -> None: ...

    def teardown(self) -> None: ...

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("sim", 0)] * int(devices)

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "sim"


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, own: Any, _: int) -> Tensor:
        return self.net(own[0]).square().mean()

    def train_dataloader(self) -> DataLoader[Any]:
        batches = torch.cat([batch(step, self.global_rank) for step in range(6)])
        return DataLoader(TensorDataset(batches), batch_size=4)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def _values(module: nn.Module) -> list[Tensor]:
    return [param.detach().cpu() for param in module.parameters()]


def _fit(accelerator: Any, name: str, options: dict[str, Any]) -> list[Tensor]:
    warnings.simplefilter("ignore")  # Lightning's advice for real fits
    torch.manual_seed(dist.get_rank())
    module = Module()
    Trainer(
        accelerator=accelerator,
        devices=dist.get_world_size(),
        strategy=ldh.DDPHooksStrategy(**SETTINGS[name]),
        max_epochs=2,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    ).fit(module)
    return _values(module)


def _fit_on_both(name: str, options: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    sim.join_world(seed=dist.get_rank(), longest_ms=1)
    return _fit(SimAccelerator(), name, options), _fit("cpu", name, options)


def _assert_alike(results: list[tuple[list[Tensor], list[Tensor]]]) -> None:
    for found, expected in results:
        for value, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_fit_gives_what_it_gives_on_the_cpu(name: str) -> None:
    _assert_alike(run_ranks(_fit_on_both, name, {}))


def test_a_fit_that_accumulates_gives_what_it_gives_on_the_cpu() -> None:
    _assert_alike(run_ranks(_fit_on_both, "mean", {"accumulate_grad_batches": 2}))


# ---------------------------------------------------------------------- without a Trainer


def _shard_on_both() -> tuple[list[Tensor], ...]:
    device, results = sim.join_world(seed=dist.get_rank(), longest_ms=1), []
    for where in (device, torch.device("cpu")):
        torch.manual_seed(0)
        net = Net().to(where)
        model = wrap(net)
        optimizer = ldh.optim.ShardedOptimizer(net.parameters(), torch.optim.AdamW, lr=0.01)
        for step in range(6):
            optimizer.zero_grad()
            model(batch(step, dist.get_rank()).to(where)).square().mean().backward()
            optimizer.step()
        results.append(_values(net))
    return tuple(results)


def test_a_sharded_optimizer_gives_what_it_gives_on_the_cpu() -> None:
    _assert_alike(run_ranks(_shard_on_both))


AVERAGERS: dict[str, partial[Any]] = {
    "periodic": partial(ldh.averaging.PeriodicModelAverager, period=2, warmup_steps=1),
    "slowmo": partial(ldh.averaging.SlowMo, period=2),
    "diloco": partial(ldh.averaging.DiLoCo, period=2),
}


def _average_on_both(name: str) -> tuple[list[Tensor], ...]:
    from averaging_case import bind

    device, results = sim.join_world(seed=dist.get_rank(), longest_ms=1), []
    for where in (device, torch.device("cpu")):
        torch.manual_seed(0)
        net = Net().to(where)
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        bound = bind(AVERAGERS[name](), net, lambda optimizer=optimizer: [optimizer])
        for step in range(7):
            optimizer.zero_grad()
            net(batch(step, dist.get_rank()).to(where)).square().mean().backward()
            optimizer.step()
            bound.average_parameters()
        results.append(_values(net))
    return tuple(results)


@pytest.mark.parametrize("name", AVERAGERS)
def test_an_averager_gives_what_it_gives_on_the_cpu(name: str) -> None:
    _assert_alike(run_ranks(_average_on_both, name))
