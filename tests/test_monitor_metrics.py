"""Steps as numbers for a logger: means over the steps, by hand."""

import pytest
from monitor_fakes import sample_steps

from lightning_ddp_hooks.monitor.record import step_metrics
from lightning_ddp_hooks.monitor.timeline import BucketTiming, StepTiming


def step(wait: float, *buckets: BucketTiming, **changes: object) -> StepTiming:
    return StepTiming(0, 0.0, 1.0, 2.0, 4.0, buckets, wait, **changes)  # type: ignore[arg-type]


def test_metrics_are_means_over_the_steps() -> None:
    first = step(0.5, BucketTiming(0, ("a",), 100, 40, 1.0, 1.5, 2.5, 0.1), other_bytes=(("buffers", 20),))
    second = step(
        0.0, BucketTiming(0, ("a",), 100, 40, 1.0, 1.5, 2.0), BucketTiming(1, ("b",), 300, 60, 1.2, 1.25, 2, 0.3)
    )

    assert step_metrics([first, second], 2) == pytest.approx(
        {
            "comm/exposed_ms": 250.0,
            "comm/time_ms": (1000 + 750) / 2,
            "comm/overlap": (0.5 + 1) / 2,
            "comm/sent_bytes": 80.0,
            "comm/compression": 500 / 160,
            "comm/error": (0.1 * 100 + 0.3 * 300) / 400,
            "comm/bucket_0/exposed_ms": 250.0,
            "comm/bucket_0/time_ms": 750.0,
            "comm/bucket_0/sent_bytes": 40.0,
            "comm/bucket_0/error": 0.1,
            "comm/bucket_1/exposed_ms": 0.0,
            "comm/bucket_1/time_ms": 375.0,
            "comm/bucket_1/sent_bytes": 30.0,
            "comm/bucket_1/error": 0.3,
        }
    )


def test_what_does_not_exist_is_left_out() -> None:
    names = step_metrics([step(0.0, local_bytes=100)], 2).keys()

    assert names == {"comm/exposed_ms", "comm/time_ms", "comm/overlap", "comm/sent_bytes"}
    assert "comm/bucket_0/time_ms" not in step_metrics(sample_steps(), 2, per_bucket=False)
