"""What rank zero says at the start of a fit: who communicates what, and which settings will have no effect in it."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Iterator, Mapping
from io import StringIO
from typing import Any

from lightning.fabric.utilities import rank_zero_info, rank_zero_warn

from lightning_ddp_hooks import _compat, comm
from lightning_ddp_hooks.averaging import DiLoCo, driver
from lightning_ddp_hooks.averaging.averager import ModelAverager
from lightning_ddp_hooks.config import FitSettings, replicas_differ_from
from lightning_ddp_hooks.conflicts import warn_no_effect
from lightning_ddp_hooks.describe import declared, mib, traffic_texts
from lightning_ddp_hooks.hooks.allreduce import Noop
from lightning_ddp_hooks.hooks.contract import CommHook
from lightning_ddp_hooks.hooks.post_local_sgd import PostLocalSGD
from lightning_ddp_hooks.hooks.registry import late_starts
from lightning_ddp_hooks.reducer.backend import BUILD_COMMAND
from lightning_ddp_hooks.run import TrainingRun
from lightning_ddp_hooks.traffic import sent_by_rank

log = logging.getLogger(__name__)


def announce(run: TrainingRun, settings: FitSettings, *, steps: float, inputs: str | None = None) -> None:
    """Say on rank zero who communicates what, and warn of what will do nothing."""
    hook, averager = run.hook.declared, settings.averager
    facts, texts = run.reducer.stats(), declared(hook, averager, settings.optimizer_in_hook)
    costs = traffic_texts(run.reducer.params, run.reducer.world_size, hook, averager, settings.optimizer_in_hook)
    texts = {label: text and "; ".join([text, *costs.get(label, ())]) for label, text in texts.items()}
    texts["inputs"] = None if inputs is None else f"uneven, {inputs}"
    with _compat.beside_progress_bar():
        rank_zero_info(as_table(*summary_rows(facts, texts)))
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


def summary_rows(facts: Mapping[str, Any], parts: Mapping[str, str | None]) -> tuple[str, dict[str, str]]:
    """Return title and rows, from what `Reducer.stats` says and further texts by label; None leaves one out."""
    ranks, total = facts["world_size"], facts["total_parameter_size_bytes"]
    first, cap = facts["first_bucket_bytes"], facts["bucket_cap_bytes"]
    sizes = f"buckets of {mib(cap)}" if first == cap else f"buckets of {mib(first)} and then {mib(cap)}"
    sizes = "one bucket" if total < 2 * min(first, cap) else sizes
    sends = "would send" if any(parts.get(label) for label in ("hook", "averager")) else "sends"
    native = facts["backend"] == "native"
    rows = {
        "gradients": f"{mib(total)} of {facts['num_parameter_tensors']} parameters, in {sizes}",
        "plain all-reduce": f"{sends} {mib(sent_by_rank('all_reduce', total, ranks))} per rank and step",
        **{label: text for label, text in parts.items() if text is not None},
        "reducer": "native" if native else f"Python; the native one takes less time: {BUILD_COMMAND}",
    }
    who = "1 rank" if ranks == 1 else f"{ranks} ranks"
    return f"lightning_ddp_hooks: {who} over {facts['comm_backend']}", rows


def as_table(title: str, rows: Mapping[str, str]) -> str:
    """Lay out rows in a table of rich's, or where that is not installed in lines."""
    try:
        from rich import box, table
        from rich.console import Console
        from rich.markup import escape
    except ImportError:
        width = max(map(len, rows))
        return "\n".join([title, *(f"  {label.ljust(width)}  {text}" for label, text in rows.items())])
    drawable = (sys.stderr.encoding or "").lower().startswith("utf")
    drawn = table.Table(box=box.ROUNDED if drawable else box.ASCII, show_header=False)
    drawn.add_column(no_wrap=True)
    drawn.add_column(overflow="fold")
    for label, text in rows.items():
        drawn.add_row(escape(label), escape(text))
    width = max(60, min(shutil.get_terminal_size((110, 24)).columns, 110))
    console = Console(file=StringIO(), width=width, color_system=None)
    with console.capture() as captured:
        console.print(drawn)
    return f"{title}\n{captured.get().rstrip()}"


def without_effect(
    hook: CommHook | None, averager: ModelAverager | None, steps: float, one_subgroup: bool = False
) -> Iterator[str]:
    """Say what of the settings will do nothing, or not what its user may think, in a fit of so many steps.

    ``steps`` is infinity where that is not known; ``one_subgroup``: whether that of a `PostLocalSGD` is all ranks.
    """
    for name, setting, start in late_starts(hook):
        if start >= steps:
            yield (
                f"The hook {name} is plain all-reduce up to step {start}, and this fit has {steps:.0f} steps: set "
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
            "The hook PostLocalSGD has one subgroup of all ranks, and so is plain all-reduce in every step: set "
            "`subgroup_size` or `subgroups` for it to do anything."
        )
    elif averager is None and isinstance(hook, PostLocalSGD) and (replicas_differ_from(hook) or 0) < steps:
        yield (
            f"The hook PostLocalSGD averages within subgroups only from step {hook.start_local_sgd_iter} on, and no "
            "`averager` brings the subgroups together: their models drift apart."
        )
