"""What goes wrong goes wrong on every rank, by name, and leaves no rank waiting."""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from odd_models import Branches, Checkpointed, Mlp, data
from ranks import run_ranks
from torch import nn

import lightning_ddp_hooks as ldh
from lightning_ddp_hooks.reducer.config import ReducerConfig

pytestmark = pytest.mark.ranks


@contextlib.contextmanager
def caught(texts: list[str]) -> Iterator[None]:
    try:
        yield
        texts.append("no error")
    except (RuntimeError, ValueError, TypeError) as error:
        texts.append(f"{type(error).__name__}: {error}")


# ---------------------------------------------------------------------- construction


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"bucket_cap_mb": 0}, ValueError, "bucket_cap_mb.*above 0"),
        ({"bucket_cap_mb": float("nan")}, ValueError, "finite"),
        ({"bucket_cap_mb": "25"}, TypeError, "number of MiB"),
        ({"first_bucket_mb": -1}, ValueError, "first_bucket_mb"),
        ({"first_bucket_mb": True}, TypeError, "first_bucket_mb"),
        ({"find_unused_parameters": 1}, TypeError, "True or False"),
        ({"static_graph": True, "find_unused_parameters": True}, ValueError, "set one of them"),
        ({"reducer_backend": "cpp"}, ValueError, "'auto', 'native', 'python'"),
    ],
)
def test_bad_settings_raise_where_they_are_written(settings: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ReducerConfig(**settings)


def test_without_a_process_group_the_error_says_what_to_call() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        ldh.DataParallel(nn.Linear(1, 1))


def _construct() -> list[str]:
    rank = dist.get_rank()
    texts: list[str] = []
    attempts: list[Callable[[], Any]] = [
        lambda: ldh.DataParallel(nn.Linear(2, 2 + rank)),
        lambda: ldh.DataParallel(nn.Linear(2, 2).to(torch.float64 if rank else torch.float32)),
        lambda: ldh.DataParallel(nn.Linear(2, 2, bias=rank == 0)),
        lambda: ldh.DataParallel(nn.Linear(2, 2).requires_grad_(rank == 0)),
        lambda: ldh.DataParallel(nn.Linear(2, 2), bucket_cap_mb=1 + rank),
        lambda: ldh.DataParallel("model"),  # type: ignore[arg-type]
        lambda: ldh.DataParallel(nn.Linear(2, 2), process_group="world"),  # type: ignore[arg-type]
        lambda: ldh.DataParallel(nn.LazyLinear(2)),
        lambda: ldh.DataParallel(nn.Linear(2, 2), comm_hook="powersdg"),
        lambda: ldh.DataParallel(nn.Linear(2, 2), comm_hook=print),  # type: ignore[arg-type]
        lambda: ldh.DataParallel(nn.Linear(2, 2), comm_hook=(print, None)),
    ]
    for attempt in attempts:
        with caught(texts):
            attempt()
    return texts


def test_ranks_that_were_given_different_models_all_raise_by_name() -> None:
    wanted = [
        r"weight: shape \(2, 2\).*rank 1: weight: shape \(3, 2\)",
        r"torch.float32.*torch.float64",
        r"rank 0: bias.*rank 1: argument|rank 0: bias.*rank 1: nothing",
        "requires_grad=True.*requires_grad=False",
        "bucket_cap_mb=1.*bucket_cap_mb=2",
        r"TypeError: Expected a torch.nn.Module, got str",
        r"TypeError: Expected a torch.distributed.ProcessGroup",
        r"ValueError: Parameter 'weight' of a lazy module",
        r"ValueError: Unknown communication hook 'powersdg'; known names: .*allreduce",
        r"TypeError: .*\(None, function\)",
        r"TypeError: .*callable comes second",
    ]
    for texts in run_ranks(_construct):
        for text, pattern in zip(texts, wanted, strict=True):
            assert re.search(pattern, text), f"{pattern!r} not in {text!r}"


def _nothing_to_train() -> int:
    model = ldh.DataParallel(nn.Linear(2, 2).requires_grad_(False))
    with model.no_sync():
        out = model(torch.ones(1, 2).requires_grad_())
    out.sum().backward()
    return int(model.stats()["num_parameter_tensors"])  # type: ignore[call-overload]


def _wrap_twice() -> str:
    module = nn.Linear(2, 1)
    wrapper = ldh.DataParallel(module)
    with pytest.raises(ValueError, match="reduced already") as raised:
        ldh.DataParallel(nn.Sequential(module))
    wrapper.detach()
    again = ldh.DataParallel(module)
    again(torch.ones(1, 2)).sum().backward()
    again.detach()
    return str(raised.value)


@pytest.mark.ranks
def test_a_module_is_wrapped_once_at_a_time() -> None:
    for text in run_ranks(_wrap_twice):
        assert text.startswith("Parameter '0.weight' is reduced already")


def test_a_model_without_trainable_parameters_works() -> None:
    assert run_ranks(_nothing_to_train) == [0, 0]


# ---------------------------------------------------------------------- missing gradients


def _unused(used: list[list[int]], settings: dict[str, Any]) -> list[str]:
    """Run steps in which this rank uses the given heads; the last step is a good one again."""
    model = ldh.DataParallel(Branches(2), bucket_cap_mb=0.0001, first_bucket_mb=0.0001, **settings)
    texts: list[str] = []
    for step, heads in enumerate([used[0], used[1 + dist.get_rank()], [0, 1]]):
        model.zero_grad()
        with caught(texts):
            model(data(0, step, 4, 8), heads).backward()
    return texts


@pytest.mark.parametrize("first", [[0, 1], [0]], ids=["after a good step", "at once"])
def test_a_parameter_without_gradient_raises_on_every_rank_in_the_same_backward(first: list[int]) -> None:
    for texts in run_ranks(_unused, [first, [0, 1], [0]], {}):
        bad = texts[1] if first == [0, 1] else texts[0]
        assert "heads.1.weight" in bad
        assert "find_unused_parameters=True" in bad
        assert '`strategy="ddp_hooks_find_unused_parameters_true"`' in bad
        if first == [0, 1]:
            assert "on rank 1" in bad
            assert texts[0] == "no error"
        assert texts[2] == "no error", "a backward after the error works again"


def test_a_static_graph_that_changes_raises() -> None:
    for texts in run_ranks(_unused, [[0], [0, 1], [0, 1]], {"static_graph": True}):
        assert texts[0] == "no error"
        assert "heads.1.weight" in texts[1]
        assert "static_graph" in texts[1]


def _freeze_on_one_rank() -> list[str]:
    module = Mlp()
    model = ldh.DataParallel(module)
    texts: list[str] = []
    for step in range(2):
        module[0].requires_grad_(step == 0 or dist.get_rank() == 0)
        model.zero_grad()
        with caught(texts):
            model(data(0, step, 4, 8)).sum().backward()
    return texts


def test_freezing_on_one_rank_only_raises_on_all() -> None:
    for texts in run_ranks(_freeze_on_one_rank):
        assert texts[0] == "no error"
        assert "'0.weight' requires a gradient on rank 0 but not on rank 1" in texts[1]


# ---------------------------------------------------------------------- backwards that cannot work


def _create_graph() -> list[str]:
    model = ldh.DataParallel(Mlp())
    texts: list[str] = []
    for create in (True, False):
        with caught(texts):
            model(data(0, 0, 4, 8)).sum().backward(create_graph=create)
    return texts


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_create_graph_raises_and_says_what_to_do_instead() -> None:
    for texts in run_ranks(_create_graph):
        assert "torch.autograd.grad" in texts[0]
        assert texts[1] == "no error"


class _Varying(Checkpointed):
    times = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = torch.utils.checkpoint.checkpoint(self.block, self.first(x), use_reentrant=True)
        return self.last(x)


def _varying_reentrant() -> list[str]:
    module = _Varying(True)
    model = ldh.DataParallel(module, bucket_cap_mb=1e-6, first_bucket_mb=1e-6)
    texts: list[str] = []
    for times in (1, 1, 2):
        module.times = times
        model.zero_grad()
        with caught(texts):
            model(data(0, 0, 4, 8)).sum().backward()
    return texts


def test_a_reentrant_block_used_more_often_than_before_raises() -> None:
    for texts in run_ranks(_varying_reentrant):
        assert texts[:2] == ["no error", "no error"]
        assert "use_reentrant=False" in texts[2]


class _Bang(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("bang")


def _exception_in_backward(position: int) -> list[str]:
    module = Mlp()
    model = ldh.DataParallel(module, bucket_cap_mb=1e-6, first_bucket_mb=1e-6)
    texts: list[str] = []
    for step in range(4):
        model.zero_grad()
        x = data(0, step, 4, 8)
        with caught(texts):
            y = model(x)
            if step == 2:
                y = y + (_Bang.apply(module[0].weight) if position else _Bang.apply(y)).sum()
            y.sum().backward()
    return texts


@pytest.mark.parametrize("position", [0, 1], ids=["before the first gradient", "among the gradients"])
def test_after_an_exception_in_the_backward_the_next_one_works(position: int) -> None:
    for texts in run_ranks(_exception_in_backward, position):
        assert texts[2] == "RuntimeError: bang"
        assert texts[3] == "no error"


class _RaisesOnce:
    """Sums, but for one bucket when it is told to."""

    bad_bucket: int | None = None

    def __call__(self, state: object, bucket: Any) -> Any:
        if bucket.index() == self.bad_bucket:
            self.bad_bucket = None
            raise ValueError("a bad bucket")
        return dist.all_reduce(bucket.buffer(), async_op=True)


def _hook_that_raises(backend: Any, one_at_a_time: bool) -> list[tuple[int, int, int, str]]:
    places = []
    for good_steps, bucket in ((0, 0), (1, 0), (1, 2), (1, 5)):  # the first step has one bucket, sent at its end
        hook = _RaisesOnce()
        declared = ldh.hooks.TorchHook(hook=hook, one_at_a_time=one_at_a_time)
        model = ldh.DataParallel(
            Mlp(), comm_hook=declared, bucket_cap_mb=1e-6, first_bucket_mb=1e-6, reducer_backend=backend
        )
        for _ in range(good_steps):
            model(data(0, 0, 4, 8)).sum().backward()
        hook.bad_bucket = bucket
        with pytest.raises(ValueError, match="a bad bucket"):
            model(data(0, 0, 4, 8)).sum().backward()
        if model.reducer.aborted_at is not None:  # in the end of the backward, where slow buckets are waited for
            places.append(model.reducer.aborted_at)
        else:  # the reducer hears of it in the next backward; of what was sent a function may remember anything
            places.append((*model.reducer.progress(), ""))
            with pytest.raises(RuntimeError, match="_RaisesOnce remembers of them cannot be taken back"):
                model(data(0, 0, 4, 8))
    return places


@pytest.mark.parametrize(("backend", "one_at_a_time"), [("python", False), ("native", False), ("native", True)])
def test_a_bucket_whose_hook_raised_does_not_count_as_sent(backend: str, one_at_a_time: bool) -> None:
    (places,) = run_ranks(_hook_that_raises, backend, one_at_a_time, world_size=1)
    assert [place[:3] for place in places] == [(0, 0, 1), (1, 0, 6), (1, 2, 6), (1, 5, 6)]
