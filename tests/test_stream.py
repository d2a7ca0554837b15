"""The order of stream operations, told by a recording fake in the place of the device's stream."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from odd_models import Mlp, data
from ranks import run_ranks

import lightning_ddp_hooks as ldh
from lightning_ddp_hooks.reducer import in_flight as in_flight_module
from lightning_ddp_hooks.reducer import stream

pytestmark = pytest.mark.ranks


class RecordingStream:
    """Notes what is asked of it, and inside which context collectives are launched and waited for."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def after_compute(self) -> AbstractContextManager[object]:
        self.log.append("comm waits for compute")
        return self._inside()

    def context(self) -> AbstractContextManager[object]:
        return self._inside()

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self.log.append("enter")
        yield
        self.log.append("leave")

    def join(self) -> None:
        self.log.append("compute waits for comm")

    def read(self, tensor: torch.Tensor) -> Any:
        self.log.append("read")
        return stream.CommStream().read(tensor)


def _record(views: bool) -> list[str]:
    log: list[str] = []
    in_flight_module.comm_stream = lambda device: RecordingStream(log)  # type: ignore[assignment]
    net = Mlp(layers=2)

    def hook(state: list[str], bucket: ldh.GradBucket) -> torch.Tensor:
        log.append(f"reduce {bucket.index()}")
        return bucket.buffer()

    model = ldh.DataParallel(
        net,
        bucket_cap_mb=0.0005,
        first_bucket_mb=0.0005,
        gradient_as_bucket_view=views,
        comm_hook=(log, hook),
        reducer_backend="python",
    )
    for param in net.parameters():
        param.register_post_accumulate_grad_hook(lambda p: log.append("gradient"))
    for _ in range(2):
        log.clear()
        model(data(0, 0, 4, 8)).sum().backward()
        log.append("backward returns")
    return log


@pytest.mark.parametrize("views", [True, False])
def test_each_bucket_waits_for_compute_and_compute_waits_once_at_the_end(views: bool) -> None:
    launch = ["comm waits for compute", "enter"]
    for log in run_ranks(_record, views, world_size=1):
        reductions = [n for n, entry in enumerate(log) if entry.startswith("reduce")]
        assert [log[n] for n in reductions] == ["reduce 0", "reduce 1"]
        for n in reductions:
            assert log[n - 2 : n] == launch, "a bucket is reduced on the communication stream, behind its gradients"
            assert log[n + 1] == "leave"
        assert log.count("compute waits for comm") == 1
        assert log.index("compute waits for comm") > reductions[-1]
        assert log[-1] == "backward returns"
        # Overlap: the first bucket is launched while gradients of the second are still to come.
        last_gradient = max(n for n, entry in enumerate(log) if entry == "gradient")
        assert reductions[0] < last_gradient


def test_the_host_stream_does_nothing() -> None:
    host = stream.comm_stream(torch.device("cpu"))
    with host.after_compute(), host.context():
        host.join()
    assert host.read(torch.tensor([3.0, 4.0])).values() == [3.0, 4.0]
