"""Conjugated and negated by a flag: parameters, buffers and gradients whose memory does not hold their values."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from backends import backend_fixture  # noqa: F401
from ranks import run_ranks
from torch import Tensor, nn

import lightning_ddp_hooks as ldh
from lightning_ddp_hooks import comm
from lightning_ddp_hooks.averaging.flat import FlatMean
from lightning_ddp_hooks.health.checks import NonfiniteGuard
from lightning_ddp_hooks.reducer.real_values import as_real, is_lazy, write_real

LAZY = {
    "conjugated": lambda: torch.randn(5, 4, dtype=torch.complex128).conj(),
    "conjugated, transposed": lambda: torch.randn(5, 4, dtype=torch.complex64).mH,
    "negated": lambda: torch.randn(6, dtype=torch.float64)._neg_view(),
    "imaginary part": lambda: torch.randn(7, dtype=torch.complex64).conj().imag,
    "both": lambda: torch.randn(3, dtype=torch.complex64).conj()._neg_view(),
    "plain": lambda: torch.randn(3, dtype=torch.complex64),
}


@pytest.mark.parametrize("kind", LAZY)
def test_real_values_are_what_the_tensor_says_and_can_be_written(kind: str) -> None:
    tensor = LAZY[kind]()
    assert is_lazy(tensor) == (kind != "plain")
    real = as_real(tensor)
    assert torch.equal(torch.view_as_complex(real) if tensor.is_complex() else real, tensor)
    wanted = torch.randn_like(real)
    flagged = is_lazy(tensor)
    write_real([tensor], [wanted])
    assert torch.equal(as_real(tensor), wanted)
    assert is_lazy(tensor) == flagged


class _LazyBackward(torch.autograd.Function):
    """Hands on a gradient as a lazy view of the right values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if gradient.is_complex():
            return gradient.resolve_conj().conj().resolve_conj().conj()
        return (-gradient)._neg_view()


class _Net(nn.Module):
    def __init__(self, lazy_params: bool) -> None:
        super().__init__()
        torch.manual_seed(5 + dist.get_rank())  # rank 0's are broadcast
        self.plain = nn.Parameter(torch.randn(40, 500, dtype=torch.complex64))  # large: copied as it comes
        self.small = nn.Parameter(torch.randn(4, 5, dtype=torch.complex64))
        self.real = nn.Parameter(torch.randn(5))
        if lazy_params:
            self.conjugated = nn.Parameter(torch.randn(4, 5, dtype=torch.complex64).conj())
            self.negated = nn.Parameter(torch.randn(5)._neg_view())
        for name, make in LAZY.items():
            self.register_buffer(name.split(",")[0].replace(" ", "_") + "_buffer", make())

    def forward(self, x: Tensor) -> Tensor:
        real = _LazyBackward.apply(self.real)
        total = (self.plain.conj() * x[0]).abs().square().sum() + (self.small.conj() * x[1]).abs().square().sum()
        total = total + (_LazyBackward.apply(self.small) * real * x[1]).abs().sum()
        if hasattr(self, "conjugated"):
            total = total + (self.conjugated * self.negated * x[1]).abs().square().sum()
        return total


def _train(backend: str, settings: dict[str, Any]) -> tuple[dict[str, list[Tensor]], dict[str, Tensor], bool]:
    """Return gradients of each step beside the mean of the ranks' own ones, the state, and whether some were lazy."""
    net, lazy = _Net(lazy_params=True), False
    wrapped = ldh.DataParallel(net, reducer_backend=backend, bucket_cap_mb=1e-4, first_bucket_mb=1e-4, **settings)
    found: dict[str, list[Tensor]] = {}
    state = {name: tensor.resolve_conj().resolve_neg().clone() for name, tensor in net.state_dict().items()}
    for step in range(3):
        x = torch.randn(2, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        params = dict(net.named_parameters())
        for param in params.values():
            param.grad = None
        with wrapped.no_sync():
            wrapped(x).backward()
        own = {name: param.grad.resolve_conj().resolve_neg().clone() for name, param in params.items()}
        lazy = lazy or any(is_lazy(param.grad) for param in params.values())
        for param in params.values():
            param.grad = None
        wrapped(x).backward()
        for name, param in params.items():
            mean = torch.stack(
                comm.all_gather(
                    torch.view_as_real(own[name]) if own[name].is_complex() else own[name], comm.resolve_group(None)
                )
            ).mean(0)
            found.setdefault(name, []).extend([as_real(param.grad).clone(), mean])
    return found, state, lazy


SETTINGS: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": False},
    {"find_unused_parameters": True},
    {"comm_hook": "allreduce", "gradient_as_bucket_view": False, "static_graph": True},
    {"comm_hook": ldh.hooks.Cast(ldh.hooks.AllReduce(), "bfloat16")},
]


@pytest.mark.ranks
@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_lazy_parameters_buffers_and_gradients_are_reduced_and_broadcast(backend: str, number: int) -> None:
    first, second = run_ranks(_train, backend, SETTINGS[number])
    assert first[2]  # else the test shows nothing
    for found, _, _ in (first, second):
        for name, pairs in found.items():
            for reduced, mean in zip(pairs[::2], pairs[1::2], strict=True):
                rtol = 0.02 if "comm_hook" in SETTINGS[number] else 1e-6
                torch.testing.assert_close(reduced, mean, rtol=rtol, atol=rtol * float(mean.abs().max()), msg=name)
    for name, tensor in first[1].items():
        assert torch.equal(tensor, second[1][name]), name


def _average() -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(dist.get_rank())
    tensors = [make() for make in LAZY.values()]
    group = comm.resolve_group(None)
    expected = [torch.stack(comm.all_gather(as_real(t).contiguous(), group)).mean(0) for t in tensors]
    FlatMean(tensors).run(group)
    return [as_real(t).clone() for t in tensors], expected


@pytest.mark.ranks
def test_lazy_tensors_are_averaged_in_place() -> None:
    for found, expected in run_ranks(_average):
        for one, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(one, wanted)


def _guard() -> None:
    guard = NonfiniteGuard(comm.resolve_group(None))
    guard.look_at_all([("a", LAZY["conjugated"]()), ("b", LAZY["negated"]())])
    guard.check(0)


@pytest.mark.ranks
def test_lazy_gradients_are_looked_at() -> None:
    run_ranks(_guard)


def _shard() -> list[Tensor]:
    torch.manual_seed(3)
    params = [nn.Parameter(make().detach()) for make in LAZY.values()]
    twins = [nn.Parameter(param.detach().resolve_conj().resolve_neg()) for param in params]
    sharded: Any = ldh.optim.ShardedOptimizer(params, torch.optim.SGD, lr=0.1, foreach=False)
    plain = torch.optim.SGD(twins, lr=0.1, foreach=False)
    for param, twin in zip(params, twins, strict=True):
        twin.grad = torch.ones_like(twin)
        param.grad = torch.ones_like(twin)
    sharded.step()
    plain.step()
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(as_real(param), as_real(twin))
    return [as_real(param).clone() for param in params]


@pytest.mark.ranks
def test_lazy_parameters_are_sharded() -> None:
    for one, other in zip(*run_ranks(_shard), strict=True):
        assert torch.equal(one, other)
