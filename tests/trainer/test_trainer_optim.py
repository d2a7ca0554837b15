"""The optimizer in the hook, in a Trainer: the bits of the unsharded optimizer in every mode and situation."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from backends import ENGINES_AND_RANKS, require
from lightning.pytorch.callbacks import BaseFinetuning, Callback, LearningRateMonitor
from lightning.pytorch.plugins import MixedPrecision
from optim_case import OPTIMIZERS, state_bytes
from ranks import run_ranks
from torch import nn
from trainer_runs import (
    WIDTH,
    Net,
    State,
    assert_close,
    assert_same,
    assert_trained,
    make_module,
    make_trainer,
    rank,
    state_of,
)
from uneven_runs import UnevenNet

from lightning_ddp_hooks.callbacks import UnevenInputs
from lightning_ddp_hooks.hooks import BlockQuantize, PostLocalSGD, PowerSGD
from lightning_ddp_hooks.optim import OptimizerInHook, ShardedOptimizer

pytestmark = [pytest.mark.ranks, pytest.mark.trainer]

SMALL = {"bucket_cap_mb": 0.001, "first_bucket_mb": 0.0005}
OVERLAPPED = {
    "each rank": OptimizerInHook(),
    "each rank, behind the backward": OptimizerInHook(interleaved=False),
    "sharded": OptimizerInHook(shard=True),
    "sharded, behind the backward": OptimizerInHook(shard=True, interleaved=False),
    "sharded buckets": OptimizerInHook(shard=True, shard_buckets=True),
    "sharded buckets, behind the backward": OptimizerInHook(shard=True, interleaved=False, shard_buckets=True),
}
TWO_PHASES = {"two phases": OptimizerInHook(shard=True, overlap=False)}
MODES = OVERLAPPED | TWO_PHASES
# One of each kind, where a test has many situations.
KINDS = ["each rank", "sharded", "sharded buckets", "two phases"]


class Groups(Net):
    """Two groups of parameters, a schedule of learning rates by steps, and step hooks."""

    make = staticmethod(OPTIMIZERS["adamw foreach"])

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.LayerNorm(16))
        self.hooked: list[str] = []

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() <= 1]
        optimizer = self.make([{"params": matrices, "lr": 0.02}, {"params": others}])
        optimizer.register_step_pre_hook(lambda *_: self.hooked.append("pre"))
        optimizer.register_step_post_hook(lambda *_: self.hooked.append("post"))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@dataclass
class Fitted:
    """What a fit left behind."""

    state: State
    steps: int
    hooked: list[str] = field(default_factory=list)
    lr: list[float] = field(default_factory=list)
    state_bytes: int = 0


def fit(module_class: type[Net], settings: OptimizerInHook | None, strategy: dict[str, Any], **options: Any) -> Fitted:
    module = make_module(module_class)
    trainer = make_trainer({"optimizer_in_hook": settings, **SMALL, **strategy}, **options)
    trainer.fit(module)
    (optimizer, *_) = trainer.optimizers
    assert "step" not in vars(optimizer) or hasattr(optimizer.step, "_wrapped_by_lr_sched")
    return Fitted(
        state_of(module),
        trainer.global_step,
        getattr(module, "hooked", []),
        [group["lr"] for group in optimizer.param_groups],
        state_bytes(optimizer),
    )


def fit_modes(
    module_class: type[Net], names: list[str], strategy: dict[str, Any], options: dict[str, Any]
) -> dict[str, Fitted]:
    """Fit without and with the optimizer in the hook."""
    fits = {"plain": fit(module_class, None, strategy, **options)}
    return fits | {name: fit(module_class, MODES[name], strategy, **options) for name in names}


def assert_like_plain(results: list[dict[str, Fitted]], module_class: type[Net]) -> None:
    for fits in results:
        plain = fits.pop("plain")
        assert_trained(plain.state, module_class)
        for name, fitted in fits.items():
            # Gradients that go to their owners are added up in the order of ranks, and not in that of a ring.
            rounds = len(results) > 2 and MODES[name].shard and MODES[name].overlap
            try:
                (assert_close if rounds else assert_same)(fitted.state, plain.state)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error
            assert fitted.steps == plain.steps, name
            assert fitted.hooked == plain.hooked, name
            assert fitted.lr == plain.lr, name


# ---------------------------------------------------------------------- optimizers, worlds, engines


def _with(optimizer: str) -> type[Groups]:
    return type(f"Groups_{optimizer}", (Groups,), {"make": staticmethod(OPTIMIZERS[optimizer])})


# These in all modes; the others, which take the same way, in one mode of each kind.
UNLIKE = ["sgd", "adamw foreach", "lion"]


def fit_optimizers(names: list[str], strategy: dict[str, Any], options: dict[str, Any]) -> dict[str, dict[str, Fitted]]:
    return {name: fit_modes(_with(name), list(MODES) if name in UNLIKE else KINDS, strategy, options) for name in names}


@pytest.mark.parametrize(("backend", "world_size"), ENGINES_AND_RANKS)
def test_every_mode_gives_the_bits_of_the_plain_optimizer(world_size: int, backend: str) -> None:
    require(backend)
    settings = {"reducer_backend": backend, "gradient_as_bucket_view": world_size != 2}
    options: dict[str, Any] = {"max_epochs": 1, "limit_train_batches": 4}
    if world_size > 2:
        options["precision"] = "64-true"
    # All of them on two ranks; on others some of each kind.
    names = {1: ["lion"], 2: list(OPTIMIZERS), 3: ["adamw foreach", "lion"]}[world_size]
    results = run_ranks(fit_optimizers, names, settings, options, world_size=world_size, timeout=100)
    for name in names:
        assert_like_plain([result[name] for result in results], _with(name))


def test_the_state_is_shared_among_the_ranks() -> None:
    results = run_ranks(fit_modes, Groups, list(MODES), {}, {"max_epochs": 1}, world_size=3)
    whole = results[0]["plain"].state_bytes
    for name, settings in MODES.items():
        held = [result[name].state_bytes for result in results]
        if not settings.shard:
            assert held == [whole] * 3, name
        else:
            counters = 4 * 8 * 3 if settings.overlap else 0  # of steps: one for each piece of a parameter
            assert whole <= sum(held) <= whole + counters, name
            assert max(held) < 0.55 * whole, name


# ---------------------------------------------------------------------- situations


class FreezesInTurns(Groups):
    def on_train_epoch_start(self) -> None:
        self.net[3].requires_grad_(self.current_epoch % 2 == 0)
        self.net[3].zero_grad()


class Thaws(Groups):
    """Begins with a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch > 0)


class Unused(Groups):
    """One head is used by nobody, one by this rank or that; weight decay would show."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if (batch_idx + rank()) % 3:
            loss = loss + self.heads[batch_idx % 2](batch[0]).square().mean()
        return loss


class Sparse(Net):
    """Gradients that go through no bucket."""

    optimizer = staticmethod(torch.optim.SGD)

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, WIDTH, sparse=True)

    def loss(self, batch: Any) -> Any:
        x, y = batch
        return nn.functional.mse_loss(self.net(x + self.table((x[:, 0] > 0).long())), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class SomeLossMissing(Groups):
    """Now and then a rank, or all of them, have no loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        missing = batch_idx % 4 == 2 or (batch_idx % 4 == 1 and rank() == 1)
        return None if missing else self.loss(batch)


class BackwardInStep(Groups):
    """A backward of its own, whose gradients are thrown away."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.loss(batch).backward()
        return self.loss(batch)


class OddLayouts(Groups):
    def __init__(self) -> None:
        super().__init__()
        self.net.append(nn.Linear(1, 16))
        self.net.append(nn.Linear(16, 1))
        self.net[-2].weight = nn.Parameter(self.net[-1].weight.detach().t().clone())
        self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.conv = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def loss(self, batch: Any) -> Any:
        x, y = batch
        picture = x.view(len(x), 2, 2, 2).contiguous(memory_format=torch.channels_last)
        x = self.conv(picture).flatten(1)
        return nn.functional.mse_loss(self.net(x) * self.phase.abs().mean(), y)


SITUATIONS: dict[str, tuple[type[Net], dict[str, Any], dict[str, Any]]] = {
    "accumulation": (Groups, {}, {"accumulate_grad_batches": 3}),
    "bf16-mixed": (Groups, {}, {"precision": "bf16-mixed"}),
    "float64": (Groups, {}, {"precision": "64-true"}),
    "frozen in turns": (FreezesInTurns, {}, {"max_epochs": 3, "limit_train_batches": 2}),
    "thawed": (Thaws, {}, {"max_epochs": 3, "limit_train_batches": 2}),
    "unused": (Unused, {"find_unused_parameters": True}, {}),
    "static graph": (Groups, {"static_graph": True}, {}),
    "sparse": (Sparse, {}, {}),
    "missing losses": (SomeLossMissing, {}, {}),
    "a backward in training_step": (BackwardInStep, {}, {"limit_train_batches": 3}),
    "one bucket": (Groups, {"bucket_cap_mb": 25, "first_bucket_mb": 25}, {}),
    "complex, channels_last": (OddLayouts, {}, {}),
    "torch's hook": (Groups, {"comm_hook": "fp16"}, {}),
    "powersgd": (Groups, {"comm_hook": PowerSGD(rank=1, start_iter=2)}, {}),
    "int8": (Groups, {"comm_hook": BlockQuantize(dtype="int8")}, {}),
    "samples": (Groups, {"gradient_weighting": "samples"}, {}),
}


@pytest.mark.filterwarnings("ignore:The loss of rank", "ignore:.training_step. returned .None.:UserWarning")
@pytest.mark.filterwarnings("ignore:.*Sparse:UserWarning", "ignore:Casting complex values:UserWarning")
@pytest.mark.parametrize("name", SITUATIONS)
def test_a_situation_makes_no_difference(name: str) -> None:
    module_class, strategy, options = SITUATIONS[name]
    if name in ("accumulation", "frozen in turns", "powersgd"):
        strategy = {**strategy, "gradient_as_bucket_view": False, "reducer_backend": "python"}
    # On three ranks where it matters who owns what.
    world_size = 2
    if name in ("unused", "frozen in turns", "powersgd"):
        world_size, options = 3, {**options, "precision": "64-true"}
    results = run_ranks(fit_modes, module_class, KINDS, strategy, options, world_size=world_size, timeout=90)
    assert_like_plain(results, module_class)


class UnevenGroups(UnevenNet):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.1)


@pytest.mark.parametrize("hook", [None, "powersgd"])
def test_ranks_without_data_go_on_stepping_what_they_own(hook: str | None) -> None:
    options = {"callbacks": [UnevenInputs()], "precision": "64-true", "use_distributed_sampler": False}
    strategy = {"comm_hook": None if hook is None else PowerSGD(rank=1, start_iter=1)}
    results = run_ranks(fit_modes, UnevenGroups, KINDS, strategy, options, world_size=3, timeout=90)
    assert_like_plain(results, UnevenGroups)
    assert_same(results[0]["sharded"].state, results[2]["sharded"].state)


class Watch(Callback):
    """Notes what a callback may look at after each batch."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        (optimizer,) = trainer.optimizers
        grads = [None if p.grad is None else p.grad.clone() for p in pl_module.parameters()]
        self.seen.append((trainer.global_step, [g["lr"] for g in optimizer.param_groups], grads, state_of(pl_module)))


def watch_modes() -> dict[str, list[Any]]:
    seen = {}
    for name, settings in [("plain", None), *MODES.items()]:
        watch = Watch()
        fit(Groups, settings, {}, callbacks=[watch], max_epochs=1)
        seen[name] = watch.seen
    return seen


def test_gradients_learning_rates_and_the_first_update_are_seen_as_ever() -> None:
    (seen, _) = run_ranks(watch_modes)
    start = state_of(make_module(Groups))
    for name in MODES:
        assert len(seen[name]) == len(seen["plain"]) == 4
        for number, ((step, rates, grads, state), (step_0, rates_0, grads_0, state_0)) in enumerate(
            zip(seen[name], seen["plain"], strict=True)
        ):
            assert (step, rates) == (step_0, rates_0)
            if MODES[name].shard and MODES[name].overlap and number:  # owners alone had them
                assert grads == [None] * len(grads)
            else:
                assert all(map(torch.equal, grads, grads_0)), name
            assert_same(state, state_0)
        assert any(not torch.equal(seen[name][0][3][key], start[key]) for key in start)


def fit_with_monitor() -> list[int]:
    monitor = LearningRateMonitor("step")
    module = make_module(Groups)
    optimizers: list[int] = []
    configure = module.configure_optimizers

    def noting() -> Any:
        configured = configure()
        optimizers.append(id(configured["optimizer"]))
        return configured

    module.configure_optimizers = noting
    trainer = make_trainer(
        {"optimizer_in_hook": OptimizerInHook(shard=True)}, logger=True, log_every_n_steps=1, callbacks=[monitor]
    )
    trainer.fit(module)
    assert optimizers == [id(trainer.optimizers[0])]
    return [len(values) for values in monitor.lrs.values()] if rank() == 0 else [1]


def test_the_optimizer_is_the_users_object(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for lengths in run_ranks(fit_with_monitor):
        assert lengths
        assert min(lengths) > 0


class Finetuned(Net):
    """Its head alone is the optimizer's at first."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.02)


class Finetuning(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.01)


def test_a_group_that_is_added_later_is_stepped_too() -> None:
    options = {"callbacks": [Finetuning()], "max_epochs": 3, "limit_train_batches": 3}
    assert_like_plain(run_ranks(fit_modes, Finetuned, list(MODES), {}, options), Finetuned)


# ---------------------------------------------------------------------- two phases


class ManyOptimizers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net[:3].parameters(), 0.05, momentum=0.9), torch.optim.Adam(
            self.net[3:].parameters(), 0.01
        )

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer, sign in zip(self.optimizers(), (1, -0.1), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(sign * self.loss(batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)


class Clipped(Groups):
    """Notes the norm that clipping is given: that of all gradients, not of this rank's share."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.hooked.append(str(float(torch.stack([p.grad.norm() for p in self.parameters()]).norm())))


def scaled() -> dict[str, Fitted]:
    fits = {}
    for name, settings in [("plain", None), *TWO_PHASES.items()]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=3)  # the first steps overflow
        fits[name] = fit(Clipped, settings, {}, plugins=[MixedPrecision("16-mixed", "cpu", scaler)], max_epochs=6)
        assert scaler.get_scale() < 2.0**20
    return fits


CLIPPING: list[dict[str, Any]] = [
    {},
    {"gradient_clip_val": 0.1},
    {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
]


@pytest.mark.parametrize("options", CLIPPING)
def test_two_phases_leave_clipping_and_step_hooks_as_they_are(options: dict[str, Any]) -> None:
    assert_like_plain(run_ranks(fit_modes, Clipped, list(TWO_PHASES), {}, options), Clipped)


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step:UserWarning")  # torch's, of steps that overflow
def test_two_phases_leave_a_grad_scaler_as_it_is() -> None:
    assert_like_plain(run_ranks(scaled), Clipped)


def test_two_phases_step_several_optimizers() -> None:
    results = run_ranks(fit_modes, ManyOptimizers, list(TWO_PHASES), {}, {}, world_size=3)
    assert_like_plain(results, ManyOptimizers)


def test_post_local_sgd_goes_with_unsharded_steps() -> None:
    strategy = {"comm_hook": PostLocalSGD(start_local_sgd_iter=3, subgroup_size=1)}
    names = [name for name, settings in MODES.items() if not settings.shard]
    assert_like_plain(run_ranks(fit_modes, Groups, names, strategy, {}), Groups)


class Wrapped(Groups):
    """Uses the optimizer of plain PyTorch, which shares its state by itself."""

    def configure_optimizers(self) -> Any:
        make: Any = OPTIMIZERS["adam"]
        optimizer = ShardedOptimizer(self.parameters(), make.func, **make.keywords)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


class Unwrapped(Groups):
    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS["adam"](self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


def fit_wrapped(folder: str, strategy: str) -> tuple[State, State, list[int]]:
    states = []
    for module_class in (Unwrapped, Wrapped):
        module = make_module(module_class)
        trainer = make_trainer(strategy)
        trainer.fit(module)
        states.append(state_of(module))
    trainer.save_checkpoint(Path(folder, "end.ckpt"))
    saved = torch.load(Path(folder, "end.ckpt"), weights_only=True)["optimizer_states"][0]["state"]
    return states[0], states[1], list(saved)


@pytest.mark.parametrize("strategy", ["ddp_hooks", "ddp"])
def test_a_sharded_optimizer_may_be_returned_under_any_strategy(strategy: str, tmp_path: Path) -> None:
    for plain, wrapped, saved in run_ranks(fit_wrapped, str(tmp_path), strategy):
        assert_same(wrapped, plain)
        assert saved == list(range(8))


class Swaps(Net):
    """Goes on with another optimizer in the second epoch."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.optimizers = [torch.optim.Adam(self.parameters(), lr=0.01)]


def _fit_swapping() -> list[State]:
    states = []
    for settings in (None, *(MODES[kind] for kind in KINDS)):
        module = make_module(Swaps)
        make_trainer({"optimizer_in_hook": settings, **SMALL}, max_epochs=2).fit(module)
        states.append(state_of(module))
    return states


def test_an_optimizer_that_is_replaced_in_mid_fit_takes_over() -> None:
    for plain, *others in run_ranks(_fit_swapping):
        for state in others:
            assert_same(state, plain)
