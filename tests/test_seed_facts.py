"""Facts that can be observed of any bucketed data parallelism, and that users of torch's DDP rely on."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

import lightning_ddp_hooks as ldh

pytestmark = pytest.mark.ranks


def _weights_before_and_after() -> tuple[list[float], list[float]]:
    torch.manual_seed(dist.get_rank())
    net = nn.Linear(2, 1, bias=False)
    before = net.weight.detach().flatten().tolist()
    ldh.DataParallel(net)
    return before, net.weight.detach().flatten().tolist()


def test_after_construction_all_ranks_hold_rank_0s_weights() -> None:
    (before_0, after_0), (before_1, after_1) = run_ranks(_weights_before_and_after)
    assert before_0 != before_1
    assert after_0 == after_1 == before_0
    assert before_0 == pytest.approx([-0.0052939653396606445, 0.37932294607162476], abs=1e-6)


def _gradient_of_ones_and_twos() -> tuple[list[float], list[float]]:
    torch.manual_seed(0)
    net = nn.Linear(3, 1, bias=False)
    x = torch.full((1, 3), float(dist.get_rank() + 1))
    net(x).sum().backward()
    assert net.weight.grad is not None
    alone = net.weight.grad.flatten().tolist()
    net.zero_grad()
    model = ldh.DataParallel(net)
    model(x).sum().backward()
    return alone, net.weight.grad.flatten().tolist()


def test_the_gradient_of_ones_and_twos_is_one_and_a_half() -> None:
    assert run_ranks(_gradient_of_ones_and_twos) == [([1.0] * 3, [1.5] * 3), ([2.0] * 3, [1.5] * 3)]


def _facts(steps: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
    theirs = nn.parallel.DistributedDataParallel(copy.deepcopy(net), bucket_cap_mb=1)
    ours = ldh.DataParallel(net, bucket_cap_mb=1)
    facts = [ours.stats()]
    x = torch.full((8, 512), float(dist.get_rank() + 1))
    for _ in range(steps):
        for model in (theirs, ours):
            model.zero_grad()
            model(x).sum().backward()
        facts.append(ours.stats())
    return facts, theirs._get_ddp_logging_data()


def test_one_bucket_first_and_three_after_the_rebuild_as_torchs_logging_data_says() -> None:
    for facts, theirs in run_ranks(_facts, 12):
        assert not facts[0]["has_rebuilt_buckets"]
        assert facts[0]["bucket_sizes"] == [3151872]
        assert facts[0]["bucket_param_indices"] == [[0, 1, 2, 3, 4, 5]]
        last = facts[-1]
        assert last["has_rebuilt_buckets"] == theirs["has_rebuilt_buckets"] == 1
        assert last["bucket_cap_bytes"] == theirs["bucket_cap_bytes"] == 1048576
        assert last["rebuilt_bucket_sizes"] == [1050624] * 3
        assert last["iteration"] == 12

        def as_text(rows: list[list[int]]) -> str:
            return ", ".join(" ".join(map(str, row)) for row in rows)

        assert theirs["rebuilt_bucket_sizes"] == ", ".join(map(str, last["rebuilt_bucket_sizes"]))
        assert theirs["rebuilt_per_bucket_param_indices"] == as_text(last["rebuilt_per_bucket_param_indices"])
        assert theirs["prev_iteration_grad_ready_order_indices"] == as_text(
            [[index] for index in last["prev_iteration_grad_ready_order_indices"]]
        )
        assert last["prev_iteration_grad_ready_order_indices"] == [5, 4, 3, 2, 1, 0]


def _buffers_and_ignored() -> tuple[float, float, float]:
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2, bias=False))
    with torch.no_grad():
        for tensor in [*net.parameters(), *net.buffers()]:
            tensor.fill_(dist.get_rank() + 1)
    net._ddp_params_and_buffers_to_ignore = ["0.running_var", "1.weight"]  # type: ignore[assignment]
    ldh.DataParallel(net)
    batch_norm = net[0]
    assert isinstance(batch_norm, nn.BatchNorm1d)
    assert batch_norm.running_mean is not None
    assert batch_norm.running_var is not None
    return batch_norm.running_mean[0].item(), batch_norm.running_var[0].item(), net[1].weight[0, 0].item()


def test_buffers_come_from_rank_0_and_ignored_names_stay() -> None:
    assert run_ranks(_buffers_and_ignored) == [(1, 1, 1), (1, 2, 2)]
