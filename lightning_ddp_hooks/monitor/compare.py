"""Two runs side by side: a page made from their ``summary.json``. Pure but for reading."""

from __future__ import annotations

import json
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from lightning_ddp_hooks.monitor import report
from lightning_ddp_hooks.monitor.output import SUMMARY
from lightning_ddp_hooks.monitor.report_charts import PARTS, budget_chart
from lightning_ddp_hooks.monitor.report_text import bytes_text, factor_text, seconds_text, share_text

_FIGURES: list[tuple[str, str, Callable[[float], str]]] = [
    ("step", "duration", seconds_text),
    ("waited for communication", "exposed", seconds_text),
    ("communication in all", "communication", seconds_text),
    ("overlap", "overlap", share_text),
    ("sent per rank and step", "sent_bytes", bytes_text),
    ("effective compression", "compression", factor_text),
    ("compression error", "error", "{:.2g}".format),
]
_OF_RANKS = "Means over the ranks, or of one where they were not compared."


def read_summary(path: Path) -> dict[str, Any]:
    """Read a run's figures, by the file or by the directory that it lies in; ValueError where there are none."""
    file = path / SUMMARY if path.is_dir() else path
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
        step, facts, parts = read["step"], read["facts"], read["phases"]
        if not (isinstance(step, dict) and isinstance(facts, dict) and isinstance(parts, dict)):
            raise TypeError("not a summary")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{file}: expected the {SUMMARY} of a CommMonitor ({type(error).__name__}: {error})."
        ) from error
    if not step:
        raise ValueError(f"{file}: no step was recorded in this run.")
    return dict(read)


def build_comparison(names: tuple[str, str], runs: tuple[dict[str, Any], dict[str, Any]]) -> str:
    """Return the page for two runs as `read_summary` returns them; the first one is what the second is measured by."""
    before, after = (run["step"]["duration"] for run in runs)
    verb = "shorter" if after < before else "longer"
    change = f"{share_text(abs(after / before - 1))} {verb}" if before else "other"
    verdict = f"A step takes {seconds_text(after)} in {names[1]} and {seconds_text(before)} in {names[0]}: {change}."
    facts = dict.fromkeys(name for run in runs for name in run["facts"])
    settings = [
        [escape(name), *(escape(str(run["facts"].get(name, ""))) for run in runs)]
        for name in facts
        if runs[0]["facts"].get(name) != runs[1]["facts"].get(name)
    ]
    figures = [
        [escape(label), *(_shown(run["step"].get(key), text) for run in runs), _factor(runs, key)]
        for label, key, text in _FIGURES
        if any(run["step"].get(key) is not None for run in runs)
    ]
    rows = [
        (name, {key: run["phases"][key] for key in PARTS if key in run["phases"]})
        for name, run in zip(names, runs, strict=True)
    ]
    head = ["", *names]
    return report.page(
        "<header><h1>Two runs compared</h1></header>"
        f'<p class="verdict">{escape(verdict)}</p>'
        + report.section("What a step takes", _OF_RANKS, budget_chart(rows))
        + report.section("Figures", "", report.table([*head, "second / first"], figures))
        + (report.section("What differs", "", report.table(head, settings)) if settings else "")
    )


def _shown(value: float | None, text: Callable[[float], str]) -> str:
    return "" if value is None else escape(text(value))


def _factor(runs: tuple[dict[str, Any], dict[str, Any]], key: str) -> str:
    first, second = (run["step"].get(key) for run in runs)
    return factor_text(second / first) if first and second is not None else ""
