"""Training under Fabric: that of ``strategy="ddp"`` and of a single process. Several cases share a start of ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from fabric_runs import (
    SCALED,
    STEPS,
    Norm,
    adamw,
    batches,
    close,
    equal,
    make_fabric,
    make_model,
    sgd,
    train,
    train_anew,
)
from lightning.fabric import Fabric
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from trainer_runs import WIDTH, State, rank, state_of

from lightning_ddp_hooks import averaging, hooks, optim

# ---------------------------------------------------------------------- loops


def accumulate(fabric: Fabric, model: Any, optimizer: Any) -> None:
    for number, (x, y) in enumerate(batches(STEPS)):
        last = number % 4 == 3
        with fabric.no_backward_sync(model, enabled=not last):
            fabric.backward(mse_loss(model(x), y) / 4)
        if last:
            optimizer.step()
            optimizer.zero_grad()


def clip(fabric: Fabric, model: Any, optimizer: Any, **how: float) -> None:
    for x, y in batches(STEPS):
        optimizer.zero_grad()
        fabric.backward(mse_loss(model(x), y))
        fabric.clip_gradients(model, optimizer, **how)
        optimizer.step()


def call_backward_of_the_loss(fabric: Fabric, model: Any, optimizer: Any) -> None:
    for x, y in batches(STEPS):
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()


def call_a_method(fabric: Fabric, model: Any, optimizer: Any) -> None:
    model.mark_forward_method("loss")
    for x, y in batches(STEPS):
        optimizer.zero_grad()
        fabric.backward(model.loss(x, y))
        optimizer.step()


def step_with_closures(fabric: Fabric, model: Any, optimizer: Any) -> None:
    for x, y in batches(STEPS):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = mse_loss(model(x), y)
            fabric.backward(loss)
            return loss

        optimizer.step(closure)


def use_autocast(fabric: Fabric, model: Any, optimizer: Any) -> None:
    for x, y in batches(STEPS):
        optimizer.zero_grad()
        with fabric.autocast():
            loss = mse_loss(model(x.float()), y.float())
        fabric.backward(loss)
        optimizer.step()


def evaluate_between(fabric: Fabric, model: Any, optimizer: Any) -> None:
    for x, y in batches(STEPS):
        optimizer.zero_grad()
        fabric.backward(mse_loss(model(x), y))
        model(x)  # with gradients, between backward and step
        optimizer.step()
        with torch.no_grad():
            if rank() == 0:
                model(x)


LOOPS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "plain": (train, {}),
    "adamw": (train, {"make_optimizer": adamw}),
    "buffers": (train, {"model_class": Norm}),
    "accumulation": (accumulate, {}),
    "clipped by norm": (partial(clip, max_norm=0.1), {}),
    "clipped by value": (partial(clip, clip_val=0.01), {}),
    "loss.backward()": (call_backward_of_the_loss, {}),
    "a forward method": (call_a_method, {}),
    "closures": (step_with_closures, {}),
    "evaluation in between": (evaluate_between, {}),
    "bf16-mixed": (use_autocast, {"precision": "bf16-mixed", "dtype": torch.float32}),
    "16-mixed": (use_autocast, {"plugins": SCALED, "dtype": torch.float32}),
    "64-true": (train, {"precision": "64-true", "dtype": torch.float32}),
}


def train_separately(strategy: Any) -> State:
    """Set up module and optimizer one by one."""
    fabric = make_fabric(strategy)
    model = fabric.setup_module(make_model())
    optimizer = fabric.setup_optimizers(sgd(model.parameters()))
    train(fabric, model, optimizer)
    return state_of(model)


def train_compiled(strategy: Any) -> State:
    fabric = make_fabric(strategy)
    model = torch.compile(make_model(), backend="eager")
    model, optimizer = fabric.setup(model, sgd(model.parameters()))
    train(fabric, model, optimizer)
    return state_of(model)


class Gan:
    """A GAN of two models, or of two parts of one, with two optimizers; the generator's step freezes nothing."""

    def __init__(self, strategy: Any, *, one_module: bool = False) -> None:
        torch.manual_seed(rank())
        self.fabric = make_fabric(strategy)
        made = nn.Linear(4, WIDTH).double(), nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        optimizers = [adamw(part.parameters(), betas=(0.0, 0.9)) for part in made]
        if one_module:
            self.whole = Parts(*made)
            self.whole, *self.optimizers = self.fabric.setup(self.whole, *optimizers)
            self.generator, self.critic = partial(self.whole, "generator"), partial(self.whole, "critic")
        else:
            self.generator, first = self.fabric.setup(made[0], optimizers[0])
            self.critic, second = self.fabric.setup(made[1], optimizers[1])
            self.optimizers = [first, second]
        self.made = made
        self.noise = torch.Generator().manual_seed(3)

    def train(self, steps: int = STEPS, start: int = 0) -> State:
        for x, y in batches(steps, start):
            z = torch.randn(8, 4, generator=self.noise, dtype=torch.float64)[rank() : rank() + len(y)]
            if self.one_step(self.optimizers[1], lambda x=x, z=z: self.critics_loss(x, z)):
                self.one_step(self.optimizers[0], lambda z=z: -self.critic(self.generator(z)).mean())
        return {f"{n}.{k}": t for n, part in enumerate(self.made) for k, t in state_of(part).items()}

    def critics_loss(self, x: Tensor, z: Tensor) -> Tensor:
        return self.critic(self.generator(z).detach()).mean() - self.critic(x).mean()

    def one_step(self, optimizer: Any, loss: Callable[[], Tensor]) -> bool:
        optimizer.zero_grad()
        self.fabric.backward(loss())
        optimizer.step()
        return True


class Parts(nn.Module):
    def __init__(self, generator: nn.Module, critic: nn.Module) -> None:
        super().__init__()
        self.generator = generator
        self.critic = critic

    def forward(self, part: str, x: Tensor) -> Tensor:
        return getattr(self, part)(x)


# ---------------------------------------------------------------------- the same as plain "ddp"


def compare_with_ddp() -> tuple[dict[str, bool], State]:
    same = {}
    for name, (loop, options) in LOOPS.items():
        expected = train_anew("ddp", loop=loop, **options)
        for setting in ({}, {"reducer_backend": "python", "gradient_as_bucket_view": False}):
            same[f"{name}, {setting}"] = equal(train_anew(setting, loop=loop, **options), expected)
    plain = train_anew("ddp")
    same["set up separately"] = equal(train_separately({}), plain)
    same["compiled"] = equal(train_compiled({}), plain)
    sharded = {
        "steps in the hook": optim.OptimizerInHook(),
        "shards": optim.OptimizerInHook(shard=True),
        "two phases": optim.OptimizerInHook(shard=True, overlap=False),
    }
    expected = train_anew("ddp", adamw)
    for name, setting in sharded.items():
        same[name] = equal(train_anew({"optimizer_in_hook": setting, "bucket_cap_mb": 0.001}, adamw), expected)
        again = train_anew({"optimizer_in_hook": setting}, loop=accumulate)
        same[f"{name}, accumulation"] = equal(again, train_anew("ddp", loop=accumulate))
        again = train_anew({"optimizer_in_hook": setting}, loop=step_with_closures)
        same[f"{name}, closures"] = equal(again, plain)
    scaled = {"loop": use_autocast, "plugins": SCALED, "dtype": torch.float32}
    again = train_anew({"optimizer_in_hook": sharded["two phases"]}, **scaled)
    same["two phases, 16-mixed"] = equal(again, train_anew("ddp", **scaled))
    clipped = train_anew({"optimizer_in_hook": sharded["two phases"]}, loop=partial(clip, max_norm=0.1))
    same["two phases, clipped"] = equal(clipped, train_anew("ddp", loop=partial(clip, max_norm=0.1)))
    gan = Gan("ddp").train()
    same["GAN"] = equal(Gan({}).train(), gan)
    same["GAN in one module"] = equal(Gan({}, one_module=True).train(), gan)
    return same, plain


@pytest.mark.ranks
@pytest.mark.trainer
def test_all_loops_train_like_plain_ddp_to_the_last_bit_and_like_one_process() -> None:
    alone = train_anew("auto")
    for same, plain in run_ranks(compare_with_ddp):
        assert all(same.values()), [name for name, value in same.items() if not value]
        assert close(plain, alone)


# ---------------------------------------------------------------------- the clock and what it drives


def steps_seen() -> dict[str, Any]:
    found: dict[str, Any] = {}
    fabric = make_fabric()
    model = make_model()
    model, optimizer = fabric.setup(model, sgd(model.parameters()))
    accumulate(fabric, model, optimizer)
    found["windows"] = fabric.strategy.step(model), fabric.strategy.step()

    gan = Gan({})
    gan.train(3)
    gan.one_step(gan.optimizers[1], lambda: gan.critic(torch.ones(1, WIDTH).double()).mean())
    found["two models"] = [gan.fabric.strategy.step(model) for model in (gan.generator, gan.critic)]

    gan = Gan({}, one_module=True)
    gan.train(3)
    found["two optimizers"] = gan.fabric.strategy.step()
    for _ in range(3):  # the first of them opens a step, the others each end one
        gan.one_step(gan.optimizers[1], lambda: gan.critic(torch.ones(1, WIDTH).double()).mean())
    found["one of two optimizers"] = gan.fabric.strategy.step()

    fabric = make_fabric()
    encoder, decoder = (fabric.setup_module(nn.Linear(WIDTH, WIDTH).double()) for _ in range(2))
    optimizer = fabric.setup_optimizers(sgd([*encoder.parameters(), *decoder.parameters()]))
    x = torch.ones(2, WIDTH).double()
    fabric.backward(decoder(encoder(x)).sum())
    optimizer.step()
    found["one optimizer for two"] = [fabric.strategy.step(model) for model in (encoder, decoder)]
    module = encoder.module
    del encoder, model
    found["taken over"] = make_fabric().setup_module(module).module is module  # once it was let go of
    return found


@pytest.mark.ranks
@pytest.mark.trainer
def test_the_clock_counts_steps_of_each_models_own_optimizers() -> None:
    for found in run_ranks(steps_seen):
        assert found["windows"] == (2, 2)
        assert found["two models"] == [3, 4]
        assert found["two optimizers"] == 3
        assert found["one of two optimizers"] == 5
        assert found["one optimizer for two"] == [1, 1]
        assert found["taken over"]


def drive_by_the_clock() -> dict[str, Any]:
    found: dict[str, Any] = {}

    # A hook that is the plain mean up to a step, in accumulation windows.
    late = train_anew({"comm_hook": hooks.PowerSGD(rank=1, start_iter=2)}, loop=accumulate)
    found["hook not begun"] = close(late, train_anew("ddp", loop=accumulate))
    begun = train_anew({"comm_hook": hooks.PowerSGD(rank=1, start_iter=1)}, loop=accumulate)
    found["hook begun"] = not close(begun, late)

    # An averager: gradients until its warm-up ends, then replicas that differ, and are the same after an average.
    fabric = make_fabric({"averager": averaging.PeriodicModelAverager(period=3, warmup_steps=2)})
    model = make_model(Norm)
    model, optimizer = fabric.setup(model, sgd(model.parameters()))
    alike = []
    for step in range(STEPS):
        train(fabric, model, optimizer, 1, step)
        own = torch.cat([p.detach().flatten() for p in model.parameters()])
        alike.append(torch.equal(fabric.broadcast(own), own))
    found["as on rank 0"] = alike
    own = state_of(model)
    with fabric.strategy.averaged_model(model):
        averaged = state_of(model)
    found["back"] = equal(state_of(model), own)
    means = {name: fabric.all_reduce(tensor.double().clone()) for name, tensor in own.items()}
    found["averaged"] = close(averaged, means) and not close(averaged, own)
    fabric.strategy.finish_averaging()
    found["finished"] = close(state_of(model), averaged)

    # An averager that begins at once and averages after each step of SGD is the mean over gradients.
    plain = partial(torch.optim.SGD, lr=0.05)
    each_step = train_anew({"averager": averaging.PeriodicModelAverager(period=1)}, plain)
    found["every step"] = close(each_step, train_anew("ddp", plain))
    return found


@pytest.mark.ranks
@pytest.mark.trainer
def test_hooks_and_averagers_follow_the_clock() -> None:
    first, second = run_ranks(drive_by_the_clock)
    assert second.pop("as on rank 0") == [True, True, True, False, False, True, False, False]
    assert all(first.pop("as on rank 0"))
    assert all(first.values()), first
    assert all(second.values()), second


# ---------------------------------------------------------------------- ranks that differ


CLIPPED = {"clipped": 0.05}


def leave_out_losses() -> dict[str, Any]:
    """Rank 1 has no loss in step 1; no rank has one in step 2."""
    found: dict[str, Any] = {}
    for name, setting in {
        "plain": {},
        "steps in the hook": {"optimizer_in_hook": optim.OptimizerInHook()},
        "clipped": {"detect_nonfinite": True},
    }.items():
        fabric = make_fabric(setting)
        model = make_model()
        model, optimizer = fabric.setup(model, sgd(model.parameters()))
        for step, (x, y) in enumerate(batches(4)):
            optimizer.zero_grad()
            loss = mse_loss(model(x), y)
            if step != 2 and not (step == 1 and rank() == 1):
                fabric.backward(loss)
            if name in CLIPPED and step != 2:
                fabric.clip_gradients(model, optimizer, max_norm=CLIPPED[name])
            optimizer.step()
        found[name] = state_of(model)
    return found


def leave_out_parts(max_norm: float) -> State:
    """Do in one process what the ranks do together."""
    fabric = make_fabric("auto")
    model = make_model()
    model, optimizer = fabric.setup(model, sgd(model.parameters()))
    for step, (x, y) in enumerate(batches(4)):
        if step != 2:  # a step without any loss is none: momentum does not move the weights either
            optimizer.zero_grad()
            for number in range(1 if step == 1 else 2):
                fabric.backward(mse_loss(model(x[number::2]), y[number::2]) / 2)
            fabric.clip_gradients(model, optimizer, max_norm=max_norm)
            optimizer.step()
    return state_of(model)


@pytest.mark.ranks
@pytest.mark.trainer
def test_a_rank_without_a_loss_takes_part_with_zeros() -> None:
    for found in run_ranks(leave_out_losses):
        for name, state in found.items():
            assert close(state, leave_out_parts(CLIPPED.get(name, 1e9))), name
