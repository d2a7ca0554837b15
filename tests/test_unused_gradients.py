"""What nobody uses costs nothing: undefined gradients, embeddings that are never used, memory of buckets."""

import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from backends import backend_fixture  # noqa: F401
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_ddp_hooks as ldh

pytestmark = pytest.mark.ranks


# ---------------------------------------------------------------------------------------- undefined gradients


class _Undefined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body, self.first, self.second = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, defined: tuple[bool, bool]) -> Tensor:
        x = self.body(x)
        parts = [self.first(x), self.second(x)]
        return sum(part if ok else _Undefined.apply(part) for part, ok in zip(parts, defined, strict=True))


# What is defined on each rank, in each backward.
DEFINED = [
    [(True, True), (True, True)],
    [(True, False), (True, False)],
    [(True, False), (False, True)],
    [(False, False), (False, False)],
    [(True, False), (False, False)],
    [(False, True), (True, True)],
]


def _undefined(backend: str | None, settings: dict[str, Any]) -> list[Tensor | None]:
    net = _Branches()
    options: dict[str, Any] = {"bucket_cap_mb": 1e-5, **settings}
    if backend is None:
        wrapped: nn.Module = DistributedDataParallel(net, **options)
    else:
        wrapped = ldh.DataParallel(net, reducer_backend=backend, first_bucket_mb=1e-5, **options)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.1)
    found: list[Tensor | None] = []
    for step, of_ranks in enumerate(DEFINED * 4):  # more than are recorded
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        wrapped(x, of_ranks[dist.get_rank()]).square().mean().backward()
        found += [None if param.grad is None else param.grad.clone() for param in net.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(param.detach().clone() for param in net.parameters())]


@pytest.mark.parametrize("views", [True, False])
def test_undefined_gradients_are_left_alone_where_parameters_may_be_unused(backend: str, views: bool) -> None:
    settings = {"find_unused_parameters": True, "gradient_as_bucket_view": views}
    theirs = run_ranks(_undefined, None, settings)
    for expected, found in zip(theirs, run_ranks(_undefined, backend, settings), strict=True):
        assert any(gradient is None for gradient in expected)
        for one, other in zip(expected, found, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                assert torch.equal(one, other)


# ---------------------------------------------------------------------------------------- embeddings


class _Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Linear(4, 4)
        self.used, self.never = (nn.Embedding(10, 4, sparse=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.used(torch.tensor([1, 2]))


def _never_used(backend: str) -> list[tuple[bool, Tensor]]:
    net = _Words()
    wrapped = ldh.DataParallel(net, static_graph=True, reducer_backend=backend)  # type: ignore[arg-type]
    before, found = net.never.weight.detach().clone(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        wrapped(torch.full((2, 4), float(step + dist.get_rank()))).square().mean().backward()
        found.append((net.never.weight.grad is None, net.used.weight.grad.to_dense()))
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(before, net.never.weight)
    return found


def test_a_static_graph_leaves_a_sparse_embedding_alone_that_is_never_used(backend: str) -> None:
    first, second = run_ranks(_never_used, backend)
    for (untouched, gradient), (others, other) in zip(first, second, strict=True):
        assert untouched
        assert others
        assert torch.equal(gradient, other)
        assert gradient.isfinite().all()


# ---------------------------------------------------------------------------------------- memory

_WIDTH, _LAYERS = 256, 6
_LAYER_BYTES = 4 * (_WIDTH * _WIDTH + _WIDTH)
_SLACK = 64 << 10  # activations, and gaps between buckets


def _held(net: nn.Module) -> int:
    """Count the bytes of all tensors that this process holds beside the parameters, each storage once."""
    gc.collect()
    # The type is asked, since objects of torch's warn when their class is looked up.
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    tensors += [param.grad for param in net.parameters() if param.grad is not None]
    tensors = [tensor for tensor in tensors if tensor.layout is torch.strided and not tensor.is_meta]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    for param in net.parameters():
        storages.pop(param.untyped_storage().data_ptr(), None)
    return sum(storages.values())


class _Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS))

    def forward(self, x: Tensor, use: int = _LAYERS) -> Tensor:
        for layer in list(self.layers)[:use]:
            x = layer(x)
        return x


def _unsynced(backend: str) -> list[int]:
    net, found = _Deep(), []
    wrapped = ldh.DataParallel(net, reducer_backend=backend)  # type: ignore[arg-type]
    found.append(_held(net))
    for _ in range(2):
        with wrapped.no_sync():
            wrapped(torch.randn(2, _WIDTH)).square().mean().backward()
    found.append(_held(net))
    wrapped(torch.randn(2, _WIDTH)).square().mean().backward()
    found.append(_held(net))
    return found


def test_a_run_that_reduces_nothing_has_no_buckets(backend: str) -> None:
    gradients = _LAYERS * _LAYER_BYTES
    for at_first, unsynced, synced in run_ranks(_unsynced, backend):
        assert at_first < _SLACK
        assert gradients <= unsynced < gradients + _SLACK
        assert gradients <= synced < gradients + _SLACK  # the gradients lie in the buckets


def _released(backend: str, views: bool) -> tuple[list[int], list[Tensor]]:
    net, found = _Deep(), []
    torch.manual_seed(dist.get_rank())
    wrapped = ldh.DataParallel(net, reducer_backend=backend, gradient_as_bucket_view=views)  # type: ignore[arg-type]
    gradients: list[Tensor] = []
    for step in range(8):
        rests = step in (3, 4, 5)
        if rests:
            wrapped.reducer.release_buckets()
        if step != 4:  # there gradients of an earlier step lie where buckets were
            net.zero_grad()
        with wrapped.no_sync() if rests else nullcontext():
            wrapped(torch.randn(2, _WIDTH)).square().mean().backward()
        found.append(_held(net) - sum(gradient.nbytes for gradient in gradients))
        if not rests:
            gradients.append(torch.cat([param.grad.flatten() for param in net.parameters() if param.grad is not None]))
    return found, gradients


@pytest.mark.parametrize("views", [True, False])
def test_buckets_are_released_while_nothing_is_reduced(backend: str, views: bool) -> None:
    (held, gradients), (_, others) = run_ranks(_released, backend, views)
    size = _LAYERS * _LAYER_BYTES
    copies = 0 if views else size
    for step, found in enumerate(held):
        assert found < size + _SLACK + (0 if step in (3, 4, 5) else copies), step
    for one, other in zip(gradients, others, strict=True):
        assert torch.equal(one, other)


def _half(backend: str, settings: dict[str, Any], clears: bool) -> int:
    net = _Deep()
    wrapped = ldh.DataParallel(net, reducer_backend=backend, **settings)  # type: ignore[arg-type]
    for _ in range(4):
        net.zero_grad(set_to_none=clears)
        wrapped(torch.randn(2, _WIDTH), use=_LAYERS // 2).square().mean().backward()
    return _held(net)


def test_a_static_graph_keeps_no_memory_for_layers_that_it_leaves_out(backend: str) -> None:
    for held in run_ranks(_half, backend, {"static_graph": True}, True):
        assert held < _LAYERS // 2 * _LAYER_BYTES + _SLACK


def _freeze(backend: str) -> tuple[int, int]:
    net = _Deep()
    wrapped = ldh.DataParallel(net, reducer_backend=backend)  # type: ignore[arg-type]
    found = []
    for layers in (_LAYERS, 2):
        for layer in list(net.layers)[layers:]:
            layer.requires_grad_(False)
        for _ in range(4):
            net.zero_grad()
            wrapped(torch.randn(2, _WIDTH)).square().mean().backward()
        found.append(_held(net))
    return found[0], found[1]


def test_frozen_layers_give_their_memory_back(backend: str) -> None:
    for before, after in run_ranks(_freeze, backend):
        assert before >= _LAYERS * _LAYER_BYTES
        assert after < 2 * _LAYER_BYTES + _SLACK
