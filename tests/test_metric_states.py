"""Metrics with lists as states: updated a different number of times on each rank, they are those of the union."""

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor
from torchmetrics import CatMetric, Metric, classification, clustering, detection, image, nominal, regression, retrieval
from torchmetrics.detection.mean_ap import MeanAveragePrecision
from torchmetrics.text import CHRFScore, EditDistance, ExtendedEditDistance, TranslationEditRate

from lightning_ddp_hooks import _compat
from lightning_ddp_hooks.health.metric_states import gather_states

pytestmark = pytest.mark.ranks
WORLD = 3
COUNTS = [(3, 1, 0), (0, 2, 1), (0, 0, 2), (0, 0, 0)]


class Entries(Metric):
    """Lists of entries of any kind, with and without a reduction, beside sums."""

    def __init__(self, reduce: Any, make: Callable[[int], Any]) -> None:
        super().__init__()
        self.make = make
        self.add_state("entries", [], dist_reduce_fx=reduce)
        self.add_state("total", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, seed: int) -> None:
        self.entries.append(self.make(seed))
        self.total += seed

    def compute(self) -> Any:
        entries = self.entries if isinstance(self.entries, list) else [self.entries]
        if all(isinstance(entry, Tensor) for entry in entries):
            values = sorted(number for entry in entries for number in entry.flatten().tolist())
        else:
            values = sorted(map(str, entries))
        return {"values": values, "dtypes": {str(getattr(e, "dtype", "")) for e in entries}, "total": int(self.total)}


class Masks(MeanAveragePrecision):
    """Its states and how it gathers them, without the package that computes the value."""

    def __init__(self) -> None:
        Metric.__init__(self)
        self.iou_type = ("segm",)
        for name in ("detection_mask", "groundtruth_mask"):
            self.add_state(name, [], dist_reduce_fx=None)
        self.add_state("detection_scores", [], dist_reduce_fx=None)

    def update(self, seed: int) -> None:
        self.detection_mask.append(((seed, 2), b"run"))
        self.groundtruth_mask.append(((seed, 3), b"run"))
        self.detection_scores.append(torch.ones(seed % 3) * seed)

    def compute(self) -> Any:
        return sorted(self.detection_mask), sorted(self.groundtruth_mask), sorted(map(len, self.detection_scores))


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _samplewise(seed: int) -> tuple[Any, ...]:
    return torch.randint(0, 3, (2, 4), generator=_seeded(seed)), torch.zeros(2, 4, dtype=torch.int64)


def _number(seed: int) -> tuple[Any, ...]:
    return (seed,)


def _binary(seed: int) -> tuple[Any, ...]:
    return torch.rand(4 + seed % 3, generator=_seeded(seed)), torch.arange(4 + seed % 3) % 2


def _classes(seed: int) -> tuple[Any, ...]:
    return torch.rand(5 + seed % 3, 3, generator=_seeded(seed)), torch.arange(5 + seed % 3) % 3


def _labels(seed: int) -> tuple[Any, ...]:
    return tuple(torch.randint(0, 3, (6 + seed % 3,), generator=_seeded(seed + part)) for part in (0, 100))


def _clusters(seed: int) -> tuple[Any, ...]:
    return torch.rand(6 + seed % 3, 2, generator=_seeded(seed)), torch.arange(6 + seed % 3) % 3


def _columns(seed: int) -> tuple[Any, ...]:
    return tuple(torch.rand(4 + seed % 3, 2, generator=_seeded(seed + part)) for part in (0, 100))


def _ratings(seed: int) -> tuple[Any, ...]:
    return (torch.tensor([[2, 1, 1], [0, 3, 1], [1, 1, 2]]).roll(seed, 1)[: 1 + seed % 3],)


def _queries(seed: int) -> tuple[Any, ...]:
    size = 4 + seed % 3
    scores = torch.rand(size, generator=_seeded(seed))
    return scores, torch.arange(size) % 2, torch.full((size,), seed)


def _boxes(seed: int) -> tuple[Any, ...]:
    corners = torch.rand(1 + seed % 3, 2, generator=_seeded(seed)) * 10
    found = {"boxes": torch.cat([corners, corners + 5], 1), "labels": torch.zeros(len(corners), dtype=torch.int64)}
    return [{**found, "scores": torch.rand(len(corners))}], [{**found, "boxes": found["boxes"] + 1}]


def _images(seed: int) -> tuple[Any, ...]:
    return tuple(torch.rand(1 + seed % 2, 3, 48, 48, generator=_seeded(seed + part)) for part in (0, 100))


def _one_image(seed: int) -> tuple[Any, ...]:
    return _images(seed)[:1]


def _sentences(seed: int) -> tuple[Any, ...]:
    words = ["the cat sat on the mat", "a dog ran far away", "rain falls on the plain"]
    return [words[seed % 3], words[(seed + 1) % 3]][: 1 + seed % 2], [[words[(seed + 2) % 3]], [words[0]]][
        : 1 + seed % 2
    ]


def _strings(seed: int) -> tuple[Any, ...]:
    predictions, targets = _sentences(seed)
    return predictions, [target for (target,) in targets]


def _mixed(seed: int) -> Tensor:
    return torch.full(((), (2,), (1, 3), (0, 2))[seed % 4], seed, dtype=(torch.float32, torch.int64)[seed % 2])


CASES: dict[str, tuple[Callable[[], Any], Callable[[int], tuple[Any, ...]]]] = {
    "scalars": (lambda: Entries(None, torch.tensor), _number),
    "scalars, concatenated": (lambda: Entries("cat", torch.tensor), _number),
    "vectors": (lambda: Entries(None, lambda seed: torch.arange(seed % 4)), _number),
    "matrices": (lambda: Entries("cat", lambda seed: torch.full((seed % 3, 2), seed)), _number),
    "of all dimensions": (lambda: Entries(None, _mixed), _number),
    "integers": (lambda: Entries("cat", lambda seed: torch.tensor([seed], dtype=torch.int16)), _number),
    "bfloat16": (lambda: Entries(None, lambda seed: torch.full((3,), seed, dtype=torch.bfloat16)), _number),
    "flags": (lambda: Entries("cat", lambda seed: torch.tensor([seed % 2 == 0])), _number),
    "words": (lambda: Entries(None, lambda seed: f"word {seed}"), _number),
    "masks": (Masks, _number),
    "CatMetric": (CatMetric, lambda seed: (float(seed),)),
    "BinaryAUROC": (classification.BinaryAUROC, _binary),
    "BinaryCalibrationError": (classification.BinaryCalibrationError, _binary),
    "MulticlassAveragePrecision": (lambda: classification.MulticlassAveragePrecision(3), _classes),
    "MulticlassAccuracy": (lambda: classification.MulticlassAccuracy(3, multidim_average="samplewise"), _samplewise),
    "RandScore": (clustering.RandScore, _labels),
    "CalinskiHarabaszScore": (clustering.CalinskiHarabaszScore, _clusters),
    "CosineSimilarity": (regression.CosineSimilarity, _columns),
    "SpearmanCorrCoef": (lambda: regression.SpearmanCorrCoef(num_outputs=2), _columns),
    "KendallRankCorrCoef": (lambda: regression.KendallRankCorrCoef(num_outputs=2), _columns),
    "FleissKappa": (nominal.FleissKappa, _ratings),
    "TotalVariation": (lambda: image.TotalVariation(reduction="none"), _one_image),
    "StructuralSimilarity": (lambda: image.StructuralSimilarityIndexMeasure(reduction="none", data_range=1.0), _images),
    "VisualInformationFidelity": (image.VisualInformationFidelity, _images),
    "SpectralDistortionIndex": (image.SpectralDistortionIndex, _images),
    "ErrorRelative": (image.ErrorRelativeGlobalDimensionlessSynthesis, _images),
    "EditDistance": (lambda: EditDistance(reduction="none"), _strings),
    "ExtendedEditDistance": (lambda: ExtendedEditDistance(return_sentence_level_score=True), _sentences),
    "CHRFScore": (lambda: CHRFScore(return_sentence_level_score=True), _sentences),
    "TranslationEditRate": (lambda: TranslationEditRate(return_sentence_level_score=True), _sentences),
    **{
        name: (getattr(retrieval, name), _queries)
        for name in retrieval.__all__
        if name.startswith("Retrieval") and "FixedPrecision" not in name
    },
    **{
        name: (getattr(detection, name), _boxes)
        for name in ("IntersectionOverUnion", "GeneralizedIntersectionOverUnion")
        if importlib.util.find_spec("torchvision")
    },
}  # fmt: skip


def updated(name: str, seeds: Sequence[int]) -> Metric:
    make, arguments = CASES[name]
    metric = make()
    for seed in seeds:
        metric.update(*arguments(seed))
    return metric


def seeds_of(rank: int, count: int) -> list[int]:
    return [1 + rank + WORLD * index for index in range(count)]


def outcome(metric: Metric) -> Any:
    """Return the value, or how it cannot be computed, such as of no entries at all."""
    try:
        return metric.compute()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def compute_all(names: Sequence[str], counts: Sequence[tuple[int, ...]]) -> Any:
    rank, values = torch.distributed.get_rank(), []
    undo = _compat.gather_metrics_by(gather_states)
    for name in names:
        for count in counts:
            metric = updated(name, seeds_of(rank, count[rank]))
            before = {state: str(value) for state, (value, _) in _compat.metric_states(metric).items()}
            values.append(outcome(metric))
            # (After an error torchmetrics leaves a metric as it is.)
            assert isinstance(values[-1], str) or before == {
                state: str(value) for state, (value, _) in _compat.metric_states(metric).items()
            }
    undo()
    return values


def numbers(value: Any) -> list[float]:
    """Return the numbers in a value in ascending order: entries of ranks come in another order than in one process."""
    if isinstance(value, dict):
        return [number for key in sorted(value) for number in numbers(value[key])]
    if isinstance(value, (list, tuple)) and any(isinstance(part, Tensor) for part in value):
        return [number for part in value for number in numbers(part)]
    return sorted(torch.as_tensor(value).double().flatten().tolist())


@pytest.mark.filterwarnings("ignore")
def test_states_of_lists_are_those_of_the_union() -> None:
    results = run_ranks(compute_all, list(CASES), COUNTS, world_size=WORLD, timeout=120)
    cases = [(name, counts) for name in CASES for counts in COUNTS]
    for number, (name, counts) in enumerate(cases):
        union = [seed for rank in range(WORLD) for seed in seeds_of(rank, counts[rank])]
        expected = outcome(updated(name, union))
        for result in results:
            found = result[number]
            if isinstance(expected, (str, list)) or name in ("masks", *list(CASES)[:9]):
                assert found == expected or (len(found) == len(expected) == 0), (name, counts, found, expected)
            else:
                assert numbers(found) == pytest.approx(numbers(expected), nan_ok=True, rel=1e-4), (name, counts)
