"""What one rank finds out alone, under Trainer and Fabric on an asynchronous device: all ranks end alike."""

import warnings
from typing import Any

import pytest
import sim
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from on_sim import Net, batch
from ranks import run_ranks
from test_trainer_on_sim import SimAccelerator
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import lightning_ddp_hooks as ldh

pytestmark = [pytest.mark.ranks, pytest.mark.trainer]

STEPS = 6


class Odd(LightningModule):
    """Rank 1 does something else in one step: it leaves layers out, or has no loss."""

    def __init__(self, odd_step: int, oddity: str, *, manual: bool = False) -> None:
        super().__init__()
        self.net = Net()
        self.odd_step, self.oddity = odd_step, oddity
        self.automatic_optimization = not manual
        self.reached: list[str] = []

    def _loss(self, own: Any, index: int) -> Tensor | None:
        odd = index == self.odd_step and self.global_rank == 1
        if odd and self.oddity == "none":
            return None
        if odd and self.oddity == "missing":
            return self.net.head(own[0]).square().mean()  # type: ignore[no-any-return]
        return self.net(own[0]).square().mean()  # type: ignore[no-any-return]

    def training_step(self, own: Any, index: int) -> Tensor | None:
        self.reached.append(f"train {index}")
        loss = self._loss(own, index)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        assert loss is not None
        self.manual_backward(loss)
        optimizer.step()
        return None

    def validation_step(self, own: Any, index: int) -> None:
        self.reached.append("validate")
        self.log("loss", self.net(own[0]).square().mean(), sync_dist=True)

    def _loader(self) -> DataLoader[Any]:
        batches = torch.cat([batch(step, self.global_rank) for step in range(STEPS)])
        return DataLoader(TensorDataset(batches), batch_size=4)

    train_dataloader = val_dataloader = _loader

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _fit(odd_step: int, oddity: str, settings: dict[str, Any], manual: bool) -> tuple[str, list[str], list[Tensor]]:
    sim.join_world(seed=dist.get_rank(), longest_ms=1)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    module = Odd(odd_step, oddity, manual=manual)
    trainer = Trainer(
        accelerator=SimAccelerator(),
        devices=2,
        strategy=ldh.DDPHooksStrategy(failure_timeout=20, **settings),
        max_epochs=1,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    text = "nothing"
    try:
        trainer.fit(module)
    except RuntimeError as error:
        text = str(error)
    return text, module.reached, [param.detach().cpu() for param in module.parameters()]


@pytest.mark.parametrize("hook", [None, "bf16"])
@pytest.mark.parametrize("odd_step", [2, STEPS - 1])
def test_a_gradient_that_one_rank_misses_raises_on_all_before_validation(odd_step: int, hook: Any) -> None:
    for text, reached, _ in run_ranks(_fit, odd_step, "missing", {"comm_hook": hook}, False, timeout=100):
        assert "'net.layers.0.0.weight' on rank 1" in text
        # The step after at the latest; in the last step, where the ranks would meet for validation.
        assert reached == [f"train {index}" for index in range(min(odd_step + 2, STEPS))]


@pytest.mark.parametrize("skip", ["zeros", "all"])
@pytest.mark.parametrize("odd_step", [2, STEPS - 1])
def test_a_rank_without_loss_hangs_nobody(odd_step: int, skip: str) -> None:
    results = run_ranks(_fit, odd_step, "none", {"skip_missing_loss": skip}, False, timeout=100)
    for text, reached, values in results:
        assert text == "nothing"
        assert reached == [*(f"train {index}" for index in range(STEPS)), *["validate"] * STEPS]
        assert all(torch.equal(a, b) for a, b in zip(values, results[0][2], strict=True))


@pytest.mark.parametrize("odd_step", [2, STEPS - 1])
def test_in_manual_optimization_sets_that_differ_raise_in_the_same_backward(odd_step: int) -> None:
    for text, reached, _ in run_ranks(_fit, odd_step, "missing", {}, True, timeout=100):
        assert "'net.layers.0.0.weight' on rank 1" in text
        assert reached == [f"train {index}" for index in range(odd_step + 1)]


def _fabric(odd_step: int) -> tuple[str, int]:
    sim.join_world(seed=dist.get_rank(), longest_ms=1)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    fabric = Fabric(accelerator=SimAccelerator(), devices=2, strategy=ldh.FabricDDPHooksStrategy(failure_timeout=20))
    fabric.launch()
    net = Net()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.01))
    steps = 0
    try:
        for step in range(STEPS):
            optimizer.zero_grad()
            own = batch(step, fabric.global_rank).to(fabric.device)
            output = model(own)
            if step == odd_step and fabric.global_rank == 1:
                output = net.head(own) + 0 * output.detach()
            fabric.backward(output.square().mean())
            optimizer.step()
            steps += 1
        fabric.save("unused", {"model": model, "optimizer": optimizer})
    except RuntimeError as error:
        return str(error), steps
    return "nothing", steps


@pytest.mark.parametrize("odd_step", [2, STEPS - 1])
def test_under_fabric_it_raises_in_the_next_backward_or_before_a_checkpoint(odd_step: int) -> None:
    for text, steps in run_ranks(_fabric, odd_step, timeout=100):
        assert "'layers.0.0.weight' on rank 1" in text
        assert steps == min(odd_step + 1, STEPS)
