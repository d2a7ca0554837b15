"""Compiled models: buckets are launched between the graphs of a backward, in whatever order one compiles and wraps."""

import contextlib
import copy
import io
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from backends import backend_fixture  # noqa: F401
from compiled_graphs import LAYERS, WIDTH, Layer, Layers, launches_inside, note_sent
from ranks import run_ranks
from torch import Tensor, nn

from lightning_ddp_hooks import DataParallel

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.timeout(300),
    # Of torch's compiler's own doing.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.* is deprecated"),
]

Forward = Callable[[Tensor], Tensor]
ONE_EACH = list(range(LAYERS))  # buckets sent as the graphs' backwards begin, if each layer is a graph and a bucket

compiled: Any = torch.compile(backend="aot_eager")
compiled_anyhow: Any = torch.compile(backend="aot_eager", dynamic=True)


class Pair:
    """A model whose forward is compiled, and its twin that is not; both are trained by this package."""

    def __init__(self, model: nn.Module, backend: str, **options: Any) -> None:
        options = {"bucket_cap_mb": 1, "reducer_backend": backend, **options}
        self.model, self.options = model, options
        self.twin = DataParallel(copy.deepcopy(model), **options)
        self.wrapped: DataParallel | None = None

    def wrap(self, model: Any) -> DataParallel:
        self.wrapped = DataParallel(model, **self.options)
        return self.wrapped

    def step(self, forward: Forward, samples: int = 4) -> list[int]:
        """Run a step of both; return how many buckets were sent as the backward of each graph began."""
        assert self.wrapped is not None
        sent: list[int] = []
        x = torch.randn(samples, WIDTH) + dist.get_rank()
        loss = forward(x).square().mean()
        note_sent(loss, self.wrapped.reducer.progress, sent)
        loss.backward()
        self.twin(x).square().mean().backward()
        for param, other in zip(self.model.parameters(), self.twin.parameters(), strict=True):
            assert (param.grad is None) == (other.grad is None)
            assert param.grad is None or torch.equal(param.grad, other.grad)
            param.grad = other.grad = None
        return sent


def layers() -> nn.Module:
    torch.manual_seed(0)
    return Layers()


def sequence() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


# ---------------------------------------------------------------------- in whatever order


def compile_then_wrap(pair: Pair) -> Forward:
    return pair.wrap(compiled(pair.model))


def wrap_then_compile(pair: Pair) -> Forward:
    return compiled(pair.wrap(pair.model))  # type: ignore[no-any-return]


def compile_in_place_then_wrap(pair: Pair) -> Forward:
    pair.model.compile(backend="aot_eager")
    return pair.wrap(pair.model)


def wrap_then_compile_in_place(pair: Pair) -> Forward:
    wrapped = pair.wrap(pair.model)
    pair.model.compile(backend="aot_eager")
    return wrapped


def compile_the_wrapper_in_place(pair: Pair) -> Forward:
    wrapped = pair.wrap(pair.model)
    wrapped.compile(backend="aot_eager")
    return wrapped


def compile_each_layer(pair: Pair) -> Forward:
    for child in pair.model.modules():
        if isinstance(child, Layer):
            child.compile(backend="aot_eager")
    return pair.wrap(pair.model)


def train_then_wrap(pair: Pair) -> Forward:
    forward = compiled(pair.model)
    forward(torch.randn(4, WIDTH)).sum().backward()
    pair.model.zero_grad()
    return pair.wrap(forward)


def train_in_place_then_wrap(pair: Pair) -> Forward:
    pair.model.compile(backend="aot_eager")
    pair.model(torch.randn(4, WIDTH)).sum().backward()
    pair.model.zero_grad()
    return pair.wrap(pair.model)


def compile_a_function_of_the_wrapped(pair: Pair) -> Forward:
    wrapped = pair.wrap(pair.model)

    def forward(x: Tensor) -> Tensor:
        return wrapped(x)  # type: ignore[no-any-return]

    return compiled(forward)  # type: ignore[no-any-return]


WAYS = [
    compile_then_wrap,
    wrap_then_compile,
    compile_the_wrapper_in_place,
    train_then_wrap,
    compile_a_function_of_the_wrapped,
]
IN_PLACE = [  # torch compiles no module of its own in place
    compile_in_place_then_wrap,
    wrap_then_compile_in_place,
    compile_each_layer,
    train_in_place_then_wrap,
]


def sent_in_each_way(backend: str) -> tuple[dict[str, list[int]], str]:
    found: dict[str, list[int]] = {}
    said = io.StringIO()
    logging.getLogger("torch").addHandler(handler := logging.StreamHandler(said))
    with contextlib.redirect_stderr(said):
        for make, ways in ((layers, WAYS + IN_PLACE), (sequence, WAYS)):
            for way in ways:
                torch.compiler.reset()
                pair = Pair(make(), backend)
                forward = way(pair)
                for _ in range(2):
                    found[f"{way.__name__}, {make.__name__}"] = pair.step(forward)
    logging.getLogger("torch").removeHandler(handler)
    return found, said.getvalue()


def test_buckets_are_launched_between_the_graphs(backend: str) -> None:
    for found, said in run_ranks(sent_in_each_way, backend, timeout=200):
        assert found == dict.fromkeys(found, ONE_EACH)
        assert len(found) == 2 * len(WAYS) + len(IN_PLACE)
        assert said == ""


# ---------------------------------------------------------------------- graphs and buckets that change


def sent_while_things_change(backend: str) -> dict[str, list[list[int]]]:
    def run(pair: Pair, forward: Forward, samples: Sequence[int] = (4, 4)) -> list[list[int]]:
        return [pair.step(forward, count) for count in samples]

    found = {}
    pair = Pair(layers(), backend)
    forward = pair.wrap(compiled(pair.model))
    found["shapes that change"] = run(pair, forward, [4, 4, 2, 6, 3, 4])[1:]
    for trainable in (False, True):
        for model in (pair.model, pair.twin):
            next(model.parameters()).requires_grad_(trainable)
        found["unfrozen" if trainable else "frozen"] = run(pair, forward, [4, 4, 4])[-1:]
    with forward.no_sync(), pair.twin.no_sync():
        for model in (forward, pair.twin):
            model(torch.ones(4, WIDTH)).sum().backward()
    found["accumulated"] = run(pair, forward, [4])

    torch.compiler.reset()
    pair = Pair(layers(), backend)
    found["dynamic shapes"] = run(pair, pair.wrap(compiled_anyhow(pair.model)), [4, 2, 6])[1:]
    torch.compiler.reset()
    pair = Pair(layers(), backend, bucket_cap_mb=0.25)
    found["small buckets"] = run(pair, pair.wrap(compiled(pair.model)))[1:]
    torch.compiler.reset()
    pair = Pair(layers(), backend, bucket_cap_mb="auto")
    found["measured size"] = run(pair, pair.wrap(compiled(pair.model)), [4, 4, 4])[1:]
    torch.compiler.reset()
    pair = Pair(layers(), backend, find_unused_parameters=True)
    found["unused allowed"] = run(pair, pair.wrap(compiled(pair.model)))[1:]
    return found


def test_launches_stay_between_the_graphs_as_they_change(backend: str) -> None:
    for found in run_ranks(sent_while_things_change, backend, timeout=200):
        sizes = found.pop("measured size")
        assert all(sent == sorted(sent) and len(sent) > 1 for sent in sizes)
        assert found.pop("frozen") == [ONE_EACH]
        assert {name: sent for name, sent in found.items() if any(one != ONE_EACH for one in sent)} == {}


def sent_under_inductor() -> tuple[list[int], float]:
    torch.manual_seed(0)
    model = layers()
    wrapped = DataParallel(torch.compile(model), bucket_cap_mb=1)
    other = nn.parallel.DistributedDataParallel(torch.compile(copy.deepcopy(model)), bucket_cap_mb=1)
    for _ in range(2):
        wrapped.zero_grad()
        other.zero_grad()
        sent: list[int] = []
        x = torch.randn(4, WIDTH) + dist.get_rank()
        loss = wrapped(x).square().mean()
        note_sent(loss, wrapped.reducer.progress, sent)
        loss.backward()
        other(x).square().mean().backward()
    pairs = zip(wrapped.parameters(), other.parameters(), strict=True)
    return sent, max(float((ours.grad - theirs.grad).abs().max()) for ours, theirs in pairs)


def test_inductor_ends_with_the_gradients_of_torchs_ddp() -> None:
    for sent, difference in run_ranks(sent_under_inductor, timeout=200):
        assert launches_inside(sent)
        assert difference == 0


# ---------------------------------------------------------------------- what is not split, and what is refused


def train_in_one_function(backend: str) -> list[int]:
    calls = []

    def hook(state: None, bucket: Any) -> Tensor:
        calls.append(bucket.index())
        return bucket.buffer() / 2  # type: ignore[no-any-return]

    pair = Pair(layers(), backend)
    wrapped = pair.wrap(pair.model)
    wrapped.register_comm_hook(None, hook)

    @compiled  # type: ignore[untyped-decorator]
    def step(x: Tensor) -> None:
        wrapped(x).square().mean().backward()

    for _ in range(3):
        step(torch.ones(4, WIDTH))
        wrapped.zero_grad()
    assert hook.__code__ not in torch._dynamo.convert_frame.input_codes
    return calls


def test_a_compiled_step_leaves_hooks_as_they_are(backend: str) -> None:
    (calls, _) = run_ranks(train_in_one_function, backend)
    assert len(calls) > 3


def graphs_alone(backend: str) -> tuple[int, int]:
    sizes = []
    for grad in (True, False):
        torch.compiler.reset()
        wrapped = DataParallel(layers(), bucket_cap_mb=1, reducer_backend=backend)  # type: ignore[arg-type]
        torch._dynamo.utils.counters.clear()
        with torch.set_grad_enabled(grad):
            compiled(wrapped)(torch.ones(4, WIDTH))
        sizes.append(torch._dynamo.utils.counters["aot_autograd"]["total"])
    return sizes[0], sizes[1]


def test_graphs_are_split_only_where_gradients_are_sent() -> None:
    assert run_ranks(graphs_alone, "python", world_size=1) == [(1, 1)]
    assert run_ranks(graphs_alone, "python") == [(LAYERS, 1)] * 2


def with_compiled_autograd(backend: str) -> list[str]:
    torch._dynamo.config.compiled_autograd = True
    with pytest.raises(RuntimeError) as at_setup:
        DataParallel(layers(), reducer_backend=backend)  # type: ignore[arg-type]
    torch._dynamo.config.compiled_autograd = False
    wrapped = DataParallel(compiled(layers()), reducer_backend=backend)  # type: ignore[arg-type]
    loss = wrapped(torch.ones(4, WIDTH)).square().mean()
    under = torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))
    with under, pytest.raises(RuntimeError) as in_backward:
        loss.backward()
    return [str(at_setup.value), str(in_backward.value)]


def test_compiled_autograd_is_refused(backend: str) -> None:
    for at_setup, in_backward in run_ranks(with_compiled_autograd, backend):
        assert at_setup.startswith("Compiled autograd cannot reduce gradients")
        assert "\n" not in at_setup
        if backend == "python":
            assert in_backward == at_setup
        else:  # to torch, which cannot run hooks in C++
            assert "[Note: Compiled Autograd]" in in_backward
