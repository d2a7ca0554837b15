"""What rank zero says at the start of a fit: who communicates what, and which settings will have no effect in it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities import rank_zero_info, rank_zero_warn

from lightning_ddp_hooks import _compat, comm
from lightning_ddp_hooks.averaging import DiLoCo, driver
from lightning_ddp_hooks.averaging.averager import ModelAverager
from lightning_ddp_hooks.config import FitSettings, replicas_differ_from
from lightning_ddp_hooks.conflicts import warn_no_effect
from lightning_ddp_hooks.hooks.allreduce import Noop
from lightning_ddp_hooks.hooks.contract import CommHook, declaration_text, hook_name
from lightning_ddp_hooks.hooks.post_local_sgd import PostLocalSGD
from lightning_ddp_hooks.hooks.registry import late_starts, short_name
from lightning_ddp_hooks.run import TrainingRun
from lightning_ddp_hooks.traffic import sent_by_rank

log = logging.getLogger(__name__)


def announce(run: TrainingRun, settings: FitSettings, *, steps: float, inputs: str | None = None) -> None:
    """Say on rank zero who communicates what, and warn of what will do nothing."""
    hook, averager = run.hook.declared, settings.averager
    texts = declared(hook, averager, settings.optimizer_in_hook)
    texts["inputs"] = None if inputs is None else f"uneven, {inputs}"
    with _compat.beside_progress_bar():
        rank_zero_info(summary_text(run.reducer.stats(), texts))
        if comm.rank(run.reducer.group) == 0:
            useless = without_effect(hook, averager, steps, getattr(run.hook.bound, "is_plain_mean", False))
            for text in (*useless, *warn_no_effect(settings), *_of_replicas(run, settings)):
                log.warning(text)


def warn_beside_bar(text: str) -> None:
    """Warn on rank zero, in the middle of a fit."""
    with _compat.beside_progress_bar():
        rank_zero_warn(text, stacklevel=6)


def _of_replicas(run: TrainingRun, settings: FitSettings) -> Iterator[str]:
    """Say what the replicas of an averager mean for checkpoints, where they are large."""
    if run.averaging is None or run.averaging.replicas_nbytes <= driver.MOST_REPLICAS or not settings.save_replicas:
        return
    size = f"Each rank's own model and optimizer state take about {mib(run.averaging.replicas_nbytes)} together"
    if run.averaging.saves_replicas:
        yield f"{size}, which rank 0 gathers and writes with each checkpoint: `save_replicas=False` leaves them out."
    else:
        yield (
            f"{size}: checkpoints leave them out, and a run that resumes begins with the averaged model. "
            "`save_replicas=True` saves them."
        )


def summary_text(facts: Mapping[str, Any], parts: Mapping[str, str | None]) -> str:
    """Return the lines, from what `Reducer.stats` says and further texts by label; None leaves one out."""
    ranks, total = facts["world_size"], facts["total_parameter_size_bytes"]
    first, cap = facts["first_bucket_bytes"], facts["bucket_cap_bytes"]
    sizes = f"buckets of {mib(cap)}" if first == cap else f"buckets of {mib(first)} and then {mib(cap)}"
    sizes = "one bucket" if total < 2 * min(first, cap) else sizes
    instead = " and ".join(label for label in ("hook", "averager") if parts.get(label) is not None)
    sends = f", without {instead}, would send" if instead else " sends"
    sent = sent_by_rank("all_reduce", total, ranks)
    lines = {
        "gradients": f"{mib(total)} of {facts['num_parameter_tensors']} parameters, in {sizes}",
        "all-reduce": f"of them{sends} {mib(sent)} from each rank",
        **{label: text for label, text in parts.items() if text is not None},
    }
    width = max(map(len, lines))
    who = "1 rank" if ranks == 1 else f"{ranks} ranks"
    head = f"lightning_ddp_hooks: {who} over {facts['comm_backend']}, {facts['backend']} reducer"
    return "\n".join([head, *(f"  {label.ljust(width)}  {text}" for label, text in lines.items())])


def declared(hook: CommHook | None, averager: ModelAverager | None, optimizer: object | None) -> dict[str, str | None]:
    """Return the lines that tell what the user has declared, by their label."""
    name = None if hook is None else short_name(hook)
    parts = {"hook": hook, "averager": averager, "optimizer": optimizer}
    texts = {label: None if part is None else brief(part) for label, part in parts.items()}
    return texts if name is None else {**texts, "hook": f"{name}: {texts['hook']}"}


def brief(declaration: object) -> str:
    """Describe a declaration by its values that are not the defaults; long ones in part."""
    if isinstance(declaration, (list, tuple)):
        more = f", ... ({len(declaration)} in all)" if len(declaration) > _SHOWN else ""
        return "[" + ", ".join(map(brief, declaration[:_SHOWN])) + more + "]"
    if isinstance(declaration, partial):
        # A command line makes a class into a partial of a function of its own, with the class among the arguments.
        called = next((value for value in declaration.args if isinstance(value, type)), declaration.func)
        given = [f"{name}={brief(value)}" for name, value in declaration.keywords.items()]
        return f"{hook_name(called)}({', '.join(given)})"
    if isinstance(declaration, torch.dtype) or not is_dataclass(declaration) or isinstance(declaration, type):
        return declaration_text(declaration)
    values = [(entry, getattr(declaration, entry.name, MISSING)) for entry in fields(declaration) if entry.repr]
    changed = [(entry, value) for entry, value in values if value is not MISSING and _differs(value, entry)]
    return f"{type(declaration).__name__}({', '.join(f'{entry.name}={brief(value)}' for entry, value in changed)})"


_SHOWN = 8


def _differs(value: object, entry: Field[Any]) -> bool:
    """Tell whether a value is another than its field's default; it is the user's, and may do anything when compared."""
    try:
        default = entry.default if entry.default_factory is MISSING else entry.default_factory()
        return default is MISSING or bool(value != default)
    except Exception:
        return True


def without_effect(
    hook: CommHook | None, averager: ModelAverager | None, steps: float, one_subgroup: bool = False
) -> Iterator[str]:
    """Say what of the settings will do nothing, or not what its user may think, in a fit of so many steps.

    ``steps`` is infinity where that is not known; ``one_subgroup``: whether that of a `PostLocalSGD` is all ranks.
    """
    for name, setting, start in late_starts(hook):
        if start >= steps:
            yield (
                f"The hook {name} is the plain mean up to step {start}, and this fit has {steps:.0f} steps: set "
                f"`{setting}` lower for it to do anything."
            )
    if averager is not None and averager.warmup_steps >= steps:
        yield (
            f"{type(averager).__name__} begins after {averager.warmup_steps} steps, and this fit has {steps:.0f}: set "
            "`warmup_steps` lower for it to do anything."
        )
    elif isinstance(averager, DiLoCo) and averager.first_outer_step >= steps:
        yield (
            f"DiLoCo makes its first outer step after step {averager.first_outer_step}, and this fit has {steps:.0f} "
            f"steps: the global model would hold nothing of what the replicas learn. Set `period` lower, or use "
            "PeriodicModelAverager."
        )
    if averager is None and isinstance(hook, Noop):
        yield "The hook Noop exchanges no gradients: each rank trains a model of its own, and that of rank 0 is saved."
    elif isinstance(hook, PostLocalSGD) and one_subgroup:
        yield (
            "The hook PostLocalSGD has one subgroup of all ranks, and so is the plain mean in every step: set "
            "`subgroup_size` or `subgroups` for it to do anything."
        )
    elif averager is None and isinstance(hook, PostLocalSGD) and (replicas_differ_from(hook) or 0) < steps:
        yield (
            f"The hook PostLocalSGD averages within subgroups only from step {hook.start_local_sgd_iter} on, and no "
            "`averager` brings the subgroups together: their models drift apart."
        )


def mib(count: float) -> str:
    """Write a number of bytes in MiB, or in KiB where that would be a small fraction."""
    size, unit = (count / (1 << 10), "KiB") if 0 < count < (1 << 20) / 10 else (count / (1 << 20), "MiB")
    digits = 0 if size == int(size) else 1 if size >= 10 else 2
    return f"{size:.{digits}f} {unit}"
