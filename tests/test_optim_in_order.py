"""Places in the order of buckets: steps follow each other, and all ranks issue the same, whatever their timing."""

import random
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hook_tools import Rig
from ranks import run_ranks

from lightning_ddp_hooks import comm, traffic
from lightning_ddp_hooks.hooks.contract import BindContext, BoundHook, CommHook, Phases
from lightning_ddp_hooks.optim.exchange import ShardExchange
from lightning_ddp_hooks.optim.sharding import ShardAssignment
from lightning_ddp_hooks.reducer import queue, requests
from lightning_ddp_hooks.reducer.bucket import GradBucket

pytestmark = pytest.mark.ranks

NUMELS = (7, 3, 11, 5, 2)


@dataclass(frozen=True, kw_only=True)
class SumsThenSends(CommHook):
    """Sums once or several times, bucket by bucket another number, then takes its turn and broadcasts."""

    at_end: bool = False

    def bind(self, context: BindContext) -> BoundHook:
        return _Bound(context, self.at_end)


class _Bound(BoundHook):
    name = "SumsThenSends"

    def __init__(self, context: BindContext, at_end: bool) -> None:
        self.context = context
        self.at_end = at_end
        self.launched: list[int] = []
        self.events: list[tuple[str, int, int]] = []
        self._random = random.Random(context.rank)

    def reduce(self, bucket: GradBucket) -> Phases:
        index, step, world_size = bucket.index(), self.context.step(), self.context.world_size
        self.events.append(("launched", step, index))
        for number in range((index * 2 + step) % 6):  # up to more than there are lanes
            self._pause()
            sent = torch.full((bucket.buffer().numel(),), float(100 * index + number), dtype=torch.float32)
            total = yield requests.AllReduce(sent)
            assert total.tolist() == [(100.0 * index + number) * world_size] * len(total)
        self._pause()
        if self.at_end:
            yield requests.EndOfBackward()
        yield requests.InOrder()
        self.events.append(("turn", step, index))
        sent = torch.full((3,), float(1000 * index + self.context.rank), dtype=torch.float32)
        source = index % world_size
        received = yield requests.Together([requests.Broadcast(sent, source)] * 2)
        assert [part.tolist() for part in received] == [[1000.0 * index + source] * 3] * 2

    def _pause(self) -> None:
        if self._random.random() < 0.5:
            time.sleep(self._random.random() * 0.01)


def _turns(at_end: bool, at_once: bool) -> list[tuple[str, int, int]]:
    rig = Rig(SumsThenSends(at_end=at_end), NUMELS)
    rig.queue.at_once = at_once
    if at_once:
        queue.is_done = lambda handle: False  # a device is behind the host
    rig.delays = random.Random(dist.get_rank() + 10)
    for _ in range(7):
        rig.step([torch.zeros(numel) for numel in NUMELS])
    events: list[tuple[str, int, int]] = rig.bound.events  # type: ignore[attr-defined]
    return events


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("at_end", [False, True])
def test_turns_come_in_bucket_order_whatever_the_number_of_collectives(at_end: bool, at_once: bool) -> None:
    for events in run_ranks(_turns, at_end, at_once, world_size=3, timeout=60):
        for step in range(7):
            of_step = [(kind, index) for kind, its_step, index in events if its_step == step]
            assert [index for kind, index in of_step if kind == "turn"] == list(range(len(NUMELS)))
            if at_end:
                assert [kind for kind, _ in of_step] == ["launched"] * len(NUMELS) + ["turn"] * len(NUMELS)
            elif at_once:  # each bucket runs through as it is launched
                assert [kind for kind, _ in of_step] == ["launched", "turn"] * len(NUMELS)


def _failing() -> str:
    class Lost:
        """Done, but without success."""

        def is_completed(self) -> bool:
            return True

        def wait(self) -> None:
            raise RuntimeError("the link is down")

    @dataclass(frozen=True, kw_only=True)
    class WaitsForLost(CommHook):
        def bind(self, context: BindContext) -> BoundHook:
            class Bound(BoundHook):
                name = "WaitsForLost"

                def reduce(self, bucket: GradBucket) -> Phases:
                    yield requests.Wait(Lost())
                    return None

            return Bound()

    with pytest.raises(RuntimeError, match=r"WaitsForLost failed on bucket 0 \(layer0.weight\): the link is down") as e:
        Rig(WaitsForLost(), NUMELS[:1]).step([torch.zeros(NUMELS[0])])
    return str(e.value)


def test_a_collective_that_is_done_but_failed_raises() -> None:
    run_ranks(_failing, world_size=1)


# ---------------------------------------------------------------------- parameters from their owners


def _exchange() -> tuple[list[torch.Tensor], dict[str, int]]:
    rank = dist.get_rank()
    shards = ShardAssignment(dist.get_world_size(), rank)
    shapes: Any = [(3, 2), (200, 100), (0,), (5,), (4, 4)]
    params = [torch.full(shape, float(rank), dtype=torch.float32) for shape in shapes]
    params += [torch.full((3,), complex(rank, -rank)), torch.full((200, 100), float(rank)).t()]
    shards.assign(params[:1])
    shards.assign(params[1:], [[params[4], params[-1], params[1]]])  # those are cut
    counter = traffic.ByteCounter()
    traffic.count_bytes(counter)
    queue.carry_out(ShardExchange(shards).send(params), comm.new_group(comm.resolve_group(None)))
    traffic.stop_counting(counter)
    assert len(shards.pieces(params[-1])) == 2
    for param in params:
        for owner, start, stop in shards.pieces(param):
            flat = param.t().reshape(-1) if param is params[-1] else param.reshape(-1)
            expected = complex(owner, -owner) if param.is_complex() else float(owner)
            assert torch.equal(flat[start:stop], torch.full_like(flat[start:stop], expected)), (param.shape, owner)
    return params, counter.take()


def test_parameters_of_any_form_come_from_their_owners_and_are_counted_by_name() -> None:
    results = run_ranks(_exchange, world_size=2)
    sizes = sum(param.nbytes for param in results[0][0])
    assert [list(sent) for _, sent in results] == [["parameters"]] * 2
    assert sum(sent["parameters"] for _, sent in results) == sizes  # each to the one other rank
