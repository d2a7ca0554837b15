import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook

from lightning_ddp_hooks.averaging import DiLoCo, HierarchicalModelAverager, PeriodicModelAverager, SlowMo
from lightning_ddp_hooks.averaging.gradients import hook_follows_schedule
from lightning_ddp_hooks.averaging.schedule import (
    FragmentSchedule,
    HierarchicalSchedule,
    PeriodicSchedule,
    split_fragments,
)
from lightning_ddp_hooks.hooks import Cast, CommHook, Noop, PostLocalSGD, PowerSGD, TorchHook


def test_periodic_averages_first_at_the_end_of_the_warm_up():
    schedule = PeriodicSchedule(period=3, warmup_steps=4)
    assert [step for step in range(14) if schedule.due(step)] == [4, 7, 10, 13]


def test_the_largest_period_that_divides_the_step_decides_the_group():
    schedule = HierarchicalSchedule.build({2: 2, 4: 4, 8: 8}, warmup_steps=3)
    sizes = [schedule.group_size(step) for step in range(17)]
    assert sizes == [None, None, None, None, 4, None, 2, None, 8, None, 2, None, 4, None, 2, None, 8]


@given(period=st.integers(1, 9), multiple=st.integers(0, 4))
def test_one_level_is_the_periodic_schedule_when_the_period_divides_the_warm_up(period, multiple):
    warmup = period * multiple
    one_level = HierarchicalSchedule.build({period: 4}, warmup)
    periodic = PeriodicSchedule(period, warmup)
    assert [one_level.group_size(s) == 4 for s in range(60)] == [periodic.due(s) for s in range(60)]


@pytest.mark.parametrize(
    ("specification", "message"),
    [
        ({}, "at least one period"),
        ({4: 2, 2: 4}, "must increase, got 2 after 4"),
        ({2: 4, 4: 2}, r"must increase with the period, got 2 \(period 4\) after 4 \(period 2\)"),
        ({2: 2, 4: 2}, r"got 2 \(period 4\) after 2 \(period 2\)"),
        ({2: 2, 4: 3}, r"must nest: 2 \(period 2\) does not divide 3 \(period 4\)"),
        ({2: 1, 4: 4}, "group of 1 rank"),
        ({0: 2}, "at least 1, got 0"),
        ({2: 0}, "at least 1, got 0"),
    ],
)
def test_wrong_hierarchies_are_refused_with_their_numbers(specification, message):
    with pytest.raises(ValueError, match=message):
        HierarchicalModelAverager(period_group_size_dict=specification)


def test_the_last_group_must_be_all_ranks():
    with pytest.raises(ValueError, match=r"number of ranks, 8, got 4 \(period 4"):
        HierarchicalSchedule.build({2: 2, 4: 4}).check_world_size(8)


@given(period=st.integers(1, 40), fragments=st.integers(1, 8), warmup=st.integers(0, 20))
def test_each_fragment_is_sent_once_a_period(period, fragments, warmup):
    if fragments > period:
        return
    schedule = FragmentSchedule(period, warmup, fragments)
    sent = [schedule.fragment(step) for step in range(warmup + 2 * period + 1)]
    assert all(fragment is None for fragment in sent[: warmup + 1])
    assert [fragment for fragment in sent if fragment is not None] == [*range(fragments)] * 2


def test_one_fragment_has_the_periodic_schedule():
    schedule, periodic = FragmentSchedule(5, 3), PeriodicSchedule(5, 3)
    due = [step == 3 or schedule.fragment(step) is not None for step in range(40)]
    assert due == [periodic.due(step) for step in range(40)]


def test_a_fragment_must_arrive_before_the_next_one_is_sent():
    FragmentSchedule(8, 0, fragments=2, delay=4)
    with pytest.raises(ValueError, match=r"period=8 and fragments=2 .* every 4 steps; delay=5"):
        FragmentSchedule(8, 0, fragments=2, delay=5)
    with pytest.raises(ValueError, match="3 fragments do not fit into a period of 2"):
        FragmentSchedule(2, 0, fragments=3)


@given(st.lists(st.integers(0, 1000)), st.integers(1, 6))
def test_fragments_hold_every_item_once_and_in_order(weights, fragments):
    parts = split_fragments(weights, fragments)
    assert len(parts) == fragments
    assert [position for part in parts for position in part] == list(range(len(weights)))


def test_fragments_have_about_equal_weight():
    assert split_fragments([1] * 6, 3) == [[0, 1], [2, 3], [4, 5]]
    assert split_fragments([8, 1, 1, 1, 1, 4], 2) == [[0], [1, 2, 3, 4, 5]]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: PeriodicModelAverager(period=0), ValueError, "`period` to be at least 1, got 0"),
        (lambda: PeriodicModelAverager(period=2.5), TypeError, "whole number for `period`, got 2.5"),
        (lambda: PeriodicModelAverager(period=2, warmup_steps=-1), ValueError, "at least 0, got -1"),
        (lambda: PeriodicModelAverager(period=2, optimizer_state="mean"), ValueError, "'none' or 'averaged'"),
        (lambda: PeriodicModelAverager(period=2, average_buffers=1), TypeError, "True or False"),
        (lambda: HierarchicalModelAverager(period_group_size_dict=[2, 4]), TypeError, "Expected a dict"),
        (lambda: SlowMo(period=2, slowmo_factor=1.0), ValueError, "below 1, got 1.0"),
        (lambda: SlowMo(period=2, slowmo_lr=0), ValueError, "above 0, got 0"),
        (lambda: DiLoCo(period=2, blending=1.0), ValueError, "below 1, got 1.0"),
        (lambda: DiLoCo(period=2, outer_lr=-1), ValueError, "above 0, got -1"),
        (lambda: DiLoCo(period=2, outer_lr=1.0, outer_optimizer=print), ValueError, "not both"),
        (lambda: DiLoCo(period=2, outer_optimizer=3), TypeError, "callable"),
        (lambda: DiLoCo(period=2, comm_hook="nonsense"), ValueError, "nonsense"),
    ],
)
def test_wrong_settings_are_refused_where_they_are_written(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_declarations_can_be_pickled_and_compared():
    for averager in (
        PeriodicModelAverager(period=4, warmup_steps=2),
        HierarchicalModelAverager(period_group_size_dict={2: 2, 4: 4}),
        SlowMo(period=4, slowmo_factor=0.6),
        DiLoCo(period=8, fragments=2, comm_hook=PostLocalSGD(start_local_sgd_iter=3)),
    ):
        assert pickle.loads(pickle.dumps(averager)) == averager


def test_a_hook_that_turns_to_subgroups_must_do_so_when_averaging_starts():
    averager = PeriodicModelAverager(period=4, warmup_steps=10)
    assert hook_follows_schedule(averager, PostLocalSGD(start_local_sgd_iter=10, subgroup_size=2))
    assert not hook_follows_schedule(averager, None)
    with pytest.raises(ValueError, match=r"from step 10 on .* at step 20"):
        hook_follows_schedule(averager, PostLocalSGD(start_local_sgd_iter=20, subgroup_size=2))


@pytest.mark.parametrize("start", [0, 7])
def test_torchs_own_post_local_hook_is_checked_too(start):
    hook = TorchHook(hook=post_localSGD_hook, state=PostLocalSGDState(None, None, start))
    assert hook_follows_schedule(PeriodicModelAverager(period=4, warmup_steps=start), hook)
    with pytest.raises(ValueError, match=f"at step {start}: set both alike"):
        hook_follows_schedule(PeriodicModelAverager(period=4, warmup_steps=3), hook)


class Local(CommHook):
    """A user's own hook, which averages everywhere up to step 5."""

    def bind(self, context):
        raise NotImplementedError

    def replicas_differ_from(self):
        return 5


def test_a_users_own_hook_that_leaves_replicas_different_is_asked_from_which_step():
    assert hook_follows_schedule(PeriodicModelAverager(period=4, warmup_steps=5), Local())
    with pytest.raises(ValueError, match=r"from step 10 on .* the hook Local leaves the global mean .* at step 5"):
        hook_follows_schedule(PeriodicModelAverager(period=4, warmup_steps=10), Local())
    with pytest.raises(ValueError, match="but the hook Noop never does"):
        hook_follows_schedule(PeriodicModelAverager(period=4, warmup_steps=10), Noop())


def test_a_local_hook_from_step_0_goes_through_the_reducer_and_one_that_does_nothing_does_not():
    averager = PeriodicModelAverager(period=4)
    assert hook_follows_schedule(averager, Cast(PostLocalSGD(start_local_sgd_iter=0, subgroup_size=2), "float16"))
    assert not hook_follows_schedule(averager, Noop())


def test_of_a_function_nothing_is_known_so_that_it_goes_with_any_averager():
    averager = PeriodicModelAverager(period=4, warmup_steps=10)
    for hook in (TorchHook(hook=print), Cast(TorchHook(hook=print), "float16"), PowerSGD()):
        assert not hook_follows_schedule(averager, hook)
