"""Shows what communication costs a run: metrics for the logger, and a report and a trace at its end.

    Trainer hooks --> CommMonitor --> Recorder <-- Reducer (as its observer), comm (counts bytes)
                          |--> metrics --> logger, progress bar
                          `--> RunRecord --> report.html, trace.json

The parts are in monitor/; here they are tied to the Trainer's hooks.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_ddp_hooks import _compat, comm, traffic
from lightning_ddp_hooks.lightning.strategy import DDPHooksStrategy
from lightning_ddp_hooks.lightning.summary import declared
from lightning_ddp_hooks.monitor.clock import clock_for
from lightning_ddp_hooks.monitor.exchange import StepExchange
from lightning_ddp_hooks.monitor.record import RunRecord, step_metrics
from lightning_ddp_hooks.monitor.recorder import CompressionError, Recorder
from lightning_ddp_hooks.monitor.report import build_report
from lightning_ddp_hooks.monitor.report_text import slow_rank_advice, slow_rank_text
from lightning_ddp_hooks.monitor.skew import metrics, slow_rank
from lightning_ddp_hooks.monitor.timeline import StepTiming
from lightning_ddp_hooks.monitor.trace import build_trace
from lightning_ddp_hooks.traffic import ByteCounter

if TYPE_CHECKING:
    from lightning_ddp_hooks.reducer.reducer import Reducer

_WINDOW = 20  # steps over which one rank must be slow
_TRACED = 100  # steps of each rank in the trace
_HELD_UP = 0.1  # part of a step that it must hold the others up


class CommMonitor(Callback):
    """Measures what communication costs each training step, logs it, and writes a report.

    Logged are means over the steps since the last log, of the rank that logs; see `step_metrics` for the names. At the
    end of a fit rank 0 writes ``report.html`` (one page without scripts or outside files) with the last ``keep_steps``
    steps, and ``trace.json`` (for chrome://tracing or https://ui.perfetto.dev) with the last 100 of all ranks; after an
    error too, then with what was known by then. A warning names a rank that holds up the others.

    Args:
        dirpath: Where to write; by default the folder ``comm_monitor`` in the logger's directory, or without a logger
            in the Trainer's ``default_root_dir``.
        log_every_n_steps: How often to log; None for as often as the Trainer does.
        prog_bar: Show exposed time and overlap in the progress bar.
        per_bucket: Log the figures of each bucket too.
        compression_error: Measure how far the reduced gradients are from the exact mean. That takes a further
            all-reduce of all gradients, uncompressed, in the steps in which it is done.
        error_every_n_steps: How often that is.
        keep_steps: How many steps the report shows.

    Raises:
        TypeError: An argument of the wrong type.
        ValueError: A number below 1; at setup: another strategy, or a second such callback.

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
        every = 1 if log_every_n_steps is None else log_every_n_steps
        numbers = {"log_every_n_steps": every, "error_every_n_steps": error_every_n_steps, "keep_steps": keep_steps}
        for name, number in numbers.items():
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
        self._exchange: StepExchange | None = None
        self._has_warned = False
        self._unlogged: list[StepTiming] = []
        self._steps_seen = 0
        self._local_bytes = 0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if sum(isinstance(callback, CommMonitor) for callback in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise ValueError("Expected one CommMonitor callback, got several.")
        if not isinstance(trainer.strategy, DDPHooksStrategy):
            raise ValueError(f"CommMonitor needs strategy='ddp_hooks', got {type(trainer.strategy).__name__}.")

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, DDPHooksStrategy)
        reducer, device = strategy.reducer, strategy.root_device
        facts: dict[str, Any] = reducer.stats()
        backend = facts["comm_backend"]
        # Asking for the directory is collective.
        self._directory = self.dirpath or _run_directory(trainer) / "comm_monitor"
        counter, error = ByteCounter(), None
        if self.compression_error:
            error = CompressionError(self._own_group(reducer), self.error_every_n_steps)
        said = declared(strategy.run.hook.declared, strategy.settings.averager, None)
        clock, has_hook = clock_for(device, queues_waits=backend != "gloo"), said["hook"] is not None
        self._recorder = Recorder(clock, counter, error, has_hook=has_hook)
        texts = {
            "model": type(pl_module).__name__,
            "hook": said["hook"] or "mean all-reduce",
            "averager": said["averager"],
            "ranks": f"{trainer.world_size} ({backend})",
            # Not every accelerator's module can name its devices.
            "device": getattr(torch.get_device_module(device), "get_device_name", str)(device),
            "precision": str(trainer.precision),
            "reducer": facts["backend"],
            "torch": torch.__version__,
        }
        self.record = RunRecord(
            world_size=reducer.world_size,
            rank=trainer.global_rank,
            keep_steps=self.keep_steps,
            facts={name: text for name, text in texts.items() if text is not None},
            has_hook=has_hook,
            bucket_cap_bytes=facts["bucket_cap_bytes"],
            hosts=comm.all_gather_object(socket.gethostname(), reducer.control_group),
            sees_ends=device.type == "cpu" or backend != "gloo",
        )
        self._exchange = StepExchange(self._own_group(reducer, cpu=True)) if reducer.world_size > 1 else None
        self._has_warned = False
        self._unlogged = []
        self._steps_seen = trainer.global_step
        traffic.count_bytes(counter)
        self._reducer, reducer.observer = reducer, self._recorder

    def _own_group(self, reducer: Reducer, *, cpu: bool = False) -> comm.ProcessGroup:
        self._groups.append(comm.new_group(reducer.parent_group, cpu=cpu))
        return self._groups[-1]

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        recorder = self._recorder
        if recorder is None or recorder.in_step:  # the next micro-batch of an accumulation window
            return
        assert self._reducer is not None
        trains_alone = not self._reducer.sync  # an averager has taken over
        self._local_bytes = sum(param.nbytes for param in self._reducer.params) if trains_alone else 0
        recorder.begin_step(_compat.logging_step(trainer))

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._recorder is not None:
            self._recorder.backward_begins()

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._recorder is not None:
            self._recorder.backward_ended()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._recorder is not None:
            self._recorder.leave_out_step()  # if it is in the middle of an accumulation window
            self._recorder.begin_aside("validation")

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._recorder is not None:
            self._recorder.end_aside()

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._recorder is not None:
            self._recorder.begin_aside("save")  # up to the next step

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        window_open = pl_module.automatic_optimization and trainer.global_step == self._steps_seen
        if self._recorder is None or self.record is None or window_open:
            return
        self._steps_seen = trainer.global_step
        steps = self._recorder.end_step(self._local_bytes)
        self.record.add(steps)
        if self._exchange is not None:
            self._exchange.add(steps)
        step = _compat.logging_step(trainer)
        every = self.log_every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]
        self._unlogged += steps if every else []  # the Trainer's 0 means never
        if not every or (step + 1) % every:
            return
        if self._exchange is not None:
            self._exchange.begin()
        values = self._compare(trainer)
        if self._unlogged:
            values |= step_metrics(self._unlogged, self.record.world_size, per_bucket=self.per_bucket)
            self._unlogged = []
        self._log(trainer, values, step)
        for name in ("comm/exposed_ms", "comm/overlap") if self.prog_bar and "comm/overlap" in values else ():
            pl_module.log(name, values[name], prog_bar=True, logger=False, on_step=True, on_epoch=False)

    def _log(self, trainer: Trainer, values: dict[str, float], step: int) -> None:
        for logger in trainer.loggers if values else ():
            logger.log_metrics(values, step=step)

    def _compare(self, trainer: Trainer, *, wait: bool = False) -> dict[str, float]:
        """Take the steps of all ranks that have come; return their figures, and warn once of a slow rank."""
        record = self.record
        if self._exchange is None or record is None or not (came := self._exchange.take(wait=wait)):
            return {}
        record.compared.extend(came)
        found = record.split(len(came))
        assert found is not None
        window = record.split(max(len(came), _WINDOW))
        slow = None if window is None or window.steps < _WINDOW // 2 else slow_rank(window)
        if window is not None and slow is not None and slow.share > _HELD_UP and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(f"{slow_rank_text(slow, window, record)} {slow_rank_advice(slow)}")
        return metrics(found)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        record, reducer = self.record, self._reducer
        if record is None or reducer is None:
            return
        facts: dict[str, Any] = reducer.stats()
        record.bucket_cap_bytes = facts["bucket_cap_bytes"]  # "auto" has chosen by now
        self._stop()
        if self._exchange is not None:
            self._exchange.begin()
            self._log(trainer, self._compare(trainer, wait=True), record.steps[-1].step if record.steps else 0)
        record.traced = comm.gather_object(list(record.steps)[-_TRACED:], reducer.control_group) or ()
        for group in self._groups:
            comm.destroy_group(group)
        self._groups.clear()
        self._write(record)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        record = self.record
        if record is None or self._recorder is None:
            return
        self._stop(wait=False)
        comm.free_after_error(self._groups, self._exchange is not None and self._exchange.is_under_way)
        self._groups.clear()
        error = type(exception).__name__
        record.note = f"The run ended with {error}: this is what rank {record.rank} had recorded by then."
        self._write(record)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop(wait=False)

    def _stop(self, *, wait: bool = True) -> None:
        """Stop watching and counting, and complete the record; nothing collective."""
        recorder, record, reducer = self._recorder, self.record, self._reducer
        if recorder is None or record is None or reducer is None:
            return
        traffic.count_bytes(None)
        reducer.observer = self._recorder = self._reducer = None
        steps = recorder.settle(wait=wait)
        record.add(steps)
        if self._exchange is not None:
            self._exchange.add(steps)
        record.outside_bytes = recorder.outside_bytes

    def _write(self, record: RunRecord) -> None:
        if record.rank != 0 or self._directory is None:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        report = self._directory / "report.html"
        report.write_text(build_report(record), encoding="utf-8")
        trace = build_trace(record.traced or [list(record.steps)], record.facts)
        (self._directory / "trace.json").write_text(json.dumps(trace, allow_nan=False), encoding="utf-8")
        with _compat.beside_progress_bar():
            rank_zero_info(f"CommMonitor: {report}")


def _run_directory(trainer: Trainer) -> Path:
    """Return the directory of this run, as checkpoints have it; collective."""
    logger, found = trainer.logger, trainer.log_dir or trainer.default_root_dir
    if logger is None or getattr(logger, "log_dir", None) is not None:
        return Path(found)
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return Path(trainer.strategy.broadcast(str(Path(found, str(logger.name), version))))
