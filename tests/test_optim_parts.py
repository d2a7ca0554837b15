"""The parts of a sharded optimizer, each alone: partition, owners, steps in parts, the trial, settings."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from optim_case import OPTIMIZERS, Lion, assert_bitwise, groups_of, loss_of, make_model, values
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ddp_hooks.hooks import (
    BlockQuantize,
    Cast,
    Noop,
    PerParameter,
    PostLocalSGD,
    PowerSGD,
    Rule,
    TorchHook,
    fp16_compress_hook,
    noop_hook,
    post_local_sgd_hook,
)
from lightning_ddp_hooks.hooks.compose import Schedule, Stage
from lightning_ddp_hooks.hooks.contract import BindContext, BoundHook, CommHook
from lightning_ddp_hooks.optim import OptimizerInHook, PostLocalSGDOptimizer
from lightning_ddp_hooks.optim.cost import cost_of_update
from lightning_ddp_hooks.optim.partial_step import PartialStepper, replace_step
from lightning_ddp_hooks.optim.pieces import UNIT, cut, cut_state, join_states, partition
from lightning_ddp_hooks.optim.separability import check_separable
from lightning_ddp_hooks.optim.sharding import ShardAssignment, diverging_part, refuse_diverging

# ---------------------------------------------------------------------- partition


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 8))
def test_a_partition_is_balanced(sizes: list[int], world_size: int) -> None:
    ranks = partition(sizes, [0] * world_size)
    loads = [sum(size for size, rank in zip(sizes, ranks, strict=True) if rank == r) for r in range(world_size)]
    least = max(max(sizes, default=0), -(-sum(sizes) // world_size))  # no partition has a lighter heaviest rank
    assert max(loads) <= least * (4 / 3) + 1000 / 3
    assert max(loads) - min(loads) <= max(sizes, default=0)
    assert ranks == partition(list(sizes), [0] * world_size)


def test_a_partition_counts_what_ranks_carry_already() -> None:
    assert partition([1, 1, 5], loads=[6, 0, 5]) == [1, 2, 1]
    assert partition([], loads=[0]) == []


@given(st.lists(st.integers(0, 1000), max_size=20), st.lists(st.integers(0, 2000), min_size=1, max_size=5))
def test_parameters_are_cut_into_one_range_for_each_rank(numels: list[int], loads: list[int]) -> None:
    cuts = cut(numels, loads)
    carried = list(loads)
    owners = []
    for numel, pieces in zip(numels, cuts, strict=True):
        assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
        assert pieces[-1].stop == numel
        assert all(piece.start % UNIT == 0 for piece in pieces)
        owners += [piece.owner for piece in pieces]
        for piece in pieces:
            carried[piece.owner] += piece.stop - piece.start
    assert owners == sorted(owners)
    # As even as it gets without taking anything from a rank.
    level = (sum(loads) + sum(numels)) / len(loads)
    if max(loads) <= level:
        assert max(carried) - level <= 2 * UNIT


def test_owners_stay_and_what_may_be_cut_is() -> None:
    params = [torch.zeros(size) for size in (80, 40, 200, 64)]
    shards = ShardAssignment(2, rank=1)

    fresh = shards.assign(params[:2])
    assert [shards.pieces(p) for p in params[:2]] == [((0, 0, 80),), ((1, 0, 40),)]
    assert all(one is other for one, other in zip(fresh, params[:2], strict=True))
    assert not shards.has(params[2])
    assert [shards.own(p) for p in params[:3]] == [None, (1, 0, 40), None]

    assert len(shards.assign(params, [params[1:3]])) == 2
    assert shards.pieces(params[1]) == ((1, 0, 40),)
    assert shards.pieces(params[3]) == ((1, 0, 64),)
    assert shards.pieces(params[2]) == ((0, 0, 128), (1, 128, 200))
    assert ShardAssignment().assign([params[0]]) == []
    assert ShardAssignment().own(params[0]) == (0, 0, 80)


def test_what_is_cut_becomes_whole_for_an_optimizer_that_needs_that() -> None:
    params = [torch.zeros(100, 4), torch.zeros(64), torch.zeros(50)]
    shards = ShardAssignment(2)
    shards.assign(params[2:], [params[:2]])
    assert [len(shards.pieces(param)) for param in params] == [2, 1, 1]
    shards.join(params)
    assert [shards.has(param) for param in params] == [False, True, True]
    assert [p is params[0] for p in shards.assign(params)] == [True]
    assert len(shards.pieces(params[0])) == 1


def test_a_cut_parameter_must_stay_in_its_order() -> None:
    param = nn.Parameter(torch.zeros(20, 30))
    shards = ShardAssignment(2)
    shards.assign([], [[param]])
    shards.require_order([param])
    param.data = torch.zeros(30, 20).t()
    with pytest.raises(
        RuntimeError, match=r"shape \(20, 30\) lies in memory in another order .* \(1, 20\), not \(30, 1\)"
    ):
        shards.require_order([param])


def test_the_state_of_a_piece_is_cut_and_joined_in_the_order_of_memory() -> None:
    param = torch.zeros(6, 50).t()
    state = {"sum": torch.arange(300.0).view(50, 6), "step": torch.tensor(3.0), "flag": True}
    (pieces,) = cut([300], [0, 0, 0])
    parts = [(piece, cut_state(state, param, piece)) for piece in pieces]
    assert [its["sum"].shape for _, its in parts] == [(128,), (64,), (108,)]
    assert torch.equal(parts[0][1]["sum"][:50], torch.arange(0.0, 300.0, 6))
    joined = join_states(parts, param)
    assert torch.equal(joined["sum"], state["sum"])  # type: ignore[arg-type]
    assert (joined["step"], joined["flag"]) == (3.0, True)


def test_muon_costs_more_by_the_square_of_the_shorter_side() -> None:
    matrices = [nn.Parameter(torch.zeros(shape)) for shape in ((512, 512), (16, 16384), (16384, 16))]
    muon = torch.optim.Muon(matrices)
    costs = [cost_of_update(muon, muon.param_groups[0], param) for param in matrices]
    assert costs[1] == costs[2] < costs[0] / 10
    plain = torch.optim.SGD(matrices)
    assert [cost_of_update(plain, plain.param_groups[0], param) for param in matrices] == [512 * 512] * 3
    assert cost_of_update(plain, {"use_muon": True}, matrices[0]) == costs[0]
    assert cost_of_update(muon, {"use_muon": False}, matrices[0]) == 512 * 512


# ---------------------------------------------------------------------- steps in parts


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_in_parts_is_the_whole_step(name: str) -> None:
    whole, parts = make_model(), make_model()
    optimizer, other = OPTIMIZERS[name](groups_of(whole)), OPTIMIZERS[name](groups_of(parts))
    stepper = PartialStepper(other)
    for step in range(5):
        for model in (whole, parts):
            model.zero_grad()
            loss_of(model, step, rank=0).backward()
        optimizer.step()
        stepper.notice_groups()
        params = list(parts.parameters())
        for first in range(0, 9, 3):
            stepper.run(params[first : first + 3], last=False)
        stepper.run(params[9:], last=True)
    assert_bitwise(values(parts), values(whole))
    for group, expected in zip(other.param_groups, optimizer.param_groups, strict=True):
        assert {k: v for k, v in group.items() if k != "params"} == {k: v for k, v in expected.items() if k != "params"}
        assert len(group["params"]) == len(expected["params"])


def test_an_error_in_a_part_leaves_the_groups_whole() -> None:
    optimizer = torch.optim.SGD(groups_of(make_model()), lr=0.1)
    before = [list(group["params"]) for group in optimizer.param_groups]
    stepper = PartialStepper(optimizer)
    stepper.notice_groups()
    with pytest.raises(TypeError):
        stepper.run(before[0][:1], last=False, arguments={"nonsense": 1})
    after = [group["params"] for group in optimizer.param_groups]
    assert [list(map(id, part)) for part in after] == [list(map(id, part)) for part in before]


def test_a_replaced_step_runs_closure_and_hooks_once_and_satisfies_schedulers() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    original = vars(optimizer)["step"]

    undo = replace_step(optimizer, lambda arguments: calls.append(f"update {dict(arguments)}"))

    def closure() -> Tensor:
        calls.append("closure")
        return model(torch.ones(1, 2)).sum().square()  # type: ignore[no-any-return]

    loss = optimizer.step(closure)
    assert isinstance(loss, Tensor)
    assert loss.requires_grad
    assert calls == ["pre", "closure", "update {}", "post"]
    schedule.step()  # warns unless it sees that a step was made
    torch.optim.lr_scheduler.StepLR(optimizer, 1).step()
    undo()
    assert vars(optimizer)["step"] is original


def test_a_step_that_somebody_else_has_replaced_is_refused() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign, assignment]
    with pytest.raises(ValueError, match="`step` of this SGD has been replaced"):
        replace_step(optimizer, lambda arguments: None)


# ---------------------------------------------------------------------- the trial


class _Each(Optimizer):
    """Base of optimizers that are made for a test: `update` is their rule."""

    def __init__(self, params: Any, lr: float = 0.01, **more: Any) -> None:
        super().__init__(params, {"lr": lr, **more})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        params = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        factor = self.factor([p for _, p in params])
        for group, param in params:
            param.sub_(self.direction(param) * (group["lr"] * factor))

    def factor(self, params: list[Tensor]) -> Any:
        return 1.0

    def direction(self, param: Tensor) -> Tensor:
        assert param.grad is not None
        return param.grad


class ClipsGlobally(_Each):
    """As LAMB does in some packages, with ``max_grad_norm``."""

    def factor(self, params: list[Tensor]) -> Any:
        norm = torch.stack([p.grad.norm() for p in params]).norm()  # type: ignore[union-attr]
        return 1.0 / max(1.0, float(norm))


class ClipsLargeOnes(_Each):
    """Clips only what ordinary gradients do not reach."""

    def factor(self, params: list[Tensor]) -> Any:
        norm = torch.stack([p.grad.norm() for p in params]).norm()  # type: ignore[union-attr]
        return 100.0 / max(100.0, float(norm))


class CountsInState(_Each):
    """Keeps a counter beside the parameters' state, and lets it decide on the rate."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.state["count"] = 0  # type: ignore[index, assignment]

    def factor(self, params: list[Tensor]) -> Any:
        self.state["count"] += 1  # type: ignore[index, operator]
        return 1.0 / self.state["count"]  # type: ignore[index, operator]


class Estimates(_Each):
    """Learns a rate from all parameters, and keeps it in the groups, as Prodigy and D-Adaptation do."""

    def factor(self, params: list[Tensor]) -> Any:
        for group in self.param_groups:
            group["d"] = group.get("d", 1e-3) + 1e-3 * float(sum(p.grad.abs().sum() for p in params))  # type: ignore
        return self.param_groups[0]["d"] if self.param_groups else 1.0


class Noisy(_Each):
    def direction(self, param: Tensor) -> Tensor:
        return torch.randn_like(param)


class Uncopyable(_Each):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.lock = (entry for entry in ())  # generators cannot be copied


class Prodigy(Uncopyable):
    pass


class CountsSteps(_Each):
    """Keeps its counter among its own attributes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.count = 0

    def factor(self, params: list[Tensor]) -> Any:
        self.count += 1
        return 1.0 / self.count


class MakesItsCounter(_Each):
    """Puts a counter into its groups, and a flag on itself, in its first step."""

    def factor(self, params: list[Tensor]) -> Any:
        self.warm = hasattr(self, "warm")
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return (2.0 if self.warm else 1.0) / self.param_groups[0]["k"]


class WithEvaluation(_Each):
    def train(self) -> None:
        pass

    def eval(self) -> None:
        pass


def _fit(
    make: Callable[[Any], Optimizer], *, sharded: bool = True, dtype: torch.dtype = torch.float32
) -> PartialStepper:
    optimizer = make(groups_of(make_model(dtype)))
    before = copy.deepcopy(optimizer.state_dict())
    random = torch.get_rng_state()
    stepper = PartialStepper(optimizer)
    check_separable(optimizer, stepper, sharded=sharded)
    assert torch.equal(torch.get_rng_state(), random)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert after["state"].keys() == before["state"].keys()
    return stepper


def _of_torch() -> dict[str, tuple[type[Optimizer], dict[str, Any]]]:
    """Return torch's optimizers, each plain and in the other forms that it has."""
    made = {}
    for name, cls in vars(torch.optim).items():
        if isinstance(cls, type) and issubclass(cls, Optimizer) and name not in ("Optimizer", "LBFGS", "SparseAdam"):
            made[name] = (cls, {})
            for form in ("foreach", "fused"):
                if form in inspect.signature(cls).parameters:
                    made[f"{name} {form}"] = (cls, {form: True})
    return made


OF_TORCH = _of_torch()
ADVANCING = {"lion": Lion, "counts": CountsSteps, "makes its counter": MakesItsCounter}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OF_TORCH)
def test_torchs_optimizers_pass(name: str, dtype: torch.dtype) -> None:
    cls, settings = OF_TORCH[name]

    def make(groups: list[dict[str, Any]]) -> Optimizer:
        if name == "Muon":  # for matrices only
            groups = groups[:1]
        return cls(groups, lr=0.01, **settings)  # type: ignore[call-arg]

    fitted = _fit(make, dtype=dtype)
    assert fitted.advances is False
    assert fitted.by_element == (set() if name.startswith(("Muon", "Adafactor")) else {0, 1})


class ByNorm(_Each):
    """Scales each parameter's update by norms, as LARS and LAMB do."""

    def direction(self, param: Tensor) -> Tensor:
        assert param.grad is not None
        return param.grad * (param.norm() / param.grad.norm())


class OrthogonalMatrices(_Each):
    """Treats a group by a value of it, as implementations of Muon with AdamW do."""

    def __init__(self, groups: Any) -> None:
        super().__init__([{**group, "use_muon": group["params"][0].dim() > 1} for group in groups])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    q = torch.linalg.qr(param.grad)[0] if group["use_muon"] else param.grad
                    param.sub_(q, alpha=group["lr"])


class KeepsANorm(_Each):
    """Has in its state what is no value for each element, though nothing comes of it."""

    def direction(self, param: Tensor) -> Tensor:
        assert param.grad is not None
        self.state[param]["norm"] = param.grad.norm()
        return param.grad


@pytest.mark.parametrize(
    ("make", "expected"),
    [(Lion, {0, 1}), (CountsSteps, {0, 1}), (ByNorm, set()), (KeepsANorm, set()), (OrthogonalMatrices, {1})],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_is_updated_by_element_is_found_out_for_each_group(make: Any, expected: set[int]) -> None:
    assert _fit(make).by_element == expected


class WritesRate(torch.optim.SGD):
    """Tells the rate that the last parameter had, as some implementations of Adafactor do, and never reads it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    group["lr"] = 0.01 * float(param.norm())
                    param.add_(param.grad, alpha=-group["lr"])


class ReadsRate(WritesRate):
    """Uses the rate of the parameter before."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        before = [group["lr"] for group in self.param_groups]
        super().step()
        for rate, group in zip(before, self.param_groups, strict=True):
            for param in group["params"]:
                param.mul_(1 - rate)


def _without_rate(params: Any) -> Optimizer:
    optimizer = WritesRate(params, lr=0.01)
    for group in optimizer.param_groups:
        group["lr"] = None
    return optimizer


def test_a_value_that_is_only_written_couples_nothing() -> None:
    assert _fit(lambda params: WritesRate(params, lr=0.01)).advances
    assert _fit(_without_rate).advances
    with pytest.raises(ValueError, match="depends on other parameters"):
        _fit(lambda params: ReadsRate(params, lr=0.01))


class CountsFused(torch.optim.SGD):
    """A user's subclass that counts its steps, as any may."""

    count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        super().step()


def test_a_fused_optimizers_own_values_still_advance() -> None:
    assert _fit(lambda params: CountsFused(params, lr=0.01, fused=True)).advances


@pytest.mark.parametrize("make", [Noisy, Uncopyable], ids=lambda make: make.__name__)
def test_an_optimizer_that_cannot_be_tried_passes_with_a_warning(make: Any) -> None:
    with pytest.warns(UserWarning, match=f"{make.__name__} could not be tried out"):
        _fit(make, sharded=False)


def test_an_optimizer_that_changes_parameters_for_evaluation_passes_unsharded() -> None:
    _fit(WithEvaluation, sharded=False)


@pytest.mark.parametrize("name", ADVANCING)
def test_the_trial_notices_values_that_advance(name: str) -> None:
    assert _fit(ADVANCING[name]).advances


def test_a_warm_up_from_zero_passes() -> None:
    _fit(lambda params: torch.optim.Adam(params, lr=0.0))


CROSSING: dict[str, tuple[Callable[[Any], Optimizer], str]] = {
    "LBFGS": (lambda groups: torch.optim.LBFGS([p for g in groups for p in g["params"]]), "LBFGS evaluates the loss"),
    "global clipping of large gradients": (
        ClipsLargeOnes,
        "ClipsLargeOnes cannot be stepped in parts or sharded: its update of a param",
    ),
    "a counter among the state": (CountsInState, "CountsInState cannot be stepped in parts or sharded"),
    "global clipping": (ClipsGlobally, "ClipsGlobally cannot be stepped in parts or sharded: its update of a param"),
    "estimated rate": (Estimates, "Estimates cannot be stepped in parts"),
    "known by name": (Prodigy, "Prodigy cannot be stepped in parts"),
    "train and eval": (WithEvaluation, "WithEvaluation has methods `train` and `eval`"),
}


@pytest.mark.parametrize("name", CROSSING)
def test_what_cannot_be_stepped_in_parts_is_refused_by_name(name: str) -> None:
    make, message = CROSSING[name]
    with pytest.raises(ValueError, match=message):
        _fit(make)


def test_a_wrapper_is_refused() -> None:
    wrapper = object.__new__(PostLocalSGDOptimizer)
    wrapper.optim = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    with pytest.raises(ValueError, match="PostLocalSGDOptimizer wraps another optimizer"):
        check_separable(wrapper, PartialStepper(wrapper), sharded=True)


# ---------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"shard": "yes"}, TypeError, "Expected True or False for `shard`, got 'yes'"),
        ({"interleaved": 1}, TypeError, "Expected True or False for `interleaved`"),
        ({"shard_buckets": True}, ValueError, "`shard_buckets=True` divides buckets .* needs `shard=True`"),
        ({"overlap": False}, ValueError, "leave `optimizer_in_hook` out"),
        ({"shard": True, "overlap": False, "interleaved": False}, ValueError, "`interleaved=False` says how"),
        ({"shard": True, "overlap": False, "shard_buckets": True}, ValueError, "`shard_buckets=True` says how"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        OptimizerInHook(**settings)


DIVERGING = {
    "PostLocalSGD": PostLocalSGD(start_local_sgd_iter=3, subgroup_size=1),
    "Noop": Cast(Noop(), torch.bfloat16),
    "noop_hook": TorchHook(hook=noop_hook),
    "post_local_sgd_hook": PerParameter([Rule((None, post_local_sgd_hook), ndim=2)], default=None),
    "PostLocalSGD in a schedule": Schedule([Stage(0, None), Stage(5, "post_local_sgd")]),
}


@pytest.mark.parametrize("name", DIVERGING)
def test_hooks_that_leave_ranks_apart_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"Communication hook {name.split(' ', 1)[0]} leaves ranks with different"):
        refuse_diverging(DIVERGING[name])


def test_other_hooks_are_not() -> None:
    simple = TorchHook(hook=fp16_compress_hook)
    for hook in (None, PowerSGD(rank=1), Cast(BlockQuantize(), "float16"), Schedule([Stage(0, "bf16")]), simple):
        refuse_diverging(hook)


class Local(CommHook):
    """A user's own hook that leaves each rank its gradients."""

    def bind(self, context: BindContext) -> BoundHook:
        raise NotImplementedError


class Says(Local):
    def replicas_differ_from(self) -> int | None:
        return None


class SaysOfAFunction(TorchHook):
    def replicas_differ_from(self) -> int | None:
        return None


def own_function(state: Any, bucket: Any) -> Any:
    return bucket.buffer()


@pytest.mark.parametrize("hook", [Local(), Cast(Local(), "float16")], ids=["alone", "inside another"])
def test_a_users_own_hook_must_say_that_ranks_get_the_same(hook: CommHook) -> None:
    with pytest.raises(
        ValueError, match=r"hook Local may leave .* override `replicas_differ_from` in its class to ret"
    ):
        refuse_diverging(hook)


def test_so_must_a_users_own_function() -> None:
    with pytest.raises(ValueError, match=r"hook own_function may leave ranks .* in a subclass of TorchHook for it"):
        refuse_diverging(TorchHook(hook=own_function))


@pytest.mark.parametrize(
    "hook",
    [Says(), Cast(Says(), "float16"), SaysOfAFunction(hook=own_function)],
    ids=["alone", "inside another", "of a function"],
)
def test_a_users_own_hook_that_says_so_is_taken(hook: CommHook) -> None:
    refuse_diverging(hook)
    assert diverging_part(hook) is None


def test_of_a_hook_that_says_nothing_it_is_not_claimed_that_ranks_differ() -> None:
    for hook in (Local(), Cast(Local(), "float16"), TorchHook(hook=own_function)):
        assert diverging_part(hook) is None
    assert diverging_part(Cast(Noop(), "float16")) == "Noop"
