"""A fit whose ranks talk through memory."""

import os
import socket
from typing import Any

import pytest
import torch.distributed as dist
from backends import require
from ranks import run_ranks
from trainer_runs import Net, assert_same, assert_trained, make_module, make_trainer, state_of

from lightning_ddp_hooks import DDPHooksStrategy, comm

pytestmark = [pytest.mark.ranks, pytest.mark.trainer, pytest.mark.timeout(900)]


def _fit(port: int) -> Any:
    os.environ["MASTER_PORT"] = str(port)
    states = []
    for backend in ("gloo", "shm"):
        dist.destroy_process_group()
        strategy = DDPHooksStrategy(process_group_backend=backend, bucket_cap_mb=0.0001, first_bucket_mb=0.0001)
        facts: dict[str, object] = {}

        class Told(Net):
            def on_train_end(self) -> None:
                facts.update(strategy.stats())  # noqa: B023

        module = make_module(Told)
        make_trainer(strategy).fit(module)
        assert facts["comm_backend"] == comm.backend_name(comm.resolve_group(None)) == backend
        states.append(state_of(module))
    return states


def test_a_fit_ends_bitwise_where_one_over_gloo_does() -> None:
    require("native")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for over_gloo, over_shm in run_ranks(_fit, port):
        assert_trained(over_gloo)
        assert_same(over_gloo, over_shm)
