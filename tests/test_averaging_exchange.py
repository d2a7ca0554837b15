"""Pseudo-gradients on their way: any hook, any timing, and what becomes of an exchange that is cut short."""

import averaging_case as case
import pytest
import torch
from ranks import run_ranks

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.averaging import DiLoCo, PeriodicModelAverager, SlowMo, exchange
from lightning_ddp_hooks.averaging.driver import Averaging
from lightning_ddp_hooks.hooks import TorchHook

pytestmark = pytest.mark.ranks

STREAMING = {"period": 4, "fragments": 2, "delay": 2, "blending": 0.5}


def mean_by_future(state, bucket):
    work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0] / comm.world_size())


HOOKS = {
    "scattered": (case.StagedMean(), 2),
    "many": (case.StagedMean(form="many"), 2),
    "ordered": (case.StagedMean(form="ordered"), 2),
    "in pairs": (case.StagedMean(form="in pairs"), 4),
    "function": (TorchHook(hook=mean_by_future), 2),
}


def with_and_without(hook, settings):
    exchange._BUCKET_BYTES = 100  # several buckets, so that there is an order to keep
    return [case.train(DiLoCo(**settings, comm_hook=chosen), 13) for chosen in (hook, None)]


@pytest.mark.parametrize("settings", [{"period": 2}, STREAMING], ids=["whole", "streaming"])
@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_that_computes_the_mean_changes_nothing_whatever_the_timing(name, settings):
    hook, world_size = HOOKS[name]
    for with_hook, without in run_ranks(with_and_without, hook, settings, world_size=world_size):
        for a, b in zip(with_hook, without, strict=True):
            case.assert_close(a, b)


class AskedTooEarly:
    """A work that seems to be under way on one rank whenever it is asked, and done on the others."""

    def __init__(self, work):
        self.work = work

    def done(self):
        return comm.rank() == 0 and self.wait() is not None

    def wait(self):
        self.work.wait()
        return self.work.get_future().value()[0] / comm.world_size()


def mean_on_a_shared_group(state, bucket):
    return AskedTooEarly(torch.distributed.all_reduce(bucket.buffer(), async_op=True))


def test_a_function_sends_nothing_behind_what_others_send_on_its_group():
    hook = TorchHook(hook=mean_on_a_shared_group)  # ends in flight; then a barrier comes on the default group
    for with_hook, without in run_ranks(with_and_without, hook, STREAMING):
        case.assert_close(with_hook[-1], without[-1])


def cut_short(hook):
    """Load an earlier state while an exchange is in flight, go on, and close with the next one in flight."""
    exchange._BUCKET_BYTES = 100
    model = case.make_model()
    optimizer = case.sgd(model)
    averaging = Averaging(DiLoCo(**STREAMING, comm_hook=hook), model, lambda: [optimizer])
    start = case.snapshot(model)
    state = averaging.state_dict()
    runs = []
    for _ in range(2):
        optimizer.state.clear()
        model.load_state_dict(start)
        averaging.load_state_dict(state)
        for step in range(7):  # sends at 2, 4 and 6, and lands two steps later
            case.local_step(model, optimizer, comm.rank(), step)
            averaging.after_step()
        assert averaging.bound.in_flight
        runs.append(case.snapshot(model))
    averaging.close()
    return runs


@pytest.mark.parametrize("name", ["scattered", "many", "ordered"])
def test_an_exchange_that_is_cut_short_leaves_nothing_behind(name):
    for first, second in run_ranks(cut_short, HOOKS[name][0]):
        case.assert_equal(first, second)


def with_tensor_rate(rate):
    return case.train(SlowMo(period=3), 8, lambda model: torch.optim.SGD(model.parameters(), lr=rate))


def test_slowmo_takes_a_learning_rate_that_is_a_tensor():
    for number, tensor in zip(
        run_ranks(with_tensor_rate, 0.05),
        run_ranks(with_tensor_rate, torch.tensor(0.05, dtype=torch.float64)),
        strict=True,
    ):
        for a, b in zip(number, tensor, strict=True):
            case.assert_close(a, b)


def lanes_made(hook):
    """Count the collective calls that make groups, by the step in which they come."""
    made: list[int] = []
    step = -1
    make = comm.new_group

    def counting(*args, **kwargs):
        made.append(step)
        return make(*args, **kwargs)

    model = case.make_model()
    optimizer = case.sgd(model)
    bound = case.bind(DiLoCo(**STREAMING, comm_hook=hook), model, lambda: [optimizer])
    comm.new_group = counting
    try:
        for step in range(13):
            case.local_step(model, optimizer, comm.rank(), step)
            bound.average_parameters()
    finally:
        comm.new_group = make
    return made


def test_groups_that_a_hook_needs_are_made_once_where_the_first_exchange_lands():
    assert run_ranks(lanes_made, case.StagedMean(form="many")) == [[4, 4, 4]] * 2
    assert run_ranks(lanes_made, None) == [[]] * 2


def frozen_late():
    """Freeze everything after the start: what was trainable is still averaged."""
    model = case.make_model()
    bound = case.bind(PeriodicModelAverager(period=1), model)
    model.requires_grad_(False)
    with torch.no_grad():
        model[0].bias.fill_(comm.rank())
    bound.average_parameters()
    return model[0].bias[0].item()


def test_a_model_that_is_frozen_later_is_averaged_all_the_same():
    assert run_ranks(frozen_late) == [0.5, 0.5]


def begun_late():
    """Begin after the warm-up, as a run that resumes without the averager's state, with more parts than tensors."""
    model = torch.nn.Linear(2, 1, bias=False)
    bound = case.bind(DiLoCo(period=4, fragments=4, outer_lr=1.0, outer_momentum=0.0), model)
    bound.step = 1
    with torch.no_grad():
        model.weight.fill_(comm.rank())
    for _ in range(4):
        bound.average_parameters()
    return model.weight.tolist()


def test_more_fragments_than_parameters_in_a_run_that_begins_late():
    assert run_ranks(begun_late) == [[[0.5, 0.5]]] * 2
