"""What ranks send: the formulas, and that every collective of `comm` is counted by them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from lightning_ddp_hooks import comm, traffic
from lightning_ddp_hooks.traffic import ByteCounter, sent_by_rank, tree_children


@pytest.mark.parametrize("world_size", range(1, 20))
def test_all_ranks_together_send_what_all_receive(world_size: int) -> None:
    n, nbytes = world_size, 1000 * world_size
    ranks = range(n)
    # Each rank but one needs the message once, however it travels.
    for tree in (True, False):
        for root in (0, n - 1):
            sent = [sent_by_rank("broadcast", nbytes, n, rank=r, root=root, tree=tree) for r in ranks]
            assert sum(sent) == (n - 1) * nbytes
    assert sum(sent_by_rank("gather", nbytes, n, rank=r, root=n // 2) for r in ranks) == (n - 1) * nbytes
    # Each rank needs the parts of all others; a reduction is the same the other way round.
    part = nbytes // n
    assert sent_by_rank("all_gather", part, n) == sent_by_rank("reduce_scatter", nbytes, n) == (n - 1) * part
    assert sent_by_rank("all_to_all", nbytes, n) == (n - 1) * part
    assert sent_by_rank("all_reduce", nbytes, n) == 2 * (n - 1) * part


def test_a_binomial_tree_doubles_who_knows_in_each_round() -> None:
    assert [tree_children(place, 8) for place in range(8)] == [3, 2, 1, 1, 0, 0, 0, 0]
    assert [tree_children(place, 6) for place in range(6)] == [3, 2, 0, 0, 0, 0]  # 0 to 1, 2, 4; 1 to 3, 5


def _count_each() -> dict[str, int]:
    group = comm.resolve_group(None)
    n = dist.get_world_size()
    x = torch.ones(12)  # 48 bytes
    calls: dict[str, Any] = {
        "all_reduce": lambda: comm.all_reduce(x, group).wait(),
        "start_sum": lambda: comm.start_sum(x, group).wait(),
        "reduce_in_place": lambda: comm.reduce_in_place(x, "max", group),
        "broadcast": lambda: comm.broadcast(x, group, src=1).wait(),
        "start_all_to_all": lambda: comm.start_all_to_all(torch.empty(12), x, group).wait(),
        "start_all_gather": lambda: comm.start_all_gather(torch.empty(12 * n), x, group).wait(),
        "all_gather": lambda: comm.all_gather(x, group),
        "all_gather_object": lambda: comm.all_gather_object([1], group),
        "gather_object": lambda: comm.gather_object([1], group),
        "broadcast_object": lambda: comm.broadcast_object([1], group, 1),
    }
    counted, found = ByteCounter(), {}
    traffic.count_bytes(counted)
    try:
        for name, call in calls.items():
            call()
            found[name] = counted.take().get("control", 0)
    finally:
        traffic.count_bytes(None)
    comm.all_reduce(x, group).wait()  # not counted any more
    assert not counted.take()
    return found


@pytest.mark.ranks
def test_every_collective_is_counted() -> None:
    results = run_ranks(_count_each, world_size=3)
    pickled = results[0]["all_gather_object"] // 2 - 8
    for rank, found in enumerate(results):
        assert found["all_reduce"] == found["start_sum"] == found["reduce_in_place"] == 2 * 2 * 48 // 3
        assert found["start_all_to_all"] == 2 * 48 // 3
        assert found["start_all_gather"] == found["all_gather"] == 2 * 48
        assert found["broadcast"] == [0, 96, 0][rank]
        assert pickled > 4
        assert found["all_gather_object"] == 2 * (8 + pickled)
        assert found["gather_object"] == 2 * 8 + (pickled if rank else 0)
        assert found["broadcast_object"] == [0, 2 * (8 + pickled), 0][rank]


def _count_by_purpose() -> dict[str, int]:
    group = comm.resolve_group(None)
    x = torch.ones(10)
    with traffic.counted_as("averaging"), traffic.counted_in(None):  # nobody counts: nothing happens
        comm.all_reduce(x, group).wait()
    counted = ByteCounter()
    traffic.count_bytes(counted)
    try:
        with pytest.raises(RuntimeError, match="counted already"):
            traffic.count_bytes(ByteCounter())
        with traffic.counted_as("averaging"):
            comm.all_reduce(x, group).wait()
            tally = traffic.current_total()
            with traffic.counted_as("buffers"):
                comm.broadcast(x, group).wait()
        with traffic.counted_in(tally):
            comm.all_reduce(x, group).wait()
        comm.all_reduce(x, group).wait()
    finally:
        traffic.count_bytes(None)
    return counted.take()


@pytest.mark.ranks
def test_what_is_sent_counts_for_the_purpose_at_hand() -> None:
    first, second = run_ranks(_count_by_purpose)

    assert first == {"control": 40, "averaging": 80, "buffers": 40}
    assert second == {"control": 40, "averaging": 80}
