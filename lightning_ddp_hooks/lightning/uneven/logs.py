"""Logs and metrics in the tail: a joined rank has nothing to add, but must have the same entries as the others.

At the end of an epoch all ranks reduce logged values one by one; a rank that lacks an entry, since it never ran a step,
would leave the others waiting. So after each step in the tail the lowest active rank sends its
entries to the joined ones, which add them with weight 0. Values of the step itself are copied, for rank 0 to show.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_ddp_hooks import _compat
from lightning_ddp_hooks.join.data import emptied, on_cpu

if TYPE_CHECKING:
    import lightning.pytorch as pl


_COPIED_ARGUMENTS: tuple[str, ...] = ("name", "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph")
_COPIED_ARGUMENTS += ("add_dataloader_idx", "metric_attribute")
_STATE_OF_LOGGED = ("value", "cumulated_batch_size", "_computed", "has_reset", "_update_count", "_forward_cache")


@dataclass(frozen=True)
class LogEntry:
    """One logged entry as the lowest active rank has it; picklable."""

    key: str  # Lightning's
    step: str  # name of the step function that logged it
    arguments: dict[str, Any]  # of `LightningModule.log`
    dataloader_idx: int | None
    dtype: torch.dtype | None  # None for a metric
    step_value: Tensor | None  # the value logged in this step, if it is shown for each step


@dataclass(frozen=True)
class StepRecord:
    """What the lowest active rank sends to joined ones about a step."""

    output: Any  # without samples
    entries: list[LogEntry]
    updated: list[str]  # the metrics that hold something, by their modules' names
    problem: str | None = None  # the message with which all ranks raise


def record_step(trainer: pl.Trainer, name: str, output: Any) -> StepRecord:
    """Describe the step that this rank has just run."""
    entries, problem = [], None
    for key, result in (_compat.logged_results(trainer) or {}).items():
        meta = result.meta
        if meta.fx.split(".")[0] != name or result.has_reset or meta.sync.rank_zero_only:
            continue
        arguments = {name: getattr(meta, name) for name in _COPIED_ARGUMENTS} | {"sync_dist": meta.sync.should}
        if meta.sync.group is not None:
            problem = (
                f"UnevenInputs does not support `self.log({meta.name!r}, ..., sync_dist_group=...)` in a step: ranks "
                "that have run out of data cannot know the group."
            )
        cache = _compat.logged_forward_cache(result) if meta.on_step else None
        value = cache.detach().cpu() if isinstance(cache, Tensor) else None
        dtype = result.value.dtype if result.is_tensor else None
        entries.append(LogEntry(key, name, arguments, meta.dataloader_idx, dtype, value))
    updated = [path for path, metric in _metrics(trainer.lightning_module) if metric.update_called]
    output = on_cpu(emptied(output))
    try:
        pickle.dumps(output)
    except Exception:  # an output of the user's own kind; nothing but the loss in it matters, and that is 0
        output = None
    return StepRecord(output, entries, updated, problem)


def apply_record(trainer: pl.Trainer, record: StepRecord) -> None:
    """Make the logged entries of a step on a rank that did not run it."""
    module = trainer.lightning_module
    for path in record.updated:
        _compat.forget_computed(module.get_submodule(path))
    results = _compat.logged_results(trainer)
    before = results.dataloader_idx
    for entry in record.entries:
        said = entry.arguments
        if entry.key not in results or results[entry.key].has_reset:
            results.dataloader_idx = entry.dataloader_idx
            if entry.dtype is None:
                value: Any = module.get_submodule(said["metric_attribute"])
            else:
                value = torch.tensor(_neutral(said["reduce_fx"]), dtype=entry.dtype, device=module.device)
            results.log(entry.step, value=value, batch_size=0, sync_dist_fn=trainer.strategy.reduce, **said)
        if said["on_step"]:
            value = None if entry.step_value is None else entry.step_value.to(module.device)
            _compat.set_logged_forward_cache(results[entry.key], value)
    results.dataloader_idx = before


def _neutral(reduce_fx: Callable[..., Any]) -> float:
    return {"max": float("-inf"), "min": float("inf")}.get(reduce_fx.__name__, 0.0)


def mask_logs(results: Any, masked: Callable[[], bool]) -> None:
    """Have what hooks and callbacks log count for nothing while ``masked()``; at most once for a collection."""
    if "update_metrics" in vars(results):
        return
    update = results.update_metrics

    def update_or_not(key: str, value: Any, batch_size: int) -> None:
        if masked() and isinstance(value, Tensor):
            value, batch_size = torch.full_like(value, _neutral(results[key].meta.reduce_fx)), 0
        update(key, value, batch_size)

    results.update_metrics = update_or_not


@contextmanager
def undoing_effects(trainer: pl.Trainer) -> Iterator[None]:
    """Undo, once the block has ended, what it did to buffers, metrics and logs."""
    module, results = trainer.lightning_module, _compat.logged_results(trainer)
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    restores = [_compat.snapshot_metric(metric) for _, metric in _metrics(module)]
    states = {key: vars(result) for key, result in results.items()}
    logged = {key: {name: state[name] for name in _STATE_OF_LOGGED if name in state} for key, state in states.items()}
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for restore in restores:
            restore()
        for key, result in list(results.items()):
            if key in logged:
                vars(result).update(logged[key])
            else:
                del results[key]


def _metrics(module: torch.nn.Module) -> list[tuple[str, Metric]]:
    return [(name, metric) for name, metric in module.named_modules() if isinstance(metric, Metric)]
