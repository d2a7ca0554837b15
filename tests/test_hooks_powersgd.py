"""PowerSGD on ranks: what it conserves, when it is exact, order over ranks, non-finite gradients, resuming."""

import copy
import io
import math
import pickle
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hook_tools import Rig, count_wire_bytes, exact_mean, gradients_of, require_plain
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_hooks import DataParallel
from lightning_ddp_hooks.hooks import (
    BatchedPowerSGD,
    Cast,
    CommHook,
    PowerSGD,
    PowerSGDState,
    TorchDDPState,
    batched_powersgd_hook,
    powersgd_hook,
    powersgd_workspace,
    run_on_torch_ddp,
)

Shapes = list[tuple[int, ...]]
MIXED: Shapes = [(12, 16), (16,), (16, 12), (5,), (12, 16), (16,), (8, 2, 3, 3), (12, 16), (16,), (1,), (40, 3)]

VARIANTS: dict[str, CommHook] = {
    "rank 1": PowerSGD(rank=1, start_iter=0),
    "rank 3": PowerSGD(rank=3, start_iter=0),
    "unbatched": PowerSGD(rank=2, start_iter=0, batch_same_shape=False),
    "epsilon": PowerSGD(rank=2, start_iter=0, orthogonalization_epsilon=1e-8),
    "cold": PowerSGD(rank=2, start_iter=0, warm_start=False),
    "late": PowerSGD(rank=2, start_iter=2),
    "whole bucket": BatchedPowerSGD(rank=2, start_iter=0),
    "bfloat16": Cast(PowerSGD(rank=2, start_iter=0), "bfloat16"),
    "float16": Cast(PowerSGD(rank=2, start_iter=0), "float16"),
}


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1).double() for t in tensors])


def owed(rig: Rig) -> Tensor:
    """The error memory, by parameter in order, in the units of the mean."""
    error = rig.bound.state_dict()["error"]
    return flat([error.get(name, torch.zeros(p.shape)) for name, p in zip(rig.names, rig.params, strict=True)])


# ---------------------------------------------------------------------------------------- identities


def train_with_all(buckets: int, steps: int) -> dict[str, Any]:
    shapes = MIXED
    layout = [list(range(len(shapes)))[n::buckets] for n in range(buckets)]
    found = {}
    for name, hook in VARIANTS.items():
        rig = Rig(hook, shapes)
        rig.set_layout([indices for indices in layout if indices])
        rig.delays = random.Random(100 * dist.get_rank() + buckets)
        results = [flat(rig.step(gradients_of(dist.get_rank(), step, shapes))) for step in range(steps)]
        found[name] = (results, owed(rig))
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(("buckets", "world_size"), [(1, 2), (3, 4), (11, 3)])
def test_what_came_out_and_what_is_owed_make_up_what_went_in(buckets: int, world_size: int) -> None:
    steps = 4
    per_rank = run_ranks(train_with_all, buckets, steps, world_size=world_size)
    went_in = sum(flat(exact_mean(step, MIXED, world_size)) for step in range(steps))
    for name in VARIANTS:
        results, rest = per_rank[0][name]
        for others, _ in (other[name] for other in per_rank[1:]):
            assert all(torch.equal(a, b) for a, b in zip(results, others, strict=True)), name  # whatever the timing
        # 16 bits: the sum over ranks rounds, and nobody can keep what it loses; dense gradients are rounded as well
        tolerance = {"bfloat16": 4e-2, "float16": 4e-3}.get(name, 2e-5)
        torch.testing.assert_close(sum(results) + rest, went_in, rtol=0, atol=tolerance, msg=lambda m: f"{name}: {m}")  # noqa: B023
        assert rest.norm() > 0


def train_twenty_buckets() -> list[Tensor]:
    shapes: Shapes = [(10 + n % 3, 14) for n in range(20)]
    rig = Rig(PowerSGD(rank=1, start_iter=1), shapes)
    rig.delays = random.Random(dist.get_rank())
    return [flat(rig.step(gradients_of(dist.get_rank(), step, shapes))) for step in range(3)]


@pytest.mark.ranks
def test_twenty_buckets_come_out_alike_on_all_ranks_whatever_the_timing() -> None:
    first, *others = run_ranks(train_twenty_buckets, world_size=3)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def reduce_exactly() -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    found = {}
    shapes: Shapes = [(6, 9), (9,), (20, 4), (3, 2, 2, 2)]
    # Full rank spans everything.
    rig = Rig(PowerSGD(rank=99, start_iter=0, min_compression_rate=0.01), shapes)
    found["full rank"] = (rig.step(gradients_of(rank, 0, shapes)), exact_mean(0, shapes, world_size))
    # A gradient of rank one is exact from the first step on, at any rank.
    for r in (1, 3):
        rig = Rig(PowerSGD(rank=r, start_iter=0), [(30, 40), (40,)])
        one = [torch.outer(torch.arange(30.0), torch.linspace(-1, 1, 40)) * (rank + 1), torch.ones(40) * rank]
        mean = [one[0] / (rank + 1) * (world_size + 1) / 2, torch.full((40,), (world_size - 1) / 2)]
        for step in range(3):
            found[f"rank {r}, step {step}"] = (rig.step(one), mean)
    # float64 and half-precision gradients.
    rig = Rig(PowerSGD(rank=99, start_iter=0, min_compression_rate=0.01), shapes, dtype=torch.float64)
    found["float64"] = (
        rig.step([g.double() for g in gradients_of(rank, 0, shapes)]),
        exact_mean(0, shapes, world_size),
    )
    return found


@pytest.mark.ranks
def test_it_is_exact_where_the_rank_suffices() -> None:
    for name, (result, expected) in run_ranks(reduce_exactly)[0].items():
        torch.testing.assert_close(flat(result), flat(expected), rtol=1e-4, atol=1e-4, msg=lambda m: f"{name}: {m}")  # noqa: B023


def train_half_and_complex() -> Any:
    half = Rig(PowerSGD(rank=99, start_iter=0, min_compression_rate=0.01), [(8, 8), (3,)], dtype=torch.bfloat16)
    mine = [g.bfloat16() for g in gradients_of(dist.get_rank(), 0, [(8, 8), (3,)])]
    result = half.step(mine)
    model = nn.ParameterDict(
        {"a": nn.Parameter(torch.ones(12, 16, dtype=torch.complex64)), "b": nn.Parameter(torch.ones(12, 16))}
    )
    wrapped = DataParallel(_Squares(model), comm_hook=PowerSGD(rank=1, start_iter=0), reducer_backend="python")
    wrapped().backward()
    return half.bound.state_dict()["error"], result, model["a"].grad, wrapped.reducer.queue.hook.stats()


class _Squares(nn.Module):
    def __init__(self, params: nn.ParameterDict) -> None:
        super().__init__()
        self.params = params

    def forward(self) -> Tensor:
        return sum((p * p.conj()).real.sum() for p in self.params.values()) * (dist.get_rank() + 1)


@pytest.mark.ranks
def test_half_precision_keeps_float32_errors_and_complex_gradients_travel_dense() -> None:
    error, result, complex_gradient, stats = run_ranks(train_half_and_complex)[0]
    assert all(tensor.dtype is torch.float32 for tensor in error.values())
    expected = flat(
        [
            sum(g.bfloat16().double() for g in pair) / 2
            for pair in zip(gradients_of(0, 0, [(8, 8), (3,)]), gradients_of(1, 0, [(8, 8), (3,)]), strict=True)
        ]
    )
    torch.testing.assert_close(flat(result), expected, rtol=0, atol=5e-2)
    torch.testing.assert_close(complex_gradient, torch.full((12, 16), 3.0, dtype=torch.complex64))
    assert stats["numel_before"] == 3 * 192
    assert stats["numel_after"] == 2 * 192 + 28


def _near(size: float, rank: int, step: int, shapes: Shapes) -> list[Tensor]:
    """Return gradients of which all elements are about as large, so that products with long rows are large."""
    return [(1 - g.abs() / g.abs().max() / 4) * size for g in gradients_of(rank, step, shapes)]


def train_in_float16(name: str, size: float) -> tuple[list[Tensor], Tensor]:
    shapes: Shapes = [(48, 64), (64,), (64, 48)]
    if name == "gradients":
        rig = Rig(PowerSGD(rank=2, start_iter=0), shapes, dtype=torch.float16)
    else:
        inner = BatchedPowerSGD if name == "cast, whole bucket" else PowerSGD
        rig = Rig(Cast(inner(rank=2, start_iter=0), "float16"), shapes)
    rig.set_layout([[0, 1, 2]])
    results = []
    for step in range(4):
        results.append(flat(rig.step([g.to(rig.params[0].dtype) for g in _near(size, dist.get_rank(), step, shapes)])))
    return results, owed(rig)


@pytest.mark.ranks
@pytest.mark.parametrize("size", [1.0, 1e4, 6e4])
@pytest.mark.parametrize("name", ["gradients", "cast", "cast, whole bucket"])
def test_factors_in_float16_do_not_overflow_where_gradients_do_not(name: str, size: float) -> None:
    first, second = run_ranks(train_in_float16, name, size)
    shapes: Shapes = [(48, 64), (64,), (64, 48)]
    for one, other in zip(first[0], second[0], strict=True):
        assert torch.equal(one, other)
        assert one.isfinite().all()
    went_in = torch.zeros(())
    for step in range(4):
        for rank in range(2):
            went_in = went_in + flat(_near(size, rank, step, shapes)) / 2
    came_out = sum(first[0]) + (first[1] + second[1]) / 2
    whole = torch.stack(first[0]).abs().max(0).values < torch.finfo(torch.float16).max  # else it was cut off
    torch.testing.assert_close(came_out[whole], went_in[whole].double(), rtol=0, atol=5e-3 * size)


def wire_bytes() -> dict[str, tuple[int, int]]:
    shapes: Shapes = [(64, 32), (32,), (64, 32)]
    found = {}
    for name, hook in {
        "plain": PowerSGD(rank=2, start_iter=0),
        "bfloat16": Cast(PowerSGD(rank=2, start_iter=0), torch.bfloat16),
    }.items():
        rig = Rig(hook, shapes)
        rig.set_layout([[0, 1, 2]])
        gradients = gradients_of(dist.get_rank(), 0, shapes)
        found[name] = (count_wire_bytes(lambda: rig.step(gradients)), rig.bound.stats()["numel_after"])  # noqa: B023
    return found


@pytest.mark.ranks
def test_two_messages_hold_the_factors_and_what_is_dense() -> None:
    numel = 2 * 2 * (64 + 32) + 32
    assert run_ranks(wire_bytes)[0] == {"plain": (4 * numel, numel), "bfloat16": (2 * numel, numel)}


# ---------------------------------------------------------------------------------------- non-finite gradients


def meet_infinity(device_path: bool, hook: CommHook) -> Any:
    shapes: Shapes = [(12, 16), (16,), (12, 16)]
    rig = Rig(hook, shapes)
    rig.set_layout([[0, 1, 2]])
    rank = dist.get_rank()
    if device_path:  # as on a GPU, where the host does not look
        powersgd_workspace.asks_host = lambda device: False
    rig.step(gradients_of(rank, 0, shapes))
    rig.step(gradients_of(rank, 1, shapes))
    before = io.BytesIO()
    torch.save(rig.bound.state_dict(), before)
    bad = gradients_of(rank, 2, shapes)
    if rank == 1:
        bad[2][3, 5] = math.inf
    poisoned = rig.step(bad)
    after = rig.bound.state_dict()
    healthy = rig.step(gradients_of(rank, 3, shapes))
    before.seek(0)
    return torch.load(before, weights_only=True), after, poisoned, healthy, rig.bound.stats()["steps_not_finite"]


@pytest.mark.ranks
@pytest.mark.parametrize("device_path", [False, True])
@pytest.mark.parametrize("name", ["rank 1", "rank 3", "whole bucket", "float16"])
def test_a_gradient_that_is_not_finite_leaves_the_memory_alone(name: str, device_path: bool) -> None:
    for before, after, poisoned, healthy, count in run_ranks(meet_infinity, device_path, VARIANTS[name]):
        for part in ("error", "right"):
            assert before[part].keys() == after[part].keys()
            assert all(torch.equal(before[part][key], after[part][key]) for key in before[part])
        assert not torch.isfinite(poisoned[2]).any()
        assert all(torch.isfinite(g).all() for g in healthy)
        assert count == 1


def both_paths() -> bool:
    found = []
    for ask in (True, False):
        rig = Rig(PowerSGD(rank=2, start_iter=0), MIXED)
        rig.set_layout([list(range(len(MIXED)))])
        powersgd_workspace.asks_host = lambda device, ask=ask: ask
        rig.step(gradients_of(dist.get_rank(), 0, MIXED))
        found.append([flat(rig.step(gradients_of(dist.get_rank(), step, MIXED))) for step in range(1, 4)])
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*found, strict=True))


@pytest.mark.ranks
def test_the_way_without_asking_the_host_gives_the_same_values() -> None:
    assert all(run_ranks(both_paths))


def begin_with_zeros(hook: CommHook) -> list[Tensor]:
    rig = Rig(hook, [(12, 16)])
    zeros = rig.step([torch.zeros(12, 16)])
    one = torch.outer(torch.arange(12.0), torch.linspace(-1, 1, 16))
    return [*zeros, *rig.step([one]), one]


@pytest.mark.ranks
def test_a_direction_that_was_zero_comes_back() -> None:
    for name in ("rank 1", "rank 3", "float16"):
        zeros, result, expected = run_ranks(begin_with_zeros, VARIANTS[name])[0]
        assert torch.equal(zeros, torch.zeros(12 * 16))
        torch.testing.assert_close(result, expected.view(-1), rtol=1e-2, atol=1e-3)


# ---------------------------------------------------------------------------------------- state


def resume(hook: CommHook, saved: bytes | None, steps: range) -> tuple[list[Tensor], bytes]:
    rig = Rig(hook, MIXED)
    rig.set_layout([[2, 1, 0], [3, 4, 5, 6], [10, 9, 8, 7]] if steps.start else [list(range(len(MIXED)))])
    rig.now = steps.start
    if saved is not None:
        rig.bound.load_state_dict(torch.load(io.BytesIO(saved), weights_only=True))
    results = [flat(rig.step(gradients_of(dist.get_rank(), step, MIXED))) for step in steps]
    state = rig.bound.state_dict()
    require_plain(state)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return results, buffer.getvalue()


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["rank 1", "rank 3", "cold"])
def test_going_on_from_a_checkpoint_equals_not_having_stopped(name: str) -> None:
    hook = VARIANTS[name]
    whole = run_ranks(resume, hook, None, range(5))[0][0]
    half = run_ranks(resume, hook, None, range(2))
    assert half[0][1] == half[1][1]  # the same on all ranks
    rest = run_ranks(resume, hook, half[0][1], range(2, 5))[0][0]  # in other buckets, too
    for a, b in zip(whole[2:], rest, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.ranks
def test_a_run_goes_on_with_another_number_of_ranks() -> None:
    hook = VARIANTS["rank 3"]
    first, saved = run_ranks(resume, hook, None, range(2), world_size=2)[0]
    then, after = run_ranks(resume, hook, saved, range(2, 4), world_size=3)[0]
    went_in = sum(flat(exact_mean(step, MIXED, 2 if step < 2 else 3)) for step in range(4))
    error = torch.load(io.BytesIO(after), weights_only=True)["error"]
    rest = flat([error[f"layer{n}.weight"] for n in range(len(MIXED))])
    torch.testing.assert_close(sum(first) + sum(then) + rest, went_in, rtol=0, atol=2e-5)


def load_wrong_state() -> str:
    rig = Rig(PowerSGD(start_iter=0), [(4, 4)])
    with pytest.raises(ValueError, match="Expected the state of communication hook 'PowerSGD', found that of 'OneBit'"):
        rig.bound.load_state_dict({"hook": "OneBit", "format": 1})
    with pytest.raises(ValueError, match=r"format 99.*up to 1"):
        rig.bound.load_state_dict({"hook": "PowerSGD", "format": 99})
    return "refused"


@pytest.mark.ranks
def test_another_hooks_state_is_refused() -> None:
    assert run_ranks(load_wrong_state, world_size=1) == ["refused"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "`rank` of at least 1, got 0"),
        ({"start_iter": -1}, "`start_iter` of at least 0, got -1"),
        ({"min_compression_rate": 0}, "`min_compression_rate` above 0, got 0"),
        ({"orthogonalization_epsilon": -1e-8}, "`orthogonalization_epsilon` of at least 0"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PowerSGD(**settings)


# ---------------------------------------------------------------------------------------- on torch's DDP, in training


def model_of_layers() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 10))


def train(module: nn.Module, wrapped: nn.Module, steps: int = 6) -> list[Tensor]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for step in range(steps):
        torch.manual_seed(1000 * step + dist.get_rank())
        wrapped(torch.randn(8, 24)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in module.parameters()]


def train_here_and_there() -> list[list[Tensor]]:
    small = 5 * 1024 / 2**20  # several buckets
    runs = []
    hook = PowerSGD(rank=2, start_iter=0)
    module = model_of_layers()
    runs.append(train(module, DataParallel(module, comm_hook=hook, bucket_cap_mb=small, reducer_backend="python")))
    module = model_of_layers()
    ddp = DistributedDataParallel(module, bucket_cap_mb=small)
    ddp.register_comm_hook(TorchDDPState(hook, module=module), run_on_torch_ddp)
    runs.append(train(module, ddp))
    return runs


@pytest.mark.ranks
def test_torchs_ddp_and_our_reducer_train_alike_with_it() -> None:
    ours, torchs = run_ranks(train_here_and_there)[0]
    for a, b in zip(ours, torchs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def train_with_functions() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, function in (("powersgd", powersgd_hook), ("batched", batched_powersgd_hook)):
        module = model_of_layers()
        state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        ddp = DistributedDataParallel(module, bucket_cap_mb=5 * 1024 / 2**20)  # several buckets
        ddp.register_comm_hook(state, function)
        weights = train(module, ddp)
        module = model_of_layers()
        ours = DataParallel(module, bucket_cap_mb=5 * 1024 / 2**20, reducer_backend="python")
        ours.register_comm_hook(PowerSGDState(None, 2, 2), function)
        found[name] = (weights, train(module, ours), state.compression_stats(), state.state_dict())
    return found


@pytest.mark.ranks
def test_the_functions_run_on_both_and_count_their_own_steps() -> None:
    per_rank = run_ranks(train_with_functions)
    for name in ("powersgd", "batched"):
        weights, ours, (rate, before, after), state = per_rank[0][name]
        assert all(torch.equal(a, b) for a, b in zip(weights, per_rank[1][name][0], strict=True))
        assert all(torch.isfinite(w).all() for w in [*weights, *ours])
        assert rate == before / after > 2
        assert before == 4 * sum(w.numel() for w in weights)  # steps 2 to 5
        assert state["steps"] == 6
        require_plain(state)


def move_through_layouts(hook: CommHook) -> tuple[Tensor, Tensor]:
    rig = Rig(hook, MIXED)
    everything = list(range(len(MIXED)))
    total = torch.zeros(())
    # The last bucket of the first layout comes back in the third one, with what has happened to it in between.
    layouts = [[[0, 1, 2], [3, 4, 5, 6], [7, 8, 9, 10]], [everything], [[0, 1, 2], [3, 4, 5, 6], [7, 8, 9, 10]]]
    for step in range(6):
        rig.set_layout(layouts[step // 2])
        total = total + flat(rig.step(gradients_of(dist.get_rank(), step, MIXED)))
    return total, owed(rig)


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["rank 3", "whole bucket"])
def test_memory_follows_its_parameter_through_layouts(name: str) -> None:
    total, rest = run_ranks(move_through_layouts, VARIANTS[name])[0]
    went_in = sum(flat(exact_mean(step, MIXED, 2)) for step in range(6))
    torch.testing.assert_close(total + rest, went_in, rtol=0, atol=2e-5)


def pickled_in_the_middle(batched: bool) -> bool:
    hook = batched_powersgd_hook if batched else powersgd_hook
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)

    def train(state: PowerSGDState, steps: range) -> Tensor:
        torch.manual_seed(0)
        model = DataParallel(nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12)))
        model.register_comm_hook(state, hook)
        for step in steps:
            x = torch.randn(4, 12, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            model.zero_grad()
            model(x).square().mean().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    train(state, range(5))
    again = pickle.loads(pickle.dumps(state)) if dist.get_rank() else copy.deepcopy(state)  # on each rank by itself
    assert again.steps == 5
    with pytest.raises(TypeError, match="knows its module"):
        pickle.dumps(TorchDDPState(None, module=nn.Linear(1, 1)))
    went_on = train(state, range(5, 8))
    return torch.equal(train(again, range(5, 8)), went_on)


@pytest.mark.ranks
@pytest.mark.parametrize("batched", [False, True])
def test_a_pickled_state_goes_on_as_the_state_itself(batched: bool) -> None:
    assert run_ranks(pickled_in_the_middle, batched) == [True, True]
