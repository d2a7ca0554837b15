"""What stands for the simulated device where TEST_DEVICE=cuda is set: the same names, on a real one.

Ranks have a GPU each and talk by NCCL, or share one over gloo, which copies through the host and so lets it wait.
Nothing can be slowed down here but a stream, for a while.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_CYCLES_PER_MS = 1_500_000


def a_gpu_each(ranks: int = 2) -> bool:
    """Tell whether so many ranks can talk by NCCL."""
    return torch.cuda.device_count() >= ranks


def join_world(*, timeout: float = 60, **delays: Any) -> torch.device:
    """Make the ranks' default group anew, for tensors on the host and on the device."""
    store, rank, size = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.destroy_process_group()
    dist.init_process_group(
        f"cpu:gloo,cuda:{'nccl' if a_gpu_each(size) else 'gloo'}",
        store=dist.PrefixStore("cuda", store),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )
    return device


def sleep(ms: float, stream: torch.Stream | None = None) -> None:
    """Queue a task that takes about so long."""
    with torch.cuda.stream(torch.cuda.current_stream() if stream is None else stream):
        torch.cuda._sleep(int(ms * _CYCLES_PER_MS))


def slow_down(stream: torch.Stream, ms: float) -> None:
    """Have a stream begin what comes next later."""
    sleep(10 * ms, stream)


def slow_down_collectives(ms: float) -> None:
    """Do nothing."""


@contextmanager
def no_host_waits() -> Iterator[None]:
    """Make it an error to wait for the device, where ranks do not have to."""
    torch.cuda.set_sync_debug_mode("error" if a_gpu_each(dist.get_world_size()) else "default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def why_not(file: str, test: str) -> str | None:
    """Say why a test of this folder cannot run on CUDA, or None."""
    if not torch.cuda.is_available():
        return "needs a GPU"
    if file in ("test_sim.py", "test_trainer_on_sim.py", "test_one_point_in_fits.py"):
        return "is about the simulated device or its accelerator"
    if test.startswith(("test_leaving_out_a_wait", "test_a_step_is_not_captured")):
        return "needs streams that are slow for long, or pretend to be captured"
    if file == "test_one_point.py" or test.startswith("test_a_whole_step_is_queued"):
        return None if a_gpu_each() else "needs a GPU for each rank: gloo lets the host wait"
    return None
