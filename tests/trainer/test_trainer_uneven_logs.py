"""Uneven inputs under a Trainer: logs, metrics, validation, callbacks, checkpoints, policies, loaders, errors."""

import copy
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch.callbacks
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.utilities import CombinedLoader
from ranks import run_ranks
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import CatMetric, MeanMetric, Metric, SumMetric
from trainer_runs import EXACT, SAFELY, WIDTH, Net, assert_close, make_module, make_trainer, rank, state_of
from uneven_runs import COUNTS, WORLD, Position, PositionStream, Shard, Stream, UnevenNet, fit_union, make_batch

from lightning_ddp_hooks.callbacks import UnevenInputs

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.trainer,
    # torchmetrics, of a rank that never had a batch.
    pytest.mark.filterwarnings("ignore:The ``compute`` method of metric:UserWarning"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
    pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor:UserWarning"),
]


# ---------------------------------------------------------------------- logs and metrics


class Journal(Callback):
    """Notes what is logged, and logs from batch hooks itself."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.epochs: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        batches = len(batch["parts"]) if isinstance(batch, dict) else 1
        module.log("hook_sum", float(batches), reduce_fx="sum", on_step=False, on_epoch=True, sync_dist=True)
        module.log("hook_max", float(batch_idx), reduce_fx="max", on_step=False, on_epoch=True, sync_dist=True)
        self.steps.append(self._values(trainer))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch:
            self.epochs.append(self._values(trainer))

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.epochs.append(self._values(trainer))

    def _values(self, trainer: Any) -> dict[str, float]:
        return {key: float(value) for key, value in trainer.callback_metrics.items()}


class Pairs(Metric):
    """Its state is a list of integer matrices, of which torchmetrics itself would not know what an empty one is."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("pairs", [], dist_reduce_fx="cat")

    def update(self, x: Tensor) -> None:
        self.pairs.append((x[:, :2] * 1000).round().long())  # type: ignore[union-attr, operator]

    def compute(self) -> Tensor:
        return torch.cat(self.pairs) if isinstance(self.pairs, list) else self.pairs  # type: ignore[arg-type]


class Logs(UnevenNet):
    """Logs in all ways; in a single process once for each of the ranks' batches."""

    counts: ClassVar = COUNTS[1]
    val_counts: ClassVar = (2, 3, 1)

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.cat, self.total = MeanMetric(), CatMetric(), SumMetric()
        self.val_mean, self.val_cat = MeanMetric(), Pairs()

    def val_dataloader(self) -> Any:
        return self.loader(self.val_counts, offset=10)

    def test_dataloader(self) -> Any:
        return [self.loader(self.val_counts, offset=10), self.loader((0, 2, 3), offset=20)]

    def parts(self, batch: Any) -> Any:
        return batch["parts"] if isinstance(batch, dict) else [batch]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.over_batches(self.loss, batch)
        samples = sum(len(x) for x, _ in self.parts(batch))
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=samples)
        self.log("most", loss * 0 + batch_idx, reduce_fx="max", on_step=False, on_epoch=True, sync_dist=True)
        self.log("count", float(samples), reduce_fx="sum", on_step=False, on_epoch=True, sync_dist=True)
        for x, y in self.parts(batch):
            values = (self.net(x) - y).detach().abs().squeeze(1)
            self.mean.update(values)
            self.cat.update(values)
            self.total.update(values)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return {"loss": loss, "more": loss.detach()}

    def on_train_epoch_end(self) -> None:
        self.seen = getattr(self, "seen", [])
        self.seen.append((sorted(torch.as_tensor(self.cat.compute()).tolist()), float(self.total.compute())))
        self.cat.reset()
        self.total.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.over_batches(self.loss, batch, "samples")
        samples = sum(len(x) for x, _ in self.parts(batch))
        self.log("val", loss, sync_dist=True, batch_size=samples)
        for x, y in self.parts(batch):
            self.val_mean.update((self.net(x) - y).abs())
            self.val_cat.update(x * y)
        self.log("val_mean", self.val_mean)
        return loss

    def on_validation_epoch_end(self) -> None:
        self.val_seen = getattr(self, "val_seen", [])
        self.val_seen.append(sorted(torch.as_tensor(self.val_cat.compute()).tolist()))
        self.val_cat.reset()

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        loss = self.over_batches(self.loss, batch, "samples")
        self.log("test", loss, sync_dist=True, batch_size=sum(len(x) for x, _ in self.parts(batch)))


class LogsWithEmptyRank(Logs):
    counts: ClassVar = COUNTS[2]
    val_counts: ClassVar = (0, 1, 3)
    kind: ClassVar = Stream


class LogsOfSizes(Logs):
    sizes: ClassVar = (1, 4, 2)
    divisor: ClassVar = "samples"


def log_all(module_class: type[Logs], options: dict[str, Any], alone: bool = False) -> Any:
    journal, module = Journal(), make_module(module_class) if not alone else module_class()
    callbacks: list[Callback] = [journal] if alone else [UnevenInputs(divisor=module_class.divisor), journal]  # type: ignore[arg-type]
    trainer = make_trainer("auto" if alone else "ddp_hooks", **{**EXACT, **options, "callbacks": callbacks})
    trainer.fit(module)
    tested = trainer.test(module, verbose=False)
    return journal.steps, journal.epochs, module.seen, module.val_seen, tested, state_of(module)


def close(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            close(found[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, two in zip(found, expected, strict=True):
            close(one, two)
    else:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize(
    ("module_class", "options"),
    [
        (Logs, {"val_check_interval": 3}),
        (LogsWithEmptyRank, {"val_check_interval": 3, "check_val_every_n_epoch": None, "accumulate_grad_batches": 2}),
        (LogsOfSizes, {"num_sanity_val_steps": 2}),
    ],
)
def test_logs_metrics_and_evaluation_are_those_of_the_union(module_class: type[Logs], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    expected = log_all(module_class, {**options, "devices": 1}, alone=True)
    for found in run_ranks(log_all, module_class, options, world_size=WORLD):
        close(found[1:5], expected[1:5])
        assert_close(found[5], expected[5])
    # Values of single steps: at every step that of the ranks which have data, also on rank 0 once it has joined.
    # (Where batches differ in size, Lightning takes the mean over ranks for it, whatever the divisor is.)
    if module_class.divisor == "active":
        for found_step, expected_step in zip(found[0], expected[0], strict=True):
            close(found_step.get("loss_step"), expected_step.get("loss_step"))


class NeverReset(UnevenNet):
    """Computes a metric by hand in each epoch, also on a rank that has no data and so has not updated its own."""

    counts: ClassVar = COUNTS[2]

    def __init__(self) -> None:
        super().__init__()
        self.total, self.seen = SumMetric(), []  # type: ignore[var-annotated]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.total.update(1.0)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.seen.append(float(self.total.compute()))


def compute_each_epoch() -> list[float]:
    module = make_module(NeverReset)
    make_trainer("ddp_hooks", **{**EXACT, "callbacks": [UnevenInputs()]}).fit(module)
    return list(module.seen)


def test_a_metric_that_is_never_reset_is_computed_anew_on_ranks_without_data() -> None:
    batches = sum(COUNTS[2])
    assert run_ranks(compute_each_epoch, world_size=WORLD) == [[batches, 2 * batches]] * WORLD


# ---------------------------------------------------------------------- callbacks and checkpoints


class Validated(UnevenNet):
    counts: ClassVar = COUNTS[1]
    kind: ClassVar = Position

    def val_dataloader(self) -> Any:
        return Stream(self.loader((2, 3, 1), offset=10))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        samples = sum(len(x) for x, _ in (batch["parts"] if isinstance(batch, dict) else [batch]))
        self.log("val", self.over_batches(self.loss, batch, "samples"), sync_dist=True, batch_size=samples)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def callbacks(folder: str) -> list[Callback]:
    average = getattr(lightning.pytorch.callbacks, "WeightAveraging", None)  # older Lightning has none
    return [
        ModelCheckpoint(Path(folder) / "best", "{epoch}-{val:.6f}", monitor="val", save_top_k=2, save_last=True),
        ModelCheckpoint(Path(folder) / "steps", "{step}", every_n_train_steps=3, save_top_k=-1),
        EarlyStopping("val", patience=1, min_delta=0.05),
        StochasticWeightAveraging(0.01, swa_epoch_start=4),
        *([] if average is None else [average(avg_fn=lambda old, new, n: 0.5 * old + 0.5 * new)]),
    ]


def fit_with_callbacks(folder: str, alone: bool = False) -> Any:
    torch.manual_seed(0)
    module = Validated() if alone else make_module(Validated)
    options: dict[str, Any] = {**EXACT, "max_epochs": 6, "enable_checkpointing": True, "val_check_interval": 4}
    used = callbacks(folder) if alone else [UnevenInputs(), *callbacks(folder)]
    trainer = make_trainer(
        "auto" if alone else "ddp_hooks", **{**options, **({"devices": 1} if alone else {}), "callbacks": used}
    )
    trainer.fit(module)
    best: Any = trainer.checkpoint_callbacks[0]
    return trainer.global_step, trainer.current_epoch, float(best.best_model_score), state_of(module)


def test_callbacks_and_checkpoints_are_those_of_the_union(tmp_path: Path) -> None:
    expected = fit_with_callbacks(str(tmp_path / "alone"), alone=True)
    for found in run_ranks(fit_with_callbacks, str(tmp_path / "ranks"), world_size=WORLD):
        assert found[:2] == expected[:2]
        close(found[2], expected[2])
        assert_close(found[3], expected[3])
    names = [
        sorted(str(path.relative_to(tmp_path / way)) for path in (tmp_path / way).rglob("*.ckpt"))
        for way in ("alone", "ranks")
    ]
    assert names[0] == names[1]
    for name in names[0]:
        saved = [torch.load(tmp_path / way / name, weights_only=False) for way in ("alone", "ranks")]
        # WeightAveraging keeps its mean in float32.
        found, expected = ({key: value.double() for key, value in entry["state_dict"].items()} for entry in saved)
        close(found, expected)


class Resumes(UnevenNet):
    counts: ClassVar = COUNTS[1]
    kind: ClassVar = Position


class ResumesStream(Resumes):
    kind: ClassVar = PositionStream


class ResumesEmpty(Resumes):
    counts: ClassVar = COUNTS[2]


def resume(module_class: type[LightningModule], folder: str) -> Any:
    # In float64 from the start: a checkpoint is read before the Trainer converts the module.
    whole = make_module(module_class).double()
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    options = {**EXACT, "enable_checkpointing": True}
    make_trainer("ddp_hooks", **{**options, "callbacks": [UnevenInputs(), saver]}).fit(whole)
    states = []
    for step in (1, 3, 4, 6):
        resumed = make_module(module_class).double()
        trainer = make_trainer("ddp_hooks", **{**EXACT, "callbacks": [UnevenInputs()]})
        trainer.fit(resumed, ckpt_path=Path(folder) / f"step={step}.ckpt", **SAFELY)
        states.append(state_of(resumed))
    return state_of(whole), states


@pytest.mark.parametrize("module_class", [Resumes, ResumesStream, ResumesEmpty])
def test_resuming_in_the_tail_equals_not_stopping(module_class: Any, tmp_path: Path) -> None:
    for whole, states in run_ranks(resume, module_class, str(tmp_path), world_size=WORLD):
        for state in states:
            assert_close(state, whole)


# ---------------------------------------------------------------------- policies


class StopsAtTheShortest(UnevenNet):
    counts: ClassVar = COUNTS[0]
    stop: ClassVar = True

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class StopsStreams(StopsAtTheShortest):
    kind: ClassVar = Stream


def stop_or_raise(module_class: type[LightningModule]) -> Any:
    stopped = make_module(module_class)
    trainer = make_trainer("ddp_hooks", **{**EXACT, "callbacks": [UnevenInputs("stop")], "accumulate_grad_batches": 3})
    trainer.fit(stopped)
    raised, steps = make_module(module_class), []
    raised.on_train_batch_end = lambda *_: steps.append(1)
    with pytest.raises(RuntimeError, match="exhausted") as caught:
        make_trainer("ddp_hooks", **{**EXACT, "callbacks": [UnevenInputs("error")]}).fit(raised)
    return state_of(stopped), trainer.global_step, len(steps), str(caught.value)


@pytest.mark.parametrize("module_class", [StopsAtTheShortest, StopsStreams])
def test_stop_ends_the_epoch_and_error_raises_on_all_ranks(module_class: Any) -> None:
    expected = fit_union(module_class, {"accumulate_grad_batches": 3})
    results = run_ranks(stop_or_raise, module_class, world_size=WORLD)
    for state, global_step, steps, _ in results:
        assert_close(state, expected)
        assert (global_step, steps) == (2, 2)
    for index, (*_, text) in enumerate(results):
        who = "Rank 2" if index == 2 else "Some ranks"
        assert text.startswith(
            f"{who} exhausted all inputs after 2 batches of epoch 0, at step 2: only ranks 0, 1 still have data. "
        )
        assert 'policy="join"' in text
        assert 'policy="stop"' in text


# ---------------------------------------------------------------------- samplers and loaders


class Numbers(Net):
    """Notes which samples it is given; 17 samples make 3 shares of 6, 6 and 5."""

    samples: ClassVar = 17

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[int]] = {"fit": [], "val": [], "test": []}

    def loader(self, shuffle: bool) -> DataLoader:
        x = torch.randn(self.samples, WIDTH, dtype=torch.float64)
        numbers = torch.arange(self.samples)
        workers = int(shuffle and self.samples > 2)
        # A rank's workers would otherwise start as the rank did, but without what was imported for it.
        context = "fork" if workers else None
        samples = TensorDataset(x, x[:, :1], numbers)
        return DataLoader(samples, 2, shuffle=shuffle, num_workers=workers, multiprocessing_context=context)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen["fit"] += batch[2].tolist()
        return self.loss(batch[:2])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen["val"] += batch[2].tolist()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.seen["test"] += batch[2].tolist()

    def train_dataloader(self) -> Any:
        return self.loader(shuffle=True)

    def val_dataloader(self) -> Any:
        return self.loader(shuffle=False)

    def test_dataloader(self) -> Any:
        return self.loader(shuffle=False)


class FewNumbers(Numbers):
    """Two samples for three ranks."""

    samples: ClassVar = 2


def see_numbers(module_class: type[LightningModule]) -> Any:
    module = make_module(module_class)
    trainer = make_trainer("ddp_hooks", **{**EXACT, "max_epochs": 1, "callbacks": [UnevenInputs()]})
    trainer.fit(module)
    trainer.test(module, verbose=False)
    return module.seen


@pytest.mark.parametrize("module_class", [Numbers, FewNumbers])
def test_each_sample_is_used_exactly_once(module_class: Any) -> None:
    results = run_ranks(see_numbers, module_class, world_size=WORLD)
    for stage in ("fit", "val", "test"):
        assert Counter(number for seen in results for number in seen[stage]) == Counter(range(module_class.samples)), (
            stage
        )


class Reloads(UnevenNet):
    """The shards change from epoch to epoch."""

    def train_dataloader(self) -> Any:
        return self.loader(COUNTS[self.trainer.current_epoch % 3])


class LimitedStream(UnevenNet):
    """An iterator that goes on where it stopped: what is read ahead of the limit would be lost."""

    def train_dataloader(self) -> Any:
        if self.trainer.world_size == 1:
            return self.loader((6, 6, 6))
        return Endless(rank())


class Endless(IterableDataset):
    def __init__(self, owner: int) -> None:
        self.batches = (make_batch(owner, index % 6) for index in range(100))

    def __iter__(self) -> Iterator[Any]:
        return self.batches


def fit_loaders() -> Any:
    options: list[tuple[type[LightningModule], dict[str, Any]]] = [
        (Reloads, {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3}),
        (LimitedStream, {"limit_train_batches": 3, "max_epochs": 2}),
    ]
    states = []
    for module_class, option in options:
        module = make_module(module_class)
        make_trainer("ddp_hooks", **{**EXACT, **option, "callbacks": [UnevenInputs()]}).fit(module)
        states.append(state_of(module))
    return states


def test_reloaded_and_limited_loaders() -> None:
    reloads = fit_union(Reloads, {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3})
    limited = fit_union(LimitedStream, {"max_epochs": 1})
    for found in run_ranks(fit_loaders, world_size=WORLD):
        assert_close(found[0], reloads)
        assert_close(found[1], limited)


# ---------------------------------------------------------------------- errors


class SeveralLoaders(UnevenNet):
    def train_dataloader(self) -> Any:
        return [Shard(0, 2), Shard(1, 2)]


class TakesIterator(UnevenNet):
    def training_step(self, dataloader_iter: Any) -> Any:
        return self.loss(next(dataloader_iter)[0])


class LogsToAGroup(UnevenNet):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("x", 1.0, sync_dist=True, sync_dist_group=torch.distributed.group.WORLD, on_step=False, on_epoch=True)
        return self.loss(batch)


class RawBackward(UnevenNet):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch).backward()


class CombinedValidation(UnevenNet):
    def val_dataloader(self) -> Any:
        return CombinedLoader([Shard(0, 2), Shard(1, 2)], "max_size")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


class Uncounted(UnevenNet):
    """A batch without samples, on one rank."""

    def train_dataloader(self) -> Any:
        shard: Any = Shard(rank(), 3)
        if rank() == 1:
            shard.batches[1:] = [{"text": "a"}] * 2
        return shard

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(make_batch(0, 0) if isinstance(batch, dict) else batch)


def wrong_setups() -> list[str]:
    messages = []
    for module_class, strategy, used in (
        (SeveralLoaders, "ddp_hooks", [UnevenInputs()]),
        (TakesIterator, "ddp_hooks", [UnevenInputs()]),
        (LogsToAGroup, "ddp_hooks", [UnevenInputs()]),
        (RawBackward, "ddp_hooks", [UnevenInputs()]),
        (CombinedValidation, "ddp_hooks", [UnevenInputs()]),
        (UnevenNet, "ddp_hooks", [UnevenInputs(), UnevenInputs()]),
        (UnevenNet, "ddp", [UnevenInputs()]),
        (UnevenNet, {"gradient_weighting": "samples"}, [UnevenInputs()]),
        (RawBackward, {"gradient_weighting": "samples"}, []),
        (Uncounted, {"gradient_weighting": "samples"}, []),
        (Uncounted, "ddp_hooks", [UnevenInputs(divisor="samples")]),
    ):
        with pytest.raises((RuntimeError, ValueError)) as caught:
            make_trainer(copy.deepcopy(strategy), **{**EXACT, "callbacks": used}).fit(make_module(module_class))
        messages.append(str(caught.value))
    return messages


def test_what_is_not_supported_raises_by_name_on_all_ranks() -> None:
    for wrong in ({"policy": "skip"}, {"divisor": "batches"}):
        with pytest.raises(ValueError, match="Expected `"):
            UnevenInputs(**wrong)  # type: ignore[arg-type]
    for index, messages in enumerate(run_ranks(wrong_setups, world_size=WORLD)):
        for number, setting in ((9, '`gradient_weighting="samples"`'), (10, '`UnevenInputs(divisor="samples")`')):
            told = f"{setting} needs the number of samples of each batch" if index == 1 else "on "
            assert told in messages[number]
            assert "cannot be counted" in messages[number] or index == 1
        assert "one training dataloader, got 2" in messages[0]
        assert "training_step(self, dataloader_iter)" in messages[1]
        assert "sync_dist_group" in messages[2]
        assert messages[3].startswith("UnevenInputs scales the loss in `manual_backward`; ")
        assert messages[3].endswith("Call `self.manual_backward(loss)` instead.")
        assert "mode='max_size'" in messages[4]
        assert "got several" in messages[5]
        assert "needs strategy='ddp_hooks', got DDPStrategy" in messages[6]
        assert 'set `divisor="samples"`' in messages[7]
        assert messages[8].startswith('`gradient_weighting="samples"` scales the loss in `manual_backward`; ')
        assert messages[8].endswith("Call `self.manual_backward(loss)` instead.")
