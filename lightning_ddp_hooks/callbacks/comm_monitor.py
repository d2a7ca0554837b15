"""Shows what communication costs a run: metrics for the logger, and a report and a trace at its end.

    Trainer hooks --> CommMonitor --> Recorder <-- Reducer (as its observer)     monitor/recorder.py
                          |              `--> comm (counts what is sent)
                          |--> metrics --> logger, progress bar                  monitor/metrics.py
                          `--> RunRecord --> report.html, trace.json             monitor/report.py, trace.py

What is measured and how is in monitor/; here it is tied to the Trainer's hooks.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_ddp_hooks import _compat, comm
from lightning_ddp_hooks.monitor.clock import clock_for
from lightning_ddp_hooks.monitor.metrics import step_metrics
from lightning_ddp_hooks.monitor.record import RunRecord, rank_row
from lightning_ddp_hooks.monitor.recorder import CompressionError, Recorder
from lightning_ddp_hooks.monitor.report import build_report
from lightning_ddp_hooks.monitor.timeline import StepTiming
from lightning_ddp_hooks.monitor.trace import build_trace
from lightning_ddp_hooks.traffic import ByteCounter

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from torch import Tensor

    from lightning_ddp_hooks.lightning.strategy import DDPHooksStrategy
    from lightning_ddp_hooks.reducer.reducer import Reducer

_IN_PROGRESS_BAR = ("comm/exposed_ms", "comm/overlap")


class CommMonitor(Callback):
    """Measures what communication costs each training step, logs it, and writes a report.

    Logged are means over the steps since the last log, of the rank that logs; see `step_metrics` for the names. At the
    end of a fit rank 0 writes ``report.html`` (one page without scripts or outside files) and ``trace.json`` (for
    chrome://tracing or https://ui.perfetto.dev) with the last ``keep_steps`` steps; after an error too, then without
    what other ranks would have to say.

    Args:
        dirpath: where to write; by default the folder ``comm_monitor`` in the logger's directory, or without a logger
            in the Trainer's ``default_root_dir``.
        log_every_n_steps: how often to log; None for as often as the Trainer does.
        prog_bar: show exposed time and overlap in the progress bar.
        per_bucket: log the figures of each bucket too.
        compression_error: measure how far the reduced gradients are from the exact mean. That takes a further
            all-reduce of all gradients, uncompressed, in the steps in which it is done.
        error_every_n_steps: how often that is.
        keep_steps: how many steps the report and the trace show.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a number below 1; at setup: another strategy, or a second such callback.

    Example:
        >>> Trainer(strategy="ddp_hooks", callbacks=[CommMonitor()])
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        *,
        log_every_n_steps: int | None = None,
        prog_bar: bool = True,
        per_bucket: bool = True,
        compression_error: bool = False,
        error_every_n_steps: int = 50,
        keep_steps: int = 1000,
    ) -> None:
        if dirpath is not None and not isinstance(dirpath, (str, Path)):
            raise TypeError(f"Expected a path for `dirpath`, got {dirpath!r}.")
        flags = {"prog_bar": prog_bar, "per_bucket": per_bucket, "compression_error": compression_error}
        for name, flag in flags.items():
            if not isinstance(flag, bool):
                raise TypeError(f"Expected True or False for `{name}`, got {flag!r}.")
        for name, number in (
            ("log_every_n_steps", 1 if log_every_n_steps is None else log_every_n_steps),
            ("error_every_n_steps", error_every_n_steps),
            ("keep_steps", keep_steps),
        ):
            if isinstance(number, bool) or not isinstance(number, int):
                raise TypeError(f"Expected a whole number for `{name}`, got {number!r}.")
            if number < 1:
                raise ValueError(f"Expected `{name}` of at least 1, got {number}.")
        self.dirpath = None if dirpath is None else Path(dirpath)
        self.log_every_n_steps = log_every_n_steps
        self.prog_bar = prog_bar
        self.per_bucket = per_bucket
        self.compression_error = compression_error
        self.error_every_n_steps = error_every_n_steps
        self.keep_steps = keep_steps
        self.record: RunRecord | None = None
        self._recorder: Recorder | None = None
        self._reducer: Reducer | None = None
        self._directory: Path | None = None
        self._groups: list[comm.ProcessGroup] = []
        self._unlogged: list[StepTiming] = []
        self._steps_seen = 0
        self._local_bytes = 0

    # ------------------------------------------------------------------ begin

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        from lightning_ddp_hooks.lightning.strategy import DDPHooksStrategy  # which imports this package

        if stage != "fit":
            return
        if sum(isinstance(callback, CommMonitor) for callback in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise ValueError("Expected one CommMonitor callback, got several.")
        if not isinstance(trainer.strategy, DDPHooksStrategy):
            raise ValueError(f"CommMonitor needs strategy='ddp_hooks', got {type(trainer.strategy).__name__}.")

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        reducer: Reducer = strategy.reducer
        # Asking for the directory is collective.
        self._directory = self.dirpath or Path(trainer.log_dir or trainer.default_root_dir) / "comm_monitor"
        self._groups = [comm.new_group(reducer.parent_group, cpu=True)]
        error = None
        if self.compression_error:
            self._groups.append(comm.new_group(reducer.parent_group))
            error = CompressionError(self._groups[1], self.error_every_n_steps)
        backend = comm.backend_name(reducer.group)
        traffic = ByteCounter()
        self._recorder = Recorder(clock_for(strategy.root_device, queues_waits=backend == "nccl"), traffic, error)
        self.record = RunRecord(
            world_size=reducer.world_size,
            rank=trainer.global_rank,
            keep_steps=self.keep_steps,
            facts=_facts(trainer, strategy, backend),
            has_hook=strategy.run.hook.bound is not None,
            bucket_cap_bytes=strategy.reducer.stats()["bucket_cap_bytes"],
        )
        self._unlogged = []
        self._steps_seen = trainer.global_step
        comm.count_bytes(traffic)
        reducer.observer, self._reducer = self._recorder, reducer

    # ------------------------------------------------------------------ each step

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        recorder = self._recorder
        if recorder is None or recorder.in_step:  # the next micro-batch of an accumulation window
            return
        strategy: Any = trainer.strategy
        trains_alone = not strategy.reducer.sync  # an averager has taken over
        self._local_bytes = sum(param.nbytes for param in strategy.reducer.params) if trains_alone else 0
        recorder.begin_step(_compat.logging_step(trainer))

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        if self._recorder is not None:
            self._recorder.backward_begins()

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._recorder is not None:
            self._recorder.backward_ended()

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._recorder is not None:  # in the middle of an accumulation window
            self._recorder.spoil_step()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._recorder is None:
            return
        if pl_module.automatic_optimization and trainer.global_step == self._steps_seen:
            return  # the window goes on
        self._steps_seen = trainer.global_step
        assert self.record is not None
        steps = self._recorder.end_step(self._local_bytes)
        self.record.add(steps)
        step = _compat.logging_step(trainer)
        every = self.log_every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every:  # the Trainer's 0 means never
            self._unlogged += steps
            if self._unlogged and (step + 1) % every == 0:
                self._log(trainer, pl_module, self.record.world_size, step)

    def _log(self, trainer: pl.Trainer, pl_module: pl.LightningModule, world_size: int, step: int) -> None:
        values = step_metrics(self._unlogged, world_size, per_bucket=self.per_bucket)
        self._unlogged = []
        for logger in trainer.loggers:
            logger.log_metrics(values, step=step)
        if self.prog_bar:
            for name in _IN_PROGRESS_BAR:
                pl_module.log(name, values[name], prog_bar=True, logger=False, on_step=True, on_epoch=False)

    # ------------------------------------------------------------------ end

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        recorder, record = self._recorder, self.record
        if recorder is None or record is None:
            return
        strategy: Any = trainer.strategy
        record.bucket_cap_bytes = strategy.reducer.stats()["bucket_cap_bytes"]  # "auto" has chosen by now
        self._detach(trainer)
        record.add(recorder.settle())
        record.ranks = comm.all_gather_object(
            rank_row(record.rank, list(record.steps), record.world_size), self._groups[0]
        )
        for group in self._groups:
            comm.destroy_group(group)
        self._write(recorder)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        recorder, record = self._recorder, self.record
        if recorder is None or record is None:
            return
        self._detach(trainer)
        if isinstance(exception, Exception) and not comm.is_collective_error(exception):
            comm.free_after_error(self._groups[:1])  # on the other one a collective may be under way
        record.add(recorder.settle(wait=False))
        record.note = (
            f"The run ended with {type(exception).__name__}: this is what rank {record.rank} had recorded by then."
        )
        self._write(recorder)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._detach(trainer)

    def _detach(self, trainer: pl.Trainer) -> None:
        """Stop watching and counting; nothing collective."""
        if self._recorder is None:
            return
        self._recorder = None
        comm.count_bytes(None)
        reducer, self._reducer = self._reducer, None
        if reducer is not None:
            reducer.observer = None

    def _write(self, recorder: Recorder) -> None:
        record = self.record
        assert record is not None
        record.parameter_bytes = recorder.parameter_bytes
        record.outside_bytes = recorder.outside_bytes
        if record.rank != 0 or self._directory is None:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        report = self._directory / "report.html"
        report.write_text(build_report(record), encoding="utf-8")
        trace = build_trace(list(record.steps), rank=record.rank, metadata=record.facts)
        (self._directory / "trace.json").write_text(json.dumps(_finite(trace), allow_nan=False), encoding="utf-8")
        rank_zero_info(f"CommMonitor: {report}")


def _facts(trainer: pl.Trainer, strategy: DDPHooksStrategy, backend: str) -> dict[str, str]:
    """Say what runs, for the head of the report."""
    from lightning_ddp_hooks.lightning.summary import declared  # whose package imports this one

    hook, bound = strategy.run.hook.declared, strategy.run.hook.bound
    # As at the start of the fit.
    texts = declared(hook, strategy.settings.averager, None)
    device = strategy.root_device
    facts = {
        "model": type(trainer.lightning_module).__name__,
        "hook": texts["hook"] or ("mean all-reduce" if bound is None else bound.name),
        "averager": texts["averager"],
        "ranks": f"{trainer.world_size} ({backend})",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "precision": str(trainer.precision),
        "reducer": str(strategy.stats()["backend"]),
        "torch": torch.__version__,
    }
    return {name: text for name, text in facts.items() if text is not None}


def _finite(value: Any) -> Any:
    """Write null for numbers that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, (list, tuple)) else value
