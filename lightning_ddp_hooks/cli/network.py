"""The network that the command line asks about: from its options, or measured between the ranks that run."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.advisor import link_model
from lightning_ddp_hooks.advisor.link_model import Link, parse_bandwidth, parse_latency
from lightning_ddp_hooks.cli.common import synchronize

_SMALL, _LARGE = 1 << 10, 8 << 20
_REPEATS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe a network."""
    group = parser.add_argument_group("the network")
    group.add_argument("--bandwidth", type=_argument(parse_bandwidth), metavar="RATE",
                       help="of a rank's link in each direction, such as 1gbit, 100mbit or 12.5GB/s")  # fmt: skip
    group.add_argument("--latency", type=_argument(parse_latency), metavar="TIME",
                       help="of a message between ranks, such as 50us or 0.1ms (default: 0.1ms)")  # fmt: skip
    group.add_argument("--measure-link", action="store_true",
                       help="measure it between the ranks of this run instead; start them with torchrun")  # fmt: skip


def _argument(parse: Callable[[str], float]) -> Callable[[str], float]:
    """Let argparse show the parser's own message."""

    def convert(text: str) -> float:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def link_of(args: argparse.Namespace, measured: Link | None) -> Link:
    """Return the link that the options describe; raises ValueError for too few or contradictory ones."""
    if measured is None and args.bandwidth is None:
        raise ValueError("Describe the network by --bandwidth (and --latency), or start the ranks with torchrun and "
                         "give --measure-link.")  # fmt: skip
    if measured is not None and (args.bandwidth is not None or args.latency is not None):
        raise ValueError("Set --measure-link or --bandwidth and --latency, not both.")
    return measured or Link(latency=1e-4 if args.latency is None else args.latency, bandwidth=args.bandwidth)


def measure_link(group: comm.ProcessGroup, device: torch.device) -> Link:
    """Time small and large all-reduces over the ranks of a group; collective, and all get the same answer.

    The link is the one that a ring would have; where a backend does something else, it is the ring that is as fast.
    """
    control = comm.new_group(group, cpu=True)
    try:
        times = [_seconds(group, nbytes, device) for nbytes in (_SMALL, _LARGE)]
        everyone = comm.all_gather_object(times, control)
    finally:
        comm.destroy_group(control)
    small, large = (max(column) for column in zip(*everyone, strict=True))
    return link_model.link_of_ring((_SMALL, small), (_LARGE, large), comm.world_size(group))


def _seconds(group: comm.ProcessGroup, nbytes: int, device: torch.device) -> float:
    buffer = torch.zeros(nbytes // 4, device=device)
    times = []
    for _ in range(1 + _REPEATS):  # the first call opens connections
        comm.barrier(group)
        begin = time.perf_counter()
        comm.all_reduce(buffer, group).wait()
        synchronize(device)
        times.append(time.perf_counter() - begin)
    return median(times[1:])
