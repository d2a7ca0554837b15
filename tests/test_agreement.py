"""What follows from the ranks' reports: pure, and so tested without any rank."""

import pytest

from lightning_ddp_hooks.reducer.agreement import RankReport, UnusedPolicy, resolve

NAMES = ["a.weight", "a.bias", "b.weight"]
ALL = tuple(NAMES)


def report(*missing: int, **kwargs: object) -> RankReport:
    return RankReport(missing=missing, **{"trainable": ALL, **kwargs})  # type: ignore[arg-type]


def test_nothing_missing_changes_nothing() -> None:
    verdict = resolve([report(), report()], NAMES, UnusedPolicy.FORBIDDEN)
    assert (verdict.unused, verdict.relayout, verdict.skip_step) == (frozenset(), False, False)


@pytest.mark.parametrize(
    ("reports", "policy", "message"),
    [
        ([report(), report(1)], UnusedPolicy.FORBIDDEN, r"'a\.bias' on rank 1\n.*find_unused_parameters"),
        ([report(2), report(2)], UnusedPolicy.FORBIDDEN, r"'b\.weight' on ranks 0, 1\n.*requires_grad_\(False\)"),
        ([report(), report(1), report(1)], UnusedPolicy.ALIKE, r"'a\.bias' on ranks 1, 2\n.*[Mm]anual"),
        ([report(), report(trainable=ALL[:2])], UnusedPolicy.ALLOWED, r"'b\.weight' requires .* rank 0 .* rank 1"),
        ([report(), report(problem="disk on fire")], UnusedPolicy.ALLOWED, "Rank 1: disk on fire"),
    ],
)
def test_what_no_rank_can_repair_raises_by_name(reports: list[RankReport], policy: UnusedPolicy, message: str) -> None:
    with pytest.raises(RuntimeError, match=f"(?s){message}"):
        resolve(reports, NAMES, policy)


def test_manual_optimization_may_leave_out_the_same_everywhere() -> None:
    assert resolve([report(0, 1), report(0, 1)], NAMES, UnusedPolicy.ALIKE).unused == {0, 1}


def test_with_unused_allowed_only_what_nobody_used_is_unused() -> None:
    assert resolve([report(0, 1), report(1, 2)], NAMES, UnusedPolicy.ALLOWED).unused == {1}


def test_frozen_everywhere_is_no_error_but_a_new_layout() -> None:
    verdict = resolve([report(2, trainable=ALL[:2])] * 2, NAMES, UnusedPolicy.FORBIDDEN)
    assert verdict.relayout
    assert verdict.unused == {2}


@pytest.mark.parametrize("policy", [UnusedPolicy.ALIKE, UnusedPolicy.ALLOWED])
def test_frozen_where_parameters_may_be_left_out_is_only_unused(policy: UnusedPolicy) -> None:
    verdict = resolve([report(2, trainable=ALL[:2])] * 2, NAMES, policy)
    assert not verdict.relayout
    assert verdict.unused == {2}


def test_thawed_everywhere_is_a_new_layout() -> None:
    assert resolve([report(trainable=(*ALL, "c"))] * 2, NAMES, UnusedPolicy.FORBIDDEN).relayout


def test_a_rank_without_loss_takes_part_with_zeros_or_all_skip() -> None:
    reports = [report(), report(0, 1, 2, had_loss=False)]
    assert not resolve(reports, NAMES, UnusedPolicy.FORBIDDEN).skip_step
    assert resolve(reports, NAMES, UnusedPolicy.FORBIDDEN, skip_missing_loss="all").skip_step
    assert resolve(reports, NAMES, UnusedPolicy.FORBIDDEN).unused == frozenset()


def test_no_rank_with_a_loss_skips_the_step_and_touches_nothing() -> None:
    verdict = resolve([report(0, 1, 2, had_loss=False)] * 2, NAMES, UnusedPolicy.FORBIDDEN)
    assert verdict.skip_step
    assert verdict.unused == {0, 1, 2}


def test_a_long_list_of_parameters_is_cut() -> None:
    names = [f"p{n}" for n in range(20)]
    reports = [RankReport(missing=tuple(range(20)), trainable=tuple(names))]
    with pytest.raises(RuntimeError, match="and 12 more"):
        resolve(reports, names, UnusedPolicy.FORBIDDEN)
