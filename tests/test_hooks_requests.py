"""Hooks with any requests, in any number: the same order on all ranks, and exact results, whatever the timing."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hook_tools import Rig
from ranks import run_ranks
from torch import Tensor, nn

import lightning_ddp_hooks as ldh
from lightning_ddp_hooks import comm
from lightning_ddp_hooks.hooks import BindContext, BoundHook, CommHook, PerParameter, Phases, Rule, requests
from lightning_ddp_hooks.reducer.bucket import Bucket, GradBucket
from lightning_ddp_hooks.reducer.issue import issue_collective
from lightning_ddp_hooks.reducer.layout import BucketLayout
from lightning_ddp_hooks.reducer.queue import CollectiveQueue

COLLECTIVES = ("all_reduce", "all_to_all", "all_gather", "reduce_scatter", "broadcast", "in_part", "gather_in_part")
ORDERS = ("in_order", "end", "wait")
NUMEL = 12  # which 2 and 3 ranks divide


def make_script(step: int, index: int) -> list[Any]:
    """What the hook asks for a bucket: the same on all ranks, another thing for each bucket and step."""
    draw = random.Random(1000 * step + index)
    script: list[Any] = []
    for _ in range(draw.randint(1, 5)):
        if draw.random() < 0.3:
            script.append(draw.choice(ORDERS))
        kinds = tuple(draw.choice(COLLECTIVES) for _ in range(draw.choice((1, 1, 1, 2, 3))))
        script.append(kinds if len(kinds) > 1 else kinds[0])
    return script


def values(rank: int, step: int, index: int, place: int) -> Tensor:
    """Small whole numbers, whose sums are exact; any rank can compute those of all."""
    generator = torch.Generator().manual_seed(((step * 50 + index) * 50 + place) * 10 + rank)
    return torch.randint(-9, 10, (NUMEL,), generator=generator).float()


class _Done:
    def wait(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Scripted(CommHook):
    """Carries out the scripts, and adds up what comes back."""

    pauses: bool = False
    only: tuple[str, ...] = ()

    def bind(self, context: BindContext) -> BoundHook:
        return BoundScripted(self, context)


class BoundScripted(BoundHook):
    name = "Scripted"

    def __init__(self, declared: Scripted, context: BindContext) -> None:
        self.rank, self.world = context.rank, context.world_size
        self.step = context.step
        self.parts = [list(range(self.world - 1)), [self.world - 1]]
        self.subgroup = context.subgroup(self.parts)
        self.pauses = random.Random(context.rank) if declared.pauses else None
        self.checked = 0

    def request(self, kind: str, step: int, index: int, place: int) -> tuple[requests.Request, Callable[[Any], None]]:
        """Return a request, and what checks its result."""
        everyone = [values(rank, step, index, place) for rank in range(self.world)]
        own, total = everyone[self.rank].clone(), torch.stack(everyone).sum(0)
        part = next(part for part in self.parts if self.rank in part)
        inside = [everyone[rank] for rank in part]
        shard = slice(self.rank * NUMEL // self.world, (self.rank + 1) * NUMEL // self.world)
        made: dict[str, tuple[Callable[[], requests.Request], Tensor]] = {
            "all_reduce": (lambda: requests.AllReduce(own), total),
            "all_to_all": (lambda: requests.AllToAll(own), torch.cat([theirs[shard] for theirs in everyone])),
            "all_gather": (lambda: requests.AllGather(own), torch.cat(everyone)),
            "reduce_scatter": (lambda: requests.ReduceScatter(own), total[shard]),
            "broadcast": (lambda: requests.Broadcast(own, place % self.world), everyone[place % self.world]),
            "in_part": (lambda: requests.AllReduce(own, self.subgroup), torch.stack(inside).sum(0)),
            "gather_in_part": (lambda: requests.AllGather(own, subgroup=self.subgroup), torch.cat(inside)),
        }
        make, expected = made[kind]

        def check(result: Any) -> None:
            assert torch.equal(result.view(-1), expected), (kind, step, index, place, self.rank)
            self.checked += 1

        return make(), check

    def reduce(self, bucket: GradBucket) -> Phases:
        step, index = self.step(), bucket.index()
        orders = {"in_order": requests.InOrder, "end": requests.EndOfBackward}
        for place, kind in enumerate(make_script(step, index)):
            if self.pauses is not None:
                time.sleep(self.pauses.random() * 0.003)
            if kind == "wait":
                handle = _Done()
                assert (yield requests.Wait(handle)) is handle
            elif kind in ORDERS:
                assert (yield orders[kind]()) is None
            elif isinstance(kind, str):
                request, check = self.request(kind, step, index, place)
                check((yield request))
            else:
                pairs = [self.request(its, step, index, 10 * place + n) for n, its in enumerate(kind)]
                results = yield requests.Together([request for request, _ in pairs])
                for (_, check), result in zip(pairs, results, strict=True):
                    check(result)
        yield requests.AllReduce(bucket.buffer())
        return bucket.buffer().div_(bucket.divisor)


def scripted_rounds(at_once: bool, steps: int) -> int:
    """Run all scripts with ranks that are slow at random; return how many results were compared."""
    rig = Rig(Scripted(pauses=True), [NUMEL] * 4, at_once=at_once)
    rig.delays = random.Random(77 + comm.rank(rig.group))
    for step in range(steps):
        gradients = [values(comm.rank(rig.group), step, index, 99) for index in range(4)]
        for index, reduced in enumerate(rig.step(gradients)):
            everyone = torch.stack([values(rank, step, index, 99) for rank in range(rig.world_size)])
            torch.testing.assert_close(reduced, everyone.mean(0))
    assert isinstance(rig.bound, BoundScripted)
    return rig.bound.checked


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("at_once", [False, True])
def test_every_request_of_every_bucket_has_the_exact_result(world_size: int, at_once: bool) -> None:
    checked = run_ranks(scripted_rounds, at_once, 12, world_size=world_size)
    assert checked[0] == checked[-1] > 150


# ---------------------------------------------------------------- the order, whatever is done when


class FakeGroup:
    """A communicator that records what is issued on it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.issued: list[Any] = []

    def size(self) -> int:
        return 2


class FakeWork:
    """A collective that is done at a time of its own, or when it is waited for.

    Args:
        draw: decides whether it is done when asked.
        queues: waiting only queues, as on a stream: it may still be going on after it.
    """

    def __init__(self, draw: random.Random, queues: bool) -> None:
        self._draw, self._queues, self._done = draw, queues, False

    def is_completed(self) -> bool:
        self._done = self._done or self._draw.random() < 0.4
        return self._done

    def wait(self) -> None:
        self._done = self._done or not self._queues


@pytest.fixture
def fake_comm(monkeypatch: pytest.MonkeyPatch) -> Callable[[random.Random, bool], list[FakeGroup]]:
    def install(draw: random.Random, queues: bool) -> list[FakeGroup]:
        groups = [FakeGroup("first")]

        def issue(kind: str, tensor: Tensor, group: FakeGroup) -> FakeWork:
            group.issued.append((kind, tuple(tensor.tolist())))
            return FakeWork(draw, queues)

        def make_group(*_: Any, **__: Any) -> FakeGroup:
            groups.append(FakeGroup(f"group {len(groups)}"))
            return groups[-1]

        monkeypatch.setattr(comm, "all_reduce", lambda tensor, group: issue("all_reduce", tensor, group))
        monkeypatch.setattr(comm, "broadcast", lambda tensor, group, src: issue("broadcast", tensor, group))
        for name in ("start_all_to_all", "start_all_gather", "start_reduce_scatter"):
            monkeypatch.setattr(comm, name, lambda out, tensor, group, name=name: issue(name, tensor, group))
        monkeypatch.setattr(comm, "new_group", make_group)
        monkeypatch.setattr(comm, "split_group", make_group)
        monkeypatch.setattr(comm, "rank", lambda group: 0)
        monkeypatch.setattr(comm, "backend_name", lambda group: "gloo")
        return groups

    return install


class Recorded(BoundHook):
    """Asks for what a script says, with tensors that tell each request apart."""

    name = "Recorded"

    def __init__(self, scripts: dict[int, list[Any]], subgroup: requests.Subgroup, draw: random.Random) -> None:
        self.scripts, self.subgroup, self.draw = scripts, subgroup, draw

    def _collective(self, kind: str, index: int, place: int, n: int) -> requests.Request:
        tensor = torch.tensor([index, place, n, 0], dtype=torch.float32)
        kinds: dict[str, Callable[[], requests.Request]] = {
            "all_reduce": lambda: requests.AllReduce(tensor),
            "all_to_all": lambda: requests.AllToAll(tensor),
            "all_gather": lambda: requests.AllGather(tensor),
            "reduce_scatter": lambda: requests.ReduceScatter(tensor),
            "broadcast": lambda: requests.Broadcast(tensor, 0),
            "in_part": lambda: requests.AllReduce(tensor, self.subgroup),
            "gather_in_part": lambda: requests.AllGather(tensor, subgroup=self.subgroup),
        }
        return kinds[kind]()

    def reduce(self, bucket: GradBucket) -> Phases:
        orders = {"in_order": requests.InOrder, "end": requests.EndOfBackward}
        for place, kind in enumerate(self.scripts[bucket.index()]):
            if kind == "wait":
                yield requests.Wait(FakeWork(self.draw, queues=False))
            elif kind in orders:
                yield orders[kind]()
            elif isinstance(kind, str):
                yield self._collective(kind, bucket.index(), place, 0)
            else:
                together = [self._collective(its, bucket.index(), place, n) for n, its in enumerate(kind)]
                yield requests.Together(together)
        return None


def a_bucket(index: int) -> tuple[GradBucket, Bucket]:
    param = torch.zeros(4)
    storage = Bucket(BucketLayout.build([0], [param]), [param], status=True)
    return GradBucket(storage, index, False, (f"p{index}",), 2.0), storage


def issued_by(
    groups: list[FakeGroup], draw: random.Random, scripts: list[dict[int, list[Any]]], at_once: bool
) -> dict[str, list[Any]]:
    """Run rounds of scripted buckets; return what came on each communicator, in order."""
    queue = CollectiveQueue(groups[0], at_once=at_once)  # type: ignore[arg-type]
    subgroup = queue.subgroup([[0, 1]])
    for script in scripts:
        queue.hook = Recorded(script, subgroup, draw)
        last = list(script)[-1]
        launched = [queue.launch(*a_bucket(index), sends_status=index == last) for index in script]
        queue.end_launches()
        for in_flight in sorted(launched, key=lambda _: draw.random()):
            in_flight.wait()
        queue.wait_for_status()
        queue.end_round()
    return {group.name: group.issued for group in groups}


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_each_communicator_sees_one_order_whatever_is_done_when(seed: int, at_once: bool, fake_comm: Any) -> None:
    indices = [3, 2, 0] if seed % 4 == 0 else list(range(1 + seed % 5))  # an averager's buckets do not count up
    scripts = [{index: make_script(10 * seed + step, index) for index in indices} for step in range(4)]
    if seed % 3 == 0:  # a bucket that only waits, at the end
        scripts = [{**script, indices[-1]: ["wait"] * (seed % 2)} for script in scripts]
    seen = []
    for timing in range(6):
        draw = random.Random(timing)
        seen.append(issued_by(fake_comm(draw, queues=at_once), draw, scripts, at_once))
    assert seen[0]["first"]
    assert all(other == seen[0] for other in seen[1:])
    if at_once:
        assert list(seen[0]) == ["first", "group 1"], "at once there is one communicator for the whole group"


@pytest.mark.parametrize("collectives", [1, 2, 3, 5])
def test_missing_lanes_are_made_once_and_phases_overlap_then(collectives: int, fake_comm: Any) -> None:
    groups = fake_comm(random.Random(0), queues=False)
    issued_by(groups, random.Random(0), [{n: ["all_reduce"] * collectives for n in range(3)}] * 3, at_once=False)
    assert len(groups) - 1 == min(collectives, 4), "the subgroup's, and one more for each further collective, up to 4"
    # From the second round on each lane has one collective of each bucket; the last one has what is beyond it, too.
    made = groups[2:]
    beyond = [0] * (len(made) - 1) + [2 * 3 * max(0, collectives - 4)]
    assert [len(group.issued) for group in made] == [2 * 3 + more for more in beyond[-len(made) :]][: len(made)]


# ---------------------------------------------------------------- what a newcomer writes


@dataclass(frozen=True, kw_only=True)
class HalfHalf(CommHook):
    """Mean of positive parts plus mean of negative parts: two collectives for each bucket."""

    def bind(self, context: BindContext) -> BoundHook:
        return BoundHalfHalf()

    def replicas_differ_from(self) -> None:
        return None


class BoundHalfHalf(BoundHook):
    name = "HalfHalf"

    def reduce(self, bucket: GradBucket) -> Phases:
        buffer = bucket.buffer()
        positive: Tensor = yield requests.AllReduce(buffer.clamp(min=0))
        negative: Tensor = yield requests.AllReduce(buffer.clamp(max=0))
        return (positive + negative) / bucket.divisor


class Slow(torch.autograd.Function):
    """Takes its time in the backward of one rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class SlowNet(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = Slow.apply(layer(x), self.seconds)  # type: ignore[no-untyped-call]
        return x


def two_collectives(hook: Any) -> list[float]:
    """Largest relative error of a gradient in each step, with one slow rank."""
    rank = comm.rank(comm.resolve_group(None))
    torch.manual_seed(0)
    net = SlowNet(0.02 if rank == 1 else 0.0)
    model = ldh.DataParallel(net, comm_hook=hook, bucket_cap_mb=0.01, first_bucket_mb=0.001)
    errors = []
    for step in range(3):
        net.zero_grad()
        torch.manual_seed(10 * step + rank)
        x = torch.randn(8, 64)
        model(x).square().mean().backward()
        grads = [param.grad.clone() for param in net.parameters() if param.grad is not None]
        exact = torch.autograd.grad(net(x).square().mean(), list(net.parameters()))
        for gradient in exact:
            comm.all_reduce(gradient, comm.resolve_group(None)).wait()
            gradient.div_(2)
        errors.append(max(float((a - b).norm() / b.norm()) for a, b in zip(grads, exact, strict=True)))
    return errors


def test_a_hook_with_two_collectives_is_exact_with_a_slow_rank() -> None:
    for errors in run_ranks(two_collectives, HalfHalf()):
        assert max(errors) < 1e-6


def torch_bucket_with_two_hooks() -> list[list[float]]:
    """Parameters of two hooks in one bucket, as torch's DDP hands it over."""
    rank = comm.rank(comm.resolve_group(None))
    hook = PerParameter([Rule(HalfHalf(), pattern="*0*")], default=Scripted())
    rig = Rig(hook, [NUMEL, NUMEL])
    rig.set_layout([[0, 1]])
    return [part.tolist() for step in range(4) for part in rig.step([values(rank, step, n, 99) for n in range(2)])]


def test_hooks_that_share_a_bucket_run_side_by_side() -> None:
    results = run_ranks(torch_bucket_with_two_hooks)
    expected = [((values(0, step, n, 99) + values(1, step, n, 99)) / 2).tolist() for step in range(4) for n in range(2)]
    assert results == [expected, expected]


@pytest.mark.parametrize("yielded", ["work", "tensor"])
def test_what_is_no_request_is_refused_with_the_remedy(yielded: str, fake_comm: Any) -> None:
    class Old(BoundHook):
        name = "Old"

        def reduce(self, bucket: GradBucket) -> Phases:
            yield FakeWork(random.Random(0), False) if yielded == "work" else bucket.buffer()  # type: ignore[misc]
            return None

    queue = CollectiveQueue(fake_comm(random.Random(0), False)[0], at_once=False, hook=Old())
    with pytest.raises(TypeError, match=r"Old yielded a (FakeWork|Tensor).*requests.AllReduce\(tensor\).*Wait"):
        queue.launch(*a_bucket(0))


class Pair:
    """A group of two ranks, of which nothing but the size is asked."""

    def size(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (requests.AllReduce([1.0]), "AllReduce: expected a tensor, got list"),
        (requests.AllReduce(torch.ones(3).expand(2, 3)), "AllReduce: expected a dense, contiguous tensor"),
        (requests.AllGather(torch.ones(4, 3).t()), "AllGather: expected a dense, contiguous tensor"),
        (requests.AllReduce(torch.ones(3).to_sparse()), "AllReduce: expected a dense, contiguous tensor"),
        (requests.AllToAll(torch.ones(3)), "AllToAll: 3 elements cannot be split into 2"),
        (requests.ReduceScatter(torch.ones(5)), "ReduceScatter: 5 elements cannot be split into 2"),
        (
            requests.AllToAll(torch.ones(3), sizes=((1, 1), (1, 2))),
            "expected sizes of 2 parts to send, 3 elements in all",
        ),
        (requests.AllToAll(torch.ones(3), sizes=((1, 2), (3,))), "expected sizes of 2 parts to send, 3 .* of 2 to get"),
        (requests.AllToAll(torch.ones(3), torch.ones(3), sizes=((1, 2), (2, 2))), "expected an output of 4 elements"),
        (requests.Broadcast(torch.ones(2), 2), "expected a source from 0 to 1, got 2"),
        (requests.AllToAll(torch.ones(4), torch.ones(2)), "expected an output of 4 elements .* got 2"),
        (requests.AllGather(torch.ones(4), torch.ones(4)), "expected an output of 8 elements .* got 4"),
        (requests.ReduceScatter(torch.ones(4), torch.ones(4)), "expected an output of 2 elements .* got 4"),
        (requests.AllGather(torch.ones(4), torch.ones(8).double()), "in torch.float32, got 8 in torch.float64"),
        (requests.AllGather(torch.ones(2), torch.ones(4, 2)[:, 0]), "expected a dense, contiguous output"),
    ],
)
def test_a_request_that_cannot_be_carried_out_is_refused_before_anything_is_sent(request_: Any, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        issue_collective(request_, Pair(), None)  # type: ignore[arg-type]
