"""Steps as a trace that chrome://tracing and https://ui.perfetto.dev show. Pure.

The format: "Trace Event Format",
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU; times in microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from lightning_ddp_hooks.monitor.timeline import StepTiming, intersect

COMPUTE_LANE, FIRST_BUCKET_LANE = 0, 10
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
    start = min((steps[0].begin - ahead for steps, ahead in zip(ranks, offsets, strict=True) if steps), default=0.0)
    events: list[dict[str, Any]] = []
    for rank, (steps, ahead) in enumerate(zip(ranks, offsets, strict=True)):
        events += _rank_events(steps, rank, start + ahead)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(metadata or {})}


def _rank_events(steps: Sequence[StepTiming], rank: int, origin: float) -> list[dict[str, Any]]:
    """Return a rank's part: a lane for compute, and one for each bucket."""
    lanes = max((bucket.index for step in steps for bucket in step.buckets), default=-1) + 1
    names = [("process_name", 0, f"rank {rank}"), ("thread_name", COMPUTE_LANE, "compute")]
    names += [("thread_name", FIRST_BUCKET_LANE + i, f"bucket {i}") for i in range(lanes)]
    events: list[dict[str, Any]] = [
        {"name": kind, "ph": "M", "pid": rank, "tid": lane, "args": {"name": name}} for kind, lane, name in names
    ]
    for step in steps:
        events += _step_events(step, rank, origin)
    return events


def _step_events(step: StepTiming, rank: int, origin: float) -> list[dict[str, Any]]:
    def span(name: str, lane: int, begin: float, end: float, **args: Any) -> dict[str, Any]:
        event = {"name": name, "ph": "X", "pid": rank, "tid": lane, "ts": _us(begin - origin)}
        return {**event, "dur": max(0.0, _us(end - begin)), "args": args}

    events = [
        span(f"step {step.step}", COMPUTE_LANE, step.begin, step.finished, sent_bytes=step.sent_bytes),
        span("forward", COMPUTE_LANE, step.begin, step.backward_begin),
        span("backward", COMPUTE_LANE, step.backward_begin, step.backward_end),
        *(span("wait for communication", COMPUTE_LANE, begin, end) for begin, end in step.wait_intervals),
        *(span("hook", COMPUTE_LANE, begin, end) for begin, end in intersect(step.hook_work, step.wait_intervals)),
    ]
    for bucket in step.buckets:
        lane = FIRST_BUCKET_LANE + bucket.index
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
    counter = {"name": "bytes sent", "ph": "C", "pid": rank, "ts": _us(step.begin - origin)}
    return [*events, {**counter, "args": {"sent": step.sent_bytes}}]


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
