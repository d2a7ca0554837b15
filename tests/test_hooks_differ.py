"""Hooks that do not ask for the same on all ranks: an error on all of them, in the first backward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

from lightning_ddp_hooks import DataParallel
from lightning_ddp_hooks.hooks import BindContext, BoundHook, CommHook, Phases, requests

pytestmark = pytest.mark.ranks


def _sizes(rank: int, bucket: Any) -> Phases:
    total = yield requests.AllReduce(bucket.buffer()[: 8 + rank].clone())
    bucket.buffer()[: 8 + rank] = total
    return None


def _dtypes(rank: int, bucket: Any) -> Phases:
    yield requests.AllReduce(bucket.buffer().to([torch.float32, torch.float64][rank % 2]))
    return None


def _kinds(rank: int, bucket: Any) -> Phases:
    yield requests.AllGather(bucket.buffer()) if rank else requests.AllReduce(bucket.buffer())
    return None


def _sources(rank: int, bucket: Any) -> Phases:
    yield requests.Together([requests.Broadcast(bucket.buffer(), rank)])
    return None


def _numbers(rank: int, bucket: Any) -> Phases:
    yield requests.AllReduce(bucket.buffer())
    if rank == 0:
        yield requests.AllReduce(bucket.buffer())
    return None


def _fails(rank: int, bucket: Any) -> Phases:
    yield requests.AllReduce(bucket.buffer())
    if rank == 1:
        raise ValueError("only here")
    yield requests.AllReduce(bucket.buffer())
    return None


CASES: dict[Callable[[int, Any], Phases], tuple[str, str]] = {
    _sizes: ("AllReduce of 8 elements in torch.float32", "AllReduce of 9 elements in torch.float32"),
    _dtypes: ("AllReduce of 20 elements in torch.float32", "AllReduce of 20 elements in torch.float64"),
    _kinds: ("AllReduce of 20 elements", "AllGather of 20 elements"),
    _sources: ("Broadcast of 20 elements in torch.float32 from 0", "Broadcast of 20 elements in torch.float32 from 1"),
    _numbers: ("AllReduce of 20 elements", "the end"),
    _fails: ("AllReduce of 20 elements", "ValueError: only here"),
}


class _Differs(BoundHook, CommHook):
    name = "Differs"

    def __init__(self, function: Callable[[int, Any], Phases]) -> None:
        self._function = function

    def bind(self, context: BindContext) -> BoundHook:
        return self

    def reduce(self, bucket: Any) -> Phases:
        return self._function(dist.get_rank(), bucket)


def _errors() -> list[tuple[str, str]]:
    found = []
    for function in CASES:
        layer = nn.Linear(4, 4)
        wrapped = DataParallel(layer, comm_hook=_Differs(function))
        try:
            wrapped(torch.ones(1, 4)).sum().backward()
            found.append(("", "no error"))
        except (RuntimeError, ValueError) as error:
            found.append((type(error).__name__, str(error)))
    return found


def test_hooks_that_differ_between_ranks_raise_on_all_of_them() -> None:
    first, second = run_ranks(_errors)
    for (zero, one), mine, other in zip(CASES.values(), first, second, strict=True):
        for kind, text in (mine, other):
            if kind == "ValueError":  # the rank whose hook failed has its own error
                assert text == "only here"
                continue
            assert text.startswith("Communication hook Differs does not do the same on all ranks. rank 0: ")
            assert zero in text
            assert f"rank 1: {one}" in text or one in text.split("rank 1: ")[1]
            assert "for bucket 0 (" in text
    assert [kind for kind, _ in second] == ["RuntimeError"] * (len(CASES) - 1) + ["ValueError"]
