"""What surrounds a fit: evaluation, checkpoints, callbacks, several fits, the Tuner; and what is left behind."""

import copy
import gc
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics import MeanSquaredError
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
    make_module,
    make_trainer,
    rank,
    state_of,
)

from lightning_ddp_hooks import DDPHooksStrategy
from lightning_ddp_hooks.averaging import DiLoCo, HierarchicalModelAverager
from lightning_ddp_hooks.hooks import Cast, PowerSGD
from lightning_ddp_hooks.reducer.bucket import Bucket
from lightning_ddp_hooks.reducer.reducer import Reducer

pytestmark = [pytest.mark.ranks, pytest.mark.trainer]


class Evaluated(Net):
    """Logs a loss and a metric, both over all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = MeanSquaredError()

    def _evaluate(self, batch: list[Tensor], name: str) -> None:
        x, y = batch
        self.log(f"{name}_loss", self.loss(batch), sync_dist=True)
        self.metric(self.net(x), y)
        self.log(f"{name}_metric", self.metric)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self._evaluate(batch, "val")

    def test_step(self, batch, batch_idx):
        self._evaluate(batch, "test")

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def _loader(self) -> DataLoader:
        return DataLoader(dataset(16), batch_size=GLOBAL_BATCH // self.trainer.world_size)

    val_dataloader = test_dataloader = predict_dataloader = _loader


def evaluate(strategy: str) -> dict[str, Any]:
    """Fit, then validate, test and predict with one Trainer."""
    module = make_module(Evaluated)
    trainer = make_trainer(strategy, **EXACT)
    trainer.fit(module)
    results = {name: float(value) for name, value in trainer.callback_metrics.items()}
    results["validate"] = trainer.validate(module, verbose=False)[0]
    results["test"] = trainer.test(module, verbose=False)[0]
    results["predict"] = torch.cat(trainer.predict(module))
    return results


def evaluate_each() -> list[dict[str, Any]]:
    return [evaluate("ddp_hooks"), evaluate("ddp")]


def test_evaluation_logs_and_predicts_what_ddp_and_one_process_do() -> None:
    (ours, ddp), (ours_1, _) = run_ranks(evaluate_each)
    single = evaluate("auto")

    predicted = torch.stack([ours.pop("predict"), ours_1.pop("predict")], dim=1).flatten(0, 1)
    torch.testing.assert_close(predicted, single.pop("predict"))
    ddp.pop("predict")
    assert set(ours) == {"train_loss", "val_loss", "val_metric", "validate", "test"}
    assert ours == ours_1 == ddp
    assert ours["test"] == pytest.approx(single.pop("test"))
    assert ours["validate"] == pytest.approx(single.pop("validate"))
    assert {name: ours[name] for name in single} == pytest.approx(single)


def evaluate_only(strategy: str) -> list[float]:
    """Evaluate without a fit before: the ranks' modules differ until the strategy has made them alike."""
    trainer = make_trainer(strategy, **EXACT)
    return [trainer.validate(make_module(Evaluated), verbose=False)[0]["val_loss"] for _ in range(2)]


def test_evaluation_without_a_fit_uses_the_first_ranks_weights() -> None:
    ours, ours_1 = run_ranks(evaluate_only, "ddp_hooks")

    assert ours == ours_1 == pytest.approx(evaluate_only("auto"))


# ---------------------------------------------------------------------- samplers, the module itself


class Indices(Net):
    """Keeps the indices it was given: they are its data."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[int]] = {"fit": [], "test": []}

    def training_step(self, batch, batch_idx):
        self.seen["fit"] += batch[0].int().tolist()
        return self.net(batch[0][:, None].expand(-1, WIDTH)).mean()

    def test_step(self, batch, batch_idx):
        self.seen["test"] += batch[0].int().tolist()

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.arange(16.0)), 2)

    test_dataloader = train_dataloader


def seen_indices() -> dict[str, list[int]]:
    module = make_module(Indices)
    trainer = make_trainer(max_epochs=1)
    trainer.fit(module)
    assert isinstance(trainer.train_dataloader.sampler, DistributedSampler)
    trainer.test(module, verbose=False)
    return module.seen


@pytest.mark.parametrize("stage", ["fit", "test"])
def test_ranks_see_disjoint_samples_and_together_all_of_them(stage: str) -> None:
    first, second = (seen[stage] for seen in run_ranks(seen_indices))

    assert len(first) == len(second) == 8
    assert sorted(first + second) == list(range(16))


class Watched(Net):
    """Looks around from inside the fit."""

    flavour = "vanilla"

    def on_train_start(self):
        strategy = self.trainer.strategy
        assert self.trainer.model is self
        assert strategy.model is strategy.lightning_module is self
        assert self.trainer.model.flavour == "vanilla"
        assert not any(isinstance(m, nn.parallel.DistributedDataParallel) for m in self.trainer.model.modules())
        self.facts = strategy.stats()


def watch() -> dict[str, Any]:
    module = make_module(Watched)
    trainer = make_trainer(max_epochs=1)
    trainer.fit(module)
    assert trainer.model is module
    assert list(module.state_dict()) == list(Watched().state_dict())
    return module.facts


def test_the_trainers_model_is_the_module_itself() -> None:
    facts = run_ranks(watch)

    assert [fact["rank"] for fact in facts] == [0, 1]
    assert facts[0]["world_size"] == 2
    assert facts[0]["num_parameter_tensors"] == 6


# ---------------------------------------------------------------------- checkpoints


class Stochastic(Evaluated):
    """Its dropout depends on the step and the rank only, so that a resumed run can be compared with a whole one."""

    optimizer = staticmethod(partial(torch.optim.AdamW, lr=0.01))

    def training_step(self, batch, batch_idx):
        torch.manual_seed(100 * self.trainer.global_step + rank())
        x, y = batch
        return self.loss((nn.functional.dropout(x, 0.3), y))

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def save_then_resume(root: str, save_with: str, resume_with: str) -> tuple[State, State]:
    """Train four epochs at one go; and two, then two more from the checkpoint."""
    whole = fit(Stochastic, save_with, {"max_epochs": 4})
    checkpoint = ModelCheckpoint(root, filename="{epoch}", every_n_epochs=1, save_top_k=-1)
    trainer = make_trainer(save_with, enable_checkpointing=True, callbacks=[checkpoint])
    trainer.fit(make_module(Stochastic))
    module = make_module(Stochastic)
    trainer = make_trainer(resume_with, max_epochs=4)
    trainer.fit(module, ckpt_path=f"{root}/epoch=1.ckpt")
    assert trainer.global_step == 16
    return whole, state_of(module)


# A resumed run need not write checkpoints itself.
without_checkpointing = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks:UserWarning")


@without_checkpointing
@pytest.mark.parametrize(
    ("save_with", "resume_with"), [("ddp_hooks", "ddp_hooks"), ("ddp_hooks", "ddp"), ("ddp", "ddp_hooks")]
)
def test_resumed_run_ends_where_the_whole_one_does(tmp_path: Path, save_with: str, resume_with: str) -> None:
    (whole, resumed), (_, resumed_1) = run_ranks(save_then_resume, str(tmp_path), save_with, resume_with)

    assert_trained(whole, Stochastic)
    assert_same(resumed, whole)
    assert_same(resumed_1, whole)
    saved = torch.load(tmp_path / "epoch=1.ckpt", weights_only=True)
    assert list(saved["state_dict"]) == list(Stochastic().state_dict())


@without_checkpointing
def test_checkpoint_opens_in_a_single_process(tmp_path: Path) -> None:
    (whole, _), _ = run_ranks(save_then_resume, str(tmp_path), "ddp_hooks", "ddp_hooks")
    module = Stochastic.load_from_checkpoint(tmp_path / "epoch=1.ckpt")
    trainer = make_trainer("auto", max_epochs=3)
    trainer.fit(module, ckpt_path=tmp_path / "epoch=1.ckpt")

    assert trainer.global_step == 12
    assert whole.keys() == module.state_dict().keys()


def fit_with_callbacks(root: str) -> tuple[str, float, int]:
    """Let the best model be kept, and stop once the loss is below a threshold."""
    best = ModelCheckpoint(root, monitor="val_loss", save_top_k=1)
    stop = EarlyStopping("val_loss", stopping_threshold=2.0, patience=100)
    trainer = make_trainer(**{**EXACT, "max_epochs": 50, "enable_checkpointing": True, "callbacks": [best, stop]})
    trainer.fit(make_module(Evaluated))
    trainer.test(ckpt_path="best", verbose=False)
    return os.path.basename(best.best_model_path), float(best.best_model_score), trainer.current_epoch


def test_best_checkpoint_and_early_stopping_are_the_same_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(fit_with_callbacks, str(tmp_path))

    name, score, epochs = first
    assert first == second
    assert score < 2.0
    assert 1 < epochs < 50
    assert os.listdir(tmp_path) == [name]


# ---------------------------------------------------------------------- several fits, the Tuner


def fit_twice(strategy: str) -> list[State]:
    """Fit one module, fit it further, then fit another, all with one Trainer."""
    trainer = make_trainer(strategy, **EXACT)
    first, second = make_module(), make_module()
    states = []
    for module, epochs in ((first, 2), (first, 3), (second, 4)):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(module)
        states.append(state_of(module))
    return states


def fit_twice_each() -> list[list[State]]:
    return [fit_twice("ddp_hooks"), fit_twice("ddp")]


def test_one_trainer_fits_several_times() -> None:
    (ours, ddp), _ = run_ranks(fit_twice_each)

    for found, expected, single in zip(ours, ddp, fit_twice("auto"), strict=True):
        assert_same(found, expected)
        assert_close(found, single)
    with pytest.raises(AssertionError):
        assert_same(ours[0], ours[1])


class Tunable(Net):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 1e-3
        self.batch_size = 4

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)

    def train_dataloader(self):
        return DataLoader(dataset(64), self.batch_size)


def tune(root: str, strategy: str) -> tuple[list[float], float, State]:
    module = make_module(Tunable)
    trainer = make_trainer(strategy, **{**EXACT, "default_root_dir": root, "max_epochs": 5})
    tuner = Tuner(trainer)
    found = tuner.lr_find(module, num_training=30, early_stop_threshold=None)
    with pytest.raises(ValueError, match="not supported with distributed strategies"):
        tuner.scale_batch_size(module)
    trainer.fit(module)
    return found.results["loss"], module.lr, state_of(module)


def tune_each(root: str) -> list[tuple[list[float], float, State]]:
    return [tune(root, "ddp_hooks"), tune(root, "ddp")]


def test_tuner_finds_what_it_finds_with_ddp(tmp_path: Path) -> None:
    (ours, ddp), (ours_1, _) = run_ranks(tune_each, str(tmp_path))

    losses, lr, state = ours
    assert len(losses) == 30
    assert losses == ddp[0] == ours_1[0]
    assert lr == ddp[1] == ours_1[1] != Tunable().lr
    assert_same(state, ddp[2])
    assert os.listdir(tmp_path) == []


# ---------------------------------------------------------------------- what is left behind


class Failing(Net):
    """Fails in its third step, before, in or after the backward."""

    where = "forward"

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if batch_idx == 2 and self.where == "forward":
            raise ZeroDivisionError("third step")
        if batch_idx == 2 and self.where == "backward":
            self.net[2].weight.register_hook(self._fail)
        return loss

    def on_after_backward(self):
        if self.trainer.global_step == 2 and self.where == "after":
            raise ZeroDivisionError("third step")

    def _fail(self, *_: object) -> None:
        raise ZeroDivisionError("third step")


class FailingBackward(Failing):
    where = "backward"


class FailingAfter(Failing):
    where = "after"


class Interrupted(Failing):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            raise KeyboardInterrupt
        return self.loss(batch)


def leftovers(module_class: type[Net], settings: dict[str, Any]) -> dict[str, int]:
    """Fit, maybe in vain, and count what is still there."""
    groups_before = len(dist.distributed_c10d._world.pg_map)
    module = make_module(module_class)
    trainer = make_trainer(DDPHooksStrategy(**settings))
    if issubclass(module_class, Failing):
        with pytest.raises((ZeroDivisionError, SystemExit)):
            trainer.fit(module)
    else:
        trainer.fit(module)
    gc.collect()
    with pytest.raises(RuntimeError, match="while the Trainer is fitting"):
        trainer.strategy.stats()
    grads = [param.grad for param in module.parameters() if param.grad is not None]
    return {
        "hooks": sum(bool(param._post_accumulate_grad_hooks) for param in module.parameters()),
        "groups": len(dist.distributed_c10d._world.pg_map) - groups_before,
        "reducers": sum(type(thing) in (Reducer, Bucket) for thing in gc.get_objects()),
        "shared gradients": len(grads) - len({grad.untyped_storage().data_ptr() for grad in grads}),
    }


NOTHING = {"hooks": 0, "groups": 0, "reducers": 0, "shared gradients": 0}


@pytest.mark.parametrize(
    ("module_class", "settings"),
    [
        (Net, {}),
        (Net, {"gradient_as_bucket_view": False}),
        (Net, {"gradient_weighting": "samples"}),
        (Net, {"find_unused_parameters": True}),
        (Manual, {}),
        # Hooks that make groups of their own, in each place that binds them.
        (Net, {"comm_hook": "int8"}),
        (Net, {"averager": DiLoCo(period=2, comm_hook="int8")}),
        (Net, {"averager": DiLoCo(period=2, comm_hook=Cast(PowerSGD(rank=1)))}),
        (Net, {"averager": HierarchicalModelAverager(period_group_size_dict={1: 2})}),
    ],
    ids=str,
)
def test_a_fit_leaves_nothing_behind(module_class: type[Net], settings: dict[str, Any]) -> None:
    assert run_ranks(leftovers, module_class, settings) == [NOTHING] * 2


@pytest.mark.parametrize("module_class", [Failing, FailingBackward, FailingAfter, Interrupted])
def test_a_failed_fit_leaves_nothing_behind(module_class: type[Net]) -> None:
    assert run_ranks(leftovers, module_class, {}) == [NOTHING] * 2


def fit_after_a_failure() -> list[State]:
    trainer = make_trainer(**EXACT)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(make_module(Failing))
    module = make_module()
    trainer.fit_loop.max_epochs = trainer.current_epoch + 2
    trainer.fit(module)
    return [state_of(module), fit(Net, "ddp", EXACT)]


def test_a_trainer_fits_again_after_a_failure() -> None:
    for ours, ddp in run_ranks(fit_after_a_failure):
        assert_same(ours, ddp)


class FailingAlone(Net):
    """Rank 0 fails in its third step while buckets are on their way; rank 1 does so once rank 0's fit has ended."""

    def __init__(self, ended: Path) -> None:
        super().__init__()
        self.ended = ended

    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and rank() == 1:
            deadline = time.monotonic() + 20
            while not self.ended.exists():
                assert time.monotonic() < deadline, "rank 0 waits for this rank"
                time.sleep(0.01)
            raise ZeroDivisionError("third step, late")
        if batch_idx == 2:
            self.net[0].weight.register_hook(self._fail)
        return self.loss(batch)

    def _fail(self, _: Tensor) -> None:
        raise ZeroDivisionError("third step")


def fail_alone(ended: Path) -> None:
    module = make_module(partial(FailingAlone, ended))
    with pytest.raises(ZeroDivisionError):
        make_trainer(DDPHooksStrategy(bucket_cap_mb=1e-5, first_bucket_mb=1e-5)).fit(module)
    gc.collect()  # a group that waits for its work does so when it is freed
    ended.touch()
    dist.barrier()


def test_a_rank_that_fails_alone_does_not_wait_for_the_others(tmp_path: Path) -> None:
    run_ranks(fail_alone, tmp_path / "ended")


class CopiedWhileFitting(Net):
    def on_train_batch_end(self, *_: object):
        twin = copy.deepcopy(self.net)
        assert not any(param._post_accumulate_grad_hooks for param in twin.parameters())
        assert_same(state_of(twin), state_of(self.net))


def test_the_module_can_be_copied_while_fitting() -> None:
    for state in run_ranks(fit, CopiedWhileFitting, "ddp_hooks", {}):
        assert_trained(state)


# ---------------------------------------------------------------------- SyncBatchNorm


class BatchNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def on_train_start(self):
        self.kinds = [type(layer) for layer in self.net]
        self.known = [name for name, _ in self.named_parameters()]
        assert self.trainer.strategy.reducer.names == self.known

    def training_step(self, batch, batch_idx):
        x, y = batch
        # torch's SyncBatchNorm runs on GPUs only; its parameters must get gradients all the same.
        norm = self.net[1]
        return ((self.net[2](self.net[0](x) * norm.weight + norm.bias)) - y).square().mean()


def fit_sync_batchnorm() -> tuple[list[type], list[type], State]:
    module = make_module(BatchNorm)
    trainer = make_trainer(sync_batchnorm=True)
    trainer.fit(module)
    return module.kinds, [type(layer) for layer in module.net], state_of(module)


def test_batchnorm_is_synchronized_during_the_fit_and_plain_after_it() -> None:
    (during, after, state), (_, _, state_1) = run_ranks(fit_sync_batchnorm)

    assert during == [nn.Linear, nn.SyncBatchNorm, nn.Linear]
    assert not issubclass(after[1], nn.SyncBatchNorm)
    assert issubclass(after[1], nn.modules.batchnorm._BatchNorm)
    assert_trained(state, BatchNorm)
    assert_same(state, state_1)
