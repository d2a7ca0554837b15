import copy
import warnings

import averaging_case as case
import pytest
import torch
from ranks import run_ranks
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager as TorchPeriodic

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.averaging import DiLoCo, PeriodicModelAverager
from lightning_ddp_hooks.join import Join
from lightning_ddp_hooks.optim import PostLocalSGDOptimizer

pytestmark = pytest.mark.ranks


def train(optimizer, model, first=0, last=6):
    for step in range(first, last):
        case.local_step(model, optimizer, comm.rank(), step)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def ours_and_torchs():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's package compiles scripts on import, which torch deprecates
        from torch.distributed.optim import PostLocalSGDOptimizer as TorchPostLocalSGDOptimizer
    mine, theirs, plain = case.make_model(), case.make_model(), case.make_model()
    ours = PostLocalSGDOptimizer(case.sgd(mine), PeriodicModelAverager(period=2, warmup_steps=1))
    torchs = TorchPostLocalSGDOptimizer(case.sgd(theirs), TorchPeriodic(2, warmup_steps=1))
    averager = PeriodicModelAverager(period=2, warmup_steps=1)
    optimizer = case.sgd(plain)
    for step in range(6):
        case.local_step(plain, optimizer, comm.rank(), step)
        averager.average_parameters(optimizer.param_groups)
    with pytest.raises(ValueError, match="Expected the 8 parameters of the first call"):
        averager.average_parameters(list(plain.parameters())[1:])
    assert averager.step == 6
    assert copy.deepcopy(averager).step == 0  # a copy is the declaration alone
    train(torchs, theirs)
    # torch's class saves the step only; its checkpoint continues here.
    ours.load_state_dict(copy.deepcopy(ours.state_dict()))
    a = train(ours, mine)
    b = {name: p.detach().clone() for name, p in theirs.named_parameters()}
    c = {name: p.detach().clone() for name, p in plain.named_parameters()}
    state = torchs.state_dict()
    other = PostLocalSGDOptimizer(case.sgd(mine), PeriodicModelAverager(period=2, warmup_steps=1))
    other.load_state_dict(state)
    return a, b, c, other.averager.step


def test_it_trains_as_torchs_optimizer_does_and_reads_its_state():
    for ours, torchs, plain, step in run_ranks(ours_and_torchs):
        case.assert_close(ours, torchs)
        case.assert_close(ours, plain)
        assert step == 6


def resume():
    def make():
        model = case.make_model()
        optimizer = PostLocalSGDOptimizer(case.sgd(model), DiLoCo(period=2), module=model)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 4)

    model, optimizer, _ = make()
    whole = train(optimizer, model, 0, 9)
    model, optimizer, _ = make()
    train(optimizer, model, 0, 5)
    state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    model, optimizer, _ = make()
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    with pytest.warns(UserWarning, match="no step of a model averager"):
        make()[1].load_state_dict(case.sgd(model).state_dict())
    return whole, train(optimizer, model, 5, 9)


def test_its_state_resumes():
    for whole, resumed in run_ranks(resume):
        case.assert_equal(whole, resumed)


def skip_on_one_rank():
    model = torch.nn.Linear(2, 1)
    torch.nn.init.zeros_(model.weight)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), PeriodicModelAverager(period=1), scaler=scaler
    )
    loss = model(torch.full((1, 2), float("inf") if comm.rank() else 2.0)).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return model.weight[0, 0].item(), scaler.get_scale(), optimizer.averager.step


def test_a_rank_whose_scaler_skips_still_averages():
    assert run_ranks(skip_on_one_rank) == [(-1.0, 4.0, 1)] * 2


def grow():
    model = torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)])
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model[0].parameters(), lr=0.1), PeriodicModelAverager(period=1))
    optimizer.add_param_group({"params": list(model[1].parameters())})
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(comm.rank())
    optimizer.step()
    return [p.item() for p in model.parameters()]


def test_added_parameters_are_averaged():
    assert run_ranks(grow) == [[0.5, 0.5]] * 2


def count_by_averager():
    model = torch.nn.Linear(1, 1, bias=False)
    averager = PeriodicModelAverager(period=2)
    averager.load_state_dict({"kind": "PeriodicModelAverager", "step": 4})
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
    for _ in range(3):
        optimizer.step()
    return averager.step, optimizer.averager.step, averager.state_dict()["step"]


def test_the_averager_that_was_given_tells_the_step():
    assert run_ranks(count_by_averager) == [(7, 7, 7)] * 2


COUNTS = [(7, 5, 2), (2, 5, 7), (0, 4, 2)]


def make_double():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)).double()


def double_loss(model, rank, step):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * rank + step), dtype=torch.float64)
    return (model(x) - x.sin().sum(1, keepdim=True)).square().mean()


def train_uneven(counts, averager, momentum):
    model, rank = make_double(), comm.rank()
    local = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    optimizer = PostLocalSGDOptimizer(local, averager)
    with Join([optimizer]):
        for step in range(counts[rank]):
            double_loss(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert optimizer.averager.step == max(counts)
    return [p.detach().clone() for p in model.parameters()]


def train_uneven_all(momentum):
    return [train_uneven(counts, PeriodicModelAverager(period=2, warmup_steps=1), momentum) for counts in COUNTS]


def reference_uneven(counts, momentum):
    replicas = [make_double() for _ in counts]
    optimizers = [torch.optim.SGD(replica.parameters(), lr=0.05, momentum=momentum) for replica in replicas]
    for step in range(max(counts)):
        for rank, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            if step < counts[rank]:
                optimizer.zero_grad()
                double_loss(replica, rank, step).backward()
                optimizer.step()
        if step >= 1 and (step - 1) % 2 == 0:
            with torch.no_grad():
                for params in zip(*(replica.parameters() for replica in replicas), strict=True):
                    mean = torch.stack(params).mean(0)
                    for param in params:
                        param.copy_(mean)
    return [list(replica.parameters()) for replica in replicas]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_in_a_join_context_a_rank_without_data_goes_on_averaging(momentum):
    found = run_ranks(train_uneven_all, momentum, world_size=3)
    for case_number, counts in enumerate(COUNTS):
        for rank, wanted in enumerate(reference_uneven(counts, momentum)):
            for a, b in zip(found[rank][case_number], wanted, strict=True):
                torch.testing.assert_close(a, b.detach(), rtol=1e-13, atol=1e-14)
