"""Model averaging in a Trainer: by the strategy, by the callback with our strategy, by the callback with plain ddp."""

import copy
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from ranks import run_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
from torch.utils.data import DataLoader, IterableDataset
from trainer_runs import (
    EXACT,
    QUIET,
    SAFELY,
    Net,
    assert_close,
    assert_same,
    dataset,
    make_module,
    make_trainer,
    rank,
    state_of,
)

from lightning_ddp_hooks import DDPHooksStrategy, comm
from lightning_ddp_hooks.averaging import DiLoCo, HierarchicalModelAverager, PeriodicModelAverager, SlowMo, driver
from lightning_ddp_hooks.callbacks import ModelAveraging
from lightning_ddp_hooks.hooks import (
    PostLocalSGD,
    PostLocalSGDState,
    PowerSGD,
    fp16_compress_wrapper,
    post_local_sgd_hook,
)
from lightning_ddp_hooks.lightning import summary

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.trainer,
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used:UserWarning"),
]

PERIODIC = PeriodicModelAverager(period=3, warmup_steps=2)
AVERAGERS = {
    "periodic": PERIODIC,
    "slowmo": SlowMo(period=3, warmup_steps=1),
    "diloco": DiLoCo(period=4, fragments=2, delay=2, blending=0.5),
}


class WithBuffers(Net):
    """Has BatchNorm, a schedule of learning rates, and momenta."""

    def __init__(self):
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(16))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "interval": "step"},
        }

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch), sync_dist=True)

    def val_dataloader(self):
        return DataLoader(dataset(8), 4)


class Watch(Callback):
    """Notes whether the ranks hold the same model at the end of each step, and in each validation."""

    def __init__(self):
        self.steps, self.validations = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps.append(self._equal(pl_module))

    def on_validation_epoch_start(self, trainer, pl_module):
        self.validations.append(self._equal(pl_module, buffers=True))

    def _equal(self, module, buffers=False):
        tensors = [*module.parameters(), *(module.buffers() if buffers else ())]
        mine = torch.cat([t.detach().double().reshape(-1) for t in tensors])
        return all(torch.equal(mine, other) for other in comm.all_gather(mine, comm.resolve_group(None)))


def trainer_with(averager, way, *callbacks, **options):
    """Make a Trainer that averages: ``way`` is "strategy", "callback" (ours) or "ddp" (the callback on plain ddp)."""
    options = {**EXACT, **options}
    if way == "strategy":
        return make_trainer({"averager": averager}, callbacks=list(callbacks), **options)
    strategy = "ddp" if way == "ddp" else "ddp_hooks"
    return make_trainer(strategy, callbacks=[*callbacks, ModelAveraging(averager)], **options)


def fit_each_way(averager, ways, options):
    states, watches = [], []
    for way in ways:
        module, watch = make_module(WithBuffers), Watch()
        trainer_with(averager, way, watch, **options).fit(module)
        states.append(state_of(module))
        watches.append((watch.steps, watch.validations))
    return states, watches


@pytest.mark.parametrize("name", AVERAGERS)
def test_strategy_and_callback_do_the_same(name):
    # On plain ddp SlowMo sees the rates of the scheduler one step later.
    ways = ["strategy", "callback"] if name == "slowmo" else ["strategy", "callback", "ddp"]
    results = run_ranks(fit_each_way, AVERAGERS[name], ways, {"limit_val_batches": 0})
    first = results[0][0][0]
    for states, _ in results:
        for state in states:
            assert_same(state, first)


def test_replicas_are_equal_when_averaged_and_in_every_validation():
    often = run_ranks(fit_each_way, PERIODIC, ["strategy"], {"val_check_interval": 1})
    seldom = run_ranks(fit_each_way, PERIODIC, ["strategy"], {"limit_val_batches": 0})
    for states, [(steps, validations)] in often:
        assert steps == [True, True, True, False, False, True, False, False]
        assert all(validations[2:])
        assert len(validations) == 8
        assert_same(states[0], seldom[0][0][0])


class Gan(Net):
    """Two optimizers, two backwards a step, and a step of one of them only every second time."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(8, 1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.05), torch.optim.Adam(self.other.parameters(), lr=0.05)

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        x, y = batch
        for optimizer, loss in ((first, self.loss(batch)), (second, (self.other(x) - y).square().mean())):
            if optimizer is second and batch_idx % 2:
                continue
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss + rank())
            optimizer.step()
            self.untoggle_optimizer(optimizer)


def fit_gan():
    module, watch = make_module(Gan), Watch()
    trainer_with(PeriodicModelAverager(period=2), "strategy", watch, max_epochs=1).fit(module)
    return watch.steps, state_of(module)


def test_both_optimizers_of_a_gan_are_averaged():
    results = run_ranks(fit_gan)
    for steps, state in results:
        assert steps == [True, False, True, False]
        assert_same(state, results[0][1])


def fit_gan_by_function(name):
    with mock.patch.object(comm, "is_initialized", return_value=False):  # as before the strategy makes a group
        ours = PostLocalSGDState(None, None, 4, post_local_gradient_allreduce=False)
    theirs = post_localSGD_hook.PostLocalSGDState(dist.group.WORLD, dist.new_subgroups(1)[0], 4, False)
    hook = {
        "declaration": PostLocalSGD(start_local_sgd_iter=4, post_local_gradient_allreduce=False),
        "ours": (ours, post_local_sgd_hook),
        "in float16": (copy.copy(ours), fp16_compress_wrapper(post_local_sgd_hook)),
        "torch's": (theirs, post_localSGD_hook.post_localSGD_hook),
    }[name]
    watch = Watch()
    strategy = DDPHooksStrategy(comm_hook=hook, averager=PeriodicModelAverager(period=2, warmup_steps=4))
    make_trainer(strategy, callbacks=[watch]).fit(make_module(Gan))
    return watch.steps


@pytest.mark.parametrize("name", ["declaration", "ours", "in float16", "torch's"])
def test_hook_and_averager_have_one_clock_with_several_optimizers(name):
    assert run_ranks(fit_gan_by_function, name) == [[True] * 5 + [False, True, False]] * 2


class Overflows(Net):
    """In step 3 the gradients of rank 1 are Inf."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch).float()
        return loss * float("inf") if batch_idx == 3 and rank() == 1 else loss


def fit_with_scaler(way):
    module, watch = make_module(Overflows), Watch()
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))
    options = {**QUIET, "plugins": plugin, "precision": None}
    trainer = trainer_with(PeriodicModelAverager(period=2), way, watch, **options)
    trainer.fit(module)
    return watch.steps, plugin.scaler.get_scale(), all(p.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("way", ["strategy", "ddp"])
def test_a_step_that_a_scaler_skips_counts(way):
    for steps, scale, finite in run_ranks(fit_with_scaler, way):
        assert steps == [True, False] * 4 if way == "strategy" else len(steps) == 8
        assert finite
        assert scale == 32.0  # both follow what one has found in step 3; that of the last step is on its way


def fit_with_scalers_that_differ(way):
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", growth_interval=100 + rank()))
    trainer = trainer_with(PeriodicModelAverager(period=2), way, Watch(), plugins=plugin, precision=None)
    with pytest.raises(RuntimeError, match=r"growth_interval=100.*growth_interval=101"):
        trainer.fit(make_module())


@pytest.mark.parametrize("way", ["strategy", "ddp"])
def test_scalers_that_differ_are_refused(way):
    run_ranks(fit_with_scalers_that_differ, way)


def fit_with_ema(way):
    trainer = trainer_with(PeriodicModelAverager(period=2), way, EMAWeightAveraging())
    with pytest.raises(ValueError, match="EMAWeightAveraging averages over the steps of one rank"):
        trainer.fit(make_module())


@pytest.mark.parametrize("way", ["strategy", "callback", "ddp"])
def test_lightnings_average_over_steps_is_refused(way):
    run_ranks(fit_with_ema, way)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(dataset(16))


class Streamed(Net):
    def train_dataloader(self):
        return DataLoader(Stream(), 4)


def said_at_the_start(module_class, averager, settings, most=driver.MOST_REPLICAS):
    """Return what a fit warns of, and whether the checkpoint in its middle holds the replicas."""
    said, saver = [], Saver()
    strategy = DDPHooksStrategy(averager=averager, **settings)
    with mock.patch.object(summary.log, "warning", said.append), mock.patch.object(driver, "MOST_REPLICAS", most):
        make_trainer(strategy, max_epochs=1, callbacks=[saver]).fit(make_module(module_class))
    return said, saver.holds


class Saver(Callback):
    holds = None

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.holds = trainer.strategy.run.state_dict()["averaging"]["replicas"] is not None


def test_a_stream_without_an_end_has_no_number_of_steps():
    averager = PeriodicModelAverager(period=2, warmup_steps=10)
    for said, _ in run_ranks(said_at_the_start, Streamed, averager, {"comm_hook": PowerSGD(start_iter=5)}):
        assert said == []


def test_diloco_says_on_one_rank_that_it_will_never_make_an_outer_step():
    (first, _), (second, _) = run_ranks(said_at_the_start, Net, DiLoCo(period=100), {})
    assert len(first) == 1
    assert "first outer step after step 100, and this fit has 4" in first[0]
    assert second == []


def test_large_replicas_are_left_out_of_checkpoints_unless_they_are_asked_for():
    averager = PeriodicModelAverager(period=3)
    for settings, text, holds in (
        ({"save_replicas": True}, "which rank 0 gathers and writes", True),
        ({}, "checkpoints leave them out", False),
        ({"save_replicas": False}, None, False),
    ):
        (said, first), (_, second) = run_ranks(said_at_the_start, Net, averager, settings, 100)
        assert [text in line for line in said] == [True] * (text is not None)
        assert first is holds
        assert second is False  # rank 0 writes them
    assert run_ranks(said_at_the_start, Net, averager, {})[0] == ([], True)


def resume(averager, way, folder):
    whole = make_module(WithBuffers)
    trainer_with(averager, way).fit(whole)
    stopped = make_module(WithBuffers)
    saver = ModelCheckpoint(Path(folder), "{step}", save_on_train_epoch_end=True)
    trainer_with(averager, way, saver, max_epochs=1, enable_checkpointing=True).fit(stopped)
    path = Path(folder) / "step=4.ckpt"  # between two averagings, with a fragment in flight
    resumed = make_module(WithBuffers)
    trainer_with(averager, way).fit(resumed, ckpt_path=path, **SAFELY)
    checkpoint = torch.load(path, weights_only=True)
    plain = make_module(WithBuffers)
    plain.load_state_dict(checkpoint["state_dict"])
    return state_of(whole), state_of(resumed), state_of(plain)


@pytest.mark.parametrize("way", ["strategy", "ddp"])
@pytest.mark.parametrize("name", AVERAGERS)
def test_resuming_in_mid_period_equals_not_stopping(name, way, tmp_path):
    for whole, resumed, _ in run_ranks(resume, AVERAGERS[name], way, str(tmp_path)):
        assert_same(whole, resumed)


def go_on(averager, way, path):
    module = make_module(WithBuffers)
    trainer_with(averager, way).fit(module, ckpt_path=path)
    return state_of(module)


def test_a_checkpoint_continues_in_another_world_and_in_plain_ddp(tmp_path):
    run_ranks(resume, PERIODIC, "strategy", str(tmp_path))
    path = str(tmp_path / "step=4.ckpt")
    four = run_ranks(go_on, PERIODIC, "strategy", path, world_size=4)
    for state in four:
        assert_same(state, four[0])
    plain = run_ranks(fit_plain_ddp, path)
    assert plain == [8, 8]


def fit_plain_ddp(path):
    trainer = make_trainer("ddp", **EXACT)
    trainer.fit(make_module(WithBuffers), ckpt_path=path)
    return trainer.global_step


def go_on_with_an_averager(folder):
    saver = ModelCheckpoint(Path(folder), "{step}", save_on_train_epoch_end=True)
    options = {**EXACT, "max_epochs": 1, "enable_checkpointing": True}
    make_trainer("ddp", callbacks=[saver], **options).fit(make_module(WithBuffers))
    watch = Watch()
    trainer = make_trainer("ddp", callbacks=[ModelAveraging(PERIODIC), watch], **EXACT)
    trainer.fit(make_module(WithBuffers), ckpt_path=Path(folder) / "step=4.ckpt")
    return watch.steps


def test_on_plain_ddp_steps_before_a_checkpoint_without_averager_count(tmp_path):
    # Steps 4 to 7, of which step 5 averages.
    assert run_ranks(go_on_with_an_averager, str(tmp_path)) == [[False, True, False, False]] * 2


def four_in_two_groups(settings):
    module, watch = make_module(Net), Watch()
    make_trainer(settings, callbacks=[watch], **{**EXACT, "max_steps": 5}).fit(module)
    return state_of(module), watch.steps


def test_four_ranks_in_two_groups():
    results = run_ranks(
        four_in_two_groups,
        {
            "averager": PeriodicModelAverager(period=2, warmup_steps=1),
            "comm_hook": PostLocalSGD(start_local_sgd_iter=1, subgroup_size=2),
        },
        world_size=4,
    )
    for state, steps in results:
        assert steps == [True, True, False, True, False]
        assert_same(state, results[0][0])


def test_averaging_within_a_subgroup_that_is_the_world_changes_nothing():
    plain = run_ranks(four_in_two_groups, {})
    averaged = run_ranks(
        four_in_two_groups,
        {
            "averager": PeriodicModelAverager(period=2),
            "comm_hook": PostLocalSGD(start_local_sgd_iter=0, subgroup_size=2),
        },
    )
    assert_close(averaged[0][0], plain[0][0])
    assert all(averaged[0][1])


def wrong_setups():
    messages = []
    for strategy, callbacks, module_class in (
        ({"averager": PERIODIC}, [ModelAveraging(PERIODIC)], Net),
        ("ddp_hooks", [ModelAveraging(PERIODIC), ModelAveraging(PERIODIC)], Net),
        ("ddp", [ModelAveraging(PERIODIC)], Gan),
        ({"averager": HierarchicalModelAverager(period_group_size_dict={2: 8})}, [], Net),
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            make_trainer(strategy, callbacks=callbacks).fit(make_module(module_class))
        messages.append(str(caught.value))
    return messages


def test_contradictions_raise_on_all_ranks():
    with pytest.raises(ValueError, match="set both alike"):
        DDPHooksStrategy(averager=PERIODIC, comm_hook=PostLocalSGD(start_local_sgd_iter=7, subgroup_size=2))
    with pytest.raises(TypeError, match="Expected a ModelAverager"):
        DDPHooksStrategy(averager=3)
    for messages in run_ranks(wrong_setups):
        assert "not both" in messages[0]
        assert "got several" in messages[1]
        assert "strategy='ddp_hooks'" in messages[2]
        assert "number of ranks, 2, got 8" in messages[3]
