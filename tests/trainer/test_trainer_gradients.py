"""Odd gradients: no loss on a rank, unequal batches, unused and thawed parameters, GANs, a user's hook."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BackboneFinetuning
from lightning.pytorch.plugins import MixedPrecision
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.utils.data import DataLoader
from trainer_runs import (
    EXACT,
    GLOBAL_BATCH,
    SAMPLES,
    WIDTH,
    Manual,
    Net,
    State,
    StrategyLike,
    assert_close,
    assert_same,
    assert_trained,
    dataset,
    fit,
    fit_each,
    make_module,
    make_trainer,
    rank,
    state_of,
)

from lightning_ddp_hooks import DDPHooksStrategy, GradBucket
from lightning_ddp_hooks.hooks import CommHook, requests
from lightning_ddp_hooks.hooks.contract import BindContext, BoundHook

pytestmark = [pytest.mark.ranks, pytest.mark.trainer]


# ---------------------------------------------------------------------- steps without a loss


class Absent(Net):
    """Some ranks have no loss in some steps; a single process plays both ranks, so as to say what is right.

    Attributes:
        absent: step -> the ranks without a loss in it.
        skip_all: what a single process does in such a step: nothing, instead of the mean with a zero.
    """

    absent: ClassVar[Mapping[int, Sequence[int]]] = {}
    skip_all = False

    def no_loss(self) -> Tensor | None:
        return None

    def training_step(self, batch, batch_idx):
        absent = self.absent.get(self.trainer.fit_loop.total_batch_idx, ())
        if self.trainer.world_size > 1:
            return self.no_loss() if rank() in absent else self.loss(batch)
        if len(absent) == 2 or (absent and self.skip_all):
            return None
        x, y = batch
        # A rank's samples are every second one.
        return sum(self.loss((x[r::2], y[r::2])) for r in (0, 1) if r not in absent) / 2


class AbsentOnOne(Absent):
    absent: ClassVar = {1: [1], 4: [0], 6: [0]}


class AbsentOnAll(Absent):
    absent: ClassVar = {0: [0, 1], 3: [0, 1], 5: [0, 1]}


class AbsentInTurns(Absent):
    """In the very first step already, and on either rank within one accumulation window."""

    absent: ClassVar = {0: [0], 2: [0], 3: [1], 5: [0, 1]}


class SkippedByAll(AbsentOnOne):
    skip_all = True


class ConstantOnOne(AbsentOnOne):
    def no_loss(self):
        return torch.tensor(1.0)


class ConstantOnAll(AbsentOnAll):
    def no_loss(self):
        return torch.tensor(1.0)


class DetachedInADict(AbsentOnOne):
    def no_loss(self):
        return {"loss": self.net(torch.ones(WIDTH)).detach().sum()}


class ManualConstantOnOne(ConstantOnOne, Manual):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = ConstantOnOne.training_step(self, batch, batch_idx)
        if loss is not None:
            self.manual_backward(loss)
            optimizer.step()


class ManualConstantOnAll(ManualConstantOnOne):
    absent: ClassVar = AbsentOnAll.absent

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)  # without momentum a step without gradients is no step


@pytest.mark.filterwarnings(
    "ignore:The loss of rank . does not depend on any parameter:UserWarning",
    "ignore:`training_step` returned `None`:UserWarning",
)
@pytest.mark.parametrize(
    ("module_class", "settings", "options"),
    [
        (module_class, settings, options)
        for module_class, settings in (
            (AbsentOnOne, {}),
            (AbsentOnOne, {"find_unused_parameters": True}),
            (AbsentOnOne, {"comm_hook": (None, allreduce_hook)}),
            (AbsentOnAll, {}),
            (AbsentOnAll, {"find_unused_parameters": True}),
            (AbsentInTurns, {}),
            (ConstantOnOne, {}),
            (ConstantOnAll, {}),
            (DetachedInADict, {}),
        )
        for options in ({}, {"accumulate_grad_batches": 2})
    ]
    + [
        (SkippedByAll, {"skip_missing_loss": "all"}, {}),
        (SkippedByAll, {"skip_missing_loss": "all", "comm_hook": (None, allreduce_hook)}, {"gradient_clip_val": 0.5}),
        (ManualConstantOnOne, {}, {}),
        (ManualConstantOnOne, {"find_unused_parameters": True}, {}),
        (ManualConstantOnAll, {}, {}),
    ],
)
def test_a_missing_loss_counts_as_zero_or_skips_the_step(
    module_class: type[Absent], settings: dict[str, Any], options: dict[str, Any]
) -> None:
    options = {**EXACT, **options}

    ours, ours_1 = (states[0] for states in run_ranks(fit_each, module_class, [settings], options))

    assert_trained(ours)
    assert_same(ours, ours_1)
    assert_close(ours, fit(module_class, "auto", options))


def warned_constant_loss() -> list[str]:
    with pytest.warns(UserWarning, match="does not depend on any parameter") as caught:
        fit(ConstantOnOne, "ddp_hooks", {})
    return [text for text in map(str, (warning.message for warning in caught)) if "does not depend" in text]


def test_a_constant_loss_warns_on_its_rank() -> None:
    for index, messages in enumerate(run_ranks(warned_constant_loss)):
        assert messages
        assert all(f"loss of rank {index}" in message for message in messages)


# ---------------------------------------------------------------------- unequal batches


class Unequal(Net):
    """Rank 0's batches are of 5 samples, rank 1's of 3, and of 2 and 4 in every second step."""

    def train_dataloader(self):
        sizes = [5, 3, 2, 4] * 4
        starts = torch.tensor([0, *sizes]).cumsum(0).tolist()
        batches = [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=False)]
        if self.trainer.world_size > 1:
            return DataLoader(dataset(64), batch_sampler=batches[rank() :: 2])
        return DataLoader(dataset(64), batch_sampler=[a + b for a, b in zip(batches[::2], batches[1::2], strict=True)])


class UnequalManual(Unequal, Manual):
    pass


class UnequalRaw(Unequal, Manual):
    def training_step(self, batch, batch_idx):
        self.loss(batch).backward()


OWN_BATCHES = {**EXACT, "use_distributed_sampler": False}


@pytest.mark.parametrize("module_class", [Unequal, UnequalManual])
@pytest.mark.parametrize("settings", [{}, {"comm_hook": (None, allreduce_hook)}], ids=["mean", "hook"])
def test_weighting_by_samples_gives_the_mean_of_all_samples(module_class: type[Net], settings: dict[str, Any]) -> None:
    by_samples = {"gradient_weighting": "samples", **settings}

    (ours, by_ranks), (ours_1, _) = run_ranks(fit_each, module_class, [by_samples, settings], OWN_BATCHES)

    single = fit(module_class, "auto", OWN_BATCHES)
    assert_same(ours, ours_1)
    assert_close(ours, single)
    with pytest.raises(AssertionError):
        assert_close(by_ranks, single)


def message_of_failed_fit(
    module_class: type[Net], settings: dict[str, Any], options: dict[str, Any] | None = None
) -> str:
    with pytest.raises(RuntimeError) as caught:
        fit(module_class, settings, options or {})
    return str(caught.value)


def test_weighting_by_samples_needs_manual_backward() -> None:
    for message in run_ranks(
        message_of_failed_fit, UnequalRaw, {"gradient_weighting": "samples"}, {"use_distributed_sampler": False}
    ):
        assert "self.manual_backward" in message


class ByHand(Manual):
    """Accumulates two micro-batches in a step, by `no_sync` of the model or by the strategy's own name for it."""

    by_model = True

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        x, y = batch
        with self.trainer.model.no_sync() if self.by_model else self.trainer.strategy.block_backward_sync():
            self.manual_backward(self.loss((x[:1], y[:1])))
        self.manual_backward(self.loss((x[1:], y[1:])))
        optimizer.step()

    def on_train_end(self) -> None:
        with pytest.raises(RuntimeError, match="is a copy"):
            copy.deepcopy(self).no_sync()


class ByStrategy(ByHand):
    by_model = False


def fit_by_hand(module_class: type[Net]) -> tuple[State, bool]:
    module = make_module(module_class)
    make_trainer("ddp_hooks", **EXACT).fit(module)
    return state_of(module), hasattr(module, "no_sync")


def test_no_sync_of_the_model_is_that_of_the_strategy() -> None:
    for (ours, left), (expected, _) in zip(
        run_ranks(fit_by_hand, ByHand), run_ranks(fit_by_hand, ByStrategy), strict=True
    ):
        assert_same(ours, expected)
        assert not left


# ---------------------------------------------------------------------- unused parameters


class TwoHeads(Net):
    """Which head is used depends on the step; `other` is used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
        self.other = nn.Linear(3, 3)

    def head(self, batch_idx: int) -> nn.Module:
        return self.heads[batch_idx % 2]

    def training_step(self, batch, batch_idx):
        x, y = batch
        return (self.head(batch_idx)(self.net(x)) - y).square().mean()


class HeadsByRank(TwoHeads):
    def head(self, batch_idx):
        return self.heads[(batch_idx + rank()) % 2]


@pytest.mark.parametrize("module_class", [TwoHeads, HeadsByRank])
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}], ids=["each step", "accumulated"])
def test_unused_parameters_are_found_and_left_alone(module_class: type[Net], options: dict[str, Any]) -> None:
    options = {**EXACT, **options}
    strategies = ["ddp_hooks_find_unused_parameters_true", "ddp_find_unused_parameters_true"]

    (ours, ddp), (ours_1, _) = run_ranks(fit_each, module_class, strategies, options)

    assert_trained(ours, module_class)
    assert_same(ours, ours_1)
    # Under torch's accumulation a parameter may get its weight decay in other steps: it forgets the earlier batches.
    (assert_close if options.get("accumulate_grad_batches") else assert_same)(ours, ddp)
    if module_class is TwoHeads:
        assert_close(ours, fit(module_class, "auto", options))
    start = state_of(make_module(module_class))
    assert torch.equal(ours["other.weight"].float(), start["other.weight"])


@pytest.mark.parametrize("module_class", [TwoHeads, HeadsByRank])
def test_an_unused_parameter_raises_on_every_rank_and_is_named(module_class: type[Net]) -> None:
    for message in run_ranks(message_of_failed_fit, module_class, {}):
        assert "'other.weight' on ranks 0, 1" in message
        assert "find_unused_parameters=True" in message
        assert '"ddp_hooks_find_unused_parameters_true"' in message
        if module_class is HeadsByRank:
            assert "'heads.1.weight' on rank 0" in message
            assert "'heads.0.weight' on rank 1" in message


def test_static_graph_leaves_out_what_the_first_step_left_out() -> None:
    class_and_settings = (Aside, [{"static_graph": True}, "ddp_find_unused_parameters_true"], EXACT)

    (ours, ddp), _ = run_ranks(fit_each, *class_and_settings)

    assert_same(ours, ddp)


class Aside(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(3, 3)


# ---------------------------------------------------------------------- freezing and unfreezing


class Thawing(Net):
    """Its first layers are frozen, then thawed in the middle of an epoch, then frozen again."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def on_train_batch_start(self, batch, batch_idx):
        step = self.trainer.global_step
        self.net[0].requires_grad_(3 <= step < 6)
        self.net[2].requires_grad_(step != 5)
        # A frozen parameter keeps no gradient of an earlier step.
        for param in self.parameters():
            if not param.requires_grad:
                param.grad = None


class Swapped(Net):
    """Trains one half at a time: after the second step nothing trains any more of what did at first."""

    def __init__(self) -> None:
        super().__init__()
        self._train(first=True)

    def _train(self, first: bool) -> None:
        self.net[:2].requires_grad_(first)
        self.net[2:].requires_grad_(not first)
        for param in self.parameters():
            if not param.requires_grad:
                param.grad = None

    def on_train_batch_start(self, batch, batch_idx):
        self._train(first=self.trainer.global_step % 4 < 2)


class ManualSwapped(Swapped, Manual):
    pass


class RawSwapped(ManualSwapped):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.loss(batch).backward()
        optimizer.step()


class Finetuned(Net):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.net[:2]
        self.head = self.net[2:]
        del self.net

    def loss(self, batch):
        x, y = batch
        return (self.head(self.backbone(x)) - y).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.05)


def finetune(strategy: StrategyLike) -> State:
    module = make_module(Finetuned)
    callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.5, backbone_initial_lr=0.01)
    make_trainer(strategy, callbacks=[callback], **{**EXACT, "max_epochs": 3}).fit(module)
    return state_of(module)


@pytest.mark.parametrize("settings", [{}, {"comm_hook": (None, allreduce_hook)}], ids=["mean", "hook"])
def test_backbone_finetuning_needs_no_flag(settings: dict[str, Any]) -> None:
    ours, ours_1 = run_ranks(finetune, settings)

    assert not torch.equal(ours["backbone.0.weight"].float(), make_module(Finetuned).state_dict()["backbone.0.weight"])
    assert_same(ours, ours_1)
    assert_close(ours, finetune("auto"))


@pytest.mark.parametrize("module_class", [Thawing, Swapped, ManualSwapped, RawSwapped])
@pytest.mark.parametrize("settings", [{}, {"find_unused_parameters": True}], ids=["default", "find unused"])
def test_freezing_and_thawing_in_user_code_needs_no_flag(module_class: type[Net], settings: dict[str, Any]) -> None:
    ours, ours_1 = (states[0] for states in run_ranks(fit_each, module_class, [settings], EXACT))

    assert_trained(ours, module_class)
    assert_same(ours, ours_1)
    assert_close(ours, fit(module_class, "auto", EXACT))


class ThawedOnOneRank(Net):
    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 2 and rank() == 1:
            self.net[2].requires_grad_(False)


def test_freezing_on_one_rank_only_raises_on_every_rank() -> None:
    for message in run_ranks(message_of_failed_fit, ThawedOnOneRank, {}):
        assert "'net.2.weight' requires a gradient on rank 0 but not on rank 1" in message


# ---------------------------------------------------------------------- GANs


class GAN(Net):
    """Two networks with an optimizer each; the noise is the data itself, so that runs can be compared."""

    toggle = True
    raw = False
    split = False

    def __init__(self) -> None:
        super().__init__()
        del self.net
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH))
        self.discriminator = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 1))

    def configure_optimizers(self):
        return [
            torch.optim.SGD(net.parameters(), 0.05, momentum=0.9) for net in (self.generator, self.discriminator)
        ], []

    def _backward(self, loss: Tensor) -> None:
        loss.backward() if self.raw else self.manual_backward(loss)

    def training_step(self, batch, batch_idx):
        real, _ = batch
        for optimizer, losses in zip(self.optimizers(), (self._generator, self._discriminator), strict=True):
            if self.toggle:
                self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            parts = losses(real)
            for loss in parts if self.split else [sum(parts)]:
                self._backward(loss)
            optimizer.step()
            if self.toggle:
                self.untoggle_optimizer(optimizer)

    def _generator(self, real: Tensor) -> list[Tensor]:
        return [-self.discriminator(self.generator(real.flip(1))).sigmoid().mean()]

    def _discriminator(self, real: Tensor) -> list[Tensor]:
        fake = self.generator(real.flip(1)).detach()
        return [self.discriminator(fake).sigmoid().mean(), -self.discriminator(real).sigmoid().mean()]


class Untoggled(GAN):
    toggle = False


class Raw(GAN):
    raw = True


class RawUntoggled(Untoggled):
    raw = True


class Split(GAN):
    split = True


class SplitUntoggled(Untoggled):
    split = True


class SplitRaw(Raw):
    split = True


class Alternating(Untoggled):
    """Steps the generator in even steps and the discriminator in odd ones."""

    def training_step(self, batch, batch_idx):
        real, _ = batch
        optimizer = self.optimizers()[batch_idx % 2]
        optimizer.zero_grad()
        self.manual_backward(sum((self._generator, self._discriminator)[batch_idx % 2](real)))
        optimizer.step()


@pytest.mark.parametrize(
    "module_class", [GAN, Untoggled, Raw, RawUntoggled, Split, SplitUntoggled, SplitRaw, Alternating]
)
@pytest.mark.parametrize("settings", [{}, {"comm_hook": (None, allreduce_hook)}], ids=["mean", "hook"])
def test_gans_need_no_flag(module_class: type[GAN], settings: dict[str, Any]) -> None:
    # torch's DDP under Lightning does not see a raw backward; there the single process is the judge.
    strategies = [settings] if module_class.raw else [settings, "ddp_find_unused_parameters_true"]

    states, states_1 = run_ranks(fit_each, module_class, strategies, EXACT)

    assert_trained(states[0], module_class)
    assert_same(states[0], states_1[0])
    assert_close(states[0], fit(module_class, "auto", EXACT))
    for ddp in states[1:]:
        assert_close(states[0], ddp)


class DifferentNetworks(Untoggled):
    def training_step(self, batch, batch_idx):
        losses = self._generator if rank() == 0 else self._discriminator
        self.manual_backward(sum(losses(batch[0])))


def test_manual_backwards_that_differ_over_ranks_raise_on_every_rank() -> None:
    for message in run_ranks(message_of_failed_fit, DifferentNetworks, {}):
        assert "'generator.0.weight' on rank 1" in message
        assert "find_unused_parameters=True" in message
        assert '"ddp_hooks_find_unused_parameters_true"' in message


class FewerBackwards(Untoggled):
    """One rank runs one backward less than the other, from a given step on."""

    first, backwards = 0, 2

    def training_step(self, batch, batch_idx):
        odd_one_out = rank() == 1 and batch_idx >= self.first
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        for _ in range(self.backwards - odd_one_out):
            self.manual_backward(sum(self._generator(batch[0])))
        for optimizer in self.optimizers():
            optimizer.step()


class NoBackward(FewerBackwards):
    backwards = 1


class FewerBackwardsLater(FewerBackwards):
    first = 2


class NoBackwardLater(FewerBackwards):
    first, backwards = 2, 1


@pytest.mark.parametrize("module_class", [FewerBackwards, NoBackward, FewerBackwardsLater, NoBackwardLater])
@pytest.mark.parametrize("settings", [{}, {"find_unused_parameters": True}, {"comm_hook": "fp16"}])
def test_a_rank_with_fewer_manual_backwards_raises_on_every_rank(
    module_class: type[FewerBackwards], settings: dict[str, Any]
) -> None:
    for message in run_ranks(message_of_failed_fit, module_class, settings):
        assert "rank 1 ended the step while rank 0 ran a further backward" in message


# ---------------------------------------------------------------------- hooks


class Counting:
    """A hook as a user writes it: an object that counts, and doubles the mean."""

    def __init__(self) -> None:
        self.parameters: list[int] = []

    def __call__(self, state: str, bucket: Any) -> torch.futures.Future:
        assert state == "state"
        self.parameters.append(len(bucket.parameters()))
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0] * (2 / dist.get_world_size()))


class Doubled(Net):
    def loss(self, batch):
        return 2 * super().loss(batch)


class RegistersItsHook(Net):
    """Registers a hook where Lightning's documentation of hooks would, in each fit again."""

    def on_fit_start(self):
        self.hook = Counting()
        self.trainer.strategy.register_comm_hook("state", self.hook)


def fit_hooked(way: str) -> tuple[State, list[int]]:
    hook = Counting()
    settings = {"bucket_cap_mb": 1e-4, "first_bucket_mb": 1e-4}
    module = make_module(RegistersItsHook if way == "on_fit_start" else Net)
    strategy = DDPHooksStrategy(comm_hook=("state", hook) if way == "argument" else None, **settings)
    if way == "before fit":
        strategy.register_comm_hook("state", hook)
    make_trainer(strategy, **EXACT).fit(module)
    if way == "on_fit_start":
        hook = module.hook
    return state_of(module), hook.parameters


@pytest.mark.parametrize("way", ["argument", "before fit", "on_fit_start"])
def test_a_users_hook_replaces_the_mean(way: str) -> None:
    (ours, calls), (ours_1, calls_1) = run_ranks(fit_hooked, way)

    steps = 2 * SAMPLES // GLOBAL_BATCH
    assert sum(calls) == steps * 6
    assert len(calls) > 2 * steps, "several buckets a step"
    assert calls == calls_1
    assert_same(ours, ours_1)
    assert_close(ours, fit(Doubled, "auto", EXACT))


def fit_twice_hooked() -> tuple[list[State], str]:
    trainer = make_trainer(**EXACT)
    states = []
    for epochs in (2, 4):
        module = make_module(RegistersItsHook)
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(module)
        states.append(state_of(module))
    strategy = DDPHooksStrategy(comm_hook=(None, allreduce_hook))
    with pytest.raises(RuntimeError) as caught:
        make_trainer(strategy).fit(make_module(RegistersItsHook))
    return states, str(caught.value)


def test_a_hook_registered_in_on_fit_start_holds_for_that_fit_only() -> None:
    (states, message), _ = run_ranks(fit_twice_hooked)

    assert_same(*states)
    assert "already registered" in message


def test_torchs_hooks_work_on_the_cpu() -> None:
    strategies = [{"comm_hook": (None, hook)} for hook in (allreduce_hook, fp16_compress_hook)]

    (mean, half, ddp), _ = run_ranks(fit_each, Net, [*strategies, "ddp"], EXACT)

    assert_same(mean, ddp)
    with pytest.raises(AssertionError):
        assert_same(half, ddp)
    for name, tensor in half.items():
        torch.testing.assert_close(tensor, ddp[name], rtol=0.05, atol=0.01)


@dataclass(frozen=True, kw_only=True)
class StepRecorder(CommHook):
    """A declared hook: the mean, with a record of the training step that the hook was told."""

    def bind(self, context: BindContext) -> BoundHook:
        return _BoundRecorder(context)


class _BoundRecorder(BoundHook):
    steps: ClassVar[list[int]] = []

    def __init__(self, context: BindContext) -> None:
        self._context = context

    def reduce(self, bucket: GradBucket) -> Iterator[Any]:
        self.steps.append(self._context.step())
        yield requests.AllReduce(bucket.buffer())
        return bucket.buffer() / bucket.divisor


class LBFGS(Net):
    optimizer = staticmethod(partial(torch.optim.LBFGS, max_iter=3))


class ManualTwice(Manual):
    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss(batch))
        super().training_step(batch, batch_idx)


def recorded_steps(module_class: type[Net], options: dict[str, Any], scale: float | None) -> tuple[list[int], State]:
    _BoundRecorder.steps.clear()
    if scale is not None:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        options = {**options, "plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]}
    return _BoundRecorder.steps, fit(module_class, {"comm_hook": StepRecorder()}, options)


@pytest.mark.parametrize(
    ("module_class", "options", "scale", "expected"),
    [
        (Net, {}, None, [0, 1, 2, 3, 4, 5, 6, 7]),
        (Net, {"accumulate_grad_batches": 2}, None, [0, 1, 2, 3]),
        (Net, {}, 2.0**40, [0, 1, 2, 3, 4, 5, 6, 7]),  # a scaler skips these, but they count
        (AbsentOnAll, {"max_epochs": 1}, None, [1, 2, 3]),  # the first one counts, though nothing was reduced
        (Manual, {"max_epochs": 1}, None, [0, 1, 2, 3]),
    ],
    ids=str,
)
def test_a_hook_is_told_the_training_step(
    module_class: type[Net], options: dict[str, Any], scale: float | None, expected: list[int]
) -> None:
    for steps, _ in run_ranks(recorded_steps, module_class, options, scale):
        assert steps == expected


@pytest.mark.parametrize("module_class", [LBFGS, ManualTwice])
def test_several_backwards_of_one_step_have_its_number(module_class: type[Net]) -> None:
    for steps, _ in run_ranks(recorded_steps, module_class, {"max_epochs": 1}, None):
        assert len(steps) > 4
        assert steps == sorted(steps)
        assert set(steps) == {0, 1, 2, 3}


class RegistersTooLate(Net):
    def on_train_batch_end(self, *_: object):
        self.trainer.strategy.register_comm_hook(None, allreduce_hook)


def test_a_hook_after_the_first_backward_is_refused() -> None:
    for message in run_ranks(message_of_failed_fit, RegistersTooLate, {}):
        assert "before the first backward" in message


def broken_hook(state: object, bucket: object) -> None:
    return None


def test_a_hook_without_a_result_is_named() -> None:
    for message in run_ranks(message_of_failed_fit, Net, {"comm_hook": (None, broken_hook)}):
        assert "broken_hook returned None for bucket 0 (net." in message
