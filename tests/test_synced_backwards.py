"""Which backwards are reduced, and when they end: through the wrapper, the module, a checkpoint, several outputs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from backends import backend_fixture  # noqa: F401
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lightning_ddp_hooks as ldh
from lightning_ddp_hooks.reducer.agreement import UnusedPolicy
from lightning_ddp_hooks.reducer.config import ReducerConfig
from lightning_ddp_hooks.reducer.reducer import Reducer

pytestmark = pytest.mark.ranks

MEAN = 1.5  # of the inputs 1 and 2 of the two ranks, which are the gradients


class Heads(nn.Module):
    """Two weights with an output each, and one whose loss stays in the module."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(1, 1, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x) + self.c(x)


def _one() -> tuple[nn.Linear, Tensor]:
    return nn.Linear(1, 1, bias=False), torch.full((1, 1), dist.get_rank() + 1.0, requires_grad=True)


def _gradients(net: nn.Module) -> list[float | None]:
    return [None if param.grad is None else param.grad.item() for param in net.parameters()]


def _checkpointed(backend: str, settings: dict[str, Any], depth: int) -> list[float]:
    net, x = _one()
    call: Callable[[Tensor], Tensor] = ldh.DataParallel(net, reducer_backend=backend, **settings)  # type: ignore[arg-type]
    for _ in range(depth):
        call = (lambda inner: lambda x: checkpoint(inner, x, use_reentrant=True))(call)
    found = []
    for _ in range(4):
        call(x).sum().backward()
        found += [net.weight.grad.item()]  # type: ignore[union-attr]
        net.zero_grad()
    return found


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("settings", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_a_wrapper_inside_a_reentrant_checkpoint_is_reduced(backend: str, settings: dict[str, Any], depth: int) -> None:
    assert run_ranks(_checkpointed, backend, settings, depth) == [[MEAN] * 4] * 2


def _through_the_module(backend: str) -> list[float]:
    net, x = _one()
    model = ldh.DataParallel(net, reducer_backend=backend)  # type: ignore[arg-type]
    found = []
    for _ in range(4):
        if dist.get_rank() == 0:
            model.module(10 * x).sum().backward()
            found.append(net.weight.grad.item())  # type: ignore[union-attr]
            net.zero_grad()
        model(x).sum().backward()
        found.append(net.weight.grad.item())  # type: ignore[union-attr]
        net.zero_grad()
    return found


def test_a_backward_through_the_module_stays_on_its_rank(backend: str) -> None:
    assert run_ranks(_through_the_module, backend) == [[10.0, MEAN] * 4, [MEAN] * 4]


class Aside(nn.Module):
    """Keeps its loss as an attribute, and returns something else."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        self.loss = self.layer(x).sum()
        return self.loss * 2


def _loss_aside(backend: str) -> list[float]:
    net = Aside()
    model = ldh.DataParallel(net, reducer_backend=backend)  # type: ignore[arg-type]
    found = []
    for _ in range(3):
        model.zero_grad()
        kept = model(torch.full((1, 1), dist.get_rank() + 1.0))
        net.loss.backward()
        found.append(net.layer.weight.grad.item())  # type: ignore[union-attr]
        del kept
    return found


def test_a_loss_that_the_module_keeps_is_reduced_after_a_forward_of_the_wrapper(backend: str) -> None:
    assert run_ranks(_loss_aside, backend) == [[MEAN] * 3] * 2


def _one_backward_each(backend: str, evaluates: bool) -> list[list[float | None]]:
    net = Heads()
    model = ldh.DataParallel(net, bucket_cap_mb=1e-6, first_bucket_mb=1e-6, reducer_backend=backend)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    found = []
    for step in range(4):
        optimizer.zero_grad()
        first, second = model(torch.full((1, 1), dist.get_rank() + 1.0))
        if step == 2 and dist.get_rank():  # what one rank does in one backward another may do in two
            (first + second).sum().backward()
        else:
            (second if step % 2 else first).sum().backward()
            if evaluates:
                with torch.no_grad():
                    model(torch.ones(1, 1))
            (first if step % 2 else second).sum().backward()
        found.append(_gradients(net))
        optimizer.step()
    return found


@pytest.mark.parametrize("evaluates", [False, True])
def test_outputs_may_have_a_backward_each(backend: str, evaluates: bool) -> None:
    assert run_ranks(_one_backward_each, backend, evaluates) == [[[MEAN] * 3] * 4] * 2


def _one_output_left_out(backend: str, warm: int, ranks: list[int], steps: bool) -> tuple[str, str, bool]:
    net = Heads()
    model = ldh.DataParallel(net, reducer_backend=backend)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(warm):
        sum(model(torch.ones(1, 1))).sum().backward()
    first, second = model(torch.ones(1, 1))
    before = net.a.weight.item()
    texts = []
    for what in (
        lambda: (first if dist.get_rank() in ranks else first + second).sum().backward(),
        lambda: optimizer.step() if steps else model(torch.ones(1, 1)),
    ):
        try:
            what()
        except RuntimeError as error:
            texts.append(str(error))
        else:
            texts.append("")
    return texts[0], texts[1], net.a.weight.item() == before


@pytest.mark.parametrize("steps", [True, False], ids=["step", "forward"])
@pytest.mark.parametrize("ranks", [[0, 1], [1]])
@pytest.mark.parametrize("warm", [0, 2])
def test_an_output_without_a_backward_raises_on_all_ranks_before_the_step(
    backend: str, warm: int, ranks: list[int], steps: bool
) -> None:
    for rank, (backward, afterward, unchanged) in enumerate(
        run_ranks(_one_output_left_out, backend, warm, ranks, steps)
    ):
        text = afterward if rank in ranks else backward
        assert "Parameters got no gradient in this backward" in text
        assert "'b.weight' on rank" in text
        assert unchanged or rank not in ranks


class Optional(nn.Module):
    """Layers in buckets of their own, of which one may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))

    def forward(self, x: Tensor, without: int | None) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = x if index == without else layer(x)
        return x


def _part_of_one_rank(backend: str) -> list[list[float]]:
    """In manual optimization with a static graph: what the first rank has used once, and nobody any more."""
    net = Optional()
    config = ReducerConfig(static_graph=True, bucket_cap_mb=1e-6, first_bucket_mb=1e-6, reducer_backend=backend)  # type: ignore[arg-type]
    reducer = Reducer(net, config, policy=UnusedPolicy.ALIKE)
    found = []
    for step in range(4):
        net.zero_grad()
        reducer.before_forward()
        with reducer.backward_window():
            net(torch.full((1, 2), dist.get_rank() + 1.0), 2 if step or dist.get_rank() else None).sum().backward()
        found.append([0.0 if param.grad is None else param.grad.sum().item() for param in net.parameters()])
    return found


def test_what_one_rank_expects_nothing_for_is_sent_by_all_ranks_or_by_none(backend: str) -> None:
    first, second = run_ranks(_part_of_one_rank, backend)
    assert first == second
    assert first[1] == first[3]
    assert first[1][4:6] == [0.0, 0.0]


def _swapped(backend: str, settings: dict[str, Any], inside: bool) -> list[list[float | None]]:
    net = Heads()
    model = ldh.DataParallel(net, reducer_backend=backend, **settings)  # type: ignore[arg-type]

    def choose(*_: Any, step: int) -> None:  # as adapters are, before a forward or in it
        for index, param in enumerate(net.parameters()):
            param.requires_grad_(index == step % 2)

    found = []
    for step in range(5):
        model.zero_grad()
        if inside:
            hook = net.register_forward_pre_hook(lambda *_, step=step: choose(step=step))
        else:
            choose(step=step)
        sum(model(torch.full((1, 1), dist.get_rank() + 1.0))).sum().backward()
        if inside:
            hook.remove()
        found.append(_gradients(net))
    return found


@pytest.mark.parametrize("inside", [True, False], ids=["in the forward", "before it"])
@pytest.mark.parametrize("settings", [{}, {"find_unused_parameters": True}], ids=str)
def test_parameters_may_be_swapped_in_each_step(backend: str, settings: dict[str, Any], inside: bool) -> None:
    wanted = [[MEAN, None, None], [None, MEAN, None]] * 3
    assert run_ranks(_swapped, backend, settings, inside) == [wanted[:5]] * 2
