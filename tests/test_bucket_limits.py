"""Bucket sizes: those of torch DDP for every cap, and the first one's by itself."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_hooks import DataParallel
from lightning_ddp_hooks.reducer.config import ReducerConfig

MIB = 1 << 20


@pytest.mark.parametrize(
    ("settings", "limits"),
    [
        ({}, [1, 25]),
        ({"bucket_cap_mb": 0.25}, [0.25, 0.25]),
        ({"bucket_cap_mb": 0.25, "first_bucket_mb": 1}, [1, 0.25]),
        ({"bucket_cap_mb": 4, "first_bucket_mb": 2}, [2, 4]),
        ({"bucket_cap_mb": "auto"}, [1, 25]),
    ],
)
def test_the_first_bucket_is_not_larger_than_the_others_unless_it_is_set(
    settings: dict[str, Any], limits: list[float]
) -> None:
    assert ReducerConfig(**settings).limits() == [int(limit * MIB) for limit in limits]
    assert ReducerConfig(bucket_cap_mb="auto").limits(MIB // 2) == [MIB // 2, MIB // 2]


def sizes(wrap: Any, cap: float) -> list[int]:
    torch.manual_seed(0)
    model = wrap(nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(12))), bucket_cap_mb=cap)
    found: list[int] = []

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        found.append(bucket.buffer().nbytes)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, hook)
    for _ in range(3):
        found.clear()
        model(torch.ones(2, 64)).sum().backward()
    return found


CAPS = (0.01, 0.02, 0.03, 0.05)


def sizes_of_both() -> list[tuple[list[int], list[int]]]:
    return [(sizes(DataParallel, cap), sizes(DistributedDataParallel, cap)) for cap in CAPS]


@pytest.mark.ranks
def test_small_buckets_are_those_of_torch() -> None:
    for ours, theirs in run_ranks(sizes_of_both)[0]:
        assert ours == theirs
