"""Uneven inputs under a Trainer: gradients and updates, against one process on the union of each step's batches."""

from functools import partial
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from trainer_runs import EXACT, WIDTH, assert_close, assert_same, fit_each, make_module, make_trainer, rank
from uneven_runs import COUNTS, WORLD, Shard, Stream, UnevenNet, fit_uneven, fit_union, make_batch, run_uneven

from lightning_ddp_hooks.averaging import DiLoCo, PeriodicModelAverager
from lightning_ddp_hooks.callbacks import UnevenInputs
from lightning_ddp_hooks.optim import OptimizerInHook

pytestmark = [pytest.mark.ranks, pytest.mark.trainer]


class Second(UnevenNet):
    counts: ClassVar = COUNTS[1]


class Third(UnevenNet):
    counts: ClassVar = COUNTS[2]


class WeighsSamples(Second):
    sizes: ClassVar = (1, 4, 2)
    divisor: ClassVar = "samples"


class WeighsWindows(WeighsSamples):
    window: ClassVar = 3


class Windows(UnevenNet):
    """In the last window of an epoch there is one batch, and only one rank has it."""

    window: ClassVar = 3


class StreamOfWindows(Windows):
    counts: ClassVar = COUNTS[1]
    kind: ClassVar = Stream


class EvenWindows(WeighsSamples):
    """As many batches on all ranks, of different sizes, and one in the last window."""

    counts: ClassVar = (5, 5, 5)
    window: ClassVar = 2


class FullWindows(UnevenNet):
    counts: ClassVar = (4, 4, 4)


class WeighsWorld(Third):
    divisor: ClassVar = "world"


class Unknown(Third):
    kind: ClassVar = Stream


class Scheduled(Second):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Branches(Scheduled):
    """Every second step leaves a branch out; AdamW would move it if its gradient were 0 instead of None."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(WIDTH, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        def loss(part: Any) -> Tensor:
            out = self.loss(part)
            return out + self.branch(part[0]).square().mean() if batch_idx % 2 else out

        return self.over_batches(loss, batch)


def check(*cases: tuple[Any, ...]) -> None:
    for (module_class, _, settings, options), states in zip(cases, run_uneven(*cases), strict=True):
        expected = fit_union(module_class, options)
        for state in states:
            assert_close(state, expected)
        for state in states[1:]:
            assert_same(state, states[0])
        assert settings.get("divisor", "active") == module_class.divisor


def test_automatic_optimization() -> None:
    check(
        (UnevenNet, "ddp_hooks", {}, {}),
        (Second, "ddp_hooks", {}, {}),
        (Third, "ddp_hooks", {}, {}),
        (Unknown, "ddp_hooks", {}, {}),
        (WeighsSamples, "ddp_hooks", {"divisor": "samples"}, {}),
        (WeighsWorld, "ddp_hooks", {"divisor": "world"}, {}),
        (Scheduled, "ddp_hooks", {}, {"gradient_clip_val": 0.05}),
    )


def test_accumulation_with_uneven_tails() -> None:
    check(
        (UnevenNet, "ddp_hooks", {}, {"accumulate_grad_batches": 2}),
        (Second, "ddp_hooks", {}, {"accumulate_grad_batches": 3}),
        (Unknown, "ddp_hooks", {}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}),
        (
            WeighsWindows,
            "ddp_hooks_find_unused_parameters_true",
            {"divisor": "samples"},
            {"accumulate_grad_batches": 3},
        ),
    )


def test_exact_windows_are_means_over_what_they_hold() -> None:
    exact, every_three = {"accumulation": "exact"}, {"accumulate_grad_batches": 3}
    in_hook = OptimizerInHook(shard=True)
    check(
        (Windows, exact, {}, every_three),
        (StreamOfWindows, {**exact, "find_unused_parameters": True}, {}, {**every_three, "gradient_clip_val": 0.05}),
        (StreamOfWindows, {**exact, "optimizer_in_hook": in_hook}, {}, every_three),
        (WeighsWindows, {"optimizer_in_hook": in_hook}, {"divisor": "samples"}, every_three),
        (Windows, {**exact, "comm_hook": (None, allreduce_hook), "gradient_as_bucket_view": False}, {}, every_three),
    )


def test_weighting_by_samples_weighs_all_of_a_window() -> None:
    options = {**EXACT, "accumulate_grad_batches": 2}
    expected = fit_union(EvenWindows, options)
    for states in run_ranks(fit_each, EvenWindows, [{"gradient_weighting": "samples"}], options, world_size=WORLD):
        assert_close(states[0], expected)


def test_windows_that_are_full_are_as_without_the_setting() -> None:
    options = {"accumulate_grad_batches": 2}
    cases = [(FullWindows, {"accumulation": choice}, {}, options) for choice in ("lightning", "exact")]
    plain, made_exact = run_uneven(*cases)
    for state, expected in zip(made_exact, plain, strict=True):
        assert_same(state, expected)


def fit_counting_reductions(module_class: type[UnevenNet], accumulate: int, settings: dict[str, Any]) -> int:
    calls = 0

    def hook(state: object, bucket: Any) -> Any:
        nonlocal calls
        calls += 1
        return allreduce_hook(None, bucket)

    fit_uneven(module_class, {"comm_hook": (None, hook), **settings}, {}, {"accumulate_grad_batches": accumulate})
    return calls


@pytest.mark.parametrize("module_class", [Second, Unknown])
def test_an_accumulation_window_in_the_tail_is_reduced_once(module_class: type[UnevenNet]) -> None:
    windows = 2 * (-(-max(module_class.counts) // 3))  # two epochs; the model is one bucket
    assert run_ranks(fit_counting_reductions, module_class, 3, {}, world_size=WORLD) == [windows] * WORLD
    # With an averager too, where the tail alone is reduced: a rank without data follows those that have some.
    tail = len({index // 3 for index in range(min(module_class.counts), max(module_class.counts))})
    averaged = {"averager": PeriodicModelAverager(period=2)}
    assert run_ranks(fit_counting_reductions, module_class, 3, averaged, world_size=WORLD) == [2 * tail] * WORLD


def test_accumulation_in_the_tail_under_other_settings() -> None:
    every_two = {"accumulate_grad_batches": 2}
    check(
        (Branches, "ddp_hooks_find_unused_parameters_true", {}, every_two),
        (Second, {"optimizer_in_hook": OptimizerInHook(shard=True)}, {}, every_two),
        (Scheduled, {"optimizer_in_hook": OptimizerInHook(shard=True, overlap=False)}, {}, every_two),
        (PlainSgd, {"averager": PeriodicModelAverager(period=1)}, {}, {"accumulate_grad_batches": 3}),
    )


def test_reducer_modes_and_hooks() -> None:
    check(
        (Branches, "ddp_hooks_find_unused_parameters_true", {}, {}),
        (Third, {"static_graph": True}, {}, {}),
        (Second, {"comm_hook": "allreduce", "bucket_cap_mb": 1e-4}, {}, {"accumulate_grad_batches": 2}),
        (Second, {"comm_hook": (None, allreduce_hook), "bucket_cap_mb": 1e-4}, {}, {}),
        (Third, {"gradient_weighting": "ranks", "gradient_as_bucket_view": False, "skip_missing_loss": "all"}, {}, {}),
        (WeighsSamples, {"gradient_weighting": "samples"}, {"divisor": "samples"}, {}),
    )


class Gan(Second):
    """Two optimizers, three backwards, accumulation by hand, a scheduler stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))

    def configure_optimizers(self) -> Any:
        first = torch.optim.AdamW(self.net.parameters(), lr=0.02)
        return [first, torch.optim.SGD(self.critic.parameters(), lr=0.1)], [torch.optim.lr_scheduler.StepLR(first, 2)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generator, critic = self.optimizers()  # type: ignore[misc]
        self.toggle_optimizer(critic)
        critic.zero_grad()
        real = self.over_batches(lambda part: (self.critic(part[1]) - 1).square().mean(), batch)
        self.manual_backward(real)
        fake = self.over_batches(lambda part: self.critic(self.net(part[0]).detach()).square().mean(), batch)
        self.manual_backward(fake)
        critic.step()
        self.untoggle_optimizer(critic)
        self.toggle_optimizer(generator)
        self.manual_backward(self.over_batches(self.loss, batch) / 2)
        self.log("loss", fake.detach(), sync_dist=True)
        if batch_idx % 2:
            generator.step()
            generator.zero_grad()
            self.lr_schedulers().step()  # type: ignore[union-attr]
        self.untoggle_optimizer(generator)


class GanWithEmptyRank(Gan):
    counts: ClassVar = COUNTS[2]


def test_manual_optimization() -> None:
    check((Gan, "ddp_hooks", {}, {}), (GanWithEmptyRank, "ddp_hooks_find_unused_parameters_true", {}, {}))


class MoreBackwards(Gan):
    """In the tail one rank runs more backwards than the others: one that has data, or one that replays."""

    odd_one_out = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        if batch_idx == max(self.counts) - 1 and rank() == self.odd_one_out:
            super().training_step(batch, batch_idx)


class MoreBackwardsElsewhere(MoreBackwards):
    odd_one_out = 2


def _messages(module_classes: list[type[UnevenNet]]) -> list[str]:
    messages = []
    for module_class in module_classes:
        with pytest.raises(RuntimeError) as caught:
            fit_uneven(module_class, "ddp_hooks", {}, {})
        messages.append(str(caught.value))
    return messages


def test_different_numbers_of_backwards_in_the_tail_raise_on_every_rank() -> None:
    for messages in run_ranks(_messages, [MoreBackwards, MoreBackwardsElsewhere], world_size=WORLD):
        for message in messages:
            assert "different numbers of backwards" in message


class Emulated(UnevenNet):
    """All ranks have as many batches, but those beyond `counts` have no gradient, and the others weigh more."""

    def loader(self, counts: Any, offset: int = 0, stop: bool = False) -> Any:
        return super().loader([max(counts)] * WORLD, offset, stop)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        active = sum(batch_idx < count for count in self.counts)
        return self.loss(batch) * (WORLD / active if batch_idx < self.counts[rank()] else 0)


def test_hooks_with_state_see_zeros_from_joined_ranks() -> None:
    hooks = ("powersgd", "int8", "bf16")
    cases = [(module_class, {"comm_hook": hook}, {}, {}) for hook in hooks for module_class in (UnevenNet, Emulated)]
    results = run_uneven(*cases)
    for hook, joined, emulated in zip(hooks, results[::2], results[1::2], strict=True):
        for state, expected in zip(joined, emulated, strict=True):
            try:
                assert_close(state, expected)
            except AssertionError as error:
                raise AssertionError(f"{hook}: {error}") from error


class Norm(Second):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(0, nn.BatchNorm1d(WIDTH))


class NormWithEmptyRank(Norm):
    counts: ClassVar = COUNTS[2]


def test_buffers_are_those_of_the_lowest_active_rank() -> None:
    sources = [(0, 0), (0, 1), (1, 2), (1, 3), (1, 4), (2, 5), (2, 6)], [(1, 0), (1, 1), (1, 2), (1, 3)]
    cases = [(module_class, "ddp_hooks", {}, {}) for module_class in (Norm, NormWithEmptyRank)]
    for states, batches in zip(run_uneven(*cases), sources, strict=True):
        norm = nn.BatchNorm1d(WIDTH).double()
        for owner, index in batches * 2:
            norm(make_batch(owner, index)[0])
        for state in states:
            torch.testing.assert_close(state["net.0.running_var"], norm.running_var)
            torch.testing.assert_close(state["net.0.running_mean"], norm.running_mean)


# ---------------------------------------------------------------------- model averaging


class PlainSgd(Second):
    optimizer = staticmethod(partial(torch.optim.SGD, lr=0.05))


def test_averaging_in_each_step_is_the_mean_over_active_ranks() -> None:
    check((PlainSgd, {"averager": PeriodicModelAverager(period=1)}, {}, {"accumulate_grad_batches": 2}))


def test_replicas_are_equal_at_the_end_of_a_fit_with_an_averager() -> None:
    averagers = (PeriodicModelAverager(period=3, warmup_steps=1), DiLoCo(period=4))
    for states in run_uneven(*((UnevenNet, {"averager": averager}, {}, {}) for averager in averagers)):
        for state in states[1:]:
            assert_same(state, states[0])


# ---------------------------------------------------------------------- precision


class Overflows(Second):
    """In steps 3 and 6 the gradients of rank 2 are Inf."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch).float()
        return loss * float("inf") if batch_idx in (3, 6) and rank() == 2 else loss


def fit_with_scaler(averager: Any = None) -> tuple[float, bool]:
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))
    module = make_module(Overflows).float()
    options = {"plugins": plugin, "precision": None, "callbacks": [UnevenInputs()]}
    module.train_dataloader = lambda: Float(Shard(rank(), Overflows.counts[rank()]))
    make_trainer({"averager": averager}, **{**EXACT, **options}).fit(module)
    return plugin.scaler.get_scale(), all(bool(p.isfinite().all()) for p in module.parameters())


class Float(Stream):
    def __iter__(self) -> Any:
        return ((x.float(), y.float()) for x, y in self.shard)


def test_all_ranks_keep_the_same_scale() -> None:
    assert run_ranks(fit_with_scaler, world_size=WORLD) == [(64.0 / 2**4, True)] * WORLD
    averager = PeriodicModelAverager(period=2)  # what the last step has found is on its way
    assert run_ranks(fit_with_scaler, averager, world_size=WORLD) == [(64.0 / 2**3, True)] * WORLD


# ---------------------------------------------------------------------- collectives of the user's own


class Collectives(Second):
    """Uses collectives within the step; each adds to the loss what a single process can know too."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.over_batches(self.loss, batch)
        if self.trainer.world_size == 1:
            return loss * 3 * len(batch["parts"]) / 10
        strategy: Any = self.trainer.strategy
        count = torch.ones(())
        dist.all_reduce(count, group=strategy.active_group())
        assert strategy.reduce(torch.tensor(float(rank()))) == self.all_gather(torch.tensor(float(rank()))).mean()
        strategy.barrier()
        assert strategy.broadcast(rank(), src=0) == (0 if batch_idx < 2 else 1 if batch_idx < 5 else 2)
        assert strategy.reduce_boolean_decision(True)
        gathered = self.all_gather(loss, sync_grads=True)
        assert len(gathered) == count
        return (gathered.sum() + 2 * count * loss) / 10


class Synchronized(nn.Module):
    """Like SyncBatchNorm, which needs a GPU: centres over the batches of all ranks of its group."""

    def __init__(self) -> None:
        super().__init__()
        self.process_group = None

    def forward(self, x: Tensor) -> Tensor:
        total = torch.cat([x.detach().sum(0), torch.tensor([float(len(x))]).to(x)])
        if dist.is_initialized():
            dist.all_reduce(total, group=self.process_group)
        return x - total[:-1] / total[-1]


class Centred(Second):
    def __init__(self) -> None:
        super().__init__()
        self.centre = Synchronized()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.world_size > 1:
            return self.loss((self.centre(batch[0]), batch[1]))
        mean = torch.cat([x for x, _ in batch["parts"]]).mean(0)
        return self.over_batches(lambda part: self.loss((part[0] - mean, part[1])), batch)


class CentredByHand(Centred):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def test_collectives_within_a_step_are_those_of_the_active_ranks() -> None:
    check(*((module_class, "ddp_hooks", {}, {}) for module_class in (Collectives, Centred, CentredByHand)))
