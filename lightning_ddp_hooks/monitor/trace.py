"""Steps as a trace that https://ui.perfetto.dev and chrome://tracing show: a process for each rank. Pure.

The format: "Trace Event Format",
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Times are in whole microseconds, so
that what follows on each other ends and begins at the same number: Perfetto drops what overlaps. To it process 0 and
thread 0 are idle, and threads of different processes had better have different numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from lightning_ddp_hooks.monitor.timeline import StepTiming, intersect

_COMPUTE_LANE, _FIRST_BUCKET_LANE, _LANES = 1, 2, 100_000
_NAMES_SHOWN = 8


def clock_offset(steps: Sequence[StepTiming], reference: Sequence[StepTiming]) -> float:
    """Return by how much one rank's clock is ahead of another's: buckets are reduced on both at the same moment."""

    def ends(of: Sequence[StepTiming]) -> dict[tuple[int, int], float]:
        return {(step.step, i): b.done for step in of for i, b in enumerate(step.buckets)}

    own, other = ends(steps), ends(reference)
    return median([done - other[key] for key, done in own.items() if key in other] or [0.0])


def build_trace(ranks: Sequence[Sequence[StepTiming]], metadata: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return a trace for ``json.dump``, on one clock; the first step begins at 0."""
    offsets = [clock_offset(steps, ranks[0]) for steps in ranks]
    clocks = zip(ranks, offsets, strict=True)
    start = min((steps[0].begin - sum(steps[0].between) - ahead for steps, ahead in clocks if steps), default=0.0)
    events: list[dict[str, Any]] = []
    for rank, (steps, ahead) in enumerate(zip(ranks, offsets, strict=True)):
        events += _rank_events(steps, rank, start + ahead)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(metadata or {})}


def _rank_events(steps: Sequence[StepTiming], rank: int, origin: float) -> list[dict[str, Any]]:
    """Return a rank's part: a lane for compute, and one for each bucket."""
    lanes = max((bucket.index for step in steps for bucket in step.buckets), default=-1) + 1
    labels = {_COMPUTE_LANE: "compute", **{_FIRST_BUCKET_LANE + i: f"bucket {i}" for i in range(lanes)}}
    told: list[tuple[str, int, str | int]] = [
        ("process_name", _COMPUTE_LANE, f"rank {rank}"),
        ("process_sort_index", _COMPUTE_LANE, rank),
        *(("thread_name", lane, name) for lane, name in labels.items()),
        *(("thread_sort_index", lane, lane) for lane in labels),
    ]
    events: list[dict[str, Any]] = [
        {"name": kind, "ph": "M", **_track(rank, lane), "args": {kind.partition("_")[2]: value}}
        for kind, lane, value in told
    ]
    for step in steps:
        events += _step_events(step, rank, origin)
    return events


def _step_events(step: StepTiming, rank: int, origin: float) -> list[dict[str, Any]]:
    def span(name: str, lane: int, begin: float, end: float, **args: Any) -> dict[str, Any]:
        event = {"name": name, "ph": "X", **_track(rank, lane), "ts": _us(begin - origin)}
        return {**event, "dur": max(0, _us(end - origin) - _us(begin - origin)), "args": args}

    parts = [
        (f"step {step.step}", step.begin, step.finished),
        ("forward", step.begin, step.backward_begin),
        ("backward", step.backward_begin, step.backward_end),
        *(("wait for communication", *wait) for wait in step.wait_intervals),
        *(("hook", *work) for work in intersect(step.hook_work, step.wait_intervals)),
    ]
    after = step.begin  # what comes between two steps, in the order in which it mostly does
    for name, seconds in zip(("load data", "validation", "save"), step.between, strict=True):
        parts += [(name, after - seconds, after)] if seconds else []
        after -= seconds
    events = [span(name, _COMPUTE_LANE, begin, end) for name, begin, end in parts]
    for bucket in step.buckets:
        lane = _FIRST_BUCKET_LANE + bucket.index
        args: dict[str, Any] = {
            "parameters": list(bucket.names[:_NAMES_SHOWN]),
            "parameters_in_all": len(bucket.names),
            "gradient_bytes": bucket.grad_bytes,
            "sent_bytes": bucket.sent_bytes,
        }
        if bucket.error is not None:
            args["relative_error"] = bucket.error if math.isfinite(bucket.error) else None  # as JSON has it
        events.append(span("hook", lane, bucket.ready, bucket.launched))
        events.append(span(f"bucket {bucket.index}", lane, *bucket.in_flight, **args))
    counter = {"name": "bytes sent", "ph": "C", **_track(rank, _COMPUTE_LANE), "ts": _us(step.begin - origin)}
    return [*events, {**counter, "args": {"sent": step.sent_bytes}}]


def _track(rank: int, lane: int) -> dict[str, int]:
    return {"pid": rank + 1, "tid": _LANES * (rank + 1) + lane}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
