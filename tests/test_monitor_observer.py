"""An observer hears of each pass in order, under either engine, and changes no bit of what comes out."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from backends import require
from odd_models import CASES, Mlp, data
from ranks import run_ranks
from torch import Tensor

import lightning_ddp_hooks as ldh

pytestmark = pytest.mark.ranks

PASS_OF_TWO_BUCKETS = [
    "backward_opened",
    "bucket_full 0 1.0", "launch_begins 0", "launch_ended 0",
    "bucket_full 1 1.0", "launch_begins 1", "launch_ended 1",
    "wait_begins", "bucket_done 0", "bucket_done 1", "wait_ended",
    "backward_finished",
]  # fmt: skip


class Log:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def note(*args: Any) -> None:
            if name == "bucket_full":
                bucket, scale = args
                assert len(bucket.names) == len(bucket.parameters())
                args = (bucket.index(), scale)
            elif name == "launch_ended":
                assert hasattr(args[1], "wait")
                args = args[:1]
            elif name == "bucket_done":
                assert isinstance(args[1], Tensor)
                args = args[:1]
            self.events.append(" ".join(map(str, (name, *args))))

        return note


def _record(backend: str, hook: Any) -> list[list[str]]:
    model = ldh.DataParallel(
        Mlp(layers=2), bucket_cap_mb=0.0005, first_bucket_mb=0.0005, comm_hook=hook, reducer_backend=backend
    )  # type: ignore[arg-type]
    log, passes = Log(), []
    model.reducer.observer = log
    for step in range(4):
        log.events = []
        if step == 3:
            with model.no_sync():
                model(data(0, step, 4, 8)).sum().backward()
        else:
            model(data(0, step, 4, 8)).sum().backward()
        passes.append(log.events)
    model.reducer.observer = None
    log.events = []
    model(data(0, 5, 4, 8)).sum().backward()
    passes.append(log.events)
    return passes


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["python", "native"])
def test_a_pass_is_told_in_order(backend: str) -> None:
    require(backend)
    for first, *usual, accumulated, unobserved in run_ranks(_record, backend, None):
        # The recorded backward sends one bucket, once ranks have exchanged their reports.
        assert first[0] == "backward_opened"
        assert first[1:3] == ["wait_begins", "wait_ended"]
        assert first[-4:] == ["wait_begins", "bucket_done 0", "wait_ended", "backward_finished"]
        assert usual == [PASS_OF_TWO_BUCKETS] * 2
        assert accumulated == unobserved == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["python", "native"])
def test_hooks_see_gradients_that_are_not_divided(backend: str) -> None:
    require(backend)
    for passes in run_ranks(_record, backend, "int8"):
        assert [e for e in passes[1] if e.startswith("bucket_full")] == ["bucket_full 0 0.5", "bucket_full 1 0.5"]


def _broken() -> list[str]:
    model = ldh.DataParallel(Mlp(layers=2), bucket_cap_mb=0.0005, first_bucket_mb=0.0005)
    log = Log()
    for step in range(3):
        model(data(0, step, 4, 8)).sum().backward()
    model.reducer.observer = log
    handle = next(model.module.parameters()).register_hook(lambda grad: 1 / 0)  # the last gradient of the backward
    with pytest.raises(ZeroDivisionError):
        model(data(0, 3, 4, 8)).sum().backward()
    with pytest.raises(RuntimeError, match="between two backwards"):
        model.reducer.observer = log
    handle.remove()
    model(data(0, 4, 4, 8)).sum().backward()
    return log.events


def test_a_broken_pass_is_told_of() -> None:
    for events in run_ranks(_broken):
        first_end = events.index("backward_aborted")
        assert "backward_finished" not in events[:first_end]
        assert events[first_end:].count("backward_finished") == 1


def _train(name: str, backend: str, observer: Any) -> list[Tensor]:
    case = CASES[name]
    torch.manual_seed(0)
    module = case.build()
    settings: dict[str, Any] = {"bucket_cap_mb": 0.001, "first_bucket_mb": 0.0005, **case.settings}
    model = ldh.DataParallel(module, reducer_backend=backend, **settings)  # type: ignore[arg-type]
    model.reducer.observer = observer
    optimizer = case.optimizer(list(module.parameters()))
    for step in range(4):
        optimizer.zero_grad()
        case.run(model, module, dist.get_rank(), step, model.no_sync)
        optimizer.step()
    model.detach()
    return [p.detach() for p in module.parameters()]


def _compare_all(backend: str) -> dict[str, bool]:
    found = {}
    for name in list(CASES)[backend == "native" :: 2]:  # every second case for each engine
        log = Log()
        alone, watched = _train(name, backend, None), _train(name, backend, log)
        found[name] = all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True))
        assert log.events.count("backward_opened") == log.events.count("backward_finished") > 0, name
        assert log.events.count("wait_begins") == log.events.count("wait_ended"), name
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["python", "native"])
def test_an_observer_changes_no_bit(backend: str) -> None:
    require(backend)
    for found in run_ranks(_compare_all, backend, timeout=120):
        assert all(found.values()), [name for name, same in found.items() if not same]
