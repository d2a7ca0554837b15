"""With ``check_logged_values`` ranks that log different things get an error with rank and key, not a wrong average."""

from typing import Any

import pytest
import torch
from faults import note_fault, run_with_fault
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, MeanMetric, Metric, SumMetric
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.retrieval import RetrievalMAP
from torchmetrics.wrappers import Running
from trainer_runs import Net, dataset, make_module, make_trainer, rank

from lightning_ddp_hooks import DDPHooksStrategy, callbacks

pytestmark = [pytest.mark.ranks, pytest.mark.trainer]


class Logging(Net):
    """Logs something of everything, the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.cat = MeanMetric(), CatMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        value = float(rank() + 10 * batch_idx)
        self.log("step", value, on_step=True, on_epoch=True, sync_dist=True)
        self.log("largest", value, on_step=False, on_epoch=True, reduce_fx="max", sync_dist=True)
        self.log("own", value, on_step=True)
        return loss

    def val_dataloader(self) -> Any:
        return DataLoader(dataset(7 if rank() else 4), 2)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        value = float(rank() + 10 * batch_idx)
        self.log("val", value, sync_dist=True, batch_size=len(batch[0]))
        self.mean.update(value)
        self.cat.update(torch.full((rank() + 1,), value))
        self.log("val_mean", self.mean)

    def on_validation_epoch_end(self) -> None:
        self.log("val_largest", self.cat.compute().max(), sync_dist=True, reduce_fx="max")


CHECKED = {"check_logged_values": True}


def fit(module_class: type[Net], strategy: Any = CHECKED, **options: Any) -> dict[str, float]:
    trainer = make_trainer(strategy, **{"max_epochs": 1, "use_distributed_sampler": False, **options})
    trainer.fit(make_module(module_class))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("strategy", [CHECKED, "ddp_hooks"], ids=["checked", "unchecked"])
def test_what_is_logged_is_reduced_exactly(strategy: Any) -> None:
    results = run_ranks(fit, Logging, strategy)
    weights, values = [2, 2, 2, 2, 2, 1], [0, 10, 1, 11, 21, 31]  # Lightning alone would divide by 11 // 2
    expected = {
        "step": 15.5,
        "step_step": 30.5,
        "step_epoch": 15.5,
        "largest": 31.0,
        "val": sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights),
        "val_mean": sum(values) / len(values),
        "val_largest": 31.0,
    }
    for result in results:
        result.pop("own")
        assert result == pytest.approx(expected)


def validate(module_class: type[Net]) -> Any:
    return make_trainer(CHECKED, use_distributed_sampler=False).validate(make_module(module_class), verbose=False)


def just_mine(tensor: Tensor, group: Any = None) -> list[Tensor]:
    """Stand for a function that gathers."""
    return [tensor]


class GathersNothing(Logging):
    """Rank 0 alone has metrics that ask nobody, each for another reason; those of all ranks differ in their states."""

    def __init__(self) -> None:
        super().__init__()
        self.local = nn.ModuleDict(
            {
                "off": MeanMetric(sync_on_compute=False),
                "alone": MeanMetric(distributed_available_fn=lambda: False),
                "own": MeanMetric(dist_sync_fn=just_mine),
                "composed": MeanMetric(sync_on_compute=False) + 0.0,
                "wrapped": Running(SumMetric(sync_on_compute=False), window=1),
            }
        )
        self.lists = Predictions(dist_sync_fn=just_mine)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.lists.update(torch.ones((1, 1) if rank() else 1))
        self.log("val_lists", self.lists)
        if not rank():
            for name, metric in self.local.items():
                metric.update(3.0)
                self.log(f"val_{name}", metric, rank_zero_only=True)


def test_also_without_a_fit_and_with_metrics_of_one_rank() -> None:
    first, second = run_ranks(validate, GathersNothing)
    for results in (first, second):
        assert results[0]["val_largest"] == 31.0
    assert (first[0]["val_lists"], second[0]["val_lists"]) == (2.0, 4.0)
    assert [first[0][f"val_{name}"] for name in GathersNothing().local] == [3.0] * 5


class OtherKey(Logging):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("left" if rank() else "right", 1.0, on_step=True, sync_dist=True)
        return self.loss(batch)


class OtherOrder(Logging):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for name in ("left", "right")[:: 1 - 2 * rank()]:
            self.log(name, 1.0, on_step=True, sync_dist=True)
        return self.loss(batch)


class OtherReduction(Logging):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("loss", 1.0, on_step=True, sync_dist=True, reduce_fx="max" if rank() else "min")
        return self.loss(batch)


class OtherEpochKey(Logging):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("left" if rank() else "right", 1.0, sync_dist=True)


class OtherHook(Logging):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if rank():
            self.log("val", 1.0, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        if not rank():
            self.log("val", 1.0, sync_dist=True)


class OtherMetric(Logging):
    def __init__(self) -> None:
        super().__init__()
        self.other = SumMetric() if rank() else MeanMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.other.update(1.0)
        self.log("val_other", self.other)


class Predictions(Metric):
    """Keeps what it is given."""

    values: list[Tensor]

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.add_state("values", [], dist_reduce_fx="cat")

    def update(self, values: Tensor) -> None:
        self.values.append(values)

    def compute(self) -> Tensor:
        values = torch.cat(self.values) if isinstance(self.values, list) else self.values
        return values.sum().float()


class OtherShape(Logging):
    """A metric of other classes, whose counts cannot be added."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(3 if rank() else 2)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.accuracy.update(torch.tensor([0, 1]), torch.tensor([1, 1]))
        self.log("val_accuracy", self.accuracy)


def errors(module_classes: list[type[Net]]) -> list[str]:
    """Return the error of one fit after another."""
    texts = []
    for module_class in module_classes:
        with pytest.raises(RuntimeError) as raised:
            fit(module_class)
        texts.append(str(raised.value))
    return texts


DIFFERENT = {
    OtherKey: ("different values", "'right' in training_step on rank 0, 'left' in training_step on rank 1"),
    OtherOrder: ("different values", "'left' in training_step on rank 0, 'right' in training_step on rank 1"),
    OtherReduction: ("different values", "'loss' in training_step"),
    OtherEpochKey: ("different values", "'right' in validation_step on rank 0, 'left' in validation_step on rank 1"),
    OtherHook: ("different values", "'val' in on_validation_epoch_end on rank 0, 'val' in validation_step on rank 1"),
    OtherMetric: ("'val_other'", "its class is MeanMetric on rank 0, SumMetric on rank 1"),
    OtherShape: (
        "metric MulticlassAccuracy",
        "state 'tp' is torch.int64 of shape (2,) on rank 0, torch.int64 of shape",
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_ranks_that_log_different_things_all_raise_and_are_named() -> None:
    for texts in run_ranks(errors, list(DIFFERENT)):
        for text, parts in zip(texts, DIFFERENT.values(), strict=True):
            assert all(part in text for part in parts), text


class OtherLists(Logging):
    """Predictions that one rank has none of, of other types, and by query: for the log, and by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.few, self.typed, self.queries = Predictions(), Predictions(), RetrievalMAP()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not rank():
            self.few.update(torch.ones(2, 2))
        self.typed.update(torch.ones(2, dtype=torch.float64 if rank() else torch.float32))
        self.queries.update(
            torch.tensor([0.5, 0.4]), torch.tensor([rank(), 1]), torch.full((2,), 9 * rank() + batch_idx)
        )
        self.log("val_few", self.few)
        self.log("val_queries", self.queries)

    def on_validation_epoch_end(self) -> None:
        self.log("val_typed", self.typed.compute(), sync_dist=True)


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric:UserWarning")
@pytest.mark.parametrize("uneven", [False, True])
def test_lists_of_metrics_are_gathered_whatever_ranks_have(uneven: bool) -> None:
    for result in run_ranks(fit_uneven if uneven else fit, OtherLists):
        assert (result["val_few"], result["val_typed"]) == (8.0, 12.0)
        assert result["val_queries"] == pytest.approx((2 * 0.5 + 4 * 1.0) / 6)


class OnlyOne(Logging):
    """Rank 1 alone logs a value, so that it waits for the others, who wait for its gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_step == 2 and rank():
            note_fault()
            self.log("lonely", 1.0, on_step=True, sync_dist=True)
        return self.loss(batch)


class OnlyOneInValidation(Logging):
    """Rank 0 alone logs a value for the epoch; the others have gone on to train."""

    training_step = Net.training_step
    on_validation_epoch_end = Net.on_validation_epoch_end

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not rank():
            self.log("lonely", 1.0, sync_dist=True)


class OwnBarrier(Net):
    """Rank 0 waits for the others in a collective of the user's, which the others never come to."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_step == 2 and not rank():
            torch.distributed.barrier()
        if self.trainer.global_step == 2 and rank():
            self.log("lonely", 1.0, on_step=True, sync_dist=True)
        return self.loss(batch)


def fit_with_watch(module_class: type[Net]) -> None:
    fit(module_class, DDPHooksStrategy(failure_timeout=1.5, **CHECKED), max_epochs=2)


@pytest.mark.parametrize(
    ("module_class", "other"),
    [(OnlyOne, "waiting for bucket 0"), (OnlyOneInValidation, "Rank 1"), (OwnBarrier, "waiting for `barrier`")],
)
def test_ranks_that_wait_for_different_things_are_not_left_waiting(module_class: type[Net], other: str) -> None:
    endings = run_with_fault(fit_with_watch, module_class, world_size=2)
    assert all(ended.code for ended in endings)
    text = "\n".join(ended.error for ended in endings)
    assert "The ranks have parted ways" in text
    assert "waiting for the value logged as 'lonely' in " in text
    assert other in text


def fit_uneven(module_class: type[Net]) -> dict[str, float]:
    return fit(module_class, callbacks=[callbacks.UnevenInputs()])


def test_logs_agree_with_uneven_inputs_too() -> None:
    for result in run_ranks(fit_uneven, Logging):
        assert result["val_mean"] == pytest.approx(74 / 6)


def nothing_is_left() -> list[int]:
    """Return the number of process groups after each of some fits."""
    counts = []
    for _ in range(3):
        fit(Logging)
        counts.append(len(torch.distributed.distributed_c10d._world.pg_map))
    return counts


class SeesLogging(Net):
    def on_fit_start(self) -> None:
        results = self.trainer.fit_loop.epoch_loop._results
        self.patched = "log" in vars(results)


def is_logging_patched(strategy: Any) -> bool:
    module = make_module(SeesLogging)
    make_trainer(strategy, max_epochs=1).fit(module)
    return module.patched


def test_lightnings_logging_is_followed_only_where_it_is_asked_for() -> None:
    assert run_ranks(is_logging_patched, CHECKED) == [True, True]
    assert run_ranks(is_logging_patched, "ddp_hooks") == [False, False]


def test_no_group_outlives_its_fit() -> None:
    for counts in run_ranks(nothing_is_left):
        assert len(set(counts)) == 1
