"""Where a fit ends: bit for bit where strategy="ddp" does, and up to rounding where a single process does."""

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from ranks import run_ranks
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader
from trainer_runs import (
    EXACT,
    GLOBAL_BATCH,
    WIDTH,
    Manual,
    Net,
    State,
    assert_close,
    assert_same,
    assert_trained,
    dataset,
    fit,
    fit_each,
    make_module,
    make_trainer,
    state_of,
)

pytestmark = [pytest.mark.ranks, pytest.mark.trainer]


class Adam(Net):
    optimizer = staticmethod(partial(torch.optim.AdamW, lr=0.01))


class LBFGS(Net):
    """Calls its closure several times in a step."""

    optimizer = staticmethod(partial(torch.optim.LBFGS, lr=0.1, max_iter=4))


class DictLoss(Net):
    def training_step(self, batch, batch_idx):
        return {"loss": self.loss(batch), "batch_idx": batch_idx}


class Steps(Net):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": StepLR(optimizer, 2, gamma=0.5), "interval": "step"}]


class Epochs(Net):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [StepLR(optimizer, 1, gamma=0.1)]


class Plateau(Net):
    """Its loss is far above the threshold forever, so that each epoch lowers the rate."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=100.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss"}}


class ManualClipping(Manual):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, 0.1, "norm")
        optimizer.step()


class ManualAccumulation(Manual):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


class ManualNoSync(Manual):
    """Accumulates without communication, where the strategy has such a thing."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        if batch_idx % 2 == 0 and hasattr(self.trainer.strategy, "block_backward_sync"):
            with self.trainer.strategy.block_backward_sync():
                self.manual_backward(self.loss(batch))
        else:
            self.manual_backward(self.loss(batch))
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


class ManualClosure(Manual):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()

        def closure():
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


class ManualBackwards(Manual):
    """Two backwards through one graph, then one through another."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(0.5 * loss)
        self.manual_backward(-0.25 * self.loss(batch))
        optimizer.step()


class OwnOptimizerStep(Net):
    """Warms up the rate, as users do."""

    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        optimizer.param_groups[0]["lr"] = 0.05 * min(1.0, (self.trainer.global_step + 1) / 4)
        optimizer.step(closure=closure)


class PlainLoader(Net):
    def train_dataloader(self):
        return DataLoader(dataset(), GLOBAL_BATCH // self.trainer.world_size)


class Frozen(Net):
    def __init__(self):
        super().__init__()
        self.net[0].requires_grad_(False)


EVERYWHERE: dict[str, tuple[type[Net], dict[str, Any]]] = {
    "automatic": (Net, {}),
    "Adam": (Adam, {}),
    "LBFGS": (LBFGS, {}),
    "loss in a dict": (DictLoss, {}),
    "frozen layer": (Frozen, {}),
    "own optimizer_step": (OwnOptimizerStep, {}),
    "accumulation": (Net, {"accumulate_grad_batches": 2}),
    "accumulation with a rest": (Net, {"accumulate_grad_batches": 3}),
    "clip by norm": (Net, {"gradient_clip_val": 0.1}),
    "clip by value": (Net, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "clip accumulated": (Net, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}),
    "scheduler by step": (Steps, {}),
    "scheduler by epoch": (Epochs, {}),
    "scheduler by plateau": (Plateau, {"max_epochs": 3}),
    "weight averaging": (Net, {"callbacks": [StochasticWeightAveraging(0.01, swa_epoch_start=1)], "max_epochs": 3}),
    "one batch": (PlainLoader, {"overfit_batches": 1, "max_epochs": 3}),
    "fast_dev_run": (Net, {"fast_dev_run": 2}),
    "manual": (Manual, {}),
    "manual clipping": (ManualClipping, {}),
    "manual accumulation": (ManualAccumulation, {}),
    "manual no_sync": (ManualNoSync, {}),
    "manual closure": (ManualClosure, {}),
    "manual, several backwards": (ManualBackwards, {}),
}


@pytest.mark.parametrize("case", EVERYWHERE)
def test_parameters_are_those_of_ddp_and_of_one_process(case: str) -> None:
    module_class, options = EVERYWHERE[case]
    options = {**EXACT, **options}

    (ours, ddp), (ours_1, _) = run_ranks(fit_each, module_class, ["ddp_hooks", "ddp"], options)

    assert_trained(ours, module_class)
    assert_same(ours, ours_1)
    assert_same(ours, ddp)
    assert_close(ours, fit(module_class, "auto", options))


class BatchNorm(Net):
    """Its statistics are each rank's own, and rank 0's are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))


@pytest.mark.parametrize(
    ("module_class", "options"),
    [(Net, {"precision": p}) for p in ("32-true", "bf16-mixed", "bf16-true")]
    + [
        (BatchNorm, {}),
        (BatchNorm, {"precision": "bf16-mixed", "accumulate_grad_batches": 2}),
        (Manual, {"precision": "bf16-mixed"}),
        (Net, {"precision": "bf16-mixed", "gradient_clip_val": 0.1}),
    ],
)
def test_low_precision_ends_with_the_parameters_of_ddp(module_class: type[Net], options: dict[str, Any]) -> None:
    results = run_ranks(fit_each, module_class, ["ddp_hooks", "ddp"], options)

    for ours, ddp in results:
        assert_trained(ours, module_class)
        assert_same(ours, ddp)
    (ours, _), (ours_1, _) = results
    trainable = {name for name, _ in make_module(module_class).named_parameters()}
    assert_same({n: ours[n] for n in trainable}, {n: ours_1[n] for n in trainable})


class CountsReductions(Net):
    def on_train_end(self):
        self.reductions = self.trainer.strategy.stats()["iteration"]


class ManualCountsReductions(CountsReductions, ManualNoSync):
    pass


def count_reductions(module_class: type[Net], options: dict[str, Any]) -> int:
    module = make_module(module_class)
    make_trainer(**options).fit(module)
    return module.reductions


@pytest.mark.parametrize(
    ("module_class", "options", "expected"),
    [
        (CountsReductions, {}, 8),
        (CountsReductions, {"accumulate_grad_batches": 2}, 4),
        (CountsReductions, {"accumulate_grad_batches": 3}, 4),
        (ManualCountsReductions, {}, 4),
    ],
)
def test_gradients_are_reduced_once_for_each_accumulation_window(
    module_class: type[Net], options: dict[str, Any], expected: int
) -> None:
    assert run_ranks(count_reductions, module_class, options) == [expected] * 2


def fit_scaled(module_class: type[Net], scale: float, options: dict[str, Any]) -> list[tuple[State, float]]:
    results = []
    for strategy in ("ddp_hooks", "ddp"):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)
        plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
        module = make_module(module_class)
        make_trainer(strategy, plugins=[plugin], **options).fit(module)
        results.append((state_of(module), scaler.get_scale()))
    return results


@pytest.mark.parametrize(
    ("module_class", "options"),
    [(Net, {}), (Net, {"accumulate_grad_batches": 2}), (Net, {"gradient_clip_val": 0.1}), (Manual, {})],
    ids=str,
)
def test_loss_scaling_skips_the_steps_that_overflow(module_class: type[Net], options: dict[str, Any]) -> None:
    scale = 2.0**17  # so much that the first steps overflow in float16, and later ones do not
    ((ours, our_scale), (ddp, ddp_scale)), _ = run_ranks(fit_scaled, module_class, scale, options)

    assert our_scale == ddp_scale < scale
    assert_trained(ours, module_class)
    assert_same(ours, ddp)


def fit_compiled_and_plain() -> list[State]:
    compiled = make_module(Net)
    make_trainer("ddp_hooks", **EXACT).fit(torch.compile(compiled, backend="aot_eager"))
    return [state_of(compiled), fit(Net, "ddp", EXACT)]


def test_compiled_module_ends_with_the_parameters_of_the_plain_one() -> None:
    (compiled, plain), (compiled_1, _) = run_ranks(fit_compiled_and_plain)

    assert_trained(compiled)
    assert_same(compiled, compiled_1)
    assert_close(compiled, plain)


def test_one_device_ends_with_the_parameters_of_no_strategy() -> None:
    ((ours, plain),) = run_ranks(fit_each, Net, ["ddp_hooks", "auto"], EXACT, world_size=1)

    assert_trained(ours)
    assert_same(ours, plain)


def test_three_ranks_end_where_ddp_does() -> None:
    results = run_ranks(fit_each, Net, ["ddp_hooks", "ddp"], EXACT, world_size=3)

    for ours, ddp in results:
        assert_close(ours, ddp)
        assert_same(ours, results[0][0])
