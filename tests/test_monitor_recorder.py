"""What a recorder makes of what a reducer tells it, with a clock that is told the time."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from monitor_fakes import FakeBucket, FakeClock, FakeTask, Watched
from ranks import run_ranks

from lightning_ddp_hooks import comm, traffic
from lightning_ddp_hooks.monitor.clock import Clock
from lightning_ddp_hooks.monitor.recorder import CompressionError, Recorder
from lightning_ddp_hooks.monitor.timeline import BucketTiming, StepTiming
from lightning_ddp_hooks.traffic import ByteCounter


def test_a_step_is_what_was_told_of_it() -> None:
    run = Watched()
    first, second = FakeBucket(0), FakeBucket(1)

    run.at(1, "begin_step", 7)
    run.at(2, "backward_begins")
    run.at(3, "backward_opened")
    run.launch(first, 4, 4.5, FakeTask(), sent=100)
    run.send(9)  # in between, for nothing in particular
    run.launch(second, 5, 5.5, FakeTask(), sent=200)
    run.clock.tells[0](6.0)
    run.at(7, "wait_begins")
    run.clock.tells[1](8.0)
    run.at(8.5, "bucket_done", 0, first.buffer())
    run.at(8.5, "bucket_done", 1, second.buffer())
    run.at(9, "wait_ended")
    run.at(9, "backward_finished")
    run.at(9.5, "backward_ended")
    [step] = run.at(10, "end_step")

    assert step == StepTiming(
        step=7,
        begin=1,
        backward_begin=2,
        backward_end=7,
        finished=10,
        buckets=(
            BucketTiming(0, ("p0.0", "p0.1"), 16, 100, 4, 4.5, 6, None, ((4.5, 6),)),
            BucketTiming(1, ("p1.0", "p1.1"), 16, 200, 5, 5.5, 8, None, ((5.5, 8),)),
        ),
        wait=2,
        waits=((7, 9),),
        other_bytes=(("control", 9),),
    )
    assert run.traffic.current is run.traffic.tally("control")


def test_what_lies_between_steps_is_told_apart() -> None:
    run = Watched()
    run.at(0, "begin_step", 0)
    run.at(2, "end_step")
    run.at(3, "begin_aside", "validation")
    run.at(7, "end_aside")
    run.at(8, "begin_aside", "save")  # up to the next step
    run.at(10, "begin_step", 1)
    [step] = run.at(11, "end_step")
    assert step.between == (2.0, 4.0, 2.0)
    run.at(12, "begin_step", 2)
    run.recorder.begin_aside("validation")  # in the middle of a step, which is left out
    run.recorder.leave_out_step()
    run.at(14, "end_step")
    run.at(15, "begin_step", 3)
    [step] = run.at(16, "end_step")
    assert step.between == (0.0, 0.0, 0.0)


def test_of_a_hook_each_collective_is_known_also_if_it_begins_later() -> None:
    run = Watched()
    bucket, task = FakeBucket(0), FakeTask()
    task.collective, task.stages = None, 0
    run.at(0, "begin_step", 0)
    run.at(1, "backward_opened")
    run.launch(bucket, 2, 3, task)
    assert task.on_collective is not None
    for posted, met in ((4, 6.0), (7, 8.0)):
        run.clock.now = float(posted)
        task.on_collective(object())
        run.clock.tells[-1](met)
    run.at(8, "bucket_done", 0, bucket.buffer())
    [step] = run.at(9, "end_step")
    assert (step.buckets[0].meetings, step.buckets[0].done) == (((4.0, 6.0), (7.0, 8.0)), 8.0)


def test_a_collective_that_is_over_within_the_launch_and_one_whose_end_is_told_late_count() -> None:
    run = Watched()
    bucket, task = FakeBucket(0), FakeTask()
    task.stages = 2  # the first is over, the second in flight: its end is never told
    run.at(0, "begin_step", 0)
    run.at(1, "backward_opened")
    run.launch(bucket, 2, 3, task)
    run.clock.now = 5.0
    assert task.on_finished is not None
    task.on_finished()
    run.at(6, "bucket_done", 0, bucket.buffer())
    [step] = run.at(9, "end_step")
    assert step.buckets[0].meetings == ((3.0, 3.0), (3.0, 5.0))


@pytest.mark.parametrize(("second_tells", "done"), [(True, 6.5), (False, 8)])
def test_a_staged_bucket_is_done_when_its_last_collective_is(second_tells: bool, done: float) -> None:
    run = Watched()
    bucket, task = FakeBucket(0), FakeTask()

    run.at(0, "begin_step", 0)
    run.at(1, "backward_opened")
    run.launch(bucket, 2, 3, task, sent=10)
    run.clock.tells[0](4.0)
    run.clock.now = 5.0
    assert task.on_collective is not None
    task.on_collective(object() if second_tells else None)
    if second_tells:
        run.clock.tells[1](6.5)
    run.at(7, "wait_begins")
    run.clock.now = 8.0
    assert task.on_finished is not None
    task.on_finished()
    run.at(9, "bucket_done", 0, bucket.buffer())
    run.at(9, "wait_ended")
    [step] = run.at(10, "end_step")

    assert step.buckets[0].done == done


def test_what_hooks_compute_in_a_wait_is_told_from_the_waiting() -> None:
    run = Watched()
    buckets, tasks = [FakeBucket(0), FakeBucket(1)], [FakeTask(), FakeTask()]

    def goes_on(task: FakeTask, now: float, then: str) -> None:
        run.clock.now = float(now)
        told = getattr(task, then)
        assert told is not None
        told(*([object()] if then == "on_collective" else []))

    run.at(0, "begin_step", 0)
    run.at(1, "backward_opened")
    for bucket, task in zip(buckets, tasks, strict=True):
        run.launch(bucket, 2 + bucket.index(), 2.5 + bucket.index(), task)
    run.clock.tells[0](3.25)
    goes_on(tasks[0], 3.75, "on_collective")  # in the backward, while another bucket is launched: not in a wait
    run.at(5, "wait_begins")
    run.clock.tells[2](5.5)  # the second collective of bucket 0: its hook ends from here to 6
    goes_on(tasks[0], 6, "on_finished")
    run.clock.tells[1](5.75)  # of bucket 1, whose hook had to wait for its turn until 6
    goes_on(tasks[1], 6.5, "on_collective")
    goes_on(tasks[1], 9, "on_finished")  # whose collective did not tell when it was done: that stays waiting
    for bucket in buckets:
        run.at(9, "bucket_done", bucket.index(), bucket.buffer())
    run.at(9, "wait_ended")
    run.at(9, "backward_finished")
    [step] = run.at(10, "end_step")

    assert step.waits == ((5, 9),)
    assert step.hook_work == ((5.5, 6), (6, 6.5))


def test_several_backwards_and_waits_make_one_step() -> None:
    run = Watched()
    bucket = FakeBucket(0)
    run.at(0, "begin_step", 0)
    for begin in (1, 11):
        run.at(begin, "backward_begins")
        run.at(begin + 1, "backward_opened")
        run.launch(bucket, begin + 2, begin + 3, FakeTask(), sent=8)
        run.at(begin + 4, "wait_begins")  # agreeing on what is used
        run.at(begin + 5, "wait_ended")
        run.at(begin + 6, "wait_begins")
        run.at(begin + 7, "bucket_done", 0, bucket.buffer())
        run.at(begin + 7, "wait_ended")
        run.at(begin + 7, "backward_finished")
    [step] = run.at(20, "end_step")

    assert (step.backward_begin, step.backward_end) == (1, 15)
    assert step.waits == ((5, 6), (7, 8), (15, 16), (17, 18))
    assert step.wait == 4
    assert [b.sent_bytes for b in step.buckets] == [8, 8]


def test_backwards_that_only_accumulate_are_part_of_the_forward() -> None:
    run = Watched()
    run.at(0, "begin_step", 0)
    run.at(1, "backward_begins")
    run.at(2, "backward_ended")
    run.at(4, "backward_begins")
    run.at(5, "backward_opened")
    run.at(6, "wait_begins")
    run.at(7, "wait_ended")
    [step] = run.at(8, "end_step")

    assert (step.backward_begin, step.backward_end) == (4, 6)


def test_a_step_without_exchange_has_the_backward_of_its_own() -> None:
    run = Watched()
    run.at(0, "begin_step", 0)
    run.at(1, "backward_begins")
    run.at(2, "backward_ended")
    run.send(500)
    [step] = run.at(3, "end_step", 64)

    assert (step.backward_begin, step.backward_end, step.wait, step.buckets) == (1, 2, 0, ())
    assert (step.sent_bytes, step.local_bytes) == (500, 64)


def test_what_a_broken_pass_has_told_counts_for_nothing() -> None:
    run = Watched()
    bucket = FakeBucket(0)
    run.at(0, "begin_step", 0)
    run.at(1, "backward_opened")
    run.at(2, "bucket_full", bucket, 1.0)
    run.at(2, "launch_begins", 0)
    run.at(3, "backward_aborted")  # the launch has failed
    run.send(5)
    run.at(4, "wait_ended")
    [step] = run.at(5, "end_step")

    assert step.buckets == ()
    assert step.waits == ()
    assert step.other_bytes == (("control", 5),)


def test_what_happens_between_steps_is_no_part_of_them() -> None:
    run = Watched()
    bucket = FakeBucket(0)
    run.at(0, "backward_opened")
    run.launch(bucket, 1, 2, FakeTask(), sent=7)
    run.at(3, "wait_begins")
    run.at(4, "bucket_done", 0, bucket.buffer())
    run.at(4, "wait_ended")
    assert run.at(5, "end_step") == []
    run.at(6, "begin_step", 0)
    [step] = run.at(7, "end_step")

    assert (step.buckets, step.waits, step.sent_bytes) == ((), (), 0)
    assert run.recorder.outside_bytes == {"control": 7}


def test_on_a_device_a_step_comes_out_once_its_last_mark_has_passed() -> None:
    clock = FakeClock(asynchronous=True)
    run = Watched(clock)
    bucket = FakeBucket(0)
    for number in range(3):
        start = 10 * number + 1
        run.at(start, "begin_step", number)
        run.at(start + 1, "backward_opened")
        run.at(start + 2, "bucket_full", bucket, 1.0)
        run.at(start + 3, "launch_begins", 0)  # the communication stream turns to it
        run.at(start + 4, "launch_ended", 0, FakeTask())
        clock.tells[-1](float(start + 6))
        run.at(start + 5, "wait_begins")
        run.at(start + 6, "bucket_done", 0, bucket.buffer())
        run.at(start + 6, "wait_ended")
        found = run.at(start + 7, "end_step")
        assert [step.step for step in found] == ([0] if number == 2 else [])  # passed up to 15
        clock.passed = 5.0 if number == 0 else 15.0
    rest = run.recorder.settle()

    assert [step.step for step in rest] == [1, 2]
    assert (rest[0].buckets[0].ready, rest[0].buckets[0].launched, rest[0].buckets[0].done) == (13, 14, 17)


def test_on_a_device_a_hook_that_has_queued_all_its_phases_is_done_where_they_end() -> None:
    clock = FakeClock(asynchronous=True)
    run = Watched(clock)
    bucket, task = FakeBucket(0), FakeTask(finished=True)
    run.at(0, "begin_step", 0)
    run.at(1, "backward_opened")
    run.at(2, "bucket_full", bucket, 1.0)
    run.at(3, "launch_begins", 0)
    run.at(4, "launch_ended", 0, task)
    run.at(5, "wait_begins")
    run.at(6, "bucket_done", 0, bucket.buffer())
    run.at(6, "wait_ended")
    run.at(7, "end_step")
    [step] = run.recorder.settle()

    assert (step.buckets[0].launched, step.buckets[0].done) == (3, 4)


# ---------------------------------------------------------------------- ranks


def _time_a_collective() -> tuple[float, float, float]:
    clock = Clock()
    noted: list[Any] = []
    before = clock.stamp()
    work = comm.all_reduce(torch.ones(1 << 20), comm.resolve_group(None))
    assert clock.when_done(work, noted.append)
    work.wait()
    after = clock.stamp()
    assert not clock.when_done(object(), noted.append)
    return clock.seconds(before), clock.seconds(noted[0]), clock.seconds(after)


@pytest.mark.ranks
def test_a_collective_tells_when_it_is_done() -> None:
    for before, done, after in run_ranks(_time_a_collective):
        assert before < done <= after


def _compare(dtype: torch.dtype) -> list[float | None]:
    """Reduce twice the mean in one step, the mean in another one; compare in every second step."""
    group = comm.resolve_group(None)
    counted = ByteCounter()
    traffic.count_bytes(counted)
    recorder = Recorder(Clock(), counted, CompressionError(group, 2))
    errors: list[float | None] = []
    for number, (factor, size) in enumerate([(2.0, 1.0), (2.0, 1.0), (1.0, 1.0), (1.0, 1.0), (1.0, 0.0)]):
        bucket = FakeBucket(0)
        bucket._buffer = torch.full((4,), size * (1.0 + 2.0 * dist.get_rank()), dtype=dtype)
        recorder.begin_step(number)
        recorder.backward_opened()
        recorder.bucket_full(bucket, 0.5)
        recorder.launch_begins(0)
        recorder.launch_ended(0, FakeTask(finished=True))
        recorder.wait_begins()
        bucket.buffer().fill_(factor * size * 2.0)  # the mean of 1 and 3 is 2
        recorder.bucket_done(0, bucket.buffer())
        recorder.wait_ended()
        [step] = recorder.end_step()
        errors.append(step.buckets[0].error)
        assert step.sent_bytes == 0  # the comparison is not the run's own traffic
    traffic.count_bytes(None)
    return errors


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_error_is_relative_to_the_exact_mean(dtype: torch.dtype) -> None:
    for errors in run_ranks(_compare, dtype):
        assert errors == [1.0, None, 0.0, None, 0.0]
