"""The hooks that lose something: bounds, what error feedback conserves, order over ranks, wire bytes, resuming."""

import io
import math
import random
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hook_tools import Rig, block_hook_bytes, count_wire_bytes, exact_mean, gradients_of
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_ddp_hooks as ldh
from lightning_ddp_hooks.hooks import (
    AllReduce,
    BlockQuantize,
    CommHook,
    OneBit,
    QuantizePerChannel,
    QuantizePerTensor,
    TopK,
    block_quantize,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
    topk,
)
from lightning_ddp_hooks.hooks.registry import resolve_hook

pytestmark = pytest.mark.ranks

HAS_FP8 = hasattr(torch, "float8_e4m3fn")

# name -> (hook, bound of the error of one shot in units of the largest gradient of any rank; None: not bounded)
LOSSY: dict[str, tuple[CommHook, float | None]] = {
    "int8": (BlockQuantize(block_size=64), 2.1 * 0.5 / 127),
    "int8 without memory": (BlockQuantize(error_feedback=False), 2.1 * 0.5 / 127),
    "int8 stochastic": (BlockQuantize(stochastic_rounding=True), 2.1 / 127),
    "onebit": (OneBit(start_iter=0, block_size=64), None),
    "topk": (TopK(ratio=0.1), None),
    "topk of all": (TopK(ratio=1.0), 1e-6),
    "per tensor": (QuantizePerTensor(), 1.5 * 2 / 255),
    "per channel": (QuantizePerChannel(bucket_size=50), 1.5 * 2 / 255),
}
if HAS_FP8:
    LOSSY["fp8"] = (BlockQuantize(dtype="fp8"), 2.1 * 16 / 448)
FEEDBACK = ("int8", "int8 stochastic", "onebit", "topk") + (("fp8",) if HAS_FP8 else ())


def unsent(state: dict[str, Any], names: list[str]) -> list[Tensor]:
    """What a hook has not sent yet, per parameter and in the units of the mean, from its state."""
    parts = [state[key] for key in ("workers", "servers", "residuals") if key in state]
    return [sum((part[name].double() for part in parts if name in part), torch.zeros(1)) for name in names]


def conserved(total: list[Tensor], owed: list[Tensor], steps: range, numels: list[int], world_size: int) -> None:
    """What came out and what is still owed make up what went in."""
    for index in range(len(numels)):
        went_in = sum(exact_mean(step, numels, world_size)[index] for step in steps)
        torch.testing.assert_close(total[index] + owed[index], went_in, rtol=0, atol=2e-5)


# ---------------------------------------------------------------------------------------- bounds, order, wire


def reduce_with_all(buckets: int) -> dict[str, list[list[Tensor]]]:
    numels = [37 + 211 * (index % 3) for index in range(buckets)]
    if dist.get_rank() % 2:
        block_quantize.native_module = lambda: None  # ranks need not all have the native module  # type: ignore[assignment]
    found = {}
    for name, (hook, _) in LOSSY.items():
        rig = Rig(hook, numels)
        rig.delays = random.Random(100 * dist.get_rank() + buckets)
        found[name] = [rig.step(gradients_of(dist.get_rank(), step, numels)) for step in range(2)]
    return found


@pytest.mark.parametrize(("buckets", "world_size"), [(1, 2), (3, 4), (20, 3)])
def test_all_ranks_get_the_same_bits_within_the_bound_whatever_the_timing(buckets: int, world_size: int) -> None:
    per_rank = run_ranks(reduce_with_all, buckets, world_size=world_size)
    numels = [37 + 211 * (index % 3) for index in range(buckets)]
    mean = exact_mean(0, numels, world_size)
    for name, (_, bound) in LOSSY.items():
        for rank in range(1, world_size):
            for mine, other in zip(chain(*per_rank[0][name]), chain(*per_rank[rank][name]), strict=True):
                assert torch.equal(mine, other), name
        for index, result in enumerate(per_rank[0][name][0]):
            largest = max(gradients_of(rank, 0, numels)[index].abs().max() for rank in range(world_size))
            if bound is not None:
                assert (result - mean[index]).abs().max() <= bound * largest, name


def count_bytes() -> list[tuple[str, int, int, int]]:
    rows = []
    for name, (hook, _) in LOSSY.items():
        for numel in (1, 1000, 30_011):
            rig = Rig(hook, [numel])
            gradients = gradients_of(dist.get_rank(), 0, [numel])
            rows.append((name, numel, count_wire_bytes(lambda rig=rig, g=gradients: rig.step(g)), rig.world_size))
    return rows


def test_bytes_are_what_is_documented() -> None:
    world_size = 3
    part = (world_size - 1) / world_size
    for name, numel, counted, _ in run_ranks(count_bytes, world_size=world_size)[0]:
        hook = LOSSY[name][0]
        if isinstance(hook, (BlockQuantize, OneBit)):
            assert counted == block_hook_bytes(hook, numel, world_size), (name, numel)
            per_element = 2 * part * ((1 / 8 if isinstance(hook, OneBit) else 1) + 4 / hook.block_size)
        elif isinstance(hook, TopK):
            per_element = (world_size - 1) * 8 * hook.entries(numel) / numel
        else:
            per_element = (world_size - 1) * (1 + (5 / hook.bucket_size if isinstance(hook, QuantizePerChannel) else 0))
        if numel > 10_000:
            assert counted == pytest.approx(numel * per_element, rel=3e-2), name  # whole blocks


# ---------------------------------------------------------------------------------------- error feedback


def run_with_feedback() -> dict[str, Any]:
    numels = [100, 33, 450, 8]
    found = {}
    for name in FEEDBACK:
        rig = Rig(LOSSY[name][0], numels)
        total = [torch.zeros(numel, dtype=torch.float64) for numel in numels]
        for step in range(6):
            if step == 1:
                rig.set_layout([[0, 1], [2, 3]])
            if step == 4:
                rig.set_layout([[3, 2, 1], [0]])
            for mean, out in zip(total, rig.step(gradients_of(dist.get_rank(), step, numels)), strict=True):
                mean += out
        found[name] = (total, unsent(rig.bound.state_dict(), rig.names))
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_was_sent_and_what_is_owed_make_up_the_gradients_also_when_buckets_change(world_size: int) -> None:
    for name, (total, owed) in run_ranks(run_with_feedback, world_size=world_size)[0].items():
        conserved(total, owed, range(6), [100, 33, 450, 8], world_size)
        assert max(part.abs().max() for part in owed) > 1e-3, f"{name} owes nothing, so the test shows nothing"


def run_with_infinity() -> dict[str, Any]:
    numels = [300, 200]
    found = {}
    for name in FEEDBACK:
        rig = Rig(LOSSY[name][0], numels)
        total = [torch.zeros(numel, dtype=torch.float64) for numel in numels]
        for step in range(4):
            gradients = gradients_of(dist.get_rank(), step, numels)
            if step == 2 and dist.get_rank() == 1:
                gradients[0][17] = math.inf if name != "topk" else math.nan
            out = rig.step(gradients)
            if step == 2:
                bad = out
            for index in range(2):
                if step != 2 or index != 0:
                    total[index] += out[index]
        owed = unsent(rig.bound.state_dict(), rig.names)
        found[name] = (bad, total, owed, rig.bound.stats()["left_out"])
    return found


def test_an_infinite_gradient_is_seen_by_all_ranks_and_leaves_the_memory_alone() -> None:
    for found in run_ranks(run_with_infinity):
        for bad, total, owed, left_out in found.values():
            assert not bad[0][17].isfinite()
            assert bad[1].isfinite().all()
            assert left_out == 1
            first = sum(exact_mean(step, [300, 200], 2)[0] for step in (0, 1, 3))
            second = sum(exact_mean(step, [300, 200], 2)[1] for step in range(4))
            torch.testing.assert_close(total[0] + owed[0], first, rtol=0, atol=2e-5)
            torch.testing.assert_close(total[1] + owed[1], second, rtol=0, atol=2e-5)


# ---------------------------------------------------------------------------------------- resuming

NUMELS = [120, 77, 300]


def go_on(states: dict[str, Any] | None, steps: range) -> dict[str, Any]:
    found = {}
    for name in FEEDBACK:
        rig = Rig(LOSSY[name][0], NUMELS)
        rig.now = steps.start
        if states is not None:
            rig.bound.load_state_dict(states[name][1])
            before = unsent(states[name][1], rig.names)
            saved_again = rig.bound.state_dict()
            for ours, theirs in zip(unsent(saved_again, rig.names), before, strict=True):
                torch.testing.assert_close(ours, theirs.expand_as(ours), rtol=0, atol=1e-6)
        total = [torch.zeros(numel, dtype=torch.float64) for numel in NUMELS]
        last: list[Tensor] = []
        for step in steps:
            last = rig.step(gradients_of(dist.get_rank(), step, NUMELS))
            for mean, out in zip(total, last, strict=True):
                mean += out
        found[name] = (total, rig.bound.state_dict(), last)
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_resumed_run_owes_what_the_saved_one_owed_at_any_world_size(world_size: int) -> None:
    saved = run_ranks(go_on, None, range(3))[0]
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for name, (total, state, _) in run_ranks(go_on, loaded, range(3, 6), world_size=world_size)[0].items():
        names = [f"layer{index}.weight" for index in range(3)]
        before = unsent(saved[name][1], names)
        owed = [now - then for now, then in zip(unsent(state, names), before, strict=True)]
        conserved(total, owed, range(3, 6), NUMELS, world_size)


def refuse_other_state() -> list[str]:
    texts = []
    one, other = Rig(OneBit(start_iter=0), [40]), Rig(TopK(), [40])
    one.step(gradients_of(dist.get_rank(), 0, [40]))
    state = one.bound.state_dict()
    for rig in (other, Rig(BlockQuantize(error_feedback=False), [40])):
        try:
            rig.bound.load_state_dict(state)
        except ValueError as error:
            texts.append(str(error))
    bigger = Rig(OneBit(start_iter=0), [41])
    bigger.bound.load_state_dict(state)
    try:
        bigger.step(gradients_of(dist.get_rank(), 0, [41]))
    except ValueError as error:
        texts.append(str(error))
    return texts


def test_the_state_of_another_hook_or_another_model_is_refused() -> None:
    foreign, memoryless, size = run_ranks(refuse_other_state)[0]
    assert "'TopK', found that of 'OneBit'" in foreign
    assert "BlockQuantize has no state" in memoryless
    assert "41 elements for parameter 'layer0.weight', found 40" in size


# ---------------------------------------------------------------------------------------- odd cases


def odd_cases() -> dict[str, Any]:
    found: dict[str, Any] = {}
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for name, (hook, bound) in LOSSY.items():
        empty = Rig(hook, [0, 40])
        out = empty.step(gradients_of(rank, 0, [0, 40]))
        assert [part.numel() for part in out] == [0, 40]
        halved = Rig(hook, [40]).step(gradients_of(rank, 0, [40]), divisor=2.0 * world_size)
        once = Rig(hook, [40]).step(gradients_of(rank, 0, [40]))
        torch.testing.assert_close(halved[0] * 2, once[0])
        for dtype, slack in ((torch.bfloat16, 2e-2), (torch.float64, 1e-6)):
            rig = Rig(hook, [90], dtype)
            got = rig.step([g.to(dtype) for g in gradients_of(rank, 0, [90])])[0]
            assert got.dtype == dtype
            mean = exact_mean(0, [90], world_size)[0]
            if bound is not None:
                assert (got.double() - mean).abs().max() <= bound * 4 + slack, name
            rig.bound.state_dict()
        found[name] = once
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_empty_buckets_other_divisors_and_other_dtypes(world_size: int) -> None:
    found = run_ranks(odd_cases, world_size=world_size)[0]
    if world_size == 1:
        for once in found.values():
            assert torch.equal(once[0], gradients_of(0, 0, [40])[0])


def warm_up_and_noise() -> dict[str, Any]:
    rank = dist.get_rank()
    one = Rig(OneBit(start_iter=2), [64])
    steps = [one.step(gradients_of(rank, step, [64]))[0] for step in range(3)]
    noisy = []
    for _ in range(2):
        rig = Rig(BlockQuantize(stochastic_rounding=True, error_feedback=False), [64])
        rig.now = 7
        noisy.append([rig.step(gradients_of(rank, 0, [64]))[0] for _ in range(2)])
    return {"warm": steps, "noisy": noisy}


def test_onebit_begins_at_its_step_and_stochastic_rounding_repeats_itself_per_step() -> None:
    found = run_ranks(warm_up_and_noise)[0]
    for step in (0, 1):
        torch.testing.assert_close(found["warm"][step].double(), exact_mean(step, [64], 2)[0], rtol=0, atol=1e-6)
    assert found["warm"][2].abs().unique().numel() < 40
    (first, second), again = found["noisy"]
    assert torch.equal(first, again[0])
    assert not torch.equal(first, second)  # the next step has other noise


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: BlockQuantize(block_size=12), "multiple of 8 between 8 and 65536, got 12"),
        (lambda: BlockQuantize(dtype="int4"), "'int8' or 'fp8', got 'int4'"),  # type: ignore[arg-type]
        (lambda: OneBit(start_iter=-1), "start_iter of at least 0, got -1"),
        (lambda: TopK(ratio=0.1, k=3), "ratio or k, got both"),
        (lambda: TopK(ratio=0.0), "above 0 and up to 1, got 0.0"),
        (lambda: TopK(k=0), "at least 1, got 0"),
        (lambda: QuantizePerChannel(bucket_size=0), "at least 1, got 0"),
    ],
)
def test_a_setting_out_of_range_raises_with_its_number(make: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


# ---------------------------------------------------------------------------------------- training


def task(rank: int, world_size: int) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 3))
    teacher = nn.Linear(12, 3)
    data = torch.randn(64 * world_size, 12)
    with torch.no_grad():
        target = teacher(data)
    mine = slice(64 * rank, 64 * (rank + 1))
    return model, data[mine], target[mine]


def train(wrapped: nn.Module, data: Tensor, target: Tensor, steps: int) -> tuple[float, Tensor]:
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    loss = torch.zeros(())
    for _ in range(steps):
        loss = (wrapped(data) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    flat = torch.cat([param.detach().flatten() for param in wrapped.parameters()])
    return float(loss.detach()), flat


SHORT = ["int8", "onebit", "topk", "quantize_per_tensor", "quantize_per_channel"] + (["fp8"] if HAS_FP8 else [])


def train_with_all(steps: int) -> dict[str, tuple[float, Tensor]]:
    found = {}
    for name in ["allreduce", *SHORT]:
        model, data, target = task(dist.get_rank(), dist.get_world_size())
        hook = {"onebit": OneBit(start_iter=10), "topk": TopK(ratio=0.1)}.get(name) or resolve_hook(name)
        found[name] = train(ldh.DataParallel(model, comm_hook=hook, bucket_cap_mb=0.001), data, target, steps)
    return found


def test_training_with_each_hook_reaches_the_loss_of_the_plain_mean() -> None:
    ranks = run_ranks(train_with_all, 80)
    plain = ranks[0]["allreduce"][0]
    for name in SHORT:
        losses, weights = zip(*(found[name] for found in ranks), strict=True)
        assert torch.equal(weights[0], weights[1]), name
        assert losses[0] <= plain * 1.15 + 1e-3, f"{name}: {losses[0]} against {plain}"


def functions_on_both() -> dict[str, Any]:
    found = {}
    for hook in (quantization_pertensor_hook, quantization_perchannel_hook):
        for wrapper in ("torch", "ours"):
            model, data, target = task(dist.get_rank(), dist.get_world_size())
            if wrapper == "torch":
                wrapped: Any = DistributedDataParallel(model)
            else:
                wrapped = ldh.DataParallel(model)
            wrapped.register_comm_hook(None, hook)
            found[hook.__name__, wrapper] = train(wrapped, data, target, 5)
    model, data, target = task(dist.get_rank(), dist.get_world_size())
    found["mean"] = train(ldh.DataParallel(model), data, target, 5)
    return found


def test_the_functions_do_the_same_on_torchs_ddp_and_on_ours() -> None:
    ranks = run_ranks(functions_on_both)
    found = ranks[0]
    for name in ("quantization_pertensor_hook", "quantization_perchannel_hook"):
        torch.testing.assert_close(found[name, "torch"][1], found[name, "ours"][1], rtol=0, atol=2e-3)
        torch.testing.assert_close(found[name, "ours"][1], found["mean"][1], rtol=0, atol=5e-3)
        assert torch.equal(ranks[0][name, "ours"][1], ranks[1][name, "ours"][1])
    one = "quantization_pertensor_hook"  # one bucket, one scale: the order of parameters in the bucket does not matter
    torch.testing.assert_close(found[one, "torch"][1], found[one, "ours"][1], rtol=0, atol=1e-6)


# ---------------------------------------------------------------------------------------- memory


def held_after_rebuild(name: str, native: bool) -> list[int]:
    """Bytes that the hook holds: with one bucket of everything, with many, and with one of them left."""
    if not native:
        block_quantize.native_module = lambda: None  # type: ignore[assignment]
    numels = [1 << 14] * 16
    rig = Rig(LOSSY[name][0] if name in LOSSY else resolve_hook(name) or AllReduce(), numels)
    rig.now = 10_000  # past every warm-up
    rank, held = dist.get_rank(), []
    for layout in ([list(range(16))], [[n] for n in range(16)], [[0, 1]]):
        rig.set_layout(layout)
        for step in range(2):
            rig.step(gradients_of(rank, step, numels))
        held.append(tensor_bytes(rig.bound))
    return held


def tensor_bytes(root: object) -> int:
    """Bytes of all tensors that can be reached from an object, each memory once."""
    found: dict[int, int] = {}
    seen: set[int] = set()
    ahead = [root]
    while ahead:
        item = ahead.pop()
        if id(item) in seen or isinstance(item, (type, str, torch.dtype, torch.device)):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            found[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        elif isinstance(item, dict):
            ahead += item.values()
        elif isinstance(item, (list, tuple, set)):
            ahead += item
        elif type(item).__module__.startswith("lightning_ddp_hooks.hooks"):
            ahead += vars(item).values()
    return sum(found.values())


@pytest.mark.ranks
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("name", ["int8", "fp8", "onebit", "fp16", "topk", "int8 without memory"])
def test_after_the_rebuild_a_hook_holds_what_its_buckets_need(name: str, native: bool) -> None:
    if name == "fp8" and not HAS_FP8:
        pytest.skip("this torch has no float8")
    (whole, many, one), _ = run_ranks(held_after_rebuild, name, native)
    gradients, bucket = 4 * 16 * (1 << 14), 4 * (1 << 14)
    # Residuals: one for each gradient, and for two stages one more for this rank's chunk.
    residuals = {"topk": 1, "int8": 1.5, "fp8": 1.5, "onebit": 1.5}.get(name, 0) * gradients
    # Two messages of a quarter, the sum of a chunk and the answer; or a copy of the bucket in 16 bits.
    messages = {"fp16": 0.5, "topk": 0}.get(name, 1.2) * gradients
    scratch = 0 if name in ("fp16", "topk") else bucket
    assert many <= residuals + messages + scratch + 4096, (whole, many)
    assert one <= residuals + messages / 8 + 2 * scratch + bucket + 4096, (many, one)


def test_indices_of_a_huge_bucket_take_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    huge = (1 << 31) + 1
    assert topk.Entries(3, huge - 1).index_dtype is torch.int32
    values = torch.arange(5, dtype=torch.float32)
    message = topk.Entries(3, huge)
    packed = message.pack(values, torch.tensor([4, 0, 2]))
    packed_indices, _ = message.unpack(packed)
    packed_indices[1] = huge - 1
    assert packed.numel() == message.nbytes == 40
    indices, found = message.unpack(torch.stack([packed, packed]))
    assert (indices[1].tolist(), found[1].tolist()) == ([4, huge - 1, 2], [4.0, 0.0, 2.0])


def reduce_with_long_indices() -> bool:
    found = []
    for limit in (1 << 31, 10):
        topk._INT32_NUMEL = limit
        rig = Rig(TopK(k=7), [100, 31])
        found.append([rig.step(gradients_of(dist.get_rank(), step, [100, 31])) for step in range(3)])
    return all(torch.equal(a, b) for one, other in zip(*found, strict=True) for a, b in zip(one, other, strict=True))


@pytest.mark.ranks
def test_long_indices_give_the_same_result() -> None:
    assert all(run_ranks(reduce_with_long_indices))
