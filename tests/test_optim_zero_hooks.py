"""A sharded optimizer in plain PyTorch: stepped by itself, by hooks of our wrapper, and by hooks of torch's DDP."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from backends import ENGINES_AND_RANKS, require
from optim_case import BUCKETS, OPTIMIZERS, assert_bitwise, groups_of, loss_of, make_model, state_bytes, values
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import lightning_ddp_hooks as ldh
from lightning_ddp_hooks import hooks, optim

pytestmark = pytest.mark.ranks

STEPS = 5
WAYS = {
    "step": None,
    "hook": (optim.hook_with_zero_step, {}),
    "hook, shard_buckets": (optim.hook_with_zero_step, {"shard_buckets": True}),
    "interleaved": (optim.hook_with_zero_step_interleaved, {}),
    "interleaved, shard_buckets": (optim.hook_with_zero_step_interleaved, {"shard_buckets": True}),
}


def _class_and_defaults(name: str) -> tuple[type, dict[str, Any]]:
    made = OPTIMIZERS[name]
    return (made, {}) if isinstance(made, type) else (made.func, made.keywords)  # type: ignore[attr-defined]


def _train(
    optimizer: str, way: str, backend: str, hook: Any = None, views: bool = True, calls_step: bool = True
) -> tuple[list[Tensor], int]:
    model = make_model(torch.float64 if dist.get_world_size() > 2 else torch.float32)
    settings: dict[str, Any] = {"reducer_backend": backend, "gradient_as_bucket_view": views, **BUCKETS}
    ddp = ldh.DataParallel(model, **settings)
    made, defaults = _class_and_defaults(optimizer)
    if way == "unsharded":
        stepper: Any = made(groups_of(model), **defaults)
        if hook is not None:
            ddp.register_comm_hook(None, hook)
    else:
        overlaps = WAYS[way] is not None
        stepper = optim.ShardedOptimizer(groups_of(model), made, overlap_with_ddp=overlaps, **defaults)
        if overlaps:
            make, arguments = WAYS[way]  # type: ignore[misc]
            ddp.register_comm_hook(None, make(hook, ddp, stepper, **arguments))
        elif hook is not None:
            ddp.register_comm_hook(None, hook)
    for step in range(STEPS):
        loss_of(ddp, step).backward()
        if calls_step:
            stepper.step()
        stepper.zero_grad()
    return values(model), state_bytes(getattr(stepper, "optim", stepper))


def _compare(names: list[str], backend: str, views: bool) -> dict[str, dict[str, tuple[list[Tensor], int]]]:
    return {name: {way: _train(name, way, backend, views=views) for way in ("unsharded", *WAYS)} for name in names}


@pytest.mark.parametrize(("backend", "world_size"), ENGINES_AND_RANKS)
def test_every_way_gives_the_bits_of_the_unsharded_optimizer(world_size: int, backend: str) -> None:
    require(backend)
    # All of them on two ranks; on others some.
    names = {1: ["lion"], 2: list(OPTIMIZERS), 3: ["adamw foreach", "lion"]}[world_size]
    for results in run_ranks(_compare, names, backend, world_size != 2, world_size=world_size, timeout=100):
        assert list(results) == names
        for name, ways in results.items():
            expected, whole = ways["unsharded"]
            start = values(make_model(expected[0].dtype))
            assert any(not torch.equal(p, q) for p, q in zip(expected, start, strict=True))
            for way in WAYS:
                if world_size == 3 and WAYS[way] is not None:  # gradients are not added up in the order of a ring
                    torch.testing.assert_close(ways[way][0], expected, rtol=1e-9, atol=1e-11)
                else:
                    assert_bitwise(ways[way][0], expected)
                assert world_size == 1 or ways[way][1] < 0.8 * whole, (name, way)


HOOKS: dict[str, Any] = {
    "ours": hooks.allreduce_hook,
    "torch's fp16": fp16_compress_hook,
    "by name": "int8",
    "declared": hooks.PowerSGD(rank=1, start_iter=2),
}


def _with_hooks() -> dict[str, dict[str, list[Tensor]]]:
    results = {}
    for name, hook in HOOKS.items():
        declared = hook if not callable(hook) else (None, hook)
        results[name] = {
            way: _train_with(declared, hook, way) for way in ("unsharded", "hook", "interleaved, shard_buckets")
        }
    return results


def _train_with(declared: Any, hook: Any, way: str, calls_step: bool = False) -> list[Tensor]:
    model = make_model()
    if way == "unsharded":
        ddp = ldh.DataParallel(model, comm_hook=declared, **BUCKETS)  # type: ignore[arg-type]
        stepper: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    else:
        ddp = ldh.DataParallel(model, **BUCKETS)  # type: ignore[arg-type]
        stepper = optim.ShardedOptimizer(model.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=0.01)
        make, arguments = WAYS[way]  # type: ignore[misc]
        ddp.register_comm_hook(None, make(hook, ddp, stepper, **arguments))
    for step in range(STEPS):
        stepper.zero_grad()
        loss_of(ddp, step).backward()
        if way == "unsharded" or calls_step:
            stepper.step()
    return values(model)


def test_any_hook_can_be_wrapped_and_step_need_not_be_called() -> None:
    for results in run_ranks(_with_hooks):
        for ways in results.values():
            for way in ways:
                assert_bitwise(ways[way], ways["unsharded"])


# ---------------------------------------------------------------------- torch's DDP


def _on_torch_ddp(sharded: str, views: bool) -> list[Tensor]:
    model = make_model()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.003, gradient_as_bucket_view=views)  # type: ignore[arg-type]
    if sharded == "no":
        stepper: Any = torch.optim.AdamW(groups_of(model), lr=0.01)
        ddp.register_comm_hook(None, hooks.allreduce_hook)
    else:
        overlaps = sharded in WAYS and WAYS[sharded] is not None
        stepper = optim.ShardedOptimizer(groups_of(model), torch.optim.AdamW, overlap_with_ddp=overlaps, lr=0.01)
        hook: Any = hooks.allreduce_hook
        if overlaps:
            make, arguments = WAYS[sharded]  # type: ignore[misc]
            hook = make(hook, ddp, stepper, **arguments)
        ddp.register_comm_hook(None, hook)
    for step in range(STEPS):
        stepper.zero_grad()
        loss_of(ddp, step).backward()
        stepper.step()
    return values(model)


def _each_way_on_torch_ddp() -> dict[str, list[Tensor]]:
    return {f"{way}, {views}": _on_torch_ddp(way, views) for way in ("no", *WAYS) for views in (False, True)}


def test_torchs_ddp_runs_the_hooks_too() -> None:
    for results in run_ranks(_each_way_on_torch_ddp):
        for way, found in results.items():
            assert_bitwise(found, results[f"no, {way.rsplit(', ')[-1]}"])


# ---------------------------------------------------------------------- what lies in no bucket, accumulation, groups


class _WithTable(nn.Module):
    """A sparse embedding goes through no bucket; one layer is frozen at first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(6, 8, sparse=True)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        self.body.requires_grad_(False)

    def forward(self, index: Tensor) -> Tensor:
        return self.head(self.body(self.table(index)).tanh())  # type: ignore[no-any-return]


def _train_table(way: str) -> list[Tensor]:
    model = _WithTable()
    ddp = ldh.DataParallel(model, **BUCKETS)  # type: ignore[arg-type]
    if way == "unsharded":
        stepper: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        overlaps = WAYS[way] is not None
        stepper = optim.ShardedOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=overlaps, lr=0.1)
        if overlaps:
            make, arguments = WAYS[way]  # type: ignore[misc]
            ddp.register_comm_hook(None, make(None, ddp, stepper, **arguments))
    for step in range(8):
        if step == 4:
            model.body.requires_grad_(True)
        stepper.zero_grad()
        with ddp.no_sync():
            ddp(torch.tensor([step % 3, dist.get_rank()])).square().mean().backward()
        ddp(torch.tensor([step % 6, 1 + dist.get_rank()])).square().mean().backward()
        if way in ("unsharded", "step"):
            stepper.step()
    return values(model)


def _tables() -> dict[str, list[Tensor]]:
    return {way: _train_table(way) for way in ("unsharded", *WAYS)}


def test_sparse_gradients_thawed_layers_and_accumulation_are_stepped() -> None:
    for results in run_ranks(_tables):
        for way in WAYS:
            assert_bitwise(results[way], results["unsharded"])


def _schedule_and_added_group(sharded: bool) -> tuple[list[Tensor], list[float]]:
    model = make_model()
    ddp = ldh.DataParallel(model)
    params = list(model.parameters())
    if sharded:
        stepper: Any = optim.ShardedOptimizer(params[:6], torch.optim.Adam, lr=0.1)
    else:
        stepper = torch.optim.Adam(params[:6], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(stepper, 2, 0.5)
    for step in range(STEPS):
        if step == 2:
            stepper.add_param_group({"params": params[6:], "lr": 0.05})
        stepper.zero_grad()
        stepper.step(lambda step=step: _backward(ddp, step))
        schedule.step()
    return values(model), [group["lr"] for group in stepper.param_groups]


def _backward(ddp: nn.Module, step: int) -> Tensor:
    loss = loss_of(ddp, step)
    loss.backward()
    return loss


def _both_with_schedules() -> list[tuple[list[Tensor], list[float]]]:
    return [_schedule_and_added_group(False), _schedule_and_added_group(True)]


def test_closures_schedules_and_added_groups_work_as_ever() -> None:
    for (expected, rates), (found, found_rates) in run_ranks(_both_with_schedules):
        assert_bitwise(found, expected)
        assert found_rates == rates


# ---------------------------------------------------------------------- uneven inputs


def _uneven(way: str, counts: list[int]) -> list[Tensor]:
    model = make_model()
    ddp = ldh.DataParallel(model, **BUCKETS)  # type: ignore[arg-type]
    joinables: list[Any] = [ddp]
    if way == "unsharded":
        stepper: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        overlaps = WAYS[way] is not None
        stepper = optim.ShardedOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=overlaps, lr=0.1)
        joinables.append(stepper)
        if overlaps:
            make, arguments = WAYS[way]  # type: ignore[misc]
            ddp.register_comm_hook(None, make(None, ddp, stepper, **arguments))
    with ldh.join.Join(joinables, divide_by_initial_world_size=False):
        for step in range(counts[dist.get_rank()]):
            stepper.zero_grad()
            loss_of(ddp, step).backward()
            stepper.step()
    return values(model)


def _uneven_each(counts: list[int]) -> dict[str, list[Tensor]]:
    return {way: _uneven(way, counts) for way in ("unsharded", *WAYS)}


@pytest.mark.parametrize("counts", [[5, 3, 1], [0, 4, 2]])
def test_ranks_without_data_go_on_stepping(counts: list[int]) -> None:
    for results in run_ranks(_uneven_each, counts, world_size=3):
        for way in WAYS:
            assert_bitwise(results[way], results["unsharded"])


# ---------------------------------------------------------------------- state


def _state(counts: int) -> dict[str, Any]:
    model = make_model()
    ddp = ldh.DataParallel(model)
    plain_model = make_model()
    plain = torch.optim.Adagrad(groups_of(plain_model), lr=0.1)
    zero = optim.ShardedOptimizer(groups_of(model), torch.optim.Adagrad, lr=0.1)
    for step in range(3):
        zero.zero_grad()
        loss_of(ddp, step).backward()
        for one, other in zip(plain_model.parameters(), model.parameters(), strict=True):
            one.grad = other.grad.clone()  # type: ignore[union-attr]
        zero.step()
        plain.step()
    with pytest.raises(RuntimeError, match="call `consolidate_state_dict"):
        zero.state_dict()
    zero.consolidate_state_dict(to=1)
    here = zero.state_dict() if dist.get_rank() == 1 else None
    if here is None:
        with pytest.raises(RuntimeError, match="call `consolidate_state_dict"):
            zero.state_dict()
    again = optim.ShardedOptimizer(groups_of(model), torch.optim.Adagrad, lr=0.5)
    again.load_state_dict(plain.state_dict())
    assert [group["lr"] for group in again.param_groups] == [0.02, 0.1]
    again.consolidate_state_dict()
    zero.step()
    with pytest.raises(RuntimeError, match="call `consolidate_state_dict"):  # it is out of date
        zero.state_dict()
    with pytest.raises(ValueError, match="Expected `to` to be a rank below 2"):
        zero.consolidate_state_dict(to=2)
    loaded = again.state_dict() if dist.get_rank() == 0 else None
    held = state_bytes(again.optim)
    for made in (zero, again):
        made.close()
    return {"plain": plain.state_dict(), "sharded": here, "loaded": loaded, "held": (held, state_bytes(plain))}


def test_the_state_is_that_of_the_unsharded_optimizer() -> None:
    results = run_ranks(_state, 3)
    for found, expected in ((results[1]["sharded"], results[1]["plain"]), (results[0]["loaded"], results[0]["plain"])):
        assert found["param_groups"] == expected["param_groups"]
        assert list(found["state"]) == list(expected["state"])
        for position, entries in found["state"].items():
            assert all(torch.equal(value, expected["state"][position][key]) for key, value in entries.items())
    held, whole = zip(*(result["held"] for result in results), strict=True)
    assert sum(held) == whole[0]
    assert max(held) < 0.6 * whole[0]


# ---------------------------------------------------------------------- errors


def _errors() -> None:
    model = make_model()
    ddp = ldh.DataParallel(model)
    params = list(model.parameters())
    overlapped = optim.ShardedOptimizer(params, torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    two_phases = optim.ShardedOptimizer(params, torch.optim.SGD, lr=0.1)
    for make in (optim.hook_with_zero_step, optim.hook_with_zero_step_interleaved):
        with pytest.raises(ValueError, match="made with `overlap_with_ddp=True`"):
            make(hooks.allreduce_hook, ddp, two_phases)
        with pytest.raises(TypeError, match="Expected a ShardedOptimizer for `zero`, got SGD"):
            make(hooks.allreduce_hook, ddp, torch.optim.SGD(params, lr=0.1))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"Expected a DataParallel or torch's .*, got Sequential"):
            make(hooks.allreduce_hook, model, overlapped)
        with pytest.raises(ValueError, match="noop_hook leaves ranks with different gradients"):
            make(hooks.noop_hook, ddp, overlapped)
    with pytest.raises(ValueError, match="torch's DDP does not tell hooks"):
        optim.hook_with_zero_step(None, DistributedDataParallel(model, find_unused_parameters=True), overlapped)
    hook = optim.hook_with_zero_step(None, ddp, overlapped)
    with pytest.raises(ValueError, match="has a hook already"):
        optim.hook_with_zero_step(None, ddp, overlapped)
    with pytest.raises(RuntimeError, match="works only in the DataParallel that it was made for"):
        hook(None, None)
    with pytest.raises(TypeError, match="Expected a class of optimizers"):
        optim.ShardedOptimizer(params, torch.optim.SGD(params, lr=0.1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Expected True or False for `overlap_with_ddp`"):
        optim.ShardedOptimizer(params, torch.optim.SGD, None, "yes", lr=0.1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="LBFGS evaluates the loss again"):
        optim.ShardedOptimizer(params, torch.optim.LBFGS)
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.deepcopy(two_phases)
    with pytest.raises(RuntimeError, match=r"differ|parameter"):
        optim.ShardedOptimizer(params[: 2 + dist.get_rank()], torch.optim.SGD, lr=0.1)
    only_one = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    alone = optim.ShardedOptimizer(params, torch.optim.SGD, only_one, overlap_with_ddp=True, lr=0.1)
    with pytest.raises(ValueError, match="different process groups"):
        optim.hook_with_zero_step(None, ddp, alone)


def test_errors_name_what_is_wrong() -> None:
    run_ranks(_errors)
