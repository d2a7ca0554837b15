"""The backend for ranks of one host beside gloo, and what happens when a rank fails."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from backends import require
from faults import run_with_fault, signal_self
from ranks import run_ranks
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils import cpp_extension

import lightning_ddp_hooks  # noqa: F401, which registers the backend
from lightning_ddp_hooks.reducer.native import build

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]  # the first test that needs it waits for the compiler


@pytest.fixture(autouse=True)
def _native() -> None:
    require("native")


def _shm(seconds: float = 60, ranks: list[int] | None = None) -> Any:
    return dist.new_group(ranks, backend="shm", timeout=timedelta(seconds=seconds))


# ----------------------------------------------------------------------------- random collectives

INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _values(rng: random.Random, numel: int, dtype: torch.dtype, group: Any) -> Tensor:
    """Values of this rank: sums of them are exact where ranks are more than two, since only then orders differ."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31) + dist.get_rank())
    if dtype in FLOATS and dist.get_world_size() <= 2:
        values = torch.randn(numel, generator=generator).to(dtype)
    else:
        values = torch.randint(0, 3, (numel,), generator=generator).to(dtype)
    if rng.random() < 0.4:  # on some ranks in memory that all share
        backend = group._get_backend(torch.device("cpu"))
        if rng.random() < 0.5 or dist.get_rank() == 0:
            values = backend.allocate_tensor(numel, dtype=dtype, device=torch.device("cpu")).copy_(values)
    return values


Collective = tuple[list[Tensor], list[Tensor], Callable[[list[Tensor], list[Tensor], Any], Any]]


def _random_collective(rng: random.Random, group: Any) -> Collective:
    """Make inputs, outputs, and what begins a collective on them."""
    size, rank = dist.get_world_size(), dist.get_rank()
    numel = rng.choice([0, 1, 3, 100, 1000, 40_000, 300_001])
    root = rng.randrange(size)
    dtype = rng.choice([*INTEGERS, *FLOATS])
    ops = [dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT]
    op = rng.choice([*ops, dist.ReduceOp.BAND, dist.ReduceOp.BOR] if dtype in INTEGERS else ops)

    def many() -> list[Tensor]:
        return [_values(rng, numel, dtype, group) for _ in range(size)]

    kinds = "all_reduce broadcast all_gather into reduce_scatter to_all reduce gather scatter barrier"
    kind = rng.choice(kinds.split())
    async_op: Any = {"async_op": True}
    if kind == "all_reduce":
        return [], [_values(rng, numel, dtype, group)], lambda i, o, g: dist.all_reduce(o[0], op, group=g, **async_op)
    if kind == "broadcast":
        return [], [_values(rng, numel, dtype, group)], lambda i, o, g: dist.broadcast(o[0], root, group=g, **async_op)
    if kind == "all_gather":
        return (
            [_values(rng, numel, dtype, group)],
            many(),
            lambda i, o, g: dist.all_gather(o, i[0], group=g, **async_op),
        )
    if kind == "into":
        output = _values(rng, numel * size, dtype, group)
        run = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return [_values(rng, numel, dtype, group)], [output], lambda i, o, g: run(o[0], i[0], group=g, **async_op)
    if kind == "reduce_scatter" and dtype not in (torch.bfloat16, torch.float16):
        op = dist.ReduceOp.SUM
        run = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        inputs, outputs = [_values(rng, numel * size, dtype, group)], [_values(rng, numel, dtype, group)]
        return inputs, outputs, lambda i, o, g: run(o[0], i[0], op=op, group=g, **async_op)
    if kind == "to_all":
        table = [[rng.randrange(5) * numel // 4 for _ in range(size)] for _ in range(size)]
        sent, received = table[rank], [row[rank] for row in table]
        inputs, outputs = [_values(rng, sum(sent), dtype, group)], [_values(rng, sum(received), dtype, group)]
        return inputs, outputs, lambda i, o, g: dist.all_to_all_single(o[0], i[0], received, sent, group=g, **async_op)
    if kind == "reduce":
        tensors = [_values(rng, numel, dtype, group)]  # what the others have then is nobody's business
        inputs, outputs = ([], tensors) if rank == root else (tensors, [])
        return inputs, outputs, lambda i, o, g: dist.reduce((i + o)[0], root, op, group=g, **async_op)
    if kind == "gather":
        inputs, outputs = [_values(rng, numel, dtype, group)], many()
        outputs = outputs if rank == root else []
        return inputs, outputs, lambda i, o, g: dist.gather(i[0], o or None, root, group=g, **async_op)
    if kind == "scatter":
        inputs, outputs = many(), [_values(rng, numel, dtype, group)]
        inputs = inputs if rank == root else []
        return inputs, outputs, lambda i, o, g: dist.scatter(o[0], i or None, root, group=g, **async_op)
    return [], [], lambda i, o, g: dist.barrier(group=g, **async_op)


def _soak(rounds: int, seed: int) -> None:
    group, rng, delays = _shm(), random.Random(seed), random.Random(seed * 100 + dist.get_rank())
    for _ in range(rounds):
        collectives = [_random_collective(rng, group) for _ in range(rng.randrange(1, 6))]
        expected, works = [], []
        for inputs, outputs, begin in collectives:
            theirs = [tensor.clone() for tensor in inputs], [tensor.clone() for tensor in outputs]
            begin(*theirs, None).wait()
            expected.append(theirs[1])
        for inputs, outputs, begin in collectives:
            time.sleep(delays.choice([0, 0, 0, 0.002]))
            works.append(begin(inputs, outputs, group))
        order = list(range(len(works)))
        delays.shuffle(order)
        for index in order:
            if delays.random() < 0.3:
                works[index].get_future().wait()
            elif delays.random() < 0.3:
                while not works[index].is_completed():
                    time.sleep(0)
            else:
                works[index].wait()
        for outputs, tensors in zip((outputs for _, outputs, _ in collectives), expected, strict=True):
            for ours, theirs in zip(outputs, tensors, strict=True):
                assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), (ours, theirs)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_random_collectives_give_gloos_bits(world_size: int) -> None:
    run_ranks(_soak, 60, world_size, world_size=world_size, timeout=120)


def _sum_of_16_bits(dtype: torch.dtype) -> None:
    values = torch.randn(3, 5000, generator=torch.Generator().manual_seed(1)).to(dtype)
    own = values[dist.get_rank()].clone()
    dist.all_reduce(own, group=_shm())
    wide = values.float()
    total = (wide[0] + wide[1]) + wide[2]
    assert torch.equal(own, total.to(dtype))
    own = values[dist.get_rank()].clone()
    dist.all_reduce(own, dist.ReduceOp.AVG, group=dist.new_group(backend="shm"))
    assert torch.equal(own, (total / 3).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_16_bits_are_rounded_once_and_in_the_order_of_ranks(dtype: torch.dtype) -> None:
    run_ranks(_sum_of_16_bits, dtype, world_size=3)


def _many_in_flight() -> None:
    group = _shm()
    tensors = [torch.full((7,), float(index)) for index in range(1000)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    del works[::3]  # nobody waits for these
    for work in works:
        work.wait()
    dist.barrier(group=group)
    dist.barrier(group=group)
    assert all(torch.equal(tensor, torch.full((7,), 2.0 * index)) for index, tensor in enumerate(tensors))


def test_more_collectives_in_flight_than_there_are_slots() -> None:
    run_ranks(_many_in_flight)


def _subgroups() -> None:
    rank = dist.get_rank()
    first, second = _shm(ranks=[0, 2]), _shm(ranks=[3, 1, 2])
    tensor = torch.tensor([2.0**rank])
    if rank in (0, 2):
        dist.all_reduce(tensor, group=first)
        assert tensor.item() == 5
    tensor = torch.tensor([2.0**rank])
    if rank > 0:
        dist.all_reduce(tensor, group=second)
        assert tensor.item() == 14
        tensor = torch.tensor([rank])
        dist.broadcast(tensor, src=3, group=second)
        assert tensor.item() == 3
        dist.destroy_process_group(second)
    dist.barrier()


def test_subgroups() -> None:
    run_ranks(_subgroups, world_size=4)


def _torch_ddp() -> None:
    def train(group: Any) -> list[Tensor]:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(32, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 8)]
        model = DistributedDataParallel(torch.nn.Sequential(*layers), process_group=group, bucket_cap_mb=0.005)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            batch = torch.randn(16, 32, generator=torch.Generator().manual_seed(step * 10 + dist.get_rank()))
            model(batch).square().mean().backward()
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    for ours, theirs in zip(train(_shm()), train(None), strict=True):
        assert torch.equal(ours, theirs)


def test_torch_ddp_on_it_is_bitwise_torch_ddp_on_gloo() -> None:
    run_ranks(_torch_ddp)


# ----------------------------------------------------------------------------- mistakes


def _wrong_arguments() -> None:
    group = _shm()
    with pytest.raises(TypeError, match="cannot reduce"):
        dist.all_reduce(torch.zeros(2, dtype=torch.int16), group=group)
    with pytest.raises(ValueError, match="no mean of Int"):
        dist.all_reduce(torch.zeros(2, dtype=torch.int32), dist.ReduceOp.AVG, group=group)
    with pytest.raises(ValueError, match="dense"):
        group.allreduce([torch.zeros(4)[::2]]).wait()
    with pytest.raises(RuntimeError, match="does not support send"):
        dist.send(torch.zeros(2), 1 - dist.get_rank(), group=group)
    assert _is_sum(group)


def _is_sum(group: Any) -> bool:
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    return tensor.tolist() == [2, 2, 2]


def test_wrong_arguments_raise_at_once_and_do_no_harm() -> None:
    run_ranks(_wrong_arguments)


def _different_collectives() -> None:
    first, group = dist.get_rank() == 0, _shm()
    different = dist.all_reduce if first else partial(dist.broadcast, src=0)
    with pytest.raises(
        dist.DistBackendError, match=r"rank 0 began an all-reduce of float32 \(sum\) of 8 bytes, rank 1 a br"
    ):
        different(torch.zeros(2), group=group)
    group, split = _shm(), [1, 1] if first else [2, 0]
    with pytest.raises(dist.DistBackendError, match=r"sends 8 bytes, rank . one that expects 4 of"):
        dist.all_to_all_single(torch.zeros(2), torch.zeros(2), split, [2, 0], group=group)


def test_different_collectives_raise_on_all_ranks() -> None:
    run_ranks(_different_collectives)


# ----------------------------------------------------------------------------- failures


def _time_out() -> str:
    group = _shm(0.3)
    if dist.get_rank() == 0:
        with pytest.raises(dist.DistBackendError, match="timed out waiting for rank 1, in collective 1, an all-reduce"):
            dist.all_reduce(torch.zeros(2), group=group)
    dist.barrier()
    with pytest.raises(dist.DistBackendError, match="noticed by rank 0"):  # at once, and for good
        dist.all_reduce(torch.zeros(2), group=group)
    assert _is_sum(_shm())
    return "done"


def test_a_time_out_names_who_is_missing_and_ends_the_group() -> None:
    assert run_ranks(_time_out) == ["done"] * 2


def _abort() -> None:
    group = _shm()
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.zeros(2), group=group, async_op=True)
        future = work.get_future()
        group._get_backend(torch.device("cpu")).abort()
        with pytest.raises(RuntimeError, match="aborted the group"):
            future.wait()
    dist.barrier()
    with pytest.raises(dist.DistBackendError, match="aborted the group"):
        dist.all_reduce(torch.zeros(2), group=group)


def test_waits_can_be_broken_off() -> None:
    run_ranks(_abort)


def _one_dies(how: str) -> str:
    group = _shm(30 if how == "kill" else 1)
    tensor = torch.zeros(1_000_000)
    for _ in range(5):
        dist.all_reduce(tensor, group=group)
    if dist.get_rank() == 1:
        signal_self(signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    try:
        dist.all_reduce(tensor, group=group)
    except dist.DistBackendError as error:
        return str(error)
    return "no error"


def test_a_rank_that_dies_is_noticed_and_leaves_nothing() -> None:
    before = set(Path("/dev/shm").iterdir())
    ended = run_with_fault(_one_dies, "kill", world_size=3)

    assert [end.code for end in ended] == [0, -signal.SIGKILL, 0], [end.error for end in ended]
    assert all("the process of rank 1 has ended" in ended[rank].value for rank in (0, 2))
    assert all(ended[rank].seconds < 5 for rank in (0, 2))
    assert set(Path("/dev/shm").iterdir()) <= before


def test_a_rank_that_stops_is_noticed_within_the_time_out() -> None:
    ended = run_with_fault(_one_dies, "stop", world_size=2)

    assert ended[0].code == 0
    assert "timed out waiting for rank 1" in ended[0].value


def _one_leaves() -> None:
    group = _shm()
    tensor = torch.ones(4)
    dist.all_reduce(tensor, group=group)
    dist.barrier()
    if dist.get_rank() == 1:
        dist.destroy_process_group(group)
    else:
        with pytest.raises(dist.DistBackendError, match="rank 1 has left the group"):
            dist.all_reduce(tensor, group=group)
    dist.barrier()


def test_a_rank_that_has_left_is_not_waited_for() -> None:
    run_ranks(_one_leaves)


def _forked() -> None:
    group = _shm()
    memory = group._get_backend(torch.device("cpu")).allocate_tensor(
        1_000_000, dtype=torch.float32, device=torch.device("cpu")
    )
    memory.fill_(1.0)
    child = os.fork()
    if child == 0:
        del memory  # not the parent's
        os._exit(0)
    os.waitpid(child, 0)
    dist.all_reduce(memory, group=group)
    assert torch.equal(memory, torch.full_like(memory, 2.0))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_process_does_not_touch_the_memory() -> None:
    run_ranks(_forked)


def _no_memory_of_others() -> None:
    if dist.get_rank() == 1:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))  # less than what another rank's memory reserves
    with pytest.raises(RuntimeError, match="rank 1 cannot share memory: rank 0: its memory cannot be mapped"):
        _shm()


def test_ranks_that_cannot_share_memory_raise_on_all_ranks() -> None:
    run_ranks(_no_memory_of_others)


# ----------------------------------------------------------------------------- memory order


def test_threads_in_place_of_ranks_race_for_nothing(tmp_path: Path) -> None:
    sources = Path(build.__file__).parent / "shm"
    program = tmp_path / "threads"
    files = [
        Path(__file__).parent / "shm_threads.cpp",
        *(sources / f"{name}.cpp" for name in ("board", "collective", "memory")),
    ]
    include = [f"-isystem{path}" for path in cpp_extension.include_paths()]
    command = [
        "c++",
        "-std=c++20",
        "-O1",
        "-g",
        "-fsanitize=thread",
        f"-I{sources}",
        *include,
        *files,
        "-o",
        program,
        "-pthread",
    ]
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode:
        assert "tsan" in built.stderr, built.stderr
        pytest.skip("no ThreadSanitizer")
    ran = subprocess.run([program], capture_output=True, text=True, timeout=200)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "done\n", "")
