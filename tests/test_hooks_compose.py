"""Hooks made of hooks: who has which parameter, which stage it is, and that composed state is saved like any other."""

import io
import pickle
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hook_tools import Rig, count_wire_bytes, exact_mean, gradients_of, require_plain
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_hooks import DataParallel
from lightning_ddp_hooks.hooks import (
    AllReduce,
    BindContext,
    BlockQuantize,
    BoundHook,
    Cast,
    CommHook,
    Noop,
    PerParameter,
    PostLocalSGD,
    PowerSGD,
    Rule,
    Schedule,
    Stage,
    TopK,
    TorchDDPState,
    TorchHook,
    allreduce_hook,
    noop_hook,
    post_local_sgd_hook,
    run_on_torch_ddp,
)
from lightning_ddp_hooks.hooks.registry import SHORT_NAMES, resolve_hook

RANK_1 = PowerSGD(start_iter=0)
BY_SHAPE = PerParameter([Rule(RANK_1, ndim=2, min_numel=300), Rule("bf16", pattern="*0*")], default="allreduce")


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 24))


def train(wrap: Callable[[nn.Module], nn.Module], steps: int = 4) -> dict[str, Tensor]:
    module = make_model()
    wrapped = wrap(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for step in range(steps):
        torch.manual_seed(1000 * step + dist.get_rank())
        wrapped(torch.randn(8, 24)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in module.named_parameters()}


# ---------------------------------------------------------------------------------------- by parameter


def lay_out() -> Any:
    wrapped = DataParallel(
        make_model(), comm_hook=BY_SHAPE, bucket_cap_mb=25, first_bucket_mb=25, reducer_backend="python"
    )

    def buckets() -> set[frozenset[str]]:
        indices = wrapped.stats()["bucket_param_indices"]
        assert isinstance(indices, list)
        return {frozenset(wrapped.reducer.names[i] for i in bucket) for bucket in indices}

    before = buckets()
    wrapped(torch.randn(2, 24)).sum().backward()
    return before, buckets(), wrapped.reducer.queue.hook.stats()


@pytest.mark.ranks
def test_parameters_of_different_rules_lie_in_different_buckets_before_and_after_the_rebuild() -> None:
    before, after, stats = run_ranks(lay_out)[0]
    assert (
        before
        == after
        == {frozenset({"0.weight", "4.weight"}), frozenset({"0.bias"}), frozenset({"2.weight", "2.bias", "4.bias"})}
    )
    assert stats["0 PowerSGD"]["numel_before"] == 2 * 24 * 16


def train_by_parameter() -> list[dict[str, Tensor]]:
    def there(module: nn.Module) -> nn.Module:
        wrapped = DistributedDataParallel(module)
        wrapped.register_comm_hook(TorchDDPState(BY_SHAPE, module=module), run_on_torch_ddp)
        return wrapped

    return [
        train(lambda module: DataParallel(module, comm_hook=BY_SHAPE, reducer_backend="python")),
        train(there),  # torch's buckets mix the rules
        train(lambda module: DataParallel(module, comm_hook=RANK_1, reducer_backend="python")),
        train(lambda module: DataParallel(module, reducer_backend="python")),
    ]


@pytest.mark.ranks
def test_each_parameter_goes_the_way_of_its_rule_on_our_buckets_and_on_torchs() -> None:
    here, there, _, _ = run_ranks(train_by_parameter)[0]
    for name in here:
        torch.testing.assert_close(here[name], there[name], rtol=1e-4, atol=1e-5)


def reduce_by_parameter(buckets: int) -> list[list[Tensor]]:
    shapes = [(20, 20), (20,), (3, 5), (20, 20), (20,)] * 4
    hook = PerParameter(
        [
            Rule(RANK_1, ndim=2, min_numel=300),
            Rule(BlockQuantize(), pattern="*[13].weight"),
            Rule((None, allreduce_hook), pattern="layer2.*"),
        ],
        default=Cast(accumulate="float32"),
    )
    rig = Rig(hook, shapes)
    # Mixed buckets, as torch makes them: the phases of all rules go side by side.
    rig.set_layout([list(range(len(shapes)))[n::buckets] for n in range(buckets)])
    rig.delays = random.Random(100 * dist.get_rank())
    return [rig.step(gradients_of(dist.get_rank(), step, shapes)) for step in range(3)]


@pytest.mark.ranks
@pytest.mark.parametrize(("buckets", "world_size"), [(1, 2), (3, 3), (20, 2)])
def test_rules_side_by_side_keep_the_ranks_together_whatever_the_timing(buckets: int, world_size: int) -> None:
    first, *others = run_ranks(reduce_by_parameter, buckets, world_size=world_size)
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    shapes = [(20, 20), (20,), (3, 5), (20, 20), (20,)] * 4
    exact = exact_mean(0, shapes, world_size)
    torch.testing.assert_close(first[0][2].double(), exact[2].view(-1), rtol=0, atol=1e-6)  # the mean
    torch.testing.assert_close(first[0][4].double(), exact[4], rtol=0, atol=0.05)  # bfloat16


def test_rules_are_checked_where_they_are_written() -> None:
    with pytest.raises(ValueError, match="Expected a rule to have a condition"):
        Rule("bf16")
    with pytest.raises(ValueError, match="Unknown communication hook 'bf17'"):
        Rule("bf17", ndim=2)
    with pytest.raises(TypeError, match="Rule objects, got str"):
        PerParameter(["bf16"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="Stage objects, got tuple"):
        Schedule([(0, "bf16")])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"ascending steps, got steps \[5, 5\]"):
        Schedule([Stage(5, "bf16"), Stage(5, None)])
    with pytest.raises(ValueError, match="one or more `stages`"):
        Schedule([])
    with pytest.raises(ValueError, match="`step` of at least 0, got -1"):
        Stage(-1, "bf16")


def bind_rules_for_nothing() -> list[str]:
    rules = [
        Rule("bf16", pattern="nothing.*"),
        Rule(PowerSGD(rank=4), ndim=3, min_numel=5),
        Rule((None, lambda state, bucket: bucket.buffer()), ndim=7),
        Rule(None, ndim=4),
    ]
    with pytest.warns(UserWarning, match="No trainable parameter is left") as caught:
        DataParallel(nn.Linear(2, 2), comm_hook=PerParameter(rules), reducer_backend="python")
    return [str(one.message) for one in caught]


@pytest.mark.ranks
def test_a_rule_that_no_parameter_meets_is_told() -> None:
    told = run_ranks(bind_rules_for_nothing, world_size=1)[0]
    named = [text.removeprefix("No trainable parameter is left for rule ") for text in told]
    assert named == [  # by what was asked for, not with all that its hook could be told
        "0 of PerParameter, Rule('bf16', pattern='nothing.*').",
        "1 of PerParameter, Rule(PowerSGD, min_numel=5, ndim=3).",
        "2 of PerParameter, Rule(bind_rules_for_nothing.<locals>.<lambda>, ndim=7).",
        "3 of PerParameter, Rule(None, ndim=4).",
    ]


@pytest.mark.parametrize("hook", [BY_SHAPE, Schedule([Stage(3, Cast(RANK_1, torch.float16))]), Cast("int8", "float16")])
def test_declarations_can_be_pickled_and_compared(hook: CommHook) -> None:
    assert pickle.loads(pickle.dumps(hook)) == hook


# ---------------------------------------------------------------------------------------- by step


def follow_a_schedule() -> list[int]:
    rig = Rig(Schedule([Stage(1, "bf16"), Stage(3, RANK_1)]), [(20, 30)])
    return [
        count_wire_bytes(lambda: rig.step(gradients_of(dist.get_rank(), step, [(20, 30)])))  # noqa: B023
        for step in range(5)
    ]


@pytest.mark.ranks
def test_stages_follow_the_step_and_the_mean_comes_first() -> None:
    assert run_ranks(follow_a_schedule)[0] == [2400, 1200, 1200, 200, 200]


# ---------------------------------------------------------------------------------------- 16 bits, state


def cast_around() -> tuple[list[int], dict[str, Any]]:
    shapes = [(20, 30), (30,)]
    parts = PerParameter([Rule(RANK_1, ndim=2)])
    sizes = []
    for hook in (parts, Cast(parts, "bfloat16"), Cast(Schedule([Stage(0, parts)]), "bfloat16")):
        rig = Rig(hook, shapes)
        sizes.append(count_wire_bytes(lambda: rig.step(gradients_of(dist.get_rank(), 0, shapes))))  # noqa: B023
    return sizes, rig.bound.state_dict()


@pytest.mark.ranks
def test_a_cast_reaches_the_hooks_inside() -> None:
    (plain, cast, scheduled), state = run_ranks(cast_around)[0]
    assert plain == 4 * 80
    assert cast == scheduled == 2 * 80
    assert state["hooks"][0]["hooks"][0]["hook"] == "PowerSGD"


def resume(saved: bytes | None, steps: range) -> tuple[list[list[Tensor]], bytes]:
    shapes = [(20, 30), (30,), (30, 20)]
    hook = Schedule([Stage(0, PerParameter([Rule(RANK_1, ndim=2)], default="int8")), Stage(3, RANK_1)])
    rig = Rig(hook, shapes)
    rig.now = steps.start
    if saved is not None:
        rig.bound.load_state_dict(torch.load(io.BytesIO(saved), weights_only=True))
    results = [rig.step(gradients_of(dist.get_rank(), step, shapes)) for step in steps]
    state = rig.bound.state_dict()
    require_plain(state)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return results, buffer.getvalue()


@pytest.mark.ranks
def test_composed_hooks_go_on_from_a_checkpoint() -> None:
    whole = run_ranks(resume, None, range(5))[0][0]
    saved = run_ranks(resume, None, range(2))[0][1]
    rest = run_ranks(resume, saved, range(2, 5))[0][0]
    for a, b in zip(whole[2:], rest, strict=True):
        for n in (0, 2):  # PowerSGD is linear; int8 goes on from the mean of the ranks' errors
            torch.testing.assert_close(a[n], b[n], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(a[1], b[1], rtol=0, atol=0.1)


def load_other_children() -> str:
    rig = Rig(Schedule([Stage(0, "bf16")]), [(4, 4)])
    state = rig.bound.state_dict()
    rig = Rig(Schedule([Stage(0, "bf16"), Stage(5, RANK_1)]), [(4, 4)])
    with pytest.raises(ValueError, match="Expected the state of 2 hooks of Schedule, found 1"):
        rig.bound.load_state_dict(state)
    return "refused"


@pytest.mark.ranks
def test_the_state_of_other_parts_is_refused() -> None:
    assert run_ranks(load_other_children, world_size=1) == ["refused"]


# ---------------------------------------------------------------------------------------- facts


class Unknown(CommHook):
    """A hook of a user's, who does not say what it does."""

    def bind(self, context: BindContext) -> BoundHook:
        raise NotImplementedError


def local_function(state: object, bucket: object) -> object:
    return bucket


@pytest.mark.parametrize(
    ("hook", "step"),
    [
        *(
            (resolve_hook(name), None)
            for name in sorted(SHORT_NAMES)
            if name not in ("allreduce", "noop", "post_local_sgd")
        ),
        (Noop(), 0),
        (Unknown(), 0),
        (PostLocalSGD(start_local_sgd_iter=7), 7),
        (Cast(PostLocalSGD(start_local_sgd_iter=7), "float16"), 7),
        (Cast(), None),
        (PerParameter([Rule("powersgd", ndim=2)], default="fp16"), None),
        (PerParameter([Rule(PostLocalSGD(start_local_sgd_iter=7), ndim=2)], default=Unknown()), 0),
        (Schedule([Stage(5, "noop")]), 5),
        (Schedule([Stage(3, "bf16"), Stage(9, PostLocalSGD(start_local_sgd_iter=20))]), 20),
        (Schedule([Stage(0, PostLocalSGD(start_local_sgd_iter=20)), Stage(9, "bf16")]), None),
        (TorchHook(hook=allreduce_hook), None),
        (TorchHook(hook=torch_hooks.fp16_compress_hook), None),
        (TorchHook(hook=noop_hook), 0),
        (TorchHook(hook=local_function), 0),
        (TorchHook(hook=post_local_sgd_hook, state=SimpleNamespace(start_local_sgd_iter=4)), 4),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_hook_says_from_which_step_replicas_may_differ(hook: CommHook, step: int | None) -> None:
    assert hook.replicas_differ_from() == step


def who_keeps_state() -> dict[str, bool]:
    hooks: dict[str, Any] = {
        **{name: name for name in SHORT_NAMES if name != "allreduce"},
        "int8 without memory": BlockQuantize(error_feedback=False),
        "topk without memory": TopK(error_feedback=False),
        "cold powersgd": PowerSGD(error_feedback=False, warm_start=False),
        "cast": Cast("topk", "float16"),
        "some": PerParameter([Rule("int8", ndim=1)]),
        "none": Schedule([Stage(0, "bf16"), Stage(5, "quantize_per_tensor")]),
        "known function": (None, allreduce_hook),
        "function": (None, local_function),
    }
    return {name: Rig(resolve_hook(hook) or AllReduce(), [8]).bound.keeps_state for name, hook in hooks.items()}


@pytest.mark.ranks
def test_a_hook_says_whether_it_keeps_state() -> None:
    kept = {name for name, keeps in run_ranks(who_keeps_state)[0].items() if keeps}
    assert kept == {"powersgd", "batched_powersgd", "int8", "fp8", "onebit", "topk", "cast", "some", "function"}
