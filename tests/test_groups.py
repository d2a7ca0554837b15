"""Groups that a part of the ranks makes alone, whatever other groups each rank has made before."""

import pytest
import torch
from ranks import run_ranks

from lightning_ddp_hooks import comm

pytestmark = pytest.mark.ranks


def _total(group: comm.ProcessGroup) -> float:
    return float(comm.reduce_in_place(torch.tensor([float(comm.rank() + 1)]), "sum", group))


def _groups_on_some_ranks_only() -> None:
    world = comm.resolve_group(None)
    for _ in range(comm.rank()):  # other numbers of groups on each rank, in use and freed
        comm.solo_group()
        comm.destroy_group(comm.solo_group())
    assert _total(comm.new_group(world)) == 10
    three = comm.new_subgroup([0, 1, 3])
    if comm.rank() != 2:
        assert _total(three) == 7
    halves = comm.split_group(world, [[0, 3], [1, 2]])
    assert _total(halves) == 5
    if comm.rank() in (0, 3):  # twice, one beside the other, and once more when the first is gone
        first, second = comm.new_group(halves), comm.new_group(halves, cpu=True)
        assert comm.group_name(first) != comm.group_name(second)
        assert _total(first) == _total(second) == 5
        comm.destroy_group(first)
        third = comm.new_group(halves)
        assert _total(second) == _total(third) == 5
        assert comm.global_ranks(third) == [0, 3]
        assert comm.rank(comm.split_group(third, [[1], [0]])) == 0
    assert _total(comm.new_group(world)) == 10
    assert _total(comm.split_group(world, [[1, 3], [0, 2]])) == (6 if comm.rank() in (1, 3) else 4)


def test_groups_on_some_ranks_do_not_disturb_those_of_all() -> None:
    run_ranks(_groups_on_some_ranks_only, world_size=4)
