"""The parts of uneven inputs that need no ranks: steps, batches, samplers."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

from lightning_ddp_hooks.join.agreement import DIVISORS, Step
from lightning_ddp_hooks.join.data import emptied, remove_padding
from lightning_ddp_hooks.join.samples import count_samples

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


def images(count: int, channels: int = 3) -> list[Tensor]:
    return [torch.ones(channels, 4 + index, 5) for index in range(count)]


def targets(count: int) -> list[dict[str, Tensor]]:
    return [{"boxes": torch.ones(index, 4), "label": torch.tensor(1)} for index in range(count)]


X = torch.ones(6, 2)


def nested(layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout)


BATCHES: dict[str, tuple[Any, int]] = {
    "columns": ([X, torch.ones(6)], 6),
    "one column": ([torch.ones(6, 3, 4)], 6),
    "dictionary": ({"x": X, "weight": torch.tensor(0.5), "names": ["a", "b", "c"], "n": 3}, 6),
    "dataclass": (Sample(X, "b"), 6),
    "named tuple": (Point(X, 1), 6),
    "scalar": (torch.tensor(1.0), 1),
    "columns in columns": ([[X, X], torch.ones(6)], 6),
    "as many columns as samples": ([[X, X, X, X, X, X], torch.ones(6)], 6),
    "images and targets": ((images(5), targets(5)), 5),
    "three images of three channels": ((images(3), targets(3)), 3),
    "images and labels": ({"images": images(5), "labels": torch.ones(5)}, 5),
    "sentences": ([torch.ones(4, 1, 2), torch.ones(3, 1, 2), torch.ones(2, 1, 2)], 3),
    "records": ([{"image": image, "size": 3} for image in (torch.ones(3, 2), torch.ones(1, 2))], 2),
    "packed sequence": (pack_sequence([torch.ones(3, 2), torch.ones(2, 2)]), 2),
    "sparse": (lambda: [X.to_sparse(), torch.ones(6)], 6),
    "sparse rows": (X.to_sparse_csr, 6),
    "jagged": (lambda: nested(torch.jagged), 2),
    "nested": (lambda: [nested(torch.strided), torch.ones(2)], 2),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested:UserWarning", "ignore:Sparse:UserWarning")
@pytest.mark.parametrize(("batch", "samples"), BATCHES.values(), ids=BATCHES)
def test_samples_are_counted_and_emptied_in_batches_of_all_kinds(batch: Any, samples: int) -> None:
    batch = batch() if callable(batch) else batch
    assert count_samples(batch) == samples
    empty = emptied(batch)
    assert type(empty) is type(batch)
    for part in filter(torch.is_tensor, tree_leaves(empty)):
        assert not part.ndim or part.size(0) == 0


def test_lists_of_samples_are_emptied_as_lists() -> None:
    assert emptied((images(5), targets(5))) == ([], [])
    assert emptied({"images": images(5), "labels": torch.ones(5)})["images"] == []
    empty = emptied([[X, X], torch.ones(6), list("abcdef")])
    assert [part.shape for part in empty[0]] == [(0, 2), (0, 2)]
    assert empty[2] == []


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ({"names": ["a", "b"]}, "no tensor with samples in a dict"),
        (object(), "no tensor with samples in a object"),
        ([X, torch.ones(5)], "differ in length"),
        ([torch.ones(3, 8, 8), torch.ones(3, 8, 8)], "a list of 2 samples, or columns of 3 samples"),
        ({"images": [torch.ones(3, 4, 4)] * 5}, "hold 3 or 5 samples"),
        ([{"x": X}, {"x": X}], "a list of 2 samples, or columns of 6 samples"),
    ],
)
def test_batches_whose_samples_cannot_be_counted(batch: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        count_samples(batch)


def test_what_cannot_be_empty_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="UnevenInputs cannot make an empty batch of a tensor with the layout torch"):
        emptied({"x": torch.ones(4, 4).to_sparse_bsr((2, 2))})


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
