"""What is written at the end: the report, a trace of all ranks, and the figures for programs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from lightning_ddp_hooks.monitor.record import RunRecord, Summary
from lightning_ddp_hooks.monitor.report import build_report
from lightning_ddp_hooks.monitor.skew import PHASES
from lightning_ddp_hooks.monitor.timeline import exposed_by_bucket, phases, typical_steps
from lightning_ddp_hooks.monitor.trace import build_trace

SUMMARY = "summary.json"


def write_output(directory: Path, record: RunRecord) -> Path:
    """Write ``report.html``, ``trace.json`` and ``summary.json``; return the path of the first."""
    directory.mkdir(parents=True, exist_ok=True)
    report = directory / "report.html"
    report.write_text(build_report(record), encoding="utf-8")
    trace = build_trace(record.traced or [list(record.steps)], record.facts)
    (directory / "trace.json").write_text(json.dumps(trace, allow_nan=False), encoding="utf-8")
    (directory / SUMMARY).write_text(json.dumps(summarize(record), indent=1) + "\n", encoding="utf-8")
    return report


def summarize(record: RunRecord) -> dict[str, Any]:
    """Return the report's figures; times in seconds, ``step`` empty where none was recorded."""
    steps, found = list(record.steps), record.split()
    if not steps:
        return {"facts": record.facts, "world_size": record.world_size, "step": {}, "phases": {}, "buckets": []}
    summary, typical = asdict(Summary.of(steps, record.world_size)), typical_steps(steps)
    if found is not None:
        parts = {name: fmean(column) for name, column in zip(PHASES, zip(*found.own, strict=True), strict=True)}
        parts |= {"skew": fmean(found.skew), "transfer": fmean(found.transfer)}
    else:
        own = [(*step.between, *_own_phases(step)) for step in typical]
        names = (*PHASES, "transfer")
        parts = {name: fmean(column) for name, column in zip(names, zip(*own, strict=True), strict=True)}
    waits = [fmean(column) for column in zip(*map(exposed_by_bucket, typical), strict=True)]
    buckets = [
        {
            "index": of_steps[0].index,
            "parameters": len(of_steps[0].names),
            "grad_bytes": of_steps[0].grad_bytes,
            "sent_bytes": fmean(bucket.sent_bytes for bucket in of_steps),
            "in_flight": fmean(end - begin for begin, end in (bucket.in_flight for bucket in of_steps)),
            "exposed": exposed,
        }
        for of_steps, exposed in zip(zip(*(step.buckets for step in typical), strict=True), waits, strict=True)
    ]
    return {
        "facts": record.facts,
        "world_size": record.world_size,
        "step": summary,
        "phases": parts,
        "buckets": buckets,
    }


def _own_phases(step: Any) -> tuple[float, ...]:
    own = phases(step)
    return own.forward, own.backward, own.hook, own.rest, own.wait
