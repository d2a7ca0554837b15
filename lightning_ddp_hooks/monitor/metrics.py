"""A few steps as numbers for a logger. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_ddp_hooks.monitor.record import mean_error
from lightning_ddp_hooks.monitor.timeline import (
    StepTiming,
    communication_time,
    effective_compression,
    exposed_by_bucket,
    overlap,
)


def step_metrics(steps: Sequence[StepTiming], world_size: int, *, per_bucket: bool = True) -> dict[str, float]:
    """Return means over the steps, of which there is at least one, by name; times in milliseconds.

    The names are ``exposed_ms``, ``time_ms``, ``overlap``, ``sent_bytes`` and, if something was sent, ``compression``;
    if reduced gradients were compared, ``error``; with ``per_bucket`` also ``bucket_0/exposed_ms``, ``.../time_ms``,
    ``.../sent_bytes`` and ``.../error`` for each bucket.
    """
    count = len(steps)
    values = {
        "exposed_ms": 1e3 * sum(step.wait for step in steps) / count,
        "time_ms": 1e3 * sum(communication_time(step) for step in steps) / count,
        "overlap": sum(overlap(step) for step in steps) / count,
        "sent_bytes": sum(step.sent_bytes for step in steps) / count,
    }
    if (compression := effective_compression(steps, world_size)) is not None:
        values["compression"] = compression
    if (error := mean_error(steps)) is not None:
        values["error"] = error
    if per_bucket:
        values.update(_bucket_metrics(steps))
    return {f"comm/{name}": value for name, value in values.items()}


def _bucket_metrics(steps: Sequence[StepTiming]) -> dict[str, float]:
    """Return figures of each bucket, summed over the backwards of a step and averaged over the steps."""
    values: dict[str, float] = {}
    errors: dict[int, list[float]] = {}
    for step in steps:
        for bucket, exposed in zip(step.buckets, exposed_by_bucket(step), strict=True):
            launched, done = bucket.in_flight
            figures = {"exposed_ms": 1e3 * exposed, "time_ms": 1e3 * (done - launched), "sent_bytes": bucket.sent_bytes}
            for name, value in figures.items():
                key = f"bucket_{bucket.index}/{name}"
                values[key] = values.get(key, 0.0) + value / len(steps)
            if bucket.error is not None:
                errors.setdefault(bucket.index, []).append(bucket.error)
    values.update({f"bucket_{index}/error": sum(found) / len(found) for index, found in errors.items()})
    return values
