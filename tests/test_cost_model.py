"""The cost model against cases computed by hand; the links' figures are chosen so that all of them are round."""

import pytest

from lightning_ddp_hooks.advisor.cost_model import (
    BucketCost,
    ComputeStep,
    Phase,
    predict,
    predict_averaging,
)
from lightning_ddp_hooks.advisor.link_model import (
    Link,
    bandwidth_text,
    link_of_ring,
    parse_bandwidth,
    parse_latency,
)

# 2 ranks on it: an all-reduce of S bytes takes 2 * 1 * (0 + S / 2 / 100) = S / 100 seconds.
SIMPLE = Link(latency=0.0, bandwidth=100.0)


def allreduce_cost(bucket_bytes: list[int]) -> list[BucketCost]:
    """What the plain mean does for each bucket."""
    return [BucketCost((Phase(0.0, "all_reduce", nbytes),)) for nbytes in bucket_bytes]


def _step(*ready: float, before: float = 1.0, backward: float = 4.0, after: float = 0.5) -> ComputeStep:
    return ComputeStep(before, ready, backward, after)


# ---------------------------------------------------------------------- collectives


@pytest.mark.parametrize(
    ("collective", "seconds"),
    [
        ("all_reduce", 2 * 3 * (0.5 + 400 / 4 / 100)),  # 9
        ("reduce_scatter", 3 * (0.5 + 1.0)),
        ("all_gather", 3 * (0.5 + 4.0)),
        ("all_to_all", 0.5 + 3.0),
        ("broadcast", 2 * (0.5 + 4.0)),
        ("gather", 0.5 + 3 * 4.0),
    ],
)
def test_collectives_of_four_ranks_take_what_their_formula_says(collective: str, seconds: float) -> None:
    network = Link(latency=0.5, bandwidth=100.0)
    assert network.seconds(collective, 400, 4) == pytest.approx(seconds)  # type: ignore[arg-type]
    assert network.seconds(collective, 400, 1) == 0.0  # type: ignore[arg-type]


def test_the_link_is_found_again_from_two_all_reduces() -> None:
    link = Link(latency=0.002, bandwidth=1e6)
    sizes = (4096, 1 << 20)
    found = link_of_ring(*((size, link.seconds("all_reduce", size, 4)) for size in sizes), 4)  # type: ignore[arg-type]
    assert (found.latency, found.bandwidth) == (pytest.approx(0.002), pytest.approx(1e6))


@pytest.mark.parametrize(
    ("text", "value"), [("1gbit", 125e6), ("100 Mbit/s", 12.5e6), ("12.5GB/s", 12.5e9), ("10Gbps", 1.25e9)]
)
def test_bandwidths_are_read(text: str, value: float) -> None:
    assert parse_bandwidth(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("bandwidth", "text"),
    [
        ("1gbit", "1 Gbit/s"), ("100mbit", "100 Mbit/s"), ("12.5GB/s", "100 Gbit/s"), ("2.5gbit", "2.5 Gbit/s"),
        ("56kbit", "56 kbit/s"), ("1.2345gbit", "1.23 Gbit/s"), ("999.9mbit", "1 Gbit/s"), ("400GB/s", "3,200 Gbit/s"),
    ],
)  # fmt: skip
def test_bandwidths_are_written_as_they_are_sold(bandwidth: str, text: str) -> None:
    assert bandwidth_text(parse_bandwidth(bandwidth)) == text


@pytest.mark.parametrize(("text", "value"), [("0.1ms", 1e-4), ("50us", 5e-5), ("2 s", 2.0)])
def test_latencies_are_read(text: str, value: float) -> None:
    assert parse_latency(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["fast", "1", "0gbit", "-1gbit", "1 gallon"])
def test_other_texts_are_no_bandwidth(text: str) -> None:
    with pytest.raises(ValueError, match="Expected a bandwidth such as"):
        parse_bandwidth(text)


def test_other_texts_are_no_latency() -> None:
    with pytest.raises(ValueError, match="latency such as"):
        parse_latency("1 hour")


# ---------------------------------------------------------------------- steps


def test_one_bucket_at_the_end_of_the_backward_is_all_exposed() -> None:
    predicted = predict(_step(4.0), allreduce_cost([300]), SIMPLE, 2)
    assert predicted.step == pytest.approx(1 + 4 + 3 + 0.5)
    assert (predicted.exposed, predicted.communication, predicted.sent) == (3.0, 3.0, 300.0)


def test_a_bucket_that_is_ready_early_costs_nothing() -> None:
    predicted = predict(_step(1.0), allreduce_cost([300]), SIMPLE, 2)
    assert predicted.step == _step(1.0).seconds
    assert predicted.exposed == 0.0


def test_buckets_queue_on_the_link() -> None:
    # Link: 1 to 3, 3 to 5, 5 to 7; the backward ends at 4.
    predicted = predict(_step(1.0, 2.0, 4.0), allreduce_cost([200, 200, 200]), SIMPLE, 2)
    assert predicted.exposed == pytest.approx(3.0)
    # Link: 1 to 1.5, idle, 3 to 3.5, 4 to 4.25.
    predicted = predict(_step(1.0, 3.0, 4.0), allreduce_cost([50, 50, 25]), SIMPLE, 2)
    assert predicted.exposed == pytest.approx(0.25)
    assert predicted.communication == pytest.approx(1.25)


def test_what_a_hook_computes_holds_up_the_backward() -> None:
    cost = BucketCost((Phase(0.5, "all_reduce", 10),), finish=0.25)
    # Ready at 1: computes until 1.5, link until 1.6. Ready at 2, but the backward is 0.5 late: 2.5, decodes the first
    # (2.75), computes until 3.25, link until 3.35. The backward ends at 4 + 0.5 + 0.75 = 5.25 and decodes: 5.5.
    predicted = predict(_step(1.0, 2.0), [cost, cost], SIMPLE, 2)
    assert predicted.step == pytest.approx(1 + 5.5 + 0.5)
    assert (predicted.hook, predicted.exposed) == (pytest.approx(1.5), 0.0)


def test_a_second_phase_is_issued_when_the_next_bucket_is_launched_and_else_at_the_end() -> None:
    cost = BucketCost((Phase(0.0, "all_reduce", 50), Phase(0.0, "all_reduce", 50)))
    # Bucket 0: first phase 1 to 1.5; its second one is issued at 2, with bucket 1: 2 to 2.5. Bucket 1: 2.5 to 3, and
    # its second one when the backward has ended: 4 to 4.5.
    predicted = predict(_step(1.0, 2.0), [cost, cost], SIMPLE, 2)
    assert predicted.exposed == pytest.approx(0.5)
    assert predicted.step == pytest.approx(1 + 4.5 + 0.5)


def test_a_later_bucket_does_not_overtake_the_phases_of_an_earlier_one() -> None:
    slow = BucketCost((Phase(0.0, "all_reduce", 400), Phase(0.0, "all_reduce", 100)))
    fast = BucketCost((Phase(0.0, "all_reduce", 0), Phase(0.0, "all_reduce", 100)))
    # Link: slow 3 to 7, fast 7 to 7; then the second phases, slow 7 to 8 and fast 8 to 9.
    predicted = predict(_step(3.0, 4.0), [slow, fast], SIMPLE, 2)
    assert predicted.step == pytest.approx(1 + 9 + 0.5)
    assert predicted.exposed == pytest.approx(5.0)


def test_one_rank_communicates_nothing() -> None:
    predicted = predict(_step(1.0, 4.0), allreduce_cost([1000, 1000]), SIMPLE, 1)
    assert predicted.step == _step(1.0, 4.0).seconds
    assert (predicted.communication, predicted.sent) == (0.0, 0.0)


def test_bytes_are_those_that_the_reducer_sends() -> None:
    predicted = predict(_step(1.0, 4.0), allreduce_cost([1000, 600]), SIMPLE, 4)
    assert predicted.sent == 2 * 3 * 1000 // 4 + 2 * 3 * 600 // 4


def test_averaging_divides_the_exchange_over_the_period() -> None:
    step = _step(4.0)
    predicted = predict_averaging(step, 800, SIMPLE, 2, period=4)
    assert predicted.step == pytest.approx(step.seconds + 8.0 / 4)
    assert predicted.sent == pytest.approx(800 / 4)
