"""The arithmetic of a step's times, on steps worked out by hand."""

import random
from dataclasses import replace
from itertools import pairwise

from lightning_ddp_hooks.monitor.timeline import (
    BucketTiming,
    Interval,
    Phases,
    StepTiming,
    communication_time,
    effective_compression,
    exposed_by_bucket,
    hook_time,
    intersect,
    length,
    median_step,
    overlap,
    phases,
    subtract,
    typical_steps,
    union,
)


def bucket(index: int, ready: float, launched: float, done: float, grad: int = 100, sent: int = 50) -> BucketTiming:
    return BucketTiming(index, (f"p{index}",), grad, sent, ready, launched, done)


def make_step(*buckets: BucketTiming, wait: float = 0.0, **changes: object) -> StepTiming:
    """A step that begins at 10, with a backward from 14 to 20, and ends at 24."""
    values: dict[str, object] = {
        "step": 0, "begin": 10.0, "backward_begin": 14.0, "backward_end": 20.0, "finished": 24.0,
        "buckets": buckets, "wait": wait,
    }  # fmt: skip
    return StepTiming(**{**values, **changes})  # type: ignore[arg-type]


#   14 ........ 16 .. 17 .. 18 .. 19 .. 20 . 21 .. 22 . 22.5
#               [ 0: 16.5 to 18 ]
#                                 [ 1: 19 to  21 ]
#                                      [ 2: 19.5 to 22 ]
#                                       wait 20 to  22.5
STEP = make_step(bucket(0, 16, 16.5, 18), bucket(1, 18.5, 19, 21), bucket(2, 19.25, 19.5, 22), wait=2.5)


def test_communication_is_the_time_in_which_any_bucket_is_in_flight() -> None:
    assert communication_time(STEP) == 1.5 + 3.0


def test_overlap_is_the_part_of_the_communication_that_nobody_waited_for() -> None:
    # Of 4.5 seconds in flight, those from 20 to 22 were waited for.
    assert overlap(STEP) == 1 - 2 / 4.5


def test_each_waiting_second_counts_for_the_earliest_bucket_that_is_not_done() -> None:
    assert exposed_by_bucket(STEP) == (0.0, 1.0, 1.0)  # the last half second is for none of them


def test_a_step_divides_into_phases_that_add_up_to_it() -> None:
    parts = phases(STEP)

    assert parts == Phases(forward=4.0, backward=6.0 - 1.25, hook=1.25, wait=2.5, rest=1.5)
    assert parts.forward + parts.backward + parts.hook + parts.wait + parts.rest == STEP.duration == 14.0
    assert hook_time(STEP) == 1.25


def test_what_a_hook_computes_in_the_wait_is_no_waiting() -> None:
    # Bucket 0 is between two collectives from 20 to 20.5, and the hook ends with bucket 2 from 22 to 22.25.
    step = replace(STEP, hook_work=((20.0, 20.5), (22.0, 22.25)))

    assert exposed_by_bucket(step) == (0.0, 0.5, 1.0)
    assert hook_time(step) == 1.25 + 0.75
    assert phases(step) == Phases(forward=4.0, backward=6.0 - 1.25, hook=1.25 + 0.75, wait=2.5 - 0.75, rest=1.5)
    assert overlap(step) == overlap(STEP)


def test_a_step_with_two_backwards_waits_twice() -> None:
    step = make_step(bucket(0, 15, 15, 17), bucket(0, 19, 19, 21), wait=2.0, waits=((16.0, 17.0), (20.0, 21.0)))

    assert exposed_by_bucket(step) == (1.0, 1.0)
    assert overlap(step) == 0.5
    assert phases(step) == Phases(forward=4.0, backward=5.0, hook=0.0, wait=2.0, rest=3.0)


def test_a_step_without_buckets_waits_for_nothing() -> None:
    step = make_step(local_bytes=400)

    assert communication_time(step) == hook_time(step) == step.sent_bytes == 0
    assert overlap(step) == 1.0
    assert exposed_by_bucket(step) == ()


def test_a_bucket_that_was_done_before_its_launch_returned_was_not_in_flight() -> None:
    assert communication_time(make_step(bucket(0, 15, 16, 15.5))) == 0.0


def test_compression_is_what_a_ring_would_send_over_what_was_sent() -> None:
    step = make_step(bucket(0, 15, 16, 17, grad=4000, sent=1000), other_bytes=(("buffers", 500),))

    assert effective_compression([step], 4) == 6000 / 1500
    # Three steps without exchange, and 1500 bytes to bring the replicas together.
    local = [make_step(local_bytes=4000) for _ in range(3)] + [
        make_step(local_bytes=4000, other_bytes=(("averaging", 6000),))
    ]
    assert effective_compression(local, 4) == 4.0


def test_compression_of_nothing() -> None:
    assert effective_compression([make_step()], 1) == 1.0
    assert effective_compression([make_step(local_bytes=8)], 2) is None


def test_the_typical_step_has_the_usual_buckets_and_is_nearest_to_the_medians() -> None:
    first = make_step(bucket(0, 15, 16, 17), step=0, finished=30.0)  # one bucket: not laid out yet
    usual = [
        make_step(bucket(0, 15, 16, 17), bucket(1, 18, 19, 20), step=n, finished=finished, wait=wait)
        for n, (finished, wait) in enumerate([(23.0, 1.0), (24.0, 5.0), (24.0, 1.5), (29.0, 2.0), (25.0, 1.0)], 1)
    ]
    local = [make_step(step=n) for n in range(6, 20)]

    assert typical_steps([first, *usual, *local]) == usual
    assert median_step([first, *usual, *local]).step == 3  # 24.0 is the median, and 1.5 that of the waits
    assert typical_steps(local) == local


def _covered(intervals: list[Interval], instants: list[float]) -> list[bool]:
    return [any(begin <= t < end for begin, end in intervals) for t in instants]


def test_unions_and_intersections_cover_what_they_should() -> None:
    rng = random.Random(0)
    instants = [t + 0.5 for t in range(30)]
    for _ in range(200):
        first, second = (
            [(float(a), float(a + rng.randrange(6))) for a in (rng.randrange(25) for _ in range(rng.randrange(6)))]
            for _ in range(2)
        )
        joined, both = union(first + second), intersect(first, second)
        left = subtract(first, second)
        assert _covered(joined, instants) == _covered(first + second, instants)
        in_first, in_second = _covered(first, instants), _covered(second, instants)
        assert _covered(both, instants) == [a and b for a, b in zip(in_first, in_second, strict=True)]
        assert _covered(left, instants) == [a and not b for a, b in zip(in_first, in_second, strict=True)]
        assert length(left) + length(both) == length(first)
        assert length(joined) == sum(_covered(joined, instants))
        assert all(a[1] < b[0] for a, b in pairwise(joined))
