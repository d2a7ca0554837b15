"""Hooks by torch's contract: ours on torch's DDP, torch's on our reducer, a user's in any form; and wrong results."""

import functools
import random
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hook_tools import Rig
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_hooks import DataParallel
from lightning_ddp_hooks import hooks as ldh_hooks
from lightning_ddp_hooks.hooks import (
    AllReduce,
    BindContext,
    BoundHook,
    Cast,
    CommHook,
    PerParameter,
    Rule,
    Schedule,
    Stage,
    TorchDDPState,
    TorchHook,
    run_on_torch_ddp,
)
from lightning_ddp_hooks.hooks.registry import SHORT_NAMES, resolve_hook

SEVERAL_BUCKETS = 5 * 1024 / 2**20
ONE_BUCKET = 25


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 10))


def train(wrap: Callable[[nn.Module], nn.Module], steps: int = 5) -> Tensor:
    """A short run; returns the weights."""
    module = make_model()
    wrapped = wrap(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for step in range(steps):
        torch.manual_seed(1000 * step + dist.get_rank())
        wrapped(torch.randn(8, 24)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def ours(state: Any, hook: Any, cap_mb: float = SEVERAL_BUCKETS, view: bool = True) -> Callable[[nn.Module], nn.Module]:
    def wrap(module: nn.Module) -> nn.Module:
        wrapped = DataParallel(
            module,
            bucket_cap_mb=cap_mb,
            first_bucket_mb=cap_mb,
            gradient_as_bucket_view=view,
            reducer_backend="python",
        )
        wrapped.register_comm_hook(state, hook)
        return wrapped

    return wrap


def torchs(state: Any = None, hook: Any = None, cap_mb: float = SEVERAL_BUCKETS) -> Callable[[nn.Module], nn.Module]:
    def wrap(module: nn.Module) -> nn.Module:
        wrapped = DistributedDataParallel(module, bucket_cap_mb=cap_mb)
        if hook is not None:
            wrapped.register_comm_hook(state, hook)
        return wrapped

    return wrap


def declared(hook: CommHook, view: bool = True) -> Callable[[nn.Module], nn.Module]:
    return lambda module: DataParallel(
        module,
        comm_hook=hook,
        bucket_cap_mb=SEVERAL_BUCKETS,
        gradient_as_bucket_view=view,
        reducer_backend="python",
    )


# ---------------------------------------------------------------------------------------- drop-in, both ways


def train_everywhere() -> dict[str, Tensor]:
    powersgd = functools.partial(powerSGD_hook.PowerSGDState, None, 2, start_powerSGD_iter=2)
    wrapper = ldh_hooks.fp16_compress_wrapper(ldh_hooks.allreduce_hook)
    return {
        "mean: torch's DDP": train(torchs()),
        "mean: torch's hook here": train(ours(None, default_hooks.allreduce_hook)),
        "mean: torch's hook here, copies": train(ours(None, default_hooks.allreduce_hook, view=False)),
        "mean: our hook there": train(torchs(None, ldh_hooks.allreduce_hook)),
        "mean: our hook here": train(ours(None, ldh_hooks.allreduce_hook)),
        "mean: declared": train(declared(ldh_hooks.Schedule([ldh_hooks.Stage(0, AllReduce())]))),
        "mean: declared, there": train(torchs(TorchDDPState("allreduce"), run_on_torch_ddp)),
        "fp16: torch's hook there": train(torchs(None, default_hooks.fp16_compress_hook)),
        "fp16: torch's hook here": train(ours(None, default_hooks.fp16_compress_hook)),
        "fp16: torch's wrapper here": train(
            ours(None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))
        ),
        "fp16: our hook there": train(torchs(None, ldh_hooks.fp16_compress_hook)),
        "fp16: our wrapper there": train(torchs(None, wrapper)),
        "fp16: our wrapper here": train(ours(None, wrapper, view=False)),
        "fp16: declared": train(declared(Cast(dtype="float16"))),
        "fp16: declared, copies": train(declared(Cast(dtype="float16"), view=False)),
        "bf16: torch's hook here": train(ours(None, default_hooks.bf16_compress_hook)),
        "bf16: our hook here": train(ours(None, ldh_hooks.bf16_compress_hook)),
        "bf16: our wrapper there": train(torchs(None, ldh_hooks.bf16_compress_wrapper(ldh_hooks.allreduce_hook))),
        "bf16: declared": train(declared(Cast(dtype=torch.bfloat16))),
        # with one bucket there, since torch's PowerSGD on gloo aborts with several
        "powersgd: torch's hook there": train(torchs(powersgd(), powerSGD_hook.powerSGD_hook, ONE_BUCKET)),
        "powersgd: torch's hook here": train(ours(powersgd(), powerSGD_hook.powerSGD_hook, ONE_BUCKET)),
    }


@pytest.mark.ranks
def test_a_hook_trains_alike_on_torchs_ddp_and_on_our_reducer() -> None:
    first, second = run_ranks(train_everywhere)
    expected: dict[str, Tensor] = {}
    for name, weights in first.items():
        assert torch.equal(weights, second[name]), name
        kind = name.split(":")[0]
        reference = expected.setdefault(kind, weights)
        # float16 divides before or after the cast, which rounds otherwise only for values below its range
        tolerance = {"mean": 0.0, "powersgd": 1e-6, "fp16": 1e-6, "bf16": 1e-6}[kind]
        torch.testing.assert_close(weights, reference, rtol=0, atol=tolerance, msg=lambda m: f"{name}: {m}")  # noqa: B023
    assert not torch.equal(expected["fp16"], expected["mean"])


def train_torchs_powersgd_in_buckets(cap_mb: float) -> Tensor:
    pause = random.Random(dist.get_rank())
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)

    def hook(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        time.sleep(pause.random() * 0.003)
        return powerSGD_hook.powerSGD_hook(state, bucket)

    return train(ours(state, hook, cap_mb))


@pytest.mark.ranks
@pytest.mark.parametrize(("cap_mb", "world_size"), [(SEVERAL_BUCKETS, 3), (1e-5, 4)])  # three buckets, one each
def test_torchs_powersgd_runs_here_with_several_buckets(cap_mb: float, world_size: int) -> None:
    first, *others = run_ranks(train_torchs_powersgd_in_buckets, cap_mb, world_size=world_size)
    assert all(torch.equal(first, other) for other in others)


# ---------------------------------------------------------------------------------------- 16 bits


def cast_extremes() -> dict[str, Tensor]:
    big = torch.full((40,), 60000.0)  # two of them overflow in float16, their mean does not
    found = {}
    for name, hook in {
        "wire": Cast(dtype="float16"),
        "float32": Cast(dtype="float16", accumulate="float32"),
        "inner": Cast(ldh_hooks.TorchHook(hook=ldh_hooks.allreduce_hook), "float16"),
    }.items():
        found[name] = reduce_once(hook, big)
    many = torch.full((10,), 1.0 + dist.get_rank() * 2**-8)
    found["bf16 wire"] = reduce_once(Cast(), many)
    found["bf16 float32"] = reduce_once(Cast(accumulate="float32"), many)
    return found


def reduce_once(hook: CommHook, gradient: Tensor) -> Tensor:
    layer = nn.Linear(1, gradient.numel(), bias=False)
    wrapped = DataParallel(layer, comm_hook=hook, reducer_backend="python")
    (wrapped(torch.ones(1, 1)) * gradient).sum().backward()
    assert layer.weight.grad is not None
    return layer.weight.grad.flatten().clone()


@pytest.mark.ranks
def test_sixteen_bits_do_not_overflow_in_the_sum() -> None:
    found = run_ranks(cast_extremes, world_size=3)[0]
    for name in ("wire", "float32", "inner"):
        torch.testing.assert_close(found[name], torch.full((40,), 60000.0), rtol=1e-3, atol=0)
    mean = 1 + 2**-8  # of 1, 1 + 2^-8, 1 + 2^-7; bfloat16 has 8 bits
    assert (found["bf16 float32"] - mean).abs().max() <= 2**-8
    assert (found["bf16 wire"] - mean).abs().max() <= 2**-6


def test_a_cast_says_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="'float16' or 'bfloat16', got 'int8'"):
        Cast(dtype="int8")
    with pytest.raises(ValueError, match=r"'float16' or 'bfloat16', got torch\.float32"):
        Cast(dtype=torch.float32)
    with pytest.raises(TypeError, match=r"name or a torch\.dtype, got int"):
        Cast(dtype=16)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'wire' or 'float32', got 'double'"):
        Cast(accumulate="double")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="PowerSGD has sums of its own"):
        Cast("powersgd", accumulate="float32")
    with pytest.raises(ValueError, match="Unknown communication hook 'fp17'"):
        Cast("fp17")


def leave_alone() -> tuple[Tensor, Tensor]:
    gradient = torch.arange(4.0) + dist.get_rank()
    return reduce_once(ldh_hooks.Noop(), gradient), reduce_once_function(gradient)


def reduce_once_function(gradient: Tensor) -> Tensor:
    layer = nn.Linear(1, 4, bias=False)
    wrapped = DistributedDataParallel(layer)
    wrapped.register_comm_hook(None, ldh_hooks.noop_hook)
    (wrapped(torch.ones(1, 1)) * gradient).sum().backward()
    assert layer.weight.grad is not None
    return layer.weight.grad.flatten()


@pytest.mark.ranks
def test_noop_leaves_each_rank_its_own_gradient() -> None:
    for rank, found in enumerate(run_ranks(leave_alone)):
        assert all(torch.equal(gradient, torch.arange(4.0) + rank) for gradient in found)
    assert "headroom" in (ldh_hooks.Noop.__doc__ or "")


# ---------------------------------------------------------------------------------------- forms of hooks and results


class Doubler:
    """A hook as a method and as a callable object."""

    def __call__(self, state: Any, bucket: Any) -> Tensor:
        return bucket.buffer() * 2

    def method(self, state: Any, bucket: Any) -> Tensor:
        return bucket.buffer() * 2


class Lazy:
    """A future by another name."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def value(self) -> Any:
        return self._value


def replace_buffer(_: Any, bucket: Any) -> torch.futures.Future[Tensor]:
    bucket.set_buffer(bucket.buffer() * 2)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def double_by(factor: float, _: Any, bucket: Any) -> Tensor:
    return bucket.buffer() * factor


def in_a_list(_: Any, bucket: Any) -> Any:
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    future.set_result([bucket.buffer() * 2])
    return future


def as_work(_: Any, bucket: Any) -> Any:
    return dist.all_reduce(bucket.buffer(), async_op=True)  # both ranks have the same gradient: twice it


FORMS: dict[str, Any] = {
    "lambda": lambda _, bucket: bucket.buffer() * 2,
    "partial": functools.partial(double_by, 2.0),
    "callable object": Doubler(),
    "method": Doubler().method,
    "value() only": lambda _, bucket: Lazy(bucket.buffer() * 2),
    "future of a list": in_a_list,
    "work": as_work,
    "float64": lambda _, bucket: bucket.buffer().double() * 2,
    "in its shape": lambda _, bucket: (bucket.buffer() * 2).view(2, -1),
    "set_buffer": replace_buffer,
}


def use_each_form(view: bool) -> dict[str, Tensor]:
    found = {}
    for name, hook in FORMS.items():
        layer = nn.Linear(1, 4, bias=False)
        wrapped = DataParallel(layer, gradient_as_bucket_view=view, reducer_backend="python")
        wrapped.register_comm_hook(None, hook)
        for _ in range(2):
            layer.zero_grad()
            (wrapped(torch.ones(1, 1)) * torch.arange(4.0)).sum().backward()
        assert layer.weight.grad is not None
        found[name] = layer.weight.grad.flatten().clone()
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("view", [True, False])
def test_hooks_and_results_may_have_any_form(view: bool) -> None:
    for name, gradient in run_ranks(use_each_form, view)[0].items():
        assert torch.equal(gradient, torch.arange(4.0) * 2), name


def failing_future(_: Any, bucket: Any) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_exception(ValueError("the network is gone"))
    return future


def nothing_hook(state: Any, bucket: Any) -> None:
    return None


def text_hook(state: Any, bucket: Any) -> str:
    return "done"


def long_hook(state: Any, bucket: Any) -> Tensor:
    return torch.zeros(bucket.buffer().numel() + 1)


def long_future_hook(state: Any, bucket: Any) -> Any:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(torch.zeros(3))
    return future


WRONG = {
    nothing_hook: r"nothing_hook returned None for bucket 0 \(.*2\.weight.*\); expected a tensor of 50 elements",
    text_hook: "text_hook returned a str for bucket 0",
    long_hook: "long_hook returned a tensor of 51 elements for bucket 0 .*expected a tensor of 50 elements",
    long_future_hook: "long_future_hook returned a tensor of 3 elements for bucket 0",
    failing_future: "failing_future failed on bucket 0 .*the network is gone",
}


def get_wrong_results() -> dict[str, tuple[str, bool]]:
    found = {}
    for hook in WRONG:
        module = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 2))
        wrapped = DataParallel(module, reducer_backend="python")
        wrapped.register_comm_hook(None, hook)
        try:
            wrapped(torch.ones(1, 5)).sum().backward()
            found[hook.__name__] = ("no error", False)
        except RuntimeError as error:
            found[hook.__name__] = (str(error), True)
    return found


@pytest.mark.ranks
def test_a_wrong_result_is_an_error_that_names_hook_bucket_and_parameters() -> None:
    for found in run_ranks(get_wrong_results):
        for hook, message in WRONG.items():
            text, raised = found[hook.__name__]
            assert raised
            assert re.search(message, text), text


class ReturnsTensor(BoundHook, CommHook):
    """Written as torch's hooks are, and not as a generator."""

    def bind(self, context: BindContext) -> BoundHook:
        return self

    def reduce(self, bucket: Any) -> Any:
        return bucket.buffer().div_(bucket.divisor)


class ReturnsNothing(ReturnsTensor):
    def reduce(self, bucket: Any) -> Any:
        dist.all_reduce(bucket.buffer().div_(bucket.divisor))


def reduce_without_yield() -> list[str]:
    texts = []
    for hook in (ReturnsTensor(), ReturnsNothing()):
        split = PerParameter([Rule(None, ndim=2), Rule(hook, min_numel=1)])
        for outer in (hook, Cast(hook), Schedule([Stage(0, hook)]), PerParameter([Rule(hook, min_numel=1)]), split):
            on_torch = torchs(TorchDDPState(outer), run_on_torch_ddp)
            for wrap in (declared(outer), on_torch) if outer is split else (declared(outer),):
                with pytest.raises(TypeError) as caught:
                    train(wrap, steps=1)
                texts.append(str(caught.value))
    return texts


@pytest.mark.ranks
def test_a_reduce_that_is_no_generator_is_an_error_that_names_the_hook_and_what_to_do() -> None:
    for texts in run_ranks(reduce_without_yield):
        expected = ["ReturnsTensor.reduce returned a Tensor"] * 6 + ["ReturnsNothing.reduce returned None"] * 6
        for text, begin in zip(texts, expected, strict=True):
            assert text.startswith(f"{begin}; expected a generator, on every rank alike: `yield` a request")
            assert "yield requests.AllReduce(tensor)" in text
            assert "`comm_hook=(state, hook)`" in text


def register_badly() -> list[str]:
    texts = []
    wrapped = DataParallel(nn.Linear(2, 2), reducer_backend="python")
    for state, hook in ((None, 5), (lambda s, b: b, 5)):
        with pytest.raises(TypeError) as caught:
            wrapped.register_comm_hook(state, hook)
        texts.append(str(caught.value))
    wrapped.register_comm_hook(None, ldh_hooks.allreduce_hook)
    with pytest.raises(RuntimeError) as twice:
        wrapped.register_comm_hook(None, ldh_hooks.allreduce_hook)
    texts.append(str(twice.value))
    wrapped = DataParallel(nn.Linear(2, 2), reducer_backend="python")
    wrapped(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError) as late:
        wrapped.register_comm_hook(None, ldh_hooks.allreduce_hook)
    return [*texts, str(late.value)]


@pytest.mark.ranks
def test_a_hook_is_registered_once_and_in_time() -> None:
    not_callable, swapped, twice, late = run_ranks(register_badly)[0]
    assert "Expected a callable hook(state, bucket), got int" in not_callable
    assert "the callable comes second" in swapped
    assert "only once" in twice
    assert "before the first backward" in late


def test_every_short_name_gives_a_hook_and_a_wrong_one_lists_them() -> None:
    for name in SHORT_NAMES:
        hook = resolve_hook(name)
        assert (hook is None) == (name == "allreduce")
        assert hook is None or isinstance(hook, CommHook)
    expected = "allreduce batched_powersgd bf16 fp16 fp8 int8 noop onebit post_local_sgd powersgd quantize_per_channel"
    assert set(expected.split()) <= set(SHORT_NAMES)
    with pytest.raises(ValueError, match=r"'powersdg'; known names: allreduce, .*powersgd"):
        resolve_hook("powersdg")


def divide_by_something_else() -> dict[str, Tensor]:
    hooks: dict[str, CommHook] = {
        "torch's": TorchHook(hook=default_hooks.allreduce_hook),
        "torch's, in our wrapper": TorchHook(hook=ldh_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
        "ours": TorchHook(hook=ldh_hooks.allreduce_hook),
        "ours, in our wrapper": TorchHook(hook=ldh_hooks.fp16_compress_wrapper(ldh_hooks.allreduce_hook)),
        "a user's that reads it": TorchHook(hook=sum_by_divisor),
        "a user's that does not": TorchHook(hook=sum_by_world_size),
        "partials": TorchHook(hook=functools.partial(ldh_hooks.fp16_compress_hook)),
        "a lambda around ours": TorchHook(hook=lambda state, bucket: ldh_hooks.allreduce_hook(state, bucket)),
        "cast": Cast((None, sum_by_divisor), "float16"),
        "by parameter": ldh_hooks.PerParameter([], default=(None, sum_by_divisor)),
        "declared": Cast("fp16"),
        "powersgd": ldh_hooks.PowerSGD(rank=1, start_iter=0),
    }
    return {name: Rig(hook, [(4, 8)]).step([torch.ones(4, 8)], divisor=1.0)[0] for name, hook in hooks.items()}


def sum_by_world_size(_: Any, bucket: Any) -> Any:
    return dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)


def sum_by_divisor(_: Any, bucket: Any) -> Any:
    return dist.all_reduce(bucket.buffer().div_(bucket.divisor), async_op=True)


@pytest.mark.ranks
def test_every_hook_divides_by_what_the_bucket_says() -> None:
    for name, gradient in run_ranks(divide_by_something_else)[0].items():
        torch.testing.assert_close(gradient, torch.full((32,), 2.0), msg=lambda m: f"{name}: {m}")  # noqa: B023


def grad_mode_between_phases() -> list[bool]:
    layer = nn.Linear(8, 8)
    wrapped = DataParallel(layer, comm_hook=ldh_hooks.PowerSGD(start_iter=0), reducer_backend="python")
    seen = []
    for _ in range(2):
        wrapped(torch.ones(1, 8)).sum().backward()
        seen.append(torch.is_grad_enabled())
    return seen


@pytest.mark.ranks
def test_a_hook_leaves_the_grad_mode_alone() -> None:
    assert run_ranks(grad_mode_between_phases)[0] == [True, True]


def test_the_declared_mean_needs_no_hook() -> None:
    assert resolve_hook(AllReduce()) is None
