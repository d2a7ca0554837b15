"""The reducer on an asynchronous device: right values however late each stream is, and a host that never waits."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Literal

import odd_models
import pytest
import sim
import torch
import torch.distributed as dist
from odd_models import CASES
from on_sim import Net, batch, moved, wrap
from ranks import run_ranks
from torch import Tensor, nn

from lightning_ddp_hooks.reducer import stream as stream_module

pytestmark = pytest.mark.ranks

Backend = Literal["python", "native"]
STEPS, RANKS = 5, 2


def reference(steps: int = STEPS) -> list[list[Tensor]]:
    """Train in one process with float64 on all ranks' batches; return the gradients of each step and the parameters."""
    torch.manual_seed(0)
    net = Net().double()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        losses = [net(batch(step, rank).double()).square().mean() for rank in range(RANKS)]
        torch.stack(losses).mean().backward()
        found.append([param.grad.clone() for param in net.parameters()])  # type: ignore[union-attr]
        optimizer.step()
    return [*found, [param.detach() for param in net.parameters()]]


def make_late(late: str) -> None:
    if late == "compute":
        sim.slow_down(torch.accelerator.current_stream(), 1)
    elif late == "communication":
        sim.slow_down_collectives(10)


def _train(
    views: bool, backend: Backend, late: str, seed: int, patch: Callable[[], None] | None = None
) -> list[list[Tensor]]:
    device = sim.join_world(seed=10 * seed + dist.get_rank(), delayed=0.2, longest_ms=1)
    if patch is not None:
        patch()
    torch.manual_seed(0)
    net = Net().to(device)
    model = wrap(net, gradient_as_bucket_view=views, reducer_backend=backend)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    batches = [batch(step, dist.get_rank()).to(device) for step in range(STEPS)]
    torch.accelerator.synchronize()
    make_late(late)
    copies = []
    for own in batches:
        optimizer.zero_grad()
        model(own).square().mean().backward()
        copies.append([param.grad.clone() for param in net.parameters()])  # type: ignore[union-attr]
        optimizer.step()
    assert len(model.stats()["bucket_sizes"]) > 2  # type: ignore[arg-type]
    copies.append([param.detach() for param in net.parameters()])
    found = [[value.cpu() for value in values] for values in copies]
    torch.accelerator.synchronize()
    return found


def assert_right(found: list[list[Tensor]]) -> None:
    for values, wanted in zip(found, reference(), strict=True):
        for value, expected in zip(values, wanted, strict=True):
            torch.testing.assert_close(value.double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("late", ["at random", "compute", "communication"])
@pytest.mark.parametrize("backend", ["python", "native"])
@pytest.mark.parametrize("views", [True, False], ids=["views", "copies"])
def test_gradients_are_the_mean_over_the_ranks(views: bool, backend: Backend, late: str) -> None:
    for found in run_ranks(_train, views, backend, late, 1):
        assert_right(found)


class _MovesItsInputs(nn.Module):
    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.module, self.device = module, device

    def forward(self, *args: Any) -> Any:
        return self.module(*(a.to(self.device) if isinstance(a, Tensor) else a for a in args))


def _train_cases(backend: Backend, views: bool) -> dict[str, list[Tensor]]:
    device, found = sim.join_world(seed=dist.get_rank(), longest_ms=1), {}
    for name in DENSE:
        case = CASES[name]
        torch.manual_seed(0)
        module = moved(case.build(), device)
        settings = {"reducer_backend": backend, "gradient_as_bucket_view": views, **case.settings}
        model = wrap(_MovesItsInputs(module, device), **settings)
        optimizer = case.optimizer([param for param in module.parameters() if param.requires_grad])
        for step in range(STEPS):
            if case.zero_grad != "never":
                optimizer.zero_grad(set_to_none=case.zero_grad == "none")
            case.run(model, module, dist.get_rank(), step, model.no_sync)
            optimizer.step()
        found[name] = [param.detach().cpu() for param in module.parameters()]
        model.detach()
    return found


DENSE = [name for name in CASES if "sparse" not in name]


@pytest.mark.parametrize(("backend", "views"), [("native", True), ("python", False)])
def test_models_of_all_kinds_train_as_the_reference(backend: Backend, views: bool) -> None:
    for found in run_ranks(_train_cases, backend, views, timeout=100):
        for name, params in found.items():
            tolerance = max(1e-9, CASES[name].tolerance)
            for value, wanted in zip(params, _reference_of(name), strict=True):
                torch.testing.assert_close(
                    value,
                    wanted,
                    rtol=tolerance,
                    atol=tolerance,
                    equal_nan=True,
                    msg=lambda text, n=name: f"{n}: {text}",
                )


@cache
def _reference_of(name: str) -> list[Tensor]:
    return odd_models.reference(CASES[name], STEPS, RANKS)


# ---------------------------------------------------------------------- each wait is needed


def _no_wait_before_communication() -> None:
    stream_module.DeviceStream.after_compute = stream_module.DeviceStream.context  # type: ignore[method-assign]


def _no_wait_after_communication() -> None:
    stream_module.DeviceStream.join = lambda self: None  # type: ignore[method-assign]


@pytest.mark.parametrize("views", [True, False], ids=["views", "copies"])
@pytest.mark.parametrize(
    ("patch", "late"), [(_no_wait_before_communication, "compute"), (_no_wait_after_communication, "communication")]
)
def test_leaving_out_a_wait_gives_wrong_gradients(patch: Callable[[], None], late: str, views: bool) -> None:
    right = 0
    for found in run_ranks(_train, views, "python", late, 1, patch):
        try:
            assert_right(found)
        except AssertionError:
            continue
        right += 1
    assert right < RANKS


# ---------------------------------------------------------------------- the host


def _queue_steps(backend: Backend) -> list[float]:
    device = sim.join_world(delayed=0)
    net = Net().to(device)
    model = wrap(net, reducer_backend=backend)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    own = batch(0, dist.get_rank()).to(device)

    def step(watched: AbstractContextManager[None]) -> float:
        torch.accelerator.synchronize()
        dist.barrier()
        with watched:
            sim.sleep(600)
            began = time.perf_counter()
            optimizer.zero_grad()
            model(own).square().mean().backward()
            optimizer.step()
            return time.perf_counter() - began

    for _ in range(3):  # learns the order of the buckets
        step(nullcontext())
    return [step(sim.no_host_waits()) for _ in range(2)]


@pytest.mark.parametrize("backend", ["python", "native"])
def test_a_whole_step_is_queued_behind_a_slow_kernel(backend: Backend) -> None:
    for seconds in run_ranks(_queue_steps, backend):
        assert min(seconds) < 0.3  # 0.015 on a quiet machine


# ---------------------------------------------------------------------- graphs


def _capture(backend: Backend) -> list[str]:
    device = sim.join_world()
    torch.manual_seed(0)
    net = Net().to(device)
    model = wrap(net, reducer_backend=backend)
    capturing = False
    torch.get_device_module(device).is_current_stream_capturing = lambda: capturing
    own, found = batch(0, dist.get_rank()).to(device), []
    for capturing_forward, capturing_backward in [(False, False), (True, True), (False, True), (False, False)]:
        net.zero_grad()
        try:
            capturing = capturing_forward
            loss = model(own).square().mean()
            capturing = capturing_backward
            loss.backward()
            found.append("reduced")
        except RuntimeError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("backend", ["python", "native"])
def test_a_step_is_not_captured_into_a_graph(backend: Backend) -> None:
    for first, forward, backward, last in run_ranks(_capture, backend):
        assert first == last == "reduced"
        assert "cannot be captured into a graph" in forward
        assert "cannot be captured into a graph" in backward
