"""A module that changes under the reducer, a backward that is tried again, and wrappers that come and go."""

import copy
import pickle
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from odd_models import Mlp, data
from ranks import run_ranks
from test_reducer_errors import caught
from torch import nn

import lightning_ddp_hooks as ldh
from lightning_ddp_hooks import comm
from lightning_ddp_hooks.reducer.config import ReducerConfig
from lightning_ddp_hooks.reducer.reducer import Reducer

pytestmark = pytest.mark.ranks
BACKENDS = ["python", "native"]


def _spread(tensor: torch.Tensor) -> float:
    """Return by how much the ranks' tensors differ."""
    gathered = comm.all_gather(tensor.detach(), comm.resolve_group(None))
    return max((other - gathered[0]).abs().max().item() for other in gathered)


def _converted_before_the_first_backward(backend: str) -> tuple[float, str]:
    net = Mlp().float()
    model = ldh.DataParallel(net, reducer_backend=backend)  # type: ignore[arg-type]
    net.double()
    model(data(dist.get_rank(), 0, 4, 8)).square().mean().backward()
    grad = net[0].weight.grad
    return _spread(grad), str(grad.dtype)


@pytest.mark.parametrize("backend", BACKENDS)
def test_parameters_converted_before_the_first_backward_are_reduced(backend: str) -> None:
    assert run_ranks(_converted_before_the_first_backward, backend) == [(0.0, "torch.float64")] * 2


def _added_before_the_first_backward(backend: str) -> tuple[float, Any]:
    net = Mlp()
    model = ldh.DataParallel(net, reducer_backend=backend)  # type: ignore[arg-type]
    net.requires_grad_(False)
    net.append(nn.Linear(8, 8, dtype=torch.float64))
    with torch.no_grad():
        for param in net[-1].parameters():
            param.fill_(0.1)
    for step in range(3):
        model.zero_grad()
        model(data(dist.get_rank(), step, 4, 8)).square().mean().backward()
    return _spread(net[-1].weight.grad), model.stats()["num_parameter_tensors"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_adapter_on_a_frozen_base_is_noticed_and_reduced(backend: str) -> None:
    assert run_ranks(_added_before_the_first_backward, backend) == [(0.0, 2)] * 2


def _converted_in_mid_training() -> list[str]:
    net = Mlp().float()
    model = ldh.DataParallel(net)
    texts: list[str] = []
    for step in range(3):
        if step == 2:
            net.double()
        with caught(texts):
            for again in range(40):
                x = data(dist.get_rank(), 100 * step + again, 4, 8).to(net[0].weight.dtype)
                model(x).square().mean().backward()
    return texts


def test_parameters_converted_in_mid_training_raise_by_name() -> None:
    for texts in run_ranks(_converted_in_mid_training):
        assert texts[:2] == ["no error", "no error"]
        assert "'0.weight'" in texts[2]


def _retry(backend: str, early: bool) -> list[float]:
    net = Mlp()
    model = ldh.DataParallel(net, bucket_cap_mb=1e-6, first_bucket_mb=1e-6, reducer_backend=backend)  # type: ignore[arg-type]
    spreads = []
    for step in range(4):
        model.zero_grad()
        out = model(data(dist.get_rank(), step, 4, 8))
        loss = out.square().mean()
        if step == 2:

            def bang(grad: torch.Tensor) -> None:
                raise RuntimeError("bang")

            handle = (out if early else net[0].weight).register_hook(bang)
            with pytest.raises(RuntimeError, match="bang"):
                loss.backward(retain_graph=True)
            handle.remove()
            model.zero_grad()
        loss.backward()
        spreads.append(max(_spread(p.grad) for p in net.parameters()))
    return spreads


@pytest.mark.parametrize("early", [True, False], ids=["early", "late"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backward_that_failed_can_be_tried_again_without_a_new_forward(backend: str, early: bool) -> None:
    assert run_ranks(_retry, backend, early) == [[0.0] * 4] * 2


def _subgroups() -> list[float]:
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    spreads = []
    for _ in range(3):
        net = Mlp()
        model = ldh.DataParallel(net, groups[rank // 2])
        model(data(rank, 0, 4, 8)).square().mean().backward()
        gathered = comm.all_gather(net[0].weight.grad, groups[rank // 2])
        spreads.append((gathered[0] - gathered[1]).abs().max().item())
        model.detach()
    return spreads


def test_wrappers_on_subgroups_can_be_made_again_after_detaching() -> None:
    assert run_ranks(_subgroups, world_size=4) == [[0.0] * 3] * 4


def _timeouts() -> list[timedelta]:
    model = ldh.DataParallel(Mlp())
    return [comm.timeout_of(group) for group in (model.reducer.group, model.reducer.control_group)]


def test_groups_take_over_the_timeout_of_the_users_group() -> None:
    assert run_ranks(_timeouts, world_size=1, timeout=37) == [[timedelta(seconds=37)] * 2]


def _different() -> list[str]:
    rank = dist.get_rank()
    texts: list[str] = []
    for hooks in (("fp16", "bf16"), ("fp16", None), ("powersgd", ldh.hooks.PowerSGD(rank=2))):
        with caught(texts):
            ldh.DataParallel(Mlp(), comm_hook=hooks[rank])
    for buffer in (torch.zeros(2 + rank), torch.zeros(2, dtype=(torch.float32, torch.float64)[rank])):
        net = Mlp()
        net.register_buffer("extra", buffer)
        with caught(texts):
            ldh.DataParallel(net)
    return texts


def test_other_hooks_or_buffers_on_another_rank_raise_on_all() -> None:
    for texts in run_ranks(_different):
        assert all("comm_hook" in text for text in texts[:3]), texts
        assert all("extra" in text for text in texts[3:]), texts


def _refusals() -> list[str]:
    texts: list[str] = []
    model = ldh.DataParallel(Mlp())
    expanded = nn.Linear(2, 2)
    expanded.weight = nn.Parameter(torch.zeros(2, 1).expand(2, 2))
    attempts = [
        lambda: copy.deepcopy(model),
        lambda: pickle.dumps(model),
        lambda: model.set_step("x"),  # type: ignore[arg-type]
        lambda: model.set_step(-1),
        lambda: ldh.DataParallel(expanded),
        lambda: ldh.DataParallel(nn.Linear(2, 2, device="meta")),
        model.detach,
        model.detach,
        lambda: model(data(0, 0, 4, 8)),
        model.stats,
    ]
    for attempt in attempts:
        with caught(texts):
            attempt()
    return texts


def test_what_cannot_work_is_refused_by_name() -> None:
    [texts] = run_ranks(_refusals, world_size=1)
    refused = ["copy or save", "copy or save", "'x'", "-1", "expanded", "meta device"]
    for text, part in zip(texts, [*refused, "no error", "no error", "detached", "detached"], strict=True):
        assert part in text


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x), self.scale


def _leaf_outputs() -> int:
    net = _Scale()
    model = ldh.DataParallel(net)
    for _ in range(5):
        out, scale = model(torch.ones(2, 4))
        (out.sum() * scale).backward()
    return len(net.scale._backward_hooks or {})


def test_a_parameter_among_the_outputs_gathers_no_hooks() -> None:
    assert run_ranks(_leaf_outputs, world_size=1) == [0]


def _retry_in_place(backend: str, views: bool) -> list[float]:
    net = Mlp()
    model = ldh.DataParallel(
        net,
        bucket_cap_mb=1e-6,
        first_bucket_mb=1e-6,
        gradient_as_bucket_view=views,
        reducer_backend=backend,  # type: ignore[arg-type]
    )
    for step in range(2):
        model(data(dist.get_rank(), step, 4, 8)).square().mean().backward()
    loss = model(data(dist.get_rank(), 2, 4, 8)).square().mean()

    def bang(grad: torch.Tensor) -> None:
        raise RuntimeError("bang")

    handle = net[0].weight.register_hook(bang)
    with pytest.raises(RuntimeError, match="bang"):
        loss.backward(retain_graph=True)
    handle.remove()
    model.zero_grad(set_to_none=False)
    expected = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
    for gradient in expected:
        dist.all_reduce(gradient)
    loss.backward()
    return [float((p.grad - e / 2).abs().max()) for p, e in zip(net.parameters(), expected, strict=True)]  # type: ignore[operator]


@pytest.mark.parametrize("views", [True, False], ids=["views", "copies"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_retry_keeps_gradients_that_were_zeroed_in_place(backend: str, views: bool) -> None:
    for errors in run_ranks(_retry_in_place, backend, views):
        assert max(errors) < 1e-6, errors


class _SparseByFunction(nn.Module):
    """A table whose sparse gradient no module announces, and a part that only rank 1 uses."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(6, 4))
        self.shared = nn.Linear(4, 1)
        self.on_rank_1 = nn.Parameter(torch.ones(4))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found = torch.nn.functional.embedding(rows, self.table, sparse=True)
        return self.shared(found * self.on_rank_1 if dist.get_rank() else found).sum()


def _static_graph_with_sparse(backend: str) -> list[float]:
    net = _SparseByFunction()
    model = ldh.DataParallel(net, static_graph=True, reducer_backend=backend)  # type: ignore[arg-type]
    spreads = []
    for step in range(3):
        model.zero_grad()
        model(torch.tensor([step, dist.get_rank()])).backward()
        spreads.append(max(_spread(p.grad.to_dense()) for p in net.parameters()))  # type: ignore[union-attr]
    return spreads


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_static_graph_learns_what_each_rank_uses_beside_a_sparse_gradient(backend: str) -> None:
    assert run_ranks(_static_graph_with_sparse, backend) == [[0.0] * 3] * 2


def _window_with_nothing_to_train() -> int:
    reducer = Reducer(Mlp().requires_grad_(False))
    if dist.get_rank() == 0:
        with pytest.raises(KeyError), reducer.backward_window():
            raise KeyError("on one rank")
    reducer.finalize_pending_backward()
    return reducer.synced_backwards


def test_an_exception_on_one_rank_leaves_nobody_waiting_where_nothing_is_trained() -> None:
    assert run_ranks(_window_with_nothing_to_train) == [0, 0]


def _no_loss_at_first(backend: str, steps_without: int) -> list[tuple[float, bool]]:
    torch.manual_seed(0)
    net = Mlp()
    reducer = Reducer(net, ReducerConfig(static_graph=True, reducer_backend=backend))  # type: ignore[arg-type]
    found = []
    for step in range(steps_without + 3):
        net.zero_grad()
        reducer.before_forward()
        with reducer.backward_window():
            if step >= steps_without:
                net(data(dist.get_rank(), step, 4, 8)).square().mean().backward()
        grad = net[0].weight.grad
        found.append((0.0 if grad is None else _spread(grad), reducer.skip_step))
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("steps_without", [1, 2])
def test_a_static_graph_is_learned_from_the_first_backward_that_has_a_loss(backend: str, steps_without: int) -> None:
    wanted = [(0.0, True)] * steps_without + [(0.0, False)] * 3
    assert run_ranks(_no_loss_at_first, backend, steps_without) == [wanted] * 2
