"""Waiting split into others and transfer: on steps that are played through on clocks that do not agree."""

import random
from collections.abc import Sequence

import pytest
from monitor_fakes import sample_record

from lightning_ddp_hooks.monitor.record import Summary
from lightning_ddp_hooks.monitor.report import build_report
from lightning_ddp_hooks.monitor.report_text import advice, headline, slow_rank_advice, who_is_slow
from lightning_ddp_hooks.monitor.skew import (
    PHASES,
    RankStep,
    SlowRank,
    StepTable,
    metrics,
    pack,
    slow_rank,
    split,
    unpack,
)
from lightning_ddp_hooks.monitor.timeline import BucketTiming, StepTiming


def play(
    ready: Sequence[Sequence[float]],
    transfer: Sequence[float],
    offsets: Sequence[float],
    *,
    number: int = 0,
    begin: Sequence[float] | None = None,
    forward: float = 0.0,
    data: Sequence[float] | None = None,
) -> list[StepTiming]:
    """Play a step through: gradients of each rank are ready at the given times, and one link sends bucket after bucket.

    What is returned was read on each rank's own clock, which is off by its offset.
    """  # fmt: skip
    done, free = [], 0.0
    for posts, seconds in zip(zip(*ready, strict=True), transfer, strict=True):
        free = max(*posts, free) + seconds
        done.append(free)
    steps = []
    for rank, (mine, offset) in enumerate(zip(ready, offsets, strict=True)):
        started, end = (begin[rank] if begin else 0.0), mine[-1]
        buckets = tuple(
            BucketTiming(i, (f"p{i}",), 100, 100, r + offset, r + offset, d + offset, None, ((r + offset, d + offset),))
            for i, (r, d) in enumerate(zip(mine, done, strict=True))
        )
        wait = max(0.0, done[-1] - end)
        steps.append(
            StepTiming(
                number, started + offset, started + forward + offset, end + offset, max(done[-1], end) + 1 + offset,
                buckets, wait, between=((data[rank] if data else 0.0), 0.0, 0.0),
            )
        )  # fmt: skip
    return steps


def of_ranks(steps: Sequence[StepTiming]) -> list[RankStep]:
    return [RankStep.of(step) for step in steps]


def test_an_early_rank_waits_for_the_late_one_and_then_both_for_the_transfer() -> None:
    # Rank 1 comes to its second bucket at 9 instead of 4; sending it takes 2.
    found = split([of_ranks(play([[2, 4], [2, 9]], [1, 2], [0.0, 1000.0]))])

    assert found.skew == (5.0, 0.0)
    assert found.transfer == (2.0, 2.0)
    assert found.held_up == (0.0, 5.0)
    slow = slow_rank(found)
    assert slow is not None
    assert (slow.rank, slow.held_up, slow.phase, slow.bucket) == (1, 5.0, "backward", 1)


def test_the_split_is_what_a_common_clock_would_say() -> None:
    rng = random.Random(0)
    for _ in range(300):
        ranks, buckets = rng.randrange(2, 6), rng.randrange(1, 6)
        ready = [sorted(float(rng.randrange(100)) for _ in range(buckets)) for _ in range(ranks)]
        transfer = [float(rng.randrange(1, 20)) for _ in range(buckets)]
        found = split([of_ranks(play(ready, transfer, [64.0 * rng.randrange(-100, 100) for _ in range(ranks)]))])

        free, skew, held_up = 0.0, [0.0] * ranks, [0.0] * ranks
        for bucket, seconds in enumerate(transfer):
            posts = [mine[bucket] for mine in ready]
            for rank, mine in enumerate(ready):  # waits from the end of its backward, and of the bucket before
                late = max(0.0, max(posts) - max(mine[-1], free))
                skew[rank] += late
                held_up[posts.index(max(posts))] += late / (ranks - 1)
            free = max(free, *posts) + seconds
        waits = [max(0.0, free - mine[-1]) for mine in ready]
        assert found.skew == pytest.approx(skew)
        assert found.held_up == pytest.approx(held_up)
        assert found.transfer == pytest.approx([wait - late for wait, late in zip(waits, skew, strict=True)])


def test_ranks_that_agree_on_something_wait_for_the_last_one_too() -> None:
    both = of_ranks(
        [StepTiming(0, 0.0, 1.0, 2.0, 9.0, (), 6.0), StepTiming(0, 0.0, 1.0, 7.0, 9.0, (), 1.0)],
    )
    found = split([both])
    assert (found.skew, found.transfer, found.held_up) == ((5.0, 0.0), (1.0, 1.0), (0.0, 5.0))


def test_a_rank_may_be_late_to_any_collective_of_a_hook() -> None:
    # The second collective of the bucket is posted at 9 by rank 0, and by rank 1, which is asleep, at 14.
    def step(second: float, backward_end: float) -> StepTiming:
        bucket = BucketTiming(0, ("a",), 100, 100, 2.0, 2.0, 16.0, None, ((2.0, 8.0), (second, 16.0)))
        return StepTiming(0, 0.0, 1.0, backward_end, 17.0, (bucket,), 16 - backward_end)

    found = split([of_ranks([step(9, 5), step(14, 14)])])
    assert (found.skew, found.transfer) == ((5.0, 0.0), (6.0, 2.0))
    assert found.held_up == (0.0, 5.0)


@pytest.mark.parametrize("phase", ["data", "forward", "backward"])
def test_the_phase_in_which_a_rank_loses_its_time_is_named(phase: str) -> None:
    late = 6.0
    ready = [[2.0, 3.0, 4.0]] * 2 + [[2.0, 3.0 + late * (phase == "backward"), 4.0 + late * (phase == "backward")]]
    if phase != "backward":
        ready[2] = [time + late for time in ready[2]]
    steps = []
    for number in range(5):
        begin = [0.0, 0.0, late if phase == "data" else 0.0]
        played = play(ready, [0.5] * 3, [0.0, -50.0, 7.0], number=number, begin=begin, data=begin)
        if phase == "forward":
            slow = played[2]
            played[2] = StepTiming(
                number, slow.begin, slow.begin + late, slow.backward_end, slow.finished, slow.buckets, slow.wait
            )
        steps.append(of_ranks(played))
    slow = slow_rank(split(steps))
    assert slow is not None
    assert (slow.rank, slow.phase, slow.bucket) == (2, phase, 1 if phase == "backward" else None)
    # The others compute on for a while, and what is late does not all come at once.
    assert slow.held_up == pytest.approx(5.5 if phase == "backward" else 5.0)
    assert slow.excess[phase] == pytest.approx(late)
    assert metrics(split(steps))[f"comm/late_{phase}_ms"] == pytest.approx(1e3 * late)


def test_ranks_that_take_turns_are_no_slow_rank() -> None:
    steps = [of_ranks(play([[2, 4], [2, 9]][:: 1 - 2 * (n % 2)], [1, 2], [0, 0])) for n in range(10)]
    found = split(steps)
    assert found.skew == (2.5, 2.5)
    assert slow_rank(found) is None


def test_steps_travel_as_numbers() -> None:
    steps = [RankStep.of(play([[2, 4], [3, 9]], [1, 2], [0, 0], number=n)[n % 2]) for n in range(40)]
    assert unpack(pack(steps, 4096)) == steps
    row = len(pack(steps[:1], 4096)) and 6 + len(PHASES) + 6
    assert unpack(pack(steps, 3 * row + 1)) == steps[-3:]
    assert len(pack(steps, 100)) == 100
    assert unpack(pack(steps, 5)) == unpack(pack([], 5)) == []


def test_a_step_is_compared_once_all_ranks_have_sent_it() -> None:
    rows = [of_ranks(play([[2, 4], [3, 9]], [1, 2], [0, 0], number=n)) for n in range(4)]
    table = StepTable(2)
    assert table.add([[rows[0][0], rows[1][0]], [rows[0][1]]]) == [rows[0]]
    assert table.add([[rows[3][0]], [rows[1][1], rows[3][1]]]) == [rows[1], rows[3]]
    assert table.add([[], [rows[2][1]]]) == []  # the other part did not fit into its message


# ---------------------------------------------------------------------- words


def record_of(late: float, transfer: float, *, hosts: Sequence[str] = ("a", "a")) -> tuple[str, str, str]:
    """Return who is slow, advice and page for steps in which rank 1 is late with its second bucket."""
    played = [play([[20, 80], [20, 80 + late]], [1, transfer], [0, 500], number=n) for n in range(20)]
    record = sample_record([of_rank[0] for of_rank in played])
    record.hosts = hosts
    record.compared.clear()
    record.compared.extend(map(of_ranks, played))
    summary = Summary.of(list(record.steps), 2)
    waits_for_others = "Ranks wait for each other" in headline(record, summary)
    assert waits_for_others == (late > transfer)
    return who_is_slow(record), advice(record, summary), build_report(record)


def test_a_hook_is_advised_for_transfer_and_nothing_else() -> None:
    said, advised, page = record_of(late=50, transfer=2)
    assert said.startswith("Rank 1 holds the others up: they wait 50.0 s of 133 s per step for it")
    assert said.endswith("in the backward, on the way to the gradients of bucket 1 (`p1`).")
    assert "No communication hook and no bucket size changes that." in advised
    assert "sends less" not in advised
    assert "shorter" not in advised
    first_screen = page[: page.index("<section")]
    assert said.split("`")[0] in first_screen
    assert advised.split(" (")[0] in first_screen
    assert "What am I waiting for?" in first_screen
    assert "<table" not in first_screen

    said, advised, _ = record_of(late=0, transfer=50)
    assert said.startswith("None: no rank waits")
    assert "a hook that sends less" in advised


def test_where_both_are_long_the_larger_part_comes_first() -> None:
    _, advised, _ = record_of(late=50, transfer=20)
    assert "look at that once the ranks are even" in advised
    assert "sends less" not in advised


def test_a_slow_ranks_host_is_named_where_there_are_several() -> None:
    assert record_of(late=50, transfer=2, hosts=["here", "there"])[0].startswith("Rank 1 (there) holds")


def test_a_rank_that_is_slow_in_the_hook_is_not_told_that_hooks_do_not_matter() -> None:
    said = slow_rank_advice(SlowRank(1, 0.02, 0.2, "hook", None, {}))
    assert "a hook that computes less" in said
    assert "No communication hook" not in said


def test_without_a_comparison_there_is_no_advice() -> None:
    record = sample_record()
    record.compared.clear()
    assert "no advice" in advice(record, Summary.of(list(record.steps), 2))
