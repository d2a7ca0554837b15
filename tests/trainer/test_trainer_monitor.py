"""CommMonitor in a Trainer: it changes no bit, and what it writes is what happened, whatever the run does."""

import contextlib
import io
import json
import logging
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from backends import require
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger
from ranks import run_ranks
from torch import Tensor, nn
from trainer_runs import (
    GLOBAL_BATCH,
    QUIET,
    SAMPLES,
    Manual,
    Net,
    assert_same,
    make_module,
    make_trainer,
    rank,
    state_of,
)
from uneven_runs import Shard

from lightning_ddp_hooks.averaging import DiLoCo, PeriodicModelAverager
from lightning_ddp_hooks.callbacks import CommMonitor, UnevenInputs
from lightning_ddp_hooks.hooks import BlockQuantize, PowerSGD
from lightning_ddp_hooks.monitor.record import RunRecord
from lightning_ddp_hooks.reducer.bucket import STATUS_NUMEL

pytestmark = [pytest.mark.trainer, pytest.mark.ranks]

STEPS = 2 * SAMPLES // GLOBAL_BATCH  # two epochs
HOOKS = {"mean": None, "powersgd": PowerSGD(start_iter=1), "int8": BlockQuantize(block_size=64)}
NUMEL = 8 * 16 + 16 + 16 * 16 + 16 + 16 + 1
PYTHON, NATIVE = {"reducer_backend": "python"}, {"reducer_backend": "native"}
BUCKETS = {"bucket_cap_mb": 0.001, "first_bucket_mb": 0.0005}


def monitored(
    path: Path, strategy: Any, module_class: type[Net] = Net, settings: dict[str, Any] | None = None, **options: Any
) -> tuple[RunRecord, Any, Trainer]:
    """Fit with a monitor; return its record, the module and the Trainer."""
    monitor = CommMonitor(path, **(settings or {}))
    callbacks = [monitor, *options.pop("callbacks", [])]
    module = make_module(module_class)
    trainer = make_trainer(strategy, callbacks=callbacks, **options)
    trainer.fit(module)
    assert monitor.record is not None
    return monitor.record, module, trainer


def check(record: RunRecord, *, backwards: int = 1) -> None:
    """What holds for any step that exchanges gradients."""
    for step in record.steps:
        assert step.begin <= step.backward_begin <= step.backward_end <= step.finished
        assert 0 <= step.wait <= step.duration
        for begin, end in step.wait_intervals:
            assert step.backward_begin <= begin <= end <= step.finished
        for begin, end in step.hook_work:
            assert begin <= end
            assert any(first <= begin and end <= last for first, last in step.wait_intervals)
        for bucket in step.buckets:
            assert step.backward_begin <= bucket.ready <= bucket.launched
            assert bucket.ready <= bucket.done <= step.finished
        assert [b.index for b in step.buckets] == sorted(b.index for b in step.buckets) or backwards > 1
        assert step.grad_bytes == backwards * 4 * NUMEL


# ---------------------------------------------------------------------- nothing changes


def fit_with_and_without(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for backend in (PYTHON, NATIVE):
        for name, hook in HOOKS.items():
            strategy = {"comm_hook": hook, **BUCKETS, **backend}
            plain = make_module(Net)
            make_trainer(strategy).fit(plain)
            for error in (False, True):
                record, module, trainer = monitored(
                    path, strategy, settings={"compression_error": error, "error_every_n_steps": 1}
                )
                assert_same(state_of(module), state_of(plain))
                check(record)
                assert trainer.strategy._run is None
                found[f"{name} {backend['reducer_backend']} {error}"] = record
    return found


@pytest.mark.timeout(300)
def test_a_monitor_changes_no_bit_under_either_engine(tmp_path: Path) -> None:
    require("native")
    first, second = run_ranks(fit_with_and_without, tmp_path, timeout=200)

    for name, record in first.items():
        assert record.count == second[name].count == len(record.steps) == STEPS
        assert [step.step for step in record.steps] == list(range(STEPS))
        # As at the start of the fit: short, and only what is not the default.
        hook = {"mean": "mean all-reduce", "powersgd": "PowerSGD(start_iter=1)",
                "int8": "BlockQuantize(block_size=64)"}[name.split()[0]]  # fmt: skip
        assert record.facts["hook"] == hook
        assert record.has_hook == (not name.startswith("mean"))
        assert record.bucket_cap_bytes == int(0.001 * 2**20)
        last = record.steps[-1]
        # What a hook computes after the backward is told apart from the waiting.
        works = [span for step in record.steps for span in step.hook_work]
        assert bool(works) == record.has_hook
        errors = [bucket.error for bucket in last.buckets]
        if name.startswith("mean"):
            assert len(last.buckets) == 2
            assert sum(b.sent_bytes for b in last.buckets) == 4 * (NUMEL + STATUS_NUMEL)  # the status, once
            assert errors == [0.0 if "True" in name else None] * 2
        elif "True" in name:  # both compress
            assert all(error is not None and 0 < error < 1 for error in errors)
            assert errors == [bucket.error for bucket in second[name].steps[-1].buckets]
        if name.startswith("int8"):
            assert last.sent_bytes < 0.5 * 4 * NUMEL
        assert dict(last.other_bytes).keys() <= {"control"}


# ---------------------------------------------------------------------- what is written


def fit_and_write(path: Path) -> tuple[Any, list[str], list[str]]:
    logger = CSVLogger(path, name="run", version=0)
    module, monitor = make_module(Net), CommMonitor()
    trainer = make_trainer(BUCKETS, callbacks=[monitor], logger=logger, log_every_n_steps=2)
    trainer.fit(module)
    assert 0 <= trainer.callback_metrics["comm/overlap"] <= 1
    return monitor.record, sorted(trainer.callback_metrics), sorted(trainer.progress_bar_metrics)


def test_metrics_report_and_trace_are_written(tmp_path: Path) -> None:
    (record, metrics, bar), (other, _, _) = run_ranks(fit_and_write, tmp_path)
    written = tmp_path / "run" / "version_0"

    assert metrics == bar == ["comm/exposed_ms", "comm/overlap"]
    rows = (written / "metrics.csv").read_text().splitlines()
    header = rows[0].split(",")
    assert {"comm/exposed_ms", "comm/time_ms", "comm/overlap", "comm/sent_bytes", "comm/compression"} <= set(header)
    assert {"comm/bucket_0/exposed_ms", "comm/bucket_1/time_ms", "comm/bucket_1/sent_bytes"} <= set(header)
    steps = [int(row.split(",")[header.index("step")]) for row in rows[1:]]
    assert sorted(set(steps)) == [1, 3, 5, 7]  # the steps that Lightning itself would log; at the end what came late
    last = dict(zip(header, rows[4].split(","), strict=True))
    assert float(last["comm/sent_bytes"]) == 4 * (NUMEL + STATUS_NUMEL)
    assert float(last["comm/compression"]) == NUMEL / (NUMEL + STATUS_NUMEL)

    report = (written / "comm_monitor" / "report.html").read_text()
    assert "Net" in report
    assert "mean all-reduce" in report
    assert [[row.step for row in rows] for rows in record.compared] == [[step, step] for step in range(STEPS)]
    assert record.compared == other.compared
    assert {"comm/skew_ms", "comm/transfer_ms"} <= set(header)
    trace = json.loads((written / "comm_monitor" / "trace.json").read_text())
    steps_of = [e["pid"] for e in trace["traceEvents"] if e["name"].startswith("step ")]
    assert steps_of == [1] * STEPS + [2] * STEPS


class ElsewhereLogger(Logger):
    """Tells where it saves, what it is called and which version it is, as that of Wandb, but no `log_dir`."""

    save_dir, name, version = "", "project", "abc"

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        pass

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass


def fit_with_logger_without_directory(path: Path) -> None:
    logger = ElsewhereLogger()
    logger.save_dir = str(path)
    make_trainer(BUCKETS, callbacks=[CommMonitor()], logger=logger, max_epochs=1).fit(make_module(Net))


def test_a_logger_without_a_directory_has_one_for_each_run(tmp_path: Path) -> None:
    run_ranks(fit_with_logger_without_directory, tmp_path)
    assert [path.relative_to(tmp_path).parts for path in tmp_path.rglob("report.html")] == [
        ("project", "abc", "comm_monitor", "report.html")
    ]


def fit_under_progress_bar(path: Path, bar: Any) -> str:
    """Return what is on the lines of a terminal that shows a bar."""
    stream = io.StringIO()
    for name in ("lightning.pytorch", "lightning.fabric"):
        for handler in logging.getLogger(name).handlers:
            handler.setStream(stream)  # type: ignore[attr-defined]
    with contextlib.redirect_stderr(stream), contextlib.redirect_stdout(stream):
        options = {"callbacks": [bar(), CommMonitor(path)], "enable_progress_bar": True, "max_epochs": 1}
        make_trainer({"comm_hook": "noop"}, **options).fit(make_module(Net))
    return stream.getvalue()


def test_what_is_said_stands_beside_the_progress_bar(tmp_path: Path) -> None:
    shown = run_ranks(fit_under_progress_bar, tmp_path, TQDMProgressBar)[0]
    lines = [line.rpartition("\r")[2] for line in shown.split("\n")]
    for said in ("lightning_ddp_hooks: 2 ranks", "The hook Noop exchanges no gradients", "CommMonitor: "):
        assert any(line.startswith(said) for line in lines), shown
    assert "Epoch 0" in shown


def fit_without_logger(path: Path) -> None:
    settings = {"log_every_n_steps": 1, "prog_bar": False, "per_bucket": False, "keep_steps": 3}
    module = make_module(Net)
    trainer = make_trainer({}, callbacks=[CommMonitor(**settings)], default_root_dir=path)
    trainer.fit(module)
    assert not trainer.callback_metrics
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module)  # a second fit, with the same callback


def test_without_a_logger_it_writes_below_the_root(tmp_path: Path) -> None:
    run_ranks(fit_without_logger, tmp_path)

    assert f"the last 3 of {STEPS} steps" in (tmp_path / "comm_monitor" / "report.html").read_text()


# ---------------------------------------------------------------------- kinds of runs


def fit_accumulating(path: Path) -> RunRecord:
    record, _, _ = monitored(path, BUCKETS, accumulate_grad_batches=2)
    check(record)
    return record


def test_an_accumulation_window_is_one_step(tmp_path: Path) -> None:
    for record in run_ranks(fit_accumulating, tmp_path):
        assert record.count == STEPS // 2
        # The first micro-batch is part of what comes before the backward that reduces.
        before = median([step.backward_begin - step.begin for step in record.steps])
        assert before > 0.3 * median([step.backward_end - step.backward_begin for step in record.steps])


class Gan(Net):
    """Two optimizers, which step in turn on halves of the network, three backwards a step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        for optimizer, loss in ((first, self.net), (second, self.other), (first, self.net)):
            optimizer.zero_grad()
            self.manual_backward(loss(batch[0]).square().mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.01) for part in (self.net, self.other)]


def fit_gan(path: Path) -> RunRecord:
    return monitored(path, BUCKETS, Gan)[0]


def test_several_backwards_make_one_step(tmp_path: Path) -> None:
    first, second = run_ranks(fit_gan, tmp_path)

    for record in (first, second):
        assert record.count == STEPS
        last = record.steps[-1]
        assert last.grad_bytes == 4 * (2 * NUMEL + 9)
        assert len(last.waits) >= 3
        assert last.wait == pytest.approx(sum(end - begin for begin, end in last.waits))


def fit_manual(path: Path) -> RunRecord:
    record, _, _ = monitored(path, BUCKETS, Manual)
    check(record)
    return record


def test_manual_optimization(tmp_path: Path) -> None:
    for record in run_ranks(fit_manual, tmp_path):
        assert record.count == STEPS


class UnevenNet(Net):
    def train_dataloader(self) -> Any:
        return Shard(rank(), (4, 2)[rank()])


def fit_uneven(path: Path) -> tuple[RunRecord, list[str]]:
    options = {"precision": "64-true", "callbacks": [UnevenInputs()], "max_epochs": 1}
    record, _, trainer = monitored(path, BUCKETS, UnevenNet, {"log_every_n_steps": 1}, **options)
    return record, sorted(trainer.callback_metrics)


def test_a_joined_rank_takes_part(tmp_path: Path) -> None:
    (first, keys), (second, other_keys) = run_ranks(fit_uneven, tmp_path)

    assert first.count == second.count == 4
    for step, other in zip(first.steps, second.steps, strict=True):
        assert step.grad_bytes == other.grad_bytes == 8 * NUMEL
        assert [b.sent_bytes for b in step.buckets] == [b.sent_bytes for b in other.buckets]
    assert first.compared == second.compared
    assert len(first.compared) == 4
    assert keys == other_keys


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))


def fit_with_averagers(path: Path) -> list[RunRecord]:
    averagers = [PeriodicModelAverager(period=4, warmup_steps=2), DiLoCo(period=4)]
    return [monitored(path, {"averager": averager}, Normed)[0] for averager in averagers]


def test_with_an_averager_what_it_sends_is_counted(tmp_path: Path) -> None:
    for owner, (periodic, diloco) in enumerate(run_ranks(fit_with_averagers, tmp_path)):
        steps = list(periodic.steps)
        size = sum(p.nbytes for p in Normed().parameters())
        for step in steps:
            sent = dict(step.other_bytes)
            if step.step < 2:
                assert step.grad_bytes == size
                assert (sent.get("buffers", 0) > 0) == (owner == 0)  # before the first forward, too
                assert step.local_bytes == 0
            else:
                assert step.buckets == ()
                assert step.local_bytes == size
        assert any("averaging" in dict(step.other_bytes) for step in steps[2:])
        averaging = sum(dict(step.other_bytes).get("averaging", 0) for step in diloco.steps)
        # Every fourth step brings the replicas together: the delta and the buffers.
        assert averaging >= STEPS // 4 * size
        assert {step.local_bytes for step in list(diloco.steps)[1:]} == {size}


class Breaks(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == 3:
            raise ValueError("no more")
        return super().training_step(batch, batch_idx)


def fit_until_it_breaks(path: Path) -> int:
    monitor = CommMonitor(path)
    with pytest.raises(ValueError, match="no more"):
        make_trainer({}, callbacks=[monitor]).fit(make_module(Breaks))
    assert monitor.record is not None
    assert not monitor.record.compared
    # Nothing is left behind: another monitor can count.
    monitored(path / "next", {})
    return monitor.record.count


def test_after_an_error_rank_0_writes_what_it_has(tmp_path: Path) -> None:
    assert run_ranks(fit_until_it_breaks, tmp_path) == [3, 3]
    assert "The run ended with ValueError" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "next" / "report.html").exists()


class Validates(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.loss(batch), sync_dist=True)

    val_dataloader = Net.train_dataloader


def fit_with_validation(path: Path) -> list[int]:
    record, _, _ = monitored(path, {}, Validates, accumulate_grad_batches=3, val_check_interval=2, max_epochs=1)
    return [step.step for step in record.steps]


def test_a_window_with_a_validation_inside_is_left_out(tmp_path: Path) -> None:
    # Four batches an epoch, three to a window: the validation after the second batch is inside the first window.
    assert run_ranks(fit_with_validation, tmp_path) == [[1], [1]]


class LoosesHook(Callback):
    """Registers a hook of its own in the fit."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        def hook(state: None, bucket: Any) -> Tensor:
            return bucket.buffer().div_(bucket.divisor)

        trainer.strategy.register_comm_hook(None, hook)


def fit_with_late_hook(path: Path) -> RunRecord:
    record, _, _ = monitored(path, BUCKETS, callbacks=[LoosesHook()])
    check(record)
    return record


def test_a_hook_that_sends_nothing_is_said_to_send_nothing(tmp_path: Path) -> None:
    for record in run_ranks(fit_with_late_hook, tmp_path):
        assert all(bucket.sent_bytes == 0 for step in record.steps for bucket in step.buckets)
        assert "hook" in record.facts["hook"]
        assert record.has_hook


class Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return gradient, None


class SlowBackward(Net):
    """Sleeps on rank 1 before the gradients of the first layer."""

    def forward(self, x: Tensor) -> Any:
        first, *others = self.net
        return nn.Sequential(*others)(Sleeps.apply(first(x), 0.1 * rank()))

    def loss(self, batch: Any) -> Any:
        return self(batch[0]).square().mean()


def fit_slowly(path: Path, how: str) -> list[str]:
    options: dict[str, Any] = {"max_epochs": 4, "log_every_n_steps": 3}
    hook = PowerSGD(start_iter=1) if how == "powersgd" else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monitored(path, {**BUCKETS, "comm_hook": hook}, SlowBackward, **options)
    return [str(warning.message) for warning in caught if "holds the others up" in str(warning.message)]


@pytest.mark.parametrize("how", ["mean", "powersgd"])
def test_a_slow_rank_is_named_once_and_no_hook_is_advised(tmp_path: Path, how: str) -> None:
    (said, nothing) = run_ranks(fit_slowly, tmp_path, how)

    assert not nothing
    [text] = said
    assert text.startswith("Rank 1 holds the others up")
    assert "in the backward, on the way to the gradients of bucket " in text
    assert "bucket 0" not in text
    report = (tmp_path / "report.html").read_text()
    assert "Rank 1 holds the others up" in report
    assert "sends less" not in report


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"dirpath": 3}, TypeError, "Expected a path for `dirpath`"),
        ({"prog_bar": 1}, TypeError, "Expected True or False for `prog_bar`"),
        ({"log_every_n_steps": 0}, ValueError, "`log_every_n_steps` of at least 1"),
        ({"keep_steps": 2.0}, TypeError, "whole number for `keep_steps`"),
        ({"error_every_n_steps": True}, TypeError, "whole number for `error_every_n_steps`"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        CommMonitor(**settings)


def fit_refused(path: Path) -> None:
    with pytest.raises(ValueError, match=r"CommMonitor needs strategy='ddp_hooks', got DDPStrategy\."):
        make_trainer("ddp", callbacks=[CommMonitor(path)]).fit(make_module(Net))
    with pytest.raises(ValueError, match="one CommMonitor callback, got several"):
        make_trainer({}, callbacks=[CommMonitor(path), CommMonitor(path)]).fit(make_module(Net))
    assert not list(path.iterdir())


def test_another_strategy_is_refused_by_name(tmp_path: Path) -> None:
    run_ranks(fit_refused, tmp_path)


def test_a_single_device_strategy_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got SingleDeviceStrategy"):
        Trainer(**{**QUIET, "devices": 1, "callbacks": [CommMonitor(tmp_path)]}).fit(Net())


def fit_alone(path: Path) -> RunRecord:
    return monitored(path, {})[0]


def test_one_rank_sends_nothing(tmp_path: Path) -> None:
    [record] = run_ranks(fit_alone, tmp_path, world_size=1)

    assert {step.sent_bytes for step in record.steps} == {0}
    assert "one rank" in (tmp_path / "report.html").read_text()
