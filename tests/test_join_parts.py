"""The parts of uneven inputs that need no ranks: steps, batches, samplers."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from itertools import chain

import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

from lightning_ddp_hooks.join.agreement import DIVISORS, Step
from lightning_ddp_hooks.join.data import emptied, remove_padding

Point = namedtuple("Point", ["x", "label"])


@dataclass(frozen=True)
class Sample:
    x: Tensor
    name: str


def test_an_emptied_batch_has_the_same_structure_and_no_samples() -> None:
    x = torch.ones(3, 2, requires_grad=True)
    batch = {
        "x": x,
        "n": torch.tensor(3.0),
        "points": [Point(x, 1), (x, "a")],
        "s": Sample(x, "b"),
        "o": OrderedDict(a=x),
    }
    empty = emptied(batch)
    assert empty["x"].shape == (0, 2)
    assert not empty["x"].requires_grad
    assert empty["n"] == 0
    assert isinstance(empty["points"][0], Point)
    assert empty["points"][0].x.shape == (0, 2)
    assert empty["points"][1][1] == "a"
    assert (empty["s"].x.shape, empty["s"].name) == ((0, 2), "b")
    assert isinstance(empty["o"], OrderedDict)
    assert batch["x"] is x
    assert batch["s"].x is x  # type: ignore[attr-defined]


@pytest.mark.parametrize("divisor", DIVISORS)
def test_factors_make_the_mean_over_all_ranks_the_wanted_one(divisor: str) -> None:
    active, samples, means = (True, False, True, True), (3, 0, 1, 2), (1.0, 0.0, 2.0, 4.0)
    steps = [Step(rank, active, samples) for rank in range(4)]
    mean = sum(step.loss_factor(divisor) * means[step.rank] for step in steps if not step.joined) / 4  # type: ignore[arg-type]
    assert mean == pytest.approx({"active": 7 / 3, "samples": 13 / 6, "world": 7 / 4}[divisor])
    assert steps[1].joined
    assert steps[0].tail
    assert steps[0].ranks == (0, 2, 3)
    assert steps[3].first == 0


def test_even_steps_leave_the_loss_as_it_is() -> None:
    step = Step(1, (True, True), (4, 4))
    assert [step.loss_factor(divisor) for divisor in DIVISORS] == [1.0, 1.0, 1.0]
    assert not step.tail


@pytest.mark.parametrize(("samples", "world_size"), [(17, 3), (2, 3), (12, 4), (1, 5)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_without_padding_shares_make_up_the_data_set(samples: int, world_size: int, shuffle: bool) -> None:
    data = TensorDataset(torch.arange(samples))
    shares = []
    for rank in range(world_size):
        sampler = DistributedSampler(data, world_size, rank, shuffle=shuffle)
        loader = DataLoader(data, batch_sampler=BatchSampler(sampler, 2, drop_last=False)) if rank % 2 else None
        loader = loader or DataLoader(data, 2, sampler=sampler)
        remove_padding(loader)
        shares.append(list(chain.from_iterable(batch[0].tolist() for batch in loader)))
        assert len(loader) == -(-len(shares[-1]) // 2)
    assert sorted(chain.from_iterable(shares)) == list(range(samples))


def test_a_sampler_that_drops_the_last_samples_stays_as_it_is() -> None:
    sampler = DistributedSampler(TensorDataset(torch.arange(17)), 3, 0, drop_last=True)
    remove_padding(DataLoader(sampler.dataset, 2, sampler=sampler))
    assert len(sampler) == 5
