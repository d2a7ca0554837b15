"""Post-local SGD's gradients: over all ranks, then over the subgroup, or not at all."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hook_tools import Rig, gradients_of
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_ddp_hooks as ldh
from lightning_ddp_hooks.hooks import PostLocalSGD, PostLocalSGDState, post_local_sgd_hook

NUMELS = [20, 7]


def mean_of(ranks: list[int], step: int) -> Tensor:
    return torch.stack([torch.cat(gradients_of(rank, step, NUMELS)).double() for rank in ranks]).mean(0)


def reduce_three_steps() -> dict[str, list[Tensor]]:
    hooks = {
        "pairs": PostLocalSGD(start_local_sgd_iter=1, subgroup_size=2),
        "crossed": PostLocalSGD(start_local_sgd_iter=1, subgroups=[[0, 2], [3, 1]]),
        "alone": PostLocalSGD(start_local_sgd_iter=1, post_local_gradient_allreduce=False),
        "one by one": PostLocalSGD(start_local_sgd_iter=0, subgroup_size=1),
        "host": PostLocalSGD(start_local_sgd_iter=0),
    }
    found = {}
    for name, hook in hooks.items():
        rig = Rig(hook, NUMELS)
        found[name] = [torch.cat(rig.step(gradients_of(dist.get_rank(), step, NUMELS))) for step in range(3)]
    return found


@pytest.mark.ranks
def test_global_mean_first_and_the_subgroups_mean_from_the_step_on() -> None:
    per_rank = run_ranks(reduce_three_steps, world_size=4)
    everyone = [0, 1, 2, 3]
    for rank, found in enumerate(per_rank):
        pair, crossed = [rank - rank % 2, rank - rank % 2 + 1], ([0, 2] if rank % 2 == 0 else [1, 3])
        for step in range(3):
            for name, ranks in {
                "pairs": everyone if step < 1 else pair,
                "crossed": everyone if step < 1 else crossed,
                "alone": everyone if step < 1 else [rank],
                "one by one": [rank],
                "host": everyone,  # all ranks of this test run on one host
            }.items():
                torch.testing.assert_close(found[name][step].double(), mean_of(ranks, step), rtol=0, atol=1e-6)


def bind_wrongly() -> list[str]:
    texts = []
    for hook in (
        PostLocalSGD(start_local_sgd_iter=1, subgroup_size=2),
        PostLocalSGD(start_local_sgd_iter=1, subgroups=[[0, 1], [1, 2]]),
    ):
        try:
            Rig(hook, NUMELS)
        except ValueError as error:
            texts.append(str(error))
    return texts


def find_own_parts() -> list[tuple[int, ...]]:
    return [Rig(PostLocalSGD(**settings), NUMELS).bound._subgroup.ranks for settings, _ in PARTS]  # type: ignore[attr-defined]


PARTS: list[tuple[dict[str, Any], list[tuple[int, ...]]]] = [
    ({}, [(0, 1, 2, 3)]),  # one host
    ({"subgroup_size": 4}, [(0, 1, 2, 3)]),
    ({"subgroups": [[3, 1, 2, 0]]}, [(0, 1, 2, 3)]),
    ({"subgroup_size": 2}, [(0, 1), (2, 3)]),
    ({"subgroups": [[0], [1, 2], [3]]}, [(0,), (1, 2), (3,)]),
]


@pytest.mark.ranks
def test_each_rank_averages_in_its_part() -> None:
    for rank, found in enumerate(run_ranks(find_own_parts, world_size=4)):
        assert found == [next(part for part in parts if rank in part) for _, parts in PARTS]


@pytest.mark.ranks
def test_subgroups_that_do_not_fit_raise_on_every_rank_with_the_numbers() -> None:
    for uneven, twice in run_ranks(bind_wrongly, world_size=3):
        assert "3 ranks cannot be split into subgroups of 2" in uneven
        assert "ranks 0 to 2 once, got [[0, 1], [1, 2]]" in twice


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"start_local_sgd_iter": -1}, "at least 0, got -1"),
        ({"subgroup_size": 0}, "at least 1, got 0"),
        ({"subgroup_size": 2, "subgroups": [[0, 1]]}, "got both"),
        ({"subgroup_size": 2, "post_local_gradient_allreduce": False}, "leave out"),
    ],
)
def test_a_contradiction_raises_at_construction(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        PostLocalSGD(**settings)


def gradients_on_both() -> dict[str, list[Tensor]]:
    found = {}
    for wrapper in ("torch", "ours"):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        wrapped: Any = DistributedDataParallel(model) if wrapper == "torch" else ldh.DataParallel(model)
        state = PostLocalSGDState(None, dist.new_subgroups(1)[0], 2)
        wrapped.register_comm_hook(state, post_local_sgd_hook)
        steps = []
        for step in range(4):
            wrapped(torch.full((1, 3), float(dist.get_rank() + step))).sum().backward()
            steps.append(model.weight.grad.clone())
            model.zero_grad()
        found[wrapper] = steps
        assert state.iter == 4
    whole = PostLocalSGDState(None, None, 0)  # the ranks of this host: all of them
    with mock.patch.object(ldh.comm, "is_initialized", return_value=False):
        early = PostLocalSGDState(None, None, 0)  # there is no group yet
    assert whole.subgroup is not None
    assert early.subgroup is None
    early.find_groups()
    assert dist.get_process_group_ranks(early.subgroup) == dist.get_process_group_ranks(whole.subgroup)
    found["host size"] = [torch.tensor(dist.get_world_size(whole.subgroup))]
    return found


@pytest.mark.ranks
def test_the_function_does_the_same_on_torchs_ddp_and_on_ours_without_cuda() -> None:
    for rank, found in enumerate(run_ranks(gradients_on_both)):
        for step in range(4):
            expected = step + (0.5 if step < 2 else rank)
            assert torch.equal(found["torch"][step], torch.full((2, 3), expected))
            assert torch.equal(found["ours"][step], found["torch"][step])
        assert found["host size"][0] == 2
