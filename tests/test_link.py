"""The bucket size that suits a link: the formula, and the agreement of the ranks on it."""

from typing import Any

import pytest
import torch
from odd_models import Mlp, data
from ranks import run_ranks

import lightning_ddp_hooks as ldh
from lightning_ddp_hooks.reducer.link import MAX_CAP_BYTES, MIN_CAP_BYTES, Link, best_bucket_bytes

GIGABIT = Link(latency=5e-4, bandwidth=125e6)


def test_at_one_gigabit_the_best_bucket_is_between_1_and_4_mib() -> None:
    assert 1 << 20 <= best_bucket_bytes(60_000_000, GIGABIT) <= 4 << 20


@pytest.mark.parametrize("total", [0, 1000, 10**8, 10**11])
def test_the_size_minimises_latency_plus_exposed_transfer(total: int) -> None:
    best = best_bucket_bytes(total, GIGABIT)

    def delay(cap: float) -> float:
        return total / cap * GIGABIT.latency + cap / GIGABIT.bandwidth

    for other in (best / 2, best * 2):
        if MIN_CAP_BYTES <= other <= MAX_CAP_BYTES:
            assert delay(best) <= delay(other)
    assert MIN_CAP_BYTES <= best <= MAX_CAP_BYTES


def _auto() -> tuple[int, Any]:
    torch.manual_seed(0)
    model = ldh.DataParallel(Mlp(), bucket_cap_mb="auto")
    before = model.stats()["bucket_cap_bytes"]
    for step in range(2):
        model(data(0, step, 4, 8)).sum().backward()
    assert before == 25 << 20
    return int(model.stats()["bucket_cap_bytes"]), model.stats()["bucket_param_indices"]  # type: ignore[call-overload]


@pytest.mark.ranks
def test_all_ranks_agree_on_the_measured_size() -> None:
    first, second = run_ranks(_auto)
    assert first == second
    assert first[0] != 25 << 20
