"""The trace and the report: what they say, that names cannot break them, and that any record makes a page."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import pytest
from monitor_fakes import sample_record, sample_steps

from lightning_ddp_hooks.monitor.record import RunRecord, Summary
from lightning_ddp_hooks.monitor.report import build_report
from lightning_ddp_hooks.monitor.report_charts import nice_ticks
from lightning_ddp_hooks.monitor.report_text import (
    advice,
    bytes_text,
    factor_text,
    headline,
    seconds_text,
    share_text,
)
from lightning_ddp_hooks.monitor.timeline import BucketTiming, StepTiming, median_step
from lightning_ddp_hooks.monitor.trace import build_trace, clock_offset

_VOID = {"meta", "br", "hr"}


class _Checker(HTMLParser):
    """Notes text and tags, and that every tag is closed in its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.text: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parse(page: str) -> _Checker:
    checker = _Checker()
    checker.feed(page)
    checker.close()
    assert checker.stack == []
    return checker


# ---------------------------------------------------------------------- trace


def test_a_trace_has_a_lane_for_compute_and_one_for_each_bucket() -> None:
    steps = sample_steps(2)
    trace = json.loads(json.dumps(build_trace([[], [], [], steps], {"model": "Net"})))

    events = trace["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert trace["otherData"] == {"model": "Net"}
    assert {event["pid"] for event in events} == {1, 2, 3, 4}  # to Perfetto 0 is the idle process
    assert len({(event["pid"], event["tid"]) for event in events}) == len({event["tid"] for event in events}) == 7
    events = [event for event in events if event["pid"] == 4]
    names = {event["args"]["name"] for event in events if event["name"] in ("process_name", "thread_name")}
    assert names == {"rank 3", "compute", "bucket 0", "bucket 1", "bucket 2"}
    [bucket] = [e for e in spans if e["name"] == "bucket 2" and e["ts"] < 1e5]
    assert (bucket["ts"], bucket["dur"]) == (72_000.0, 20_000.0)  # launched at 72 ms, done at 92
    assert bucket["args"]["sent_bytes"] == 1_000_000
    waits = [(e["ts"], e["dur"]) for e in spans if e["name"] == "wait for communication"]
    assert waits == [(80_000.0, 12_000.0), (280_000.0, 13_000.0)]
    assert [e["args"]["sent"] for e in events if e["ph"] == "C"] == [3_000_512, 3_000_512]


def test_ranks_lie_on_one_axis_though_their_clocks_differ() -> None:
    steps = sample_steps(3)
    late = [_shifted(step, 5000.0) for step in steps]
    spans = [event for event in build_trace([steps, late])["traceEvents"] if event["ph"] == "X"]
    first, second = ([(e["name"], round(e["ts"])) for e in spans if e["pid"] == rank + 1] for rank in (0, 1))
    assert first == second
    assert min(ts for _, ts in first) == 0
    assert clock_offset(late, steps) == pytest.approx(5000.0)
    assert clock_offset([], steps) == 0.0


def _shifted(step: StepTiming, by: float) -> StepTiming:
    buckets = tuple(replace(b, ready=b.ready + by, launched=b.launched + by, done=b.done + by) for b in step.buckets)
    times = {name: getattr(step, name) + by for name in ("begin", "backward_begin", "backward_end", "finished")}
    return replace(step, buckets=buckets, **times)


def test_spans_of_a_lane_nest() -> None:
    """To the last digit: Perfetto drops what overlaps."""
    steps = [_shifted(step, 1 / 3) for step in sample_steps(60)]
    steps[3] = replace(steps[3], hook_work=((0.681 + 1 / 3, 0.685 + 1 / 3), (0.69 + 1 / 3, 0.7 + 1 / 3)))
    steps[5] = replace(steps[5], between=(0.01 / 3, 0.02 / 3, 0.03 / 3))
    spans = [e for e in build_trace([steps])["traceEvents"] if e["ph"] == "X"]
    for lane in {span["tid"] for span in spans}:
        stack: list[int] = []
        ordered = sorted((s for s in spans if s["tid"] == lane), key=lambda s: (s["ts"], -s["dur"]))
        for span in ordered:
            end = span["ts"] + span["dur"]
            while stack and stack[-1] <= span["ts"]:
                stack.pop()
            assert not stack or end <= stack[-1], span
            stack.append(end)


def test_an_error_that_is_not_finite_is_null_in_a_trace() -> None:
    [step] = sample_steps(1)
    step = replace(step, buckets=tuple(replace(bucket, error=float("inf")) for bucket in step.buckets))
    spans = json.loads(json.dumps(build_trace([[step]]), allow_nan=False))["traceEvents"]
    errors = [span["args"]["relative_error"] for span in spans if span["name"].startswith("bucket ")]
    assert errors == [None] * 3


def test_a_trace_of_nothing() -> None:
    assert {event["ph"] for event in build_trace([[]])["traceEvents"]} == {"M"}


# ---------------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (seconds_text(0.0411), "41.1 ms"), (seconds_text(0.00087), "870 µs"), (seconds_text(2.3), "2.30 s"),
        (seconds_text(0.0009996), "1.00 ms"), (seconds_text(0), "0 µs"), (seconds_text(0.123456), "123 ms"),
        (bytes_text(25e6), "25.0 MB"), (bytes_text(999_999), "1.00 MB"), (bytes_text(512), "512 B"),
        (bytes_text(1.234e9), "1.23 GB"), (share_text(0.0756), "7.6%"), (share_text(0.546), "55%"),
        (factor_text(3.984), "3.98\N{MULTIPLICATION SIGN}"), (factor_text(None), "\N{EN DASH}"),
    ],
)  # fmt: skip
def test_figures_have_three_digits(text: str, expected: str) -> None:
    assert text == expected


def step_with(
    *buckets: tuple[float, float], wait: float, hook: float = 0.0, late: tuple[float, float] = (0, 0)
) -> StepTiming:
    """A step of 100 ms with a backward from 20 to 80 ms; each bucket is launched and done at the given ms.

    A hook computes for ``hook`` ms before each launch, and in the interval ``late`` of the wait.
    """
    timings = tuple(
        BucketTiming(i, (f"p{i}",), 100, 100, (launched - hook) / 1e3, launched / 1e3, done / 1e3)
        for i, (launched, done) in enumerate(buckets)
    )
    work = ((late[0] / 1e3, late[1] / 1e3),) if late[1] else ()
    return StepTiming(0, 0.0, 0.02, 0.08, 0.1, timings, wait / 1e3, hook_work=work)


def said(words: Callable[[RunRecord, Summary], str], step: StepTiming, *, world_size: int = 2, **fields: Any) -> str:
    record = sample_record([step], world_size=world_size)
    for name, value in fields.items():
        setattr(record, name, value)
    return words(record, Summary.of([step], world_size))


@pytest.mark.parametrize(
    ("step", "sentence"),
    [
        (step_with((40, 60), (70, 80.5), wait=0.5), "hides behind the backward: waiting takes 500 µs of 100 ms"),
        (step_with((40, 84), (70, 86), (78, 89), wait=9), "82% of the communication hides"),
        (step_with((79, 95), wait=15), "all gradients share one bucket: waiting takes 15.0 ms"),
        (step_with((79, 88), (80, 95), wait=15), "Little of the communication hides"),
        (step_with(wait=0), "Replicas trained on their own"),
    ],
)
def test_the_headline_says_what_was_waited_for(step: StepTiming, sentence: str) -> None:
    assert sentence in said(headline, step)


def test_one_rank_has_nobody_to_talk_to() -> None:
    step = step_with((40, 60), wait=0)

    assert "one rank" in said(headline, step, world_size=1)


def test_advice_bounds_the_gain() -> None:
    step = step_with((40, 60), (75, 90), wait=10)

    text = said(advice, step)
    assert "at most 10% shorter." in text
    assert "smaller buckets" in text
    quiet = step_with((40, 60), (70, 80.5), wait=0.5)
    assert "little to gain" in said(advice, quiet)


@pytest.mark.parametrize(
    ("step", "has_hook", "expected"),
    [
        (step_with((40, 60), (75, 85), wait=5, hook=10), True,
         "at most 25% shorter. The hook itself takes 20.0 ms of a "
         "step, more than the 5.00 ms of transfer: try larger buckets (`bucket_cap_mb`), a cheaper hook or none."),
        (step_with((75, 85), wait=5, hook=10), True, "than the 5.00 ms of transfer: try a cheaper hook or none."),
        (step_with((40, 60), (75, 85), wait=19, late=(81, 99)), True, "The hook itself takes 18.0 ms of a step"),
        (step_with((40, 60), (75, 76), wait=0, hook=10), False,
         "Starting to communicate takes 20.0 ms of a step, more than the 0 µs of transfer: larger buckets"),
        (step_with((75, 76), wait=0, hook=10), False, "a hook would not shorten that"),
        (step_with((40, 95), (75, 96), wait=16, hook=5), True,
         "a hook that sends less than this one, if it computes no longer (10.0 ms of a step) would shorten that."),
        (step_with((40, 95), (75, 96), wait=16), False, "can hide: a hook that sends less would shorten that."),
        (step_with((40, 60), (70, 82), wait=15), True, "other buckets or hooks would not help"),
        (step_with((79, 95), wait=15), False, "Buckets smaller than the model"),
    ],
)  # fmt: skip
def test_advice_weighs_what_a_hook_costs(step: StepTiming, has_hook: bool, expected: str) -> None:
    assert expected in said(advice, step, has_hook=has_hook)


def test_larger_buckets_are_advised_only_where_the_limit_closes_them() -> None:
    step = step_with((40, 60), (75, 85), wait=5, hook=10)  # two buckets of 100 bytes

    def advised(cap: int, *, has_hook: bool = True) -> str:
        return said(advice, step, has_hook=has_hook, bucket_cap_bytes=cap)

    assert "larger buckets" in advised(100)
    assert advised(101).endswith("try a cheaper hook or none.")
    assert "a hook would not shorten that" in advised(101, has_hook=False)


def test_a_summary_of_steps() -> None:
    summary = Summary.of(sample_steps(), 2)

    assert summary.steps == 20
    assert summary.duration == pytest.approx(0.102)
    assert summary.exposed == pytest.approx(0.014)
    assert summary.communication == pytest.approx(0.013 * 2 + 0.022)
    assert summary.overlap == pytest.approx(1 - 0.014 / 0.048)
    assert summary.sent_bytes == 3_000_512
    assert summary.compression == pytest.approx(12_000_000 / 3_000_512)
    assert summary.error is None


# ---------------------------------------------------------------------- drawing


@pytest.mark.parametrize(("extent", "ticks"), [(0.041, 5), (1.0, 6), (7e-6, 8), (300.0, 7), (0.0, 1)])
def test_ticks_are_round_and_few(extent: float, ticks: int) -> None:
    found = nice_ticks(extent)

    assert found[0] == 0.0
    assert len(found) == ticks
    assert all(0 < later <= extent * (1 + 1e-9) for later in found[1:])


# ---------------------------------------------------------------------- the page


def test_the_page_is_whole_and_needs_nothing_from_outside() -> None:
    page = build_report(sample_record())
    checker = parse(page)
    text = " ".join(checker.text)

    assert "of the communication hides behind the backward: waiting takes 14.0 ms of 102 ms per step" in text
    for figure in ("3.00 MB", "4.00\N{MULTIPLICATION SIGN}", "rank 1", "buffers", "layer0.weight", "BlockQuantize"):
        assert figure in text, figure
    assert not [tag for tag, _ in checker.tags if tag in ("script", "link", "img", "iframe", "object")]
    assert "://" not in page
    assert "url(" not in page
    assert "@import" not in page


def test_the_table_says_how_long_each_bucket_was_waited_for() -> None:
    # Every other step waits for the other bucket, so that the median wait for each one is zero.
    first, second = step_with((40, 90), (50, 60), wait=10), step_with((40, 60), (50, 90), wait=10)
    page = build_report(sample_record([first, second, first, first] * 5))
    table = page.partition("<h2>Buckets</h2>")[2].partition("</table>")[0]
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in table.split("<tr>")[2:]]
    assert [(row[0], row[7]) for row in rows] == [("0", "7.50 ms"), ("1", "2.50 ms")]


def test_the_charts_say_which_backward_contains_the_hook() -> None:
    steps = [step_with((40, 60), (75, 90), wait=15, hook=10, late=(90, 95))]
    record = sample_record(steps)
    text = " ".join(parse(build_report(record)).text)
    assert "backward with launching 60.0 ms" in text
    record.has_hook = True
    text = " ".join(parse(build_report(record)).text)
    assert "backward with hook 60.0 ms" in text
    assert "waits with hook 15.0 ms" in text


def test_without_a_comparison_the_own_step_is_divided() -> None:
    record = sample_record([step_with((40, 60), (75, 90), wait=15, hook=10, late=(90, 95))])
    assert "waits for others" in build_report(record)
    record.compared.clear()
    text = " ".join(parse(build_report(record)).text)
    for label in ("backward alone 40.0 ms", "hook, launching 25.0 ms", "waits 10.0 ms"):
        assert label in text, label


def test_names_are_text_wherever_they_come_from() -> None:
    evil = '<script>alert("1")</script>&\''
    step = StepTiming(0, 0.0, 0.02, 0.08, 0.1, (BucketTiming(0, (evil,), 100, 100, 0.03, 0.04, 0.09),), 0.01)
    record = RunRecord(2, 0, 10, facts={evil: evil}, note=evil)
    record.add([step])
    record.outside_bytes = {evil: 1}
    page = build_report(record)
    checker = parse(page)

    assert "<script" not in page
    assert evil in "".join(checker.text)
    assert any(evil in (attributes.get("title") or "") for _, attributes in checker.tags)


@pytest.mark.parametrize("name", ["none", "one", "no buckets", "many buckets", "nothing lasts", "one rank", "long run"])
def test_any_record_makes_a_page(name: str) -> None:
    steps = sample_steps(1)
    world_size = 2
    if name == "none":
        steps = []
    elif name == "no buckets":
        steps = [StepTiming(0, 0.0, 0.02, 0.08, 0.1, (), 0.0, (), (("averaging", 10),), 100)]
    elif name == "many buckets":
        steps = [step_with(*((30 + i / 10, 40 + i / 10) for i in range(300)), wait=1)]
    elif name == "nothing lasts":
        steps = [StepTiming(0, 1.0, 1.0, 1.0, 1.0, (BucketTiming(0, ("p",), 0, 0, 1.0, 1.0, 1.0),), 0.0)]
    elif name == "one rank":
        world_size = 1
    elif name == "long run":
        steps = sample_steps(1000)
    record = sample_record(steps, world_size=world_size)
    text = " ".join(parse(build_report(record)).text)

    assert ("No step was recorded" in text) == (name == "none")


def test_only_the_last_steps_are_kept_and_the_page_says_so() -> None:
    record = RunRecord(2, 0, keep_steps=5)
    for step in sample_steps(8):
        record.add([step])

    assert [step.step for step in record.steps] == [3, 4, 5, 6, 7]
    assert "the last 5 of 8 steps" in build_report(record)


def test_the_typical_step_is_the_one_drawn() -> None:
    steps = sample_steps()

    assert f"Step {median_step(steps).step}," in build_report(sample_record(steps))
    assert all(a.step < b.step for a, b in pairwise(steps))
