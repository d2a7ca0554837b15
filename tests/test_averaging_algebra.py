"""What averagers must equal: each other, plain averaging, or a reference in one process."""

from functools import partial

import averaging_case as case
import pytest
import torch
from ranks import run_ranks

from lightning_ddp_hooks import DataParallel, comm
from lightning_ddp_hooks.averaging import DiLoCo, HierarchicalModelAverager, PeriodicModelAverager, SlowMo
from lightning_ddp_hooks.hooks.allreduce import AllReduce
from lightning_ddp_hooks.hooks.powersgd import PowerSGD

pytestmark = pytest.mark.ranks


def reference(world_size, steps, after_step):
    """Train ``world_size`` replicas in this process; ``after_step(step, models)`` may change them."""
    models = [case.make_model() for _ in range(world_size)]
    optimizers = [case.sgd(model) for model in models]
    history = []
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            case.local_step(model, optimizer, rank, step)
        after_step(step, models)
        history.append([case.snapshot(model) for model in models])
    return history


def set_all(models, state):
    for model in models:
        own = {k: v for k, v in model.state_dict().items() if not v.is_floating_point()}
        model.load_state_dict({**state, **own})


def average(models):
    set_all(models, case.mean_states([model.state_dict() for model in models]))


def compare(averager, world_size, steps, after_step, tolerance=1e-12):
    expected = reference(world_size, steps, after_step)
    for rank, history in enumerate(run_ranks(case.train, averager, steps, world_size=world_size)):
        for step in range(steps):
            case.assert_close(history[step], expected[step][rank], tolerance)


def test_period_one_without_gradient_exchange_averages_after_each_step():
    compare(PeriodicModelAverager(period=1), 2, 4, lambda step, models: average(models))


def test_replicas_train_for_themselves_between_two_averagings():
    def after_step(step, models):
        if step >= 2 and (step - 2) % 3 == 0:
            average(models)

    compare(PeriodicModelAverager(period=3, warmup_steps=2), 2, 7, after_step)


def test_hierarchical_averages_within_groups_and_over_all():
    def after_step(step, models):
        if step % 4 == 0:
            average(models)
        elif step % 2 == 0:
            average(models[:2])
            average(models[2:])

    compare(HierarchicalModelAverager(period_group_size_dict={2: 2, 4: 4}), 4, 7, after_step)


def both(first, second, steps):
    return case.train(first, steps), case.train(second, steps)


@pytest.mark.parametrize(
    ("first", "second", "tolerance"),
    [
        (HierarchicalModelAverager(period_group_size_dict={3: 2}), PeriodicModelAverager(period=3), 0.0),
        (DiLoCo(period=3, outer_lr=1.0, outer_momentum=0.0), PeriodicModelAverager(period=3), 1e-12),
        (SlowMo(period=3, slowmo_factor=0.0), PeriodicModelAverager(period=3), 1e-12),
        # With a constant rate slow momentum is an outer SGD with momentum, not Nesterov's.
        (
            SlowMo(period=3, slowmo_factor=0.6, slowmo_lr=0.8),
            DiLoCo(period=3, outer_optimizer=partial(torch.optim.SGD, lr=0.8, momentum=0.6)),
            1e-12,
        ),
        (
            DiLoCo(period=3, comm_hook=AllReduce()),
            DiLoCo(period=3),
            1e-12,
        ),
    ],
    ids=["hierarchical=periodic", "diloco=periodic", "slowmo=periodic", "slowmo=diloco", "hook=none"],
)
def test_averagers_that_must_agree(first, second, tolerance):
    for one, other in run_ranks(both, first, second, 10):
        for a, b in zip(one, other, strict=True):
            case.assert_close(a, b, tolerance)


def test_slowmo_against_one_process():
    beta, alpha, lr = 0.5, 0.9, 0.05
    outer, momentum = {}, {}

    def after_step(step, models):
        if step < 1 or (step - 1) % 2:
            return
        average(models)
        if not outer:
            outer.update({name: p.detach().clone() for name, p in models[0].named_parameters()})
            momentum.update({name: torch.zeros_like(p) for name, p in outer.items()})
            return
        for name, p in models[0].named_parameters():
            momentum[name] = beta * momentum[name] + (outer[name] - p.detach()) / lr
            outer[name] = outer[name] - alpha * lr * momentum[name]
        set_all(models, {**models[0].state_dict(), **outer})

    compare(SlowMo(period=2, warmup_steps=1, slowmo_factor=beta, slowmo_lr=alpha), 2, 8, after_step)


def test_diloco_against_one_process():
    outer = {}
    optimizer = None

    def after_step(step, models):
        nonlocal optimizer
        if step % 3:
            return
        average(models)
        if not outer:
            outer.update({name: torch.nn.Parameter(p.detach().clone()) for name, p in models[0].named_parameters()})
            optimizer = torch.optim.SGD(outer.values(), lr=0.7, momentum=0.9, nesterov=True)
            return
        for name, p in models[0].named_parameters():
            outer[name].grad = outer[name].detach() - p.detach()
        optimizer.step()
        set_all(models, {**models[0].state_dict(), **{name: p.detach() for name, p in outer.items()}})

    compare(DiLoCo(period=3), 2, 8, after_step)


def streaming(delay, blending, outer_device):
    averager = DiLoCo(
        period=4,
        fragments=2,
        delay=delay,
        blending=blending,
        outer_lr=1.0,
        outer_momentum=0.0,
        average_buffers=False,
        outer_device=outer_device,
    )
    return case.train(averager, 10)


def test_streaming_lands_each_fragment_late_and_blends_it():
    delay, blending = 1, 0.25
    names = [name for name, _ in case.make_model().named_parameters()]
    # The layout of `split_fragments`, from sizes 54 3 3 3 60 5 10 2: the last Linear layers are the second half.
    fragments = [names[:4], names[4:]]
    outer, sent = {}, {}

    def after_step(step, models):
        params = [dict(model.named_parameters()) for model in models]
        with torch.no_grad():
            if step == 0:
                for name in names:
                    outer[name] = torch.stack([p[name] for p in params]).mean(0)
                    for p in params:
                        p[name].copy_(outer[name])
            if step in (3, 5, 7, 9):  # sent at 2, 4, 6, 8
                for name, mean in sent.items():
                    outer[name] = mean
                    for p in params:
                        p[name].copy_(blending * p[name] + (1 - blending) * mean)
                sent.clear()
            if step in (2, 4, 6, 8):
                for name in fragments[(step // 2 - 1) % 2]:
                    sent[name] = torch.stack([p[name] for p in params]).mean(0)

    expected = reference(2, 10, after_step)
    for rank, history in enumerate(run_ranks(streaming, delay, blending, "cpu")):
        for step in range(10):
            case.assert_close(history[step], expected[step][rank])


def same_gradients_everywhere(averager):
    """Exchange gradients at each step, as with a subgroup that is the whole world."""
    model = DataParallel(case.make_model())
    optimizer = case.sgd(model)
    bound = case.bind(averager, model.module)
    for step in range(5):
        optimizer.zero_grad()
        output_loss = case.loss_of(model, comm.rank(), step)
        output_loss.backward()
        optimizer.step()
        bound.average_parameters()
    return {name: p.detach().clone() for name, p in model.module.named_parameters()}


def compare_with_data_parallel():
    never = PeriodicModelAverager(period=1, warmup_steps=1000)
    return same_gradients_everywhere(never), same_gradients_everywhere(
        PeriodicModelAverager(period=2, average_buffers=False)
    )


def test_with_the_whole_world_as_subgroup_any_period_is_plain_data_parallel():
    for plain, averaged in run_ranks(compare_with_data_parallel):
        case.assert_equal(plain, averaged)  # bitwise: the mean of two equal numbers is that number


def compressed():
    history = case.train(DiLoCo(period=2, comm_hook=PowerSGD(rank=1, start_iter=0), outer_momentum=0.0), 9)
    return history, case.train(DiLoCo(period=2, outer_momentum=0.0), 9)


def test_outer_gradients_can_be_compressed():
    results = run_ranks(compressed)
    last = [history[-1] for history, _ in results]
    params = {name for name, _ in case.make_model().named_parameters()}
    case.assert_equal(*({name: state[name] for name in params} for state in last))
    exact = results[0][1][-1]
    assert any(not torch.equal(last[0][name], exact[name]) for name in params)
    assert all((last[0][name] - exact[name]).abs().max() < 0.5 for name in params)
