"""The simulated device itself: operators come out right however late they run, and a missing wait shows."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import sim
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn

pytestmark = pytest.mark.ranks


def alone(fn: Callable[..., Any], *args: Any) -> Any:
    """Run ``fn`` in a process of its own, which has the device."""
    return run_ranks(fn, *args, world_size=1)[0]


# ---------------------------------------------------------------------- operators


def _algebra(a: Tensor, b: Tensor) -> Any:
    return (
        *torch.linalg.qr(a),
        torch.linalg.solve(a, b),
        torch.linalg.cholesky(a @ a.T + torch.eye(5, device=a.device)),
    )


def _views(a: Tensor, b: Tensor) -> Any:
    pairs = torch.view_as_real(torch.complex(a, b)) * 2
    return a.t().reshape(-1)[3:9].view(2, 3) + 1, a[1:3, ::2] + 1, a[:1].expand(3, 5) + 1, a.unfold(0, 2, 1), pairs


def _indexing(a: Tensor, b: Tensor) -> Any:
    signs, rows = (b > 0).long(), torch.tensor([0, 1], device=a.device)
    written = a.clone().index_put_((rows,), b[:2]).masked_fill_(b > 1, 0)
    return a.gather(0, signs), torch.zeros_like(a).scatter_(0, signs, a), a[rows], written


def _made_there(a: Tensor, b: Tensor) -> Any:
    like = {"device": a.device}
    return torch.arange(7, **like), torch.full((3,), 2.5, **like), torch.tensor([1, 2], **like), torch.zeros_like(a)


OPERATORS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "pointwise": lambda a, b: (a + b * 2, a.maximum(b), torch.where(a > 0, a, b), (a > 0) * 2.5, a.clamp(-1, 1)),
    "reductions": lambda a, b: (a.sum(), a.mean(0), a.norm(dim=1), a.abs().amax(1), (a > 0).any(), *torch.var_mean(a)),
    "products": lambda a, b: (a @ b, torch.bmm(a[None], b[None]), torch.einsum("ij,jk->ik", a, b), a[0].dot(b[0])),
    "views": _views,
    "bits": lambda a, b: (a.view(torch.int32), (a > 0).to(torch.uint8) << 2),
    "lists": lambda a, b: (torch.cat([a, b]), torch.stack([a, b], 1), *torch._foreach_mul([a, b], 2.0), *a.split(2)),
    "dtypes": lambda a, b: (a.half(), a.bfloat16() * 2, a.double() + b, (a * 9).round().to(torch.int8), a.long()),
    "indexing": _indexing,
    "selection": lambda a, b: (*a.topk(2), *a.sort(), a.kthvalue(2).values, torch.searchsorted(a.sort().values, b)),
    "algebra": _algebra,
    "values decide the shape": lambda a, b: ((a > 0).nonzero(), a[a > 0], (a > 0).unique()),
    "to the host": lambda a, b: (a.sum().item(), a.tolist(), torch.equal(a, b), torch.allclose(a, a), bool(a.any())),
    "made there": _made_there,
    "out": lambda a, b: (torch.mul(a, b, out=torch.empty(0, device=a.device)), torch.mm(a, b, out=torch.empty_like(a))),
}


def _compare_operators() -> None:
    device = sim.join_world(delayed=0.5, longest_ms=0.5)
    a, b = torch.randn(5, 5), torch.randn(5, 5)
    for name, operator in OPERATORS.items():
        expected, found = operator(a, b), operator(a.to(device), b.to(device))
        for wanted, got in zip(expected, found, strict=True):
            if isinstance(wanted, Tensor):
                assert got.device.type == "sim", name
                assert got.dtype == wanted.dtype, name
                torch.testing.assert_close(got.cpu(), wanted, rtol=1e-5, atol=1e-6)
            else:
                assert got == wanted, name
    with pytest.raises(RuntimeError, match="must match the size"):
        a.to(device) + torch.zeros(2, 7, device=device)


def test_operators_give_what_the_cpu_gives() -> None:
    alone(_compare_operators)


def _train(device: torch.device, make: Callable[[Any], torch.optim.Optimizer]) -> list[Tensor]:
    torch.manual_seed(0)
    convolution = nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    net = nn.Sequential(convolution, nn.Linear(36, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)).to(device)
    optimizer = make(net.parameters())
    for _ in range(4):
        batch, labels = torch.randn(6, 2, 5, 5).to(device), torch.arange(6).remainder(3).to(device)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(batch), labels).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    return [value.cpu() for value in net.state_dict().values()]


def _compare_training() -> None:
    device = sim.join_world(delayed=0.3, longest_ms=0.5)
    for make in (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), lambda p: torch.optim.AdamW(p, 0.01)):
        for found, expected in zip(_train(device, make), _train(torch.device("cpu"), make), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_model_trains_as_on_the_cpu() -> None:
    alone(_compare_training)


def _random_numbers() -> None:
    device = sim.join_world()
    torch.manual_seed(1)
    first = torch.rand(5, device=device)
    torch.manual_seed(1)
    assert torch.equal(first, torch.rand(5, device=device))
    generator = torch.Generator(device).manual_seed(3)
    second = torch.randn(5, generator=generator, device=device)
    assert torch.equal(second, torch.randn(5, generator=generator.manual_seed(3), device=device))
    assert not torch.equal(second, torch.randn(5, generator=generator, device=device))


def test_random_numbers_follow_their_seed() -> None:
    alone(_random_numbers)


def _fail_later() -> None:
    device = sim.join_world()
    values, index = torch.zeros(3, device=device), torch.tensor([7], device=device)
    taken = values.gather(0, index)
    with pytest.raises(RuntimeError, match="queued on the simulated device failed: index 7 is out of bounds"):
        taken.cpu()
    assert values.tolist() == [0.0] * 3  # told once


def test_the_host_hears_of_an_error_when_it_next_waits() -> None:
    alone(_fail_later)


# ---------------------------------------------------------------------- streams, events, memory


def _read_while_written(wait: bool) -> float:
    device = sim.join_world(delayed=0)
    value, producer = torch.zeros(1, device=device), torch.Stream(device=device)
    torch.accelerator.synchronize()
    with producer:
        sim.sleep(50)
        value.fill_(1)
    if wait:
        torch.accelerator.current_stream().wait_stream(producer)
    return (value + 1).item()


def test_a_missing_wait_between_streams_gives_a_wrong_value() -> None:
    assert alone(_read_while_written, True) == 2
    assert alone(_read_while_written, False) == 1


def _order_of_events() -> None:
    device = sim.join_world(delayed=0)
    producer, consumer = torch.Stream(device=device), torch.Stream(device=device)
    event, before = torch.Event(device=device, enable_timing=True), torch.Event(device=device, enable_timing=True)
    value = torch.zeros(1, device=device)
    torch.accelerator.synchronize()
    with producer:
        before.record()
        sim.sleep(40)
        value.fill_(1)
        event.record()
    consumer.wait_event(event)  # the first record, whatever comes after
    assert not event.query()
    with producer:
        sim.sleep(40)
        value.fill_(2)
        event.record()
    with consumer:
        seen = value.clone()
    consumer.synchronize()
    assert not event.query()
    event.synchronize()
    assert event.query()
    assert (seen.item(), value.item()) == (1, 2)
    assert before.elapsed_time(event) >= 80


def test_a_wait_refers_to_what_was_recorded_when_it_was_queued() -> None:
    alone(_order_of_events)


def _queue_much() -> None:
    device = sim.join_world()
    weights, total, pinned = (
        torch.randn(8, 8, device=device),
        torch.zeros((), device=device),
        torch.empty((), pin_memory=True),
    )
    pinned.fill_(-1)
    torch.accelerator.synchronize()
    with sim.no_host_waits():
        sim.sleep(600)
        began = time.perf_counter()
        for _ in range(50):
            total += (weights @ weights).norm()
        pinned.copy_(total, non_blocking=True)
        assert time.perf_counter() - began < 0.3  # 0.01 on a quiet machine
        assert pinned == -1  # not there yet
    torch.accelerator.current_stream().synchronize()
    assert time.perf_counter() - began > 0.5
    assert pinned > 0


def test_the_host_runs_ahead_of_the_device() -> None:
    alone(_queue_much)


def _wait_in_all_ways() -> None:
    device = sim.join_world()
    value = torch.ones(2, device=device)
    waits: dict[str, Callable[[], Any]] = {
        "item": lambda: value.sum().item(),
        "cpu": lambda: value.cpu(),
        "tolist": lambda: value.tolist(),
        "bool": lambda: bool(value.any()),
        "nonzero": lambda: value.nonzero(),
        "from the host": lambda: torch.zeros(2).to(device),
        "to pageable memory": lambda: torch.zeros(2).copy_(value, non_blocking=True),
        "synchronize": lambda: torch.accelerator.synchronize(),
    }
    for name, wait in waits.items():
        before = sim.host_waits()
        sim.sleep(50)  # longer than the host is held up on a busy machine
        with sim.no_host_waits(), pytest.raises(RuntimeError, match="host waits for the simulated device"):
            wait()
        assert sim.host_waits() == before
        wait()
        assert sim.host_waits() > before, name
    sim.sleep(5)
    with sim.no_host_waits():
        torch.zeros(2, pin_memory=True).to(device, non_blocking=True)
        torch.empty(2, pin_memory=True).copy_(value, non_blocking=True)


def test_what_makes_the_host_wait_is_noticed() -> None:
    alone(_wait_in_all_ways)


def _let_go_while_in_use(record: bool) -> list[float]:
    device = sim.join_world(delayed=0)
    reader, value = torch.Stream(device=device), torch.ones(2, device=device)
    reader.wait_stream(torch.accelerator.current_stream())
    with reader:
        sim.sleep(50)
        copy = value + 1
    if record:
        value.record_stream(reader)
    del value
    torch.zeros(2, device=device)
    reader.synchronize()
    return copy.tolist()


def test_memory_let_go_of_while_another_stream_uses_it_is_overwritten() -> None:
    assert alone(_let_go_while_in_use, True) == [2, 2]
    assert alone(_let_go_while_in_use, False) != [2, 2]


def _streams_of_backward() -> tuple[bool, list[float]]:
    device = sim.join_world()
    stream, weight, seen = torch.Stream(device=device), torch.ones(2, device=device, requires_grad=True), []
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        product = weight * 3
        product.register_hook(lambda gradient: seen.append(torch.accelerator.current_stream() == stream))
        loss = product.sum()
    torch.accelerator.current_stream().wait_stream(stream)
    loss.backward()
    assert weight.grad is not None
    return seen[0], weight.grad.tolist()


def test_backward_runs_on_the_stream_of_the_forward() -> None:
    assert alone(_streams_of_backward) == (True, [3, 3])


# ---------------------------------------------------------------------- collectives


def _collectives() -> dict[str, list[float]]:
    device, rank = sim.join_world(delayed=0.5, longest_ms=1), dist.get_rank()
    own, results = torch.tensor([rank + 1.0, rank + 3.0], device=device), {}
    results["all_reduce"] = own.clone()
    dist.all_reduce(results["all_reduce"])
    results["broadcast"] = own.clone()
    dist.broadcast(results["broadcast"], 1)
    parts = [torch.empty(2, device=device) for _ in range(2)]
    dist.all_gather(parts, own)
    results["all_gather"] = torch.cat(parts)
    group: Any = dist.group.WORLD
    results["into one"] = torch.empty(4, device=device)
    group._allgather_base(results["into one"], own).wait()
    results["reduce_scatter"] = torch.empty(1, device=device)
    group._reduce_scatter_base(results["reduce_scatter"], own).wait()
    results["all_to_all"] = torch.empty(2, device=device)
    dist.all_to_all_single(results["all_to_all"], own)
    work = dist.all_reduce(own, async_op=True)
    assert work is not None
    results["future"] = work.get_future().then(lambda done: done.value()[0] * 2).wait()
    dist.barrier()
    return {name: result.tolist() for name, result in results.items()}


def test_collectives_give_what_gloo_gives() -> None:
    for rank, results in enumerate(run_ranks(_collectives)):
        assert results == {
            "all_reduce": [3, 7],
            "broadcast": [2, 4],
            "all_gather": [1, 3, 2, 4],
            "into one": [1, 3, 2, 4],
            "reduce_scatter": [[3], [7]][rank],
            "all_to_all": [[1, 2], [3, 4]][rank],
            "future": [6, 14],
        }


def _sum_of_late_values(wait_before: bool, wait_after: bool) -> list[float]:
    """Sum what a slow stream is still writing, on another one, and read the slow sum on the first."""
    device = sim.join_world(delayed=0)
    sim.slow_down_collectives(60)
    compute, comm = torch.accelerator.current_stream(), torch.Stream(device=device)
    value = torch.zeros(2, device=device)
    torch.accelerator.synchronize()
    with sim.no_host_waits():
        sim.sleep(30)
        value.fill_(dist.get_rank() + 1)
        if wait_before:
            comm.wait_stream(compute)
        with comm:
            work = dist.all_reduce(value, async_op=True)
        assert work is not None
        assert not work.is_completed()
        if wait_after:
            work.wait()
        copy = value.clone()
    result = copy.tolist()
    torch.accelerator.synchronize()
    return result


def test_collectives_are_ordered_by_streams() -> None:
    assert run_ranks(_sum_of_late_values, True, True) == [[3, 3], [3, 3]]
    assert run_ranks(_sum_of_late_values, True, False) == [[1, 1], [2, 2]]


def _sum_before_written() -> list[float]:
    device = sim.join_world(delayed=0)
    comm, value = torch.Stream(device=device), torch.zeros(2, device=device)
    torch.accelerator.synchronize()
    sim.sleep(100)
    value.fill_(dist.get_rank() + 1)
    with comm:
        total = value.clone()
        dist.all_reduce(total)
    comm.synchronize()
    return total.tolist()


def test_a_collective_does_not_wait_for_other_streams_than_its_own() -> None:
    assert run_ranks(_sum_before_written) == [[0, 0], [0, 0]]


def _differ_in_order() -> str:
    device = sim.join_world()
    groups = [dist.new_group(backend="simccl", timeout=timedelta(seconds=2)) for _ in range(2)]
    values = [torch.ones(2, device=device), torch.ones(2, device=device)]
    for index in (0, 1) if dist.get_rank() == 0 else (1, 0):
        dist.all_reduce(values[index], group=groups[index])
    began = time.perf_counter()
    try:
        torch.accelerator.synchronize()
    except RuntimeError as error:
        return f"{str(error).splitlines()[0]} after {time.perf_counter() - began > 1}"
    return "no error"


def test_ranks_that_differ_in_the_order_of_collectives_hang() -> None:
    outcomes = run_ranks(_differ_in_order)
    assert any("failed" in outcome and outcome.endswith("True") for outcome in outcomes), outcomes
