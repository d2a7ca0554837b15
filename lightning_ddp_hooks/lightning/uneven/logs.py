"""Logs and metrics in the tail: a joined rank has nothing to add, but must have the same entries as the others.

At the end of an epoch all ranks reduce their logged values one by one, and metrics gather their states one by one; a
rank that lacks an entry, since it never ran a step, would leave the others waiting. So after each step in the tail the
lowest active rank tells the joined ones which entries there are; they take them up with weight 0. Values of the step
itself are taken over as they are, so that rank 0 logs and shows current ones also once it has joined.
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
from lightning_ddp_hooks.join.batches import emptied, on_cpu

if TYPE_CHECKING:
    import lightning.pytorch as pl


@dataclass(frozen=True)
class LogEntry:
    """One logged entry as the lowest active rank has it; picklable.

    Attributes:
        key: under which Lightning keeps it.
        step: the step function that logged it.
        arguments: of `LightningModule.log`.
        dataloader_idx: of the validation loader.
        dtype: of its value; None for a metric.
        step_value: what was logged in this step, if it is shown for each step.
    """

    key: str
    step: str
    arguments: dict[str, Any]
    dataloader_idx: int | None
    dtype: torch.dtype | None
    step_value: Tensor | None


@dataclass(frozen=True)
class StepRecord:
    """What the lowest active rank tells of a step.

    Attributes:
        output: what it returned, without samples.
        entries: what it logged.
        list_states: metrics' states that are lists, by module and name: an empty tensor of the right kind for each.
        problem: what makes all ranks raise.
    """

    output: Any
    entries: list[LogEntry]
    list_states: dict[str, dict[str, Tensor]]
    problem: str | None = None


def record_step(trainer: pl.Trainer, name: str, output: Any) -> StepRecord:
    """Describe the step that this rank has just run."""
    module = trainer.lightning_module
    entries, problem = [], None
    for key, result in (_compat.logged_results(trainer) or {}).items():
        meta = result.meta
        if meta.fx.split(".")[0] != name or result.has_reset or meta.sync.rank_zero_only:
            continue
        arguments = {
            "name": meta.name,
            "prog_bar": meta.prog_bar,
            "logger": meta.logger,
            "on_step": meta.on_step,
            "on_epoch": meta.on_epoch,
            "reduce_fx": meta.reduce_fx,
            "enable_graph": meta.enable_graph,
            "sync_dist": meta.sync.should,
            "add_dataloader_idx": meta.add_dataloader_idx,
            "metric_attribute": meta.metric_attribute,
        }
        if meta.sync.group is not None:
            problem = (
                f"UnevenInputs does not support `self.log({meta.name!r}, ..., sync_dist_group=...)` in a step: ranks "
                "that have run out of data cannot know the group."
            )
        cache = _compat.logged_forward_cache(result) if meta.on_step else None
        value = cache.detach().cpu() if isinstance(cache, Tensor) else None
        dtype = result.value.dtype if result.is_tensor else None
        entries.append(LogEntry(key, name, arguments, meta.dataloader_idx, dtype, value))
    states = {}
    for path, metric in _metrics(module):
        lists = {
            state: emptied(values[0]).cpu()
            for state, values in _compat.list_states(metric).items()
            if values and isinstance(values[0], Tensor)
        }
        if lists:
            states[path] = lists
    return StepRecord(_sendable(on_cpu(emptied(output))), entries, states, problem)


def _sendable(output: Any) -> Any:
    try:
        pickle.dumps(output)
    except Exception:  # an output of the user's own kind; nothing but the loss in it matters, and that is 0
        return None
    return output


def take_over(trainer: pl.Trainer, record: StepRecord) -> None:
    """Have the entries of a step on a rank that did not run it."""
    module = trainer.lightning_module
    for path, lists in record.list_states.items():
        own = _compat.list_states(module.get_submodule(path))
        for state, empty in lists.items():
            if not own[state]:
                own[state].append(empty.to(module.device))
    results = _compat.logged_results(trainer)
    before = results.dataloader_idx
    for entry in record.entries:
        if entry.key not in results or results[entry.key].has_reset:
            results.dataloader_idx = entry.dataloader_idx
            _log_nothing(trainer, results, entry)
        if entry.arguments["on_step"]:
            value = None if entry.step_value is None else entry.step_value.to(module.device)
            _compat.set_logged_forward_cache(results[entry.key], value)
    results.dataloader_idx = before


def _log_nothing(trainer: pl.Trainer, results: Any, entry: LogEntry) -> None:
    module = trainer.lightning_module
    if entry.dtype is not None:
        value: Any = torch.tensor(_nothing(entry.arguments["reduce_fx"]), dtype=entry.dtype, device=module.device)
    else:
        value = module.get_submodule(entry.arguments["metric_attribute"])
    results.log(entry.step, value=value, batch_size=0, sync_dist_fn=trainer.strategy.reduce, **entry.arguments)


def _nothing(reduce_fx: Callable[..., Any]) -> float:
    return {"max": float("-inf"), "min": float("inf")}.get(reduce_fx.__name__, 0.0)


def mask_logs(results: Any, masked: Callable[[], bool]) -> None:
    """Have what hooks and callbacks log count for nothing while ``masked()``; at most once for a collection."""
    if "update_metrics" in vars(results):
        return
    update = results.update_metrics

    def update_or_not(key: str, value: Any, batch_size: int) -> None:
        if masked() and isinstance(value, Tensor):
            value, batch_size = torch.full_like(value, _nothing(results[key].meta.reduce_fx)), 0
        update(key, value, batch_size)

    results.update_metrics = update_or_not


@contextmanager
def without_traces(trainer: pl.Trainer) -> Iterator[None]:
    """Run a step whose effect on buffers, metrics and logs is undone."""
    module = trainer.lightning_module
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    restores = [_compat.snapshot_metric(metric) for _, metric in _metrics(module)]
    results = _compat.logged_results(trainer)
    logged = {key: _LoggedState(result) for key, result in results.items()}
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
                logged[key].restore(result)
            else:
                del results[key]


class _LoggedState:
    _NAMES = ("value", "cumulated_batch_size", "_computed", "has_reset", "_update_count", "_forward_cache")

    def __init__(self, result: Any) -> None:
        self._values = {name: vars(result)[name] for name in self._NAMES if name in vars(result)}

    def restore(self, result: Any) -> None:
        vars(result).update(self._values)


def _metrics(module: torch.nn.Module) -> list[tuple[str, Metric]]:
    return [(name, metric) for name, metric in module.named_modules() if isinstance(metric, Metric)]
