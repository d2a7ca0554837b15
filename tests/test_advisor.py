"""The advisor: what is recommended, profiles and buckets, and the costs of hooks against what they must send."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hook_tools import block_hook_bytes

from lightning_ddp_hooks import DDPHooksStrategy
from lightning_ddp_hooks.advisor.advice import Change, Option, advise, align, mb_text, ms_text, table, why_unknown
from lightning_ddp_hooks.advisor.cost_model import Prediction
from lightning_ddp_hooks.advisor.profile import BackwardProfile, StepSample, profile_of, slowest
from lightning_ddp_hooks.cli.candidates import CANDIDATES, DEFAULT
from lightning_ddp_hooks.cli.hook_cost import measure_hooks
from lightning_ddp_hooks.cli.target import make_object
from lightning_ddp_hooks.hooks import BlockQuantize, OneBit
from lightning_ddp_hooks.traffic import sent_by_rank

# ---------------------------------------------------------------------- what is recommended


def _option(name: str, change: Change, step: float, exposed: float = 0.0) -> Option:
    predicted = Prediction(step=step, exposed=exposed, hook=0.0, communication=exposed, sent=1e6)
    return Option(
        name=name, change=change, effect=f"effect of {name}", yaml=f"yaml of {name}", bucket_cap_mb=4.0,
        predicted=predicted,
    )  # fmt: skip


def test_plain_allreduce_is_recommended_where_it_waits_for_next_to_nothing() -> None:
    advice = advise([_option("mean", "none", 1.0, 0.01), _option("int8", "rounding", 0.99)])
    assert advice.option.name == "mean"
    assert "Plain all-reduce is best." in advice.because
    assert advice.beyond is None


def test_where_predictions_cannot_tell_bench_is_advised() -> None:
    # 0.74 x 1.30 is more than 0.95: both steps may well take as long.
    advice = advise([_option("mean", "none", 1.0, 0.5), _option("int8", "rounding", 0.74)])
    assert advice.option.name == "mean"
    assert "int8 may be 26% faster, which is less than predictions can tell: measure it by `bench`" in advice.because
    for options, reason in (
        ([_option("int8", "rounding", 1.2)], "none of the accepted options is faster"),
        ([_option("topk", "approximation", 0.9)], "no other option was asked about"),
    ):
        assert reason in advise([_option("mean", "none", 1.0, 0.5), *options]).because


def test_rounding_is_recommended_where_ranges_do_not_overlap() -> None:
    rounding = [_option("int8", "rounding", 1.4), _option("bf16", "rounding", 1.5)]
    advice = advise([_option("mean", "none", 2.0, 1.0), *rounding])
    assert advice.option.name == "int8"
    assert advice.because == (
        "A step takes 1330 to 1820 ms instead of 1900 to 2600 ms with plain all-reduce, which waits 50% of the time "
        "for the network."
    )


@pytest.mark.parametrize(
    ("seconds", "world_size", "device", "reason"),
    [
        (0.15, 4, "cpu", None),
        (0.09, 4, "cpu", "A step takes 90.0 ms without communication: below 100 ms predictions were off"),
        (0.15, 5, "cpu", "of more than 4 ranks, 5 are asked for"),
        (0.15, 2, "cuda", "on a GPU"),
    ],
)
def test_what_was_never_checked_is_refused(seconds: float, world_size: int, device: str, reason: str | None) -> None:
    found = why_unknown(seconds, world_size, device)
    assert found is None if reason is None else found is not None and reason in found


def test_what_changes_more_than_is_accepted_is_named_and_not_recommended() -> None:
    options = [
        _option("mean", "none", 2.0, 1.5),
        _option("int8", "rounding", 1.0),
        _option("powersgd", "approximation", 0.7),
        _option("diloco", "local", 0.6),  # a little faster than PowerSGD: not worth it
    ]
    advice = advise(options)
    assert (advice.option.name, advice.beyond and advice.beyond.name) == ("int8", "powersgd")
    advice = advise(options, accept="approximation")
    assert (advice.option.name, advice.beyond) == ("powersgd", None)
    options[-1] = _option("diloco", "local", 0.3)
    advice = advise(options, accept="approximation")
    assert (advice.option.name, advice.beyond and advice.beyond.name) == ("powersgd", "diloco")
    assert advise(options, accept="local").option.name == "diloco"
    assert advise(options, accept="none").option.name == "mean"


def test_the_table_is_aligned_and_fastest_first() -> None:
    lines = table([_option("mean", "none", 2.0, 1.0), _option("int8", "rounding", 1.0)]).split("\n")
    assert [line.split()[0] for line in lines] == ["hook", "----", "int8", "mean"]
    assert lines[2].split()[1:5] == ["950", "to", "1300", "0.50"]
    assert len({line.index("effect of") for line in lines[2:]}) == 1


def test_the_table_has_bucket_sizes_only_where_they_make_a_difference() -> None:
    options = [_option("mean", "none", 2.0), _option("int8", "rounding", 1.0)]
    assert "buckets MB" in table(options)
    lines = table([replace(option, bucket_cap_mb=None) for option in options]).split("\n")
    assert lines[0].endswith("sent MB  what it changes")
    assert lines[2].endswith("effect of int8")


def test_numbers_are_shown_with_three_digits() -> None:
    assert [ms_text(s) for s in (1.2344, 0.01234, 0.001234)] == ["1234", "12.3", "1.23"]
    assert [mb_text(n) for n in (123.4e6, 12.34e6, 1.234e6, 12340)] == ["123", "12.3", "1.23", "0.012"]
    assert align([("a", "b"), ("cc", "1")], right=(1,)) == "a   b\n--  -\ncc  1"


# ---------------------------------------------------------------------- profiles


def _profile(ready: tuple[float, ...], shapes: tuple[tuple[int, ...], ...] | None = None) -> BackwardProfile:
    shapes = shapes or ((4,),) * len(ready)
    return BackwardProfile(
        names=tuple(f"p{i}" for i in range(len(ready))),
        shapes=shapes,
        dtypes=("float32",) * len(ready),
        nbytes=tuple(4 * torch.Size(shape).numel() for shape in shapes),
        ready=ready,
        before=1.0,
        backward=max(ready),
        after=0.5,
        steps=3,
    )


def test_a_bucket_is_ready_with_its_last_gradient_and_not_before_the_bucket_before_it() -> None:
    profile = _profile((4.0, 3.0, 1.0, 2.0))
    step = profile.compute_step([[3, 1], [2], [0]])
    assert step.ready == (3.0, 3.0, 4.0)
    assert (step.before, step.backward, step.after) == (1.0, 4.0, 0.5)
    assert profile.order == [2, 3, 1, 0]


def test_a_profile_holds_medians_and_what_never_came_comes_last() -> None:
    samples = [StepSample((t, None, None if t < 2 else t / 2), 1.0, 10 * t, 0.1 * t) for t in (1.0, 3.0, 2.0)]
    profile = profile_of(["a", "b", "c"], [(1,)] * 3, ["float32"] * 3, [4] * 3, samples)
    assert profile.ready == (2.0, 20.0, 1.25)
    assert (profile.before, profile.backward, profile.after, profile.steps) == (1.0, 20.0, 0.2, 3)


def test_the_slowest_rank_counts() -> None:
    joined = slowest([_profile((1.0, 4.0)), _profile((2.0, 3.0))])
    assert joined.ready == (2.0, 4.0)
    with pytest.raises(ValueError, match="same trainable parameters"):
        slowest([_profile((1.0,)), _profile((1.0, 2.0))])


# ---------------------------------------------------------------------- costs of hooks


def test_hooks_cost_what_they_are_known_to_send_at_any_world_size() -> None:
    profile = _profile((3.0, 2.0, 1.0), ((256, 512), (512,), (1024, 256)))
    numel = [256 * 512, 512, 1024 * 256]
    measured = measure_hooks(profile, ["allreduce", "bf16", "int8", "onebit", "powersgd-4", "topk"], [25.0, 0.5], 16,
                             device=torch.device("cpu"), first_bucket_mb=0.25)  # fmt: skip

    def sent(name: str, cap: float) -> int:
        return sum(cost.sent(16) for cost in measured[name][cap][1])

    buckets, costs = measured["allreduce"][0.5]
    assert buckets == [[2], [1, 0]]
    assert [cost.phases[0].nbytes for cost in costs] == [4 * numel[2], 4 * (numel[0] + numel[1])]
    assert sent("allreduce", 25.0) == 2 * 15 * 4 * sum(numel) // 16
    assert sent("bf16", 25.0) == 15 * 4 * sum(numel) // 16
    assert sent("int8", 0.5) == sum(block_hook_bytes(BlockQuantize(), n, 16) for n in (numel[2], numel[0] + numel[1]))
    assert sent("onebit", 0.5) == sum(block_hook_bytes(OneBit(), n, 16) for n in (numel[2], numel[0] + numel[1]))
    low_rank = 4 * (4 * (256 + 512) + 4 * (1024 + 256) + 512)
    assert sent("powersgd-4", 25.0) == pytest.approx(sent_by_rank("all_reduce", low_rank, 16), rel=0.01)
    int8 = measured["int8"][25.0][1][0]
    assert [phase.collective for phase in int8.phases] == ["all_to_all", "all_gather"]
    assert all(phase.compute > 0 for phase in int8.phases)
    assert int8.finish > 0


# ---------------------------------------------------------------------- candidates


@pytest.mark.parametrize("name", list(CANDIDATES))
def test_the_yaml_of_a_candidate_makes_the_strategy_that_is_meant(name: str, tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    pytest.importorskip("jsonargparse")
    candidate = CANDIDATES[name]
    section = yaml.safe_load(candidate.yaml(4.0 if candidate.averager is None else None))["trainer"]["strategy"]
    strategy = make_object(None, section, "strategy", DDPHooksStrategy)
    assert isinstance(strategy, DDPHooksStrategy)
    hook, averager = strategy.settings.hook, strategy.settings.averager
    if candidate.hook is None:
        assert hook is None
    else:
        assert type(hook) is type(candidate.hook())
        assert getattr(hook, "rank", None) == getattr(candidate.hook(), "rank", None)
    if candidate.averager is not None:
        assert type(averager) is type(candidate.averager())
        assert averager.period == candidate.period
    if candidate.averager is None:
        assert strategy.settings.bucket_cap_mb == 4


def test_the_default_candidates_are_known() -> None:
    assert set(DEFAULT) <= set(CANDIDATES)
