"""The GPU as the tests of this folder see it, and what stands for it in a dry run.

GPU_CHECK_DRY=1 runs all their code on the CPU over gloo, so that a mistake in it shows without a GPU. What only a GPU
can show (streams, a trace with kernels, its memory) is not asserted then.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

DRY = os.environ.get("GPU_CHECK_DRY") == "1"

# Of a batch whose backward takes a GPU a few milliseconds.
ROWS = 8 if DRY else 4096

# How a trace names matrix products, which make up most of a backward of linear layers.
_PRODUCTS = ("gemm", "cutlass", "nvjet", "xmma")

# Calls in which the host waits for the device, as the profiler names them. ``cudaEventQuery`` does not wait.
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaMemset")


def gpus() -> int:
    """Count the GPUs; one, where there is none in a dry run."""
    return 1 if DRY else torch.cuda.device_count()


def own_device() -> torch.device:
    """Take this rank's device: ranks share one if there are more ranks than GPUs."""
    if DRY:
        return torch.device("cpu")
    device = torch.device("cuda", dist.get_rank() % gpus())
    torch.cuda.set_device(device)
    return device


def stream_ordered_group() -> Any:
    """Make a group for which the host does not wait; one rank for each GPU, since NCCL takes no two on one."""
    return dist.new_group(backend="gloo" if DRY else "nccl")


def synchronize() -> None:
    """Wait for the device."""
    if not DRY:
        torch.cuda.synchronize()


def spin(cycles: int) -> None:
    """Queue a kernel that takes so many cycles."""
    if not DRY:
        torch.cuda._sleep(cycles)


def forbid_waits(forbid: bool) -> None:
    """Make waits of the host an error, as far as torch knows of them."""
    if not DRY:
        torch.cuda.set_sync_debug_mode("error" if forbid else "default")


def restart_peak() -> int:
    """Begin to measure the peak of memory anew; return what is in use."""
    synchronize()
    if DRY:
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak() -> int:
    """Return the most bytes that were in use."""
    return 0 if DRY else torch.cuda.max_memory_allocated()


def layers(count: int, width: int, device: torch.device) -> nn.Sequential:
    """Make linear layers, the same on each call."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count))).to(device)


class Trace:
    """What a profiler has seen of one call.

    Attributes:
        waits: Calls of the runtime in which the host waits, and copies from or to memory that is not pinned.
        products: Begin and end of each matrix product on the device, in microseconds.
        kernels: Name and begin of all that has run on the device, copies included.
    """

    def __init__(self, call: Callable[[], object]) -> None:
        synchronize()
        activities = [ProfilerActivity.CPU] + ([] if DRY else [ProfilerActivity.CUDA])
        with profile(activities=activities) as seen:
            with record_function("traced call"):
                call()
            synchronize()
        events = list(seen.events() or ())
        (span,) = [e.time_range for e in events if e.name == "traced call" and e.device_type.name == "CPU"]
        inside = [e for e in events if span.start <= e.time_range.start <= span.end]
        on_device = [e for e in events if e.device_type.name == "CUDA" and e.name != "traced call"]
        self.saw_calls = any(e.name.startswith("cuda") for e in inside)
        self.waits = [e.name for e in inside if e.name in _WAITS]
        self.waits += [e.name for e in on_device if "Pageable" in e.name]
        self.kernels = [(e.name, e.time_range.start, e.time_range.end) for e in on_device]
        self.products = [
            (begin, end) for name, begin, end in self.kernels if any(part in name.lower() for part in _PRODUCTS)
        ]

    def inside_the_products(self, *names: str) -> int:
        """Count what has such a name and begins before the last matrix product has ended."""
        if DRY:
            return 1 << 30
        end = max(end for _, end in self.products)
        return sum(any(part in name for part in names) and begin < end for name, begin, _ in self.kernels)
