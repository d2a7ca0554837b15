"""The mean over hosts and the ranks of each: its values, and what crosses from host to host."""

import random
import socket
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from backends import require
from hook_tools import Rig, exact_mean, gradients_of
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_ddp_hooks as ldh
from lightning_ddp_hooks import comm, traffic
from lightning_ddp_hooks.hooks import HierarchicalAllReduce
from lightning_ddp_hooks.reducer import shm_backend
from lightning_ddp_hooks.traffic import ByteCounter

NUMELS = [24, 7, 1]  # of which two ranks can share one evenly


def _places() -> dict[str, list[list[Tensor]]]:
    found = {}
    for name, hook in {"given": HierarchicalAllReduce(ranks_per_host=2), "alone": HierarchicalAllReduce()}.items():
        rig = Rig(hook, NUMELS)
        rig.delays = random.Random(dist.get_rank())
        found[name] = [rig.step(gradients_of(dist.get_rank(), step, NUMELS)) for step in range(3)]
    # Ranks 0 and 2 on one host, 1 and 3 on another.
    with mock.patch.object(socket, "gethostname", return_value=f"host{dist.get_rank() % 2}"):
        rig = Rig(HierarchicalAllReduce(), NUMELS, at_once=True)
        assert rig.bound._host.ranks == ((0, 2) if dist.get_rank() % 2 == 0 else (1, 3))  # type: ignore[attr-defined]
        found["by name"] = [rig.step(gradients_of(dist.get_rank(), step, NUMELS)) for step in range(3)]
    return found


def _bytes_of_hook() -> tuple[int, int]:
    counter = ByteCounter()
    traffic.count_bytes(counter)
    sent = []
    for hook in (HierarchicalAllReduce(ranks_per_host=2), HierarchicalAllReduce(ranks_per_host=4)):
        rig = Rig(hook, [4000])
        before = counter.current.sent
        rig.step([torch.ones(4000)])
        sent.append(int(counter.current.sent - before))
    traffic.count_bytes(None)
    return sent[0], sent[1]


def _in_training() -> bool:
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).double() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    ours = ldh.DataParallel(nets[0], comm_hook=HierarchicalAllReduce(ranks_per_host=2), bucket_cap_mb=1e-4)
    stock = DistributedDataParallel(nets[1])
    for step in range(4):
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())).double()
        for model in (ours, stock):
            model.zero_grad()
            model(x).sum().backward()
        for mine, its in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            torch.testing.assert_close(mine.grad, its.grad, rtol=1e-12, atol=1e-12)
    return True


def _wrong() -> list[str]:
    texts = []
    for hook in (HierarchicalAllReduce(ranks_per_host=3), HierarchicalAllReduce()):
        with mock.patch.object(socket, "gethostname", return_value=f"host{dist.get_rank() == 0}"):
            try:
                Rig(hook, NUMELS)
            except ValueError as error:
                texts.append(str(error))
    return texts


def _all() -> dict[str, object]:
    return {"values": _places(), "bytes": _bytes_of_hook(), "training": _in_training(), "wrong": _wrong()}


@pytest.mark.ranks
def test_it_is_the_mean_however_ranks_lie_and_sends_less_between_hosts() -> None:
    for found in run_ranks(_all, world_size=4):
        for steps in found["values"].values():
            for step, tensors in enumerate(steps):
                for tensor, exact in zip(tensors, exact_mean(step, NUMELS, 4), strict=True):
                    torch.testing.assert_close(tensor.double(), exact, rtol=0, atol=1e-6)
        hierarchical, flat = found["bytes"]
        # Of 16,000 bytes: half to the neighbor, half of them to the other host and back, half to the neighbor; a ring
        # over all sends 3/4 twice, and of the ranks at the edge of a host all of it to the other one.
        assert (hierarchical, flat) == (8000 + 8000 + 8000, 24000)
        assert "does not divide the 4 ranks" in found["wrong"][0]
        assert "same number of ranks on each host, and has 1, 3" in found["wrong"][1]


def test_ranks_per_host_is_a_positive_number() -> None:
    with pytest.raises(ValueError, match="at least one rank"):
        HierarchicalAllReduce(ranks_per_host=0)
    with pytest.raises(TypeError, match="whole number"):
        HierarchicalAllReduce(ranks_per_host=2.0)  # type: ignore[arg-type]


def _parts(port: int) -> list[str]:
    size, rank = dist.get_world_size(), dist.get_rank()
    named = comm.backend_name(shm_backend.split_group(comm.resolve_group(None), [[0, 1], [2, 3]]))
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0)  # type: ignore[attr-defined]
    shm_backend.make_world(
        lambda: dist.init_process_group("gloo", store=store, rank=rank, world_size=size), named=False
    )
    world = comm.resolve_group(None)
    found = [named, comm.backend_name(shm_backend.split_group(world, [[0, 1], [2, 3]]))]
    with mock.patch.object(socket, "gethostname", return_value=f"host{rank // 2}"):
        found += [
            comm.backend_name(shm_backend.split_group(world, parts)) for parts in ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
        ]
        found.append(str(shm_backend.group_of_neighbors()))
    dist.barrier()
    return found


@pytest.mark.ranks
@pytest.mark.timeout(900)
def test_parts_on_one_host_each_talk_through_memory_where_nobody_has_named_a_backend() -> None:
    require("native")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert run_ranks(_parts, port, world_size=4) == [["gloo", "shm", "shm", "gloo", "None"]] * 4
