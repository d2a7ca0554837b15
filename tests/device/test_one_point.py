"""No rank acts on what the others cannot know at the same point: what one finds out alone is settled later."""

import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal

import pytest
import sim
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn

import lightning_ddp_hooks as ldh

pytestmark = pytest.mark.ranks

Backend = Literal["python", "native"]
BACKENDS = ["python", "native"]
WARM = 3  # backwards after which buckets are laid out for good


class Net(nn.Module):
    """Layers that a rank can leave out, one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("cache", torch.zeros(1))

    def forward(self, x: Tensor, without: int | None = None) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = x if index == without else layer(x).tanh()
        return x


class Ranks:
    """One rank's end of a small training run on the device."""

    def __init__(self, backend: Backend, hook: Any = None, **settings: Any) -> None:
        self.rank = dist.get_rank()
        self.device = sim.join_world(seed=self.rank, delayed=0.2, longest_ms=1)
        torch.manual_seed(0)
        self.net = Net().to(self.device)
        self.model = ldh.DataParallel(
            self.net, comm_hook=hook, bucket_cap_mb=0.0005, first_bucket_mb=0.0003, reducer_backend=backend, **settings
        )
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1)
        for step in range(WARM):
            self.step(step)

    def loss(self, step: int, without: int | None = None) -> Tensor:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + self.rank)).to(self.device)
        return self.model(x, without).square().mean()  # type: ignore[no-any-return]

    def step(self, step: int, without: int | None = None) -> None:
        self.optimizer.zero_grad()
        self.loss(step, without).backward()
        self.optimizer.step()

    def meet(self) -> None:
        """What a Trainer does where all ranks wait for each other: collectives of somebody else's."""
        self.model.reducer.settle_status()
        dist.all_reduce(torch.ones(1))

    def replicas_are_alike(self) -> bool:
        flat = torch.cat([p.detach().flatten() for p in self.net.parameters()]).cpu()
        gathered = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, flat)
        return all(torch.equal(other, flat) for other in gathered)


def _what_raises(call: Callable[..., None], *args: Any, **kwargs: Any) -> str:
    try:
        call(*args, **kwargs)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def _missing_in_mid_run(backend: Backend, hook: Any) -> list[Any]:
    run = Ranks(backend, hook)
    first = _what_raises(run.step, WARM, without=2 if run.rank == 1 else None)
    alike = run.replicas_are_alike()
    return [first, alike, _what_raises(run.step, WARM + 1)]


@pytest.mark.parametrize("hook", [None, "bf16", "int8"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_missing_gradient_counts_as_zeros_and_raises_on_all_ranks_at_the_end_of_the_next_backward(
    backend: Backend, hook: Any
) -> None:
    for first, alike, second in run_ranks(_missing_in_mid_run, backend, hook):
        assert first == "nothing"
        assert alike
        assert "Parameters got no gradient in this backward:\n  'layers.2.weight' on rank 1" in second


def _missing_at_the_end(backend: Backend, hook: Any) -> list[Any]:
    run = Ranks(backend, hook)
    first = _what_raises(run.step, WARM, without=2 if run.rank == 1 else None)
    return [first, _what_raises(run.meet)]


@pytest.mark.parametrize("hook", [None, "bf16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_in_the_last_backward_it_raises_where_ranks_meet(backend: Backend, hook: Any) -> None:
    for first, second in run_ranks(_missing_at_the_end, backend, hook):
        assert first == "nothing"
        assert "'layers.2.weight' on rank 1" in second


def _nothing_is_wrong(backend: Backend, hook: Any) -> list[Any]:
    run = Ranks(backend, hook)
    found = [_what_raises(run.step, step) for step in range(WARM, WARM + 4)]
    return [*found, _what_raises(run.meet), _what_raises(run.meet)]


@pytest.mark.parametrize("hook", [None, "bf16", "int8", "powersgd"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_where_nothing_is_wrong_nothing_is_raised(backend: Backend, hook: Any) -> None:
    for found in run_ranks(_nothing_is_wrong, backend, hook):
        assert set(found) == {"nothing"}


def _no_loss(backend: Backend, everywhere: bool) -> list[Any]:
    """Step as a Trainer does: a rank without a loss does its part in the window of the backward."""
    run = Ranks(backend)
    reducer = run.model.reducer
    skipped = []
    for step in range(WARM, WARM + 4):
        run.optimizer.zero_grad()
        has_loss = step != WARM + 1 or (run.rank == 0 and not everywhere)
        loss = run.loss(step)
        with reducer.backward_window():
            if has_loss:
                loss.backward()
        skipped.append(reducer.skip_step)
        if not reducer.skip_step:
            run.optimizer.step()
    return [skipped, _what_raises(run.meet), run.replicas_are_alike()]


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_without_loss_takes_part_and_all_skip_if_none_had_one(backend: Backend, everywhere: bool) -> None:
    for skipped, raised, alike in run_ranks(_no_loss, backend, everywhere):
        assert skipped == [False, everywhere, False, False]
        assert raised == "nothing"
        assert alike


class _Boom(Exception):
    pass


def _aborted(backend: Backend, ranks: list[int]) -> list[Any]:
    run = Ranks(backend)
    fails = False

    def boom(grad: Tensor) -> None:
        if fails:
            raise _Boom

    run.net.layers[1].register_forward_hook(lambda m, a, out: out.requires_grad and out.register_hook(boom) and None)
    found = []
    for step in range(WARM, WARM + 4):
        fails = step == WARM + 1 and run.rank in ranks
        try:
            found.append(_what_raises(run.step, step))
        except _Boom:
            found.append("boom")
        if found[-1] not in ("boom", "nothing"):
            return found
    return [*found, _what_raises(run.meet), run.replicas_are_alike()]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backward_that_an_exception_ends_on_all_ranks_leaves_the_next_ones_right(backend: Backend) -> None:
    for found in run_ranks(_aborted, backend, [0, 1]):
        assert found == ["nothing", "boom", "nothing", "nothing", "nothing", True]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backward_that_an_exception_ends_on_one_rank_raises_on_all(backend: Backend) -> None:
    for found in run_ranks(_aborted, backend, [1]):
        assert "The backward of rank 1 was ended by an exception" in found[-1]


def _unfreeze(backend: Backend, on: list[int]) -> list[Any]:
    run = Ranks(backend)
    found: list[Any] = []
    weights = [run.net.layers[0].weight.detach().cpu().clone()]
    for step in range(WARM, WARM + 8):
        if step in (WARM, WARM + 3) and run.rank in on:
            run.net.layers[0].requires_grad_(step > WARM)
        found.append(_what_raises(run.step, step))
        if found[-1] != "nothing":
            return [found, [], False]
        weights.append(run.net.layers[0].weight.detach().cpu().clone())
    moved = [not torch.equal(a, b) for a, b in pairwise(weights)]
    return [found, moved, run.replicas_are_alike()]


@pytest.mark.parametrize("backend", BACKENDS)
def test_freezing_and_unfreezing_need_no_flag(backend: Backend) -> None:
    for found, moved, alike in run_ranks(_unfreeze, backend, [0, 1]):
        assert set(found) == {"nothing"}
        # What is unfrozen in a step is known to all ranks at the end of the next one, and is trained from that one on.
        assert moved[:3] == [False, False, False]
        assert moved[4:] == [True] * 4
        assert alike


@pytest.mark.parametrize("backend", BACKENDS)
def test_freezing_on_one_rank_raises_on_all(backend: Backend) -> None:
    for found, _, _ in run_ranks(_unfreeze, backend, [1]):
        assert "requires a gradient on rank 0 but not on rank 1" in found[-1]
        assert len(found) == 2  # one backward late


def _replace_a_buffer(backend: Backend, on: list[int]) -> list[Any]:
    run = Ranks(backend)
    found: list[Any] = []
    for step in range(WARM, WARM + 5):
        if step == WARM + 1 and run.rank in on:
            run.net.cache = torch.full((3,), float(run.rank), device=run.device)
        found.append(_what_raises(run.step, step))
        if found[-1] != "nothing":
            return found
    return [*found, _what_raises(run.meet), run.net.cache.tolist()]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_buffer_of_another_shape_on_one_rank_raises_on_all(backend: Backend) -> None:
    for rank in (0, 1):
        for found in run_ranks(_replace_a_buffer, backend, [rank]):
            assert found[:2] == ["nothing"] * 2
            assert len(found) == 3
            assert "cache: shape (3,)" in found[2]
    for found in run_ranks(_replace_a_buffer, backend, [0, 1]):
        assert found == ["nothing"] * 6 + [[0, 0, 0]]


def _settled_in_mid_window(backend: Backend) -> list[Any]:
    run = Ranks(backend)
    run.net.layers[0].requires_grad_(False)
    found = [_what_raises(run.step, WARM)]
    run.optimizer.zero_grad()
    with run.model.no_sync():
        run.loss(WARM + 1).backward()
    found.append(_what_raises(run.meet))  # lays out anew
    run.loss(WARM + 2, without=2).backward()  # of that layer there is a gradient from before
    run.optimizer.step()
    return [*found, _what_raises(run.step, WARM + 3), _what_raises(run.meet), run.replicas_are_alike()]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_new_layout_in_mid_window_knows_of_the_gradients_before_it(backend: Backend) -> None:
    assert run_ranks(_settled_in_mid_window, backend) == [["nothing"] * 4 + [True]] * 2


def _swapped_in_each_step(backend: Backend, settings: dict[str, Any]) -> list[Any]:
    run = Ranks(backend, **settings)
    run.net.layers[1].requires_grad_(False)
    for step in range(WARM, 2 * WARM + 1):
        run.step(step)
    trained = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(6):
            for index in (0, 1):
                run.net.layers[index].requires_grad_(index != step % 2)
            before = run.net.layers[(step + 1) % 2].weight.detach().cpu().clone()
            run.step(10 + step)
            trained.append(not torch.equal(before, run.net.layers[(step + 1) % 2].weight.detach().cpu()))
    return [trained, sum("in one backward only" in str(w.message) for w in caught), run.replicas_are_alike()]


@pytest.mark.parametrize("backend", BACKENDS)
def test_parameters_may_be_swapped_in_each_step_once_all_ranks_know(backend: Backend) -> None:
    for trained, warned, alike in run_ranks(_swapped_in_each_step, backend, {}):
        assert trained == [False] + [True] * 5
        assert (warned, alike) == (1, True)
    for trained, warned, alike in run_ranks(_swapped_in_each_step, backend, {"find_unused_parameters": True}):
        assert trained == [True] * 6
        assert (warned, alike) == (0, True)


def _status_behind_a_slow_kernel(backend: Backend, before: str) -> list[Any]:
    """The status is read and written again on two streams: a slow one must not lose a count."""
    run = Ranks(backend)
    stream = run.model.reducer._in_flight.streams[-1]
    read = stream.read

    def read_late(status: Tensor) -> Any:
        sim.sleep(30, stream.stream)
        return read(status)

    if before == "the read":
        stream.read = read_late  # type: ignore[method-assign]
    found = []
    for step in range(WARM, WARM + 6):
        if before == "the backward":
            sim.sleep(20, stream.stream)
        found.append(_what_raises(run.step, step, without=1 if step == WARM + 2 and run.rank else None))
        if found[-1] != "nothing":
            break
    return found


@pytest.mark.parametrize("before", ["the backward", "the read"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_count_is_lost_on_a_slow_communication_stream(backend: Backend, before: str) -> None:
    for found in run_ranks(_status_behind_a_slow_kernel, backend, before):
        assert found[:3] == ["nothing"] * 3
        assert len(found) == 4
        assert "'layers.1.weight' on rank 1" in found[3]
