"""How fast the link between the ranks is, and what bucket size suits it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from lightning_ddp_hooks import comm

MIN_CAP_BYTES = 1 << 20  # under 1 MiB the cost of each collective outweighs what the overlap gains
MAX_CAP_BYTES = 100 << 20
_SMALL, _LARGE = 1 << 12, 4 << 20
_REPEATS = 3


@dataclass(frozen=True)
class Link:
    """A link as an all-reduce sees it: ``seconds = latency + nbytes / bandwidth``."""

    latency: float
    bandwidth: float


def best_bucket_bytes(total_bytes: int, link: Link) -> int:
    """Return the bucket size at which communication delays the step least.

    With buckets of c bytes, ``total / c`` collectives each cost the latency, and the last bucket, which nothing hides,
    takes ``c / bandwidth``. The sum is smallest at the geometric mean ``sqrt(total * latency * bandwidth)``.
    """
    best = math.sqrt(max(1, total_bytes) * link.latency * link.bandwidth)
    return int(min(max(best, MIN_CAP_BYTES), MAX_CAP_BYTES))


def measure_link(group: comm.ProcessGroup, control_group: comm.ProcessGroup, device: torch.device) -> Link:
    """Time small and large all-reduces; all ranks get the slowest rank's figures. Collective; takes milliseconds."""
    small, large = (_seconds(group, nbytes, device) for nbytes in (_SMALL, _LARGE))
    everyone = comm.all_gather_object((small, large), control_group)
    small, large = (max(times) for times in zip(*everyone, strict=True))
    return Link(small, (_LARGE - _SMALL) / max(large - small, 1e-6))


def _seconds(group: comm.ProcessGroup, nbytes: int, device: torch.device) -> float:
    buffer = torch.zeros(nbytes // 4, dtype=torch.float32, device=device)
    times = []
    for _ in range(1 + _REPEATS):  # the first call opens connections
        _wait_for_device(device)
        start = time.perf_counter()
        comm.all_reduce(buffer, group).wait()
        _wait_for_device(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _wait_for_device(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
