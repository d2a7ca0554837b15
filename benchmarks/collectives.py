"""Time of the shm backend's collectives beside gloo's, and beside one copy of the same bytes.

Blocks of calls take turns, in an order that changes from block to block; printed are the medians over blocks of the
time of a call on the slowest rank, and of the ratios within a block. `shm` stages its tensors; `shm, in place` has them
where all ranks reach them, as the reducer's buckets are. What is copied for comparison is what a rank gets as its
result.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _harness import Rank, format_table, positive_int, run_ranks
from torch import Tensor

import lightning_ddp_hooks  # noqa: F401, which registers the backend

SIZES = [8, 1 << 10, 32 << 10, 1 << 20, 8 << 20, 64 << 20]
WAYS = ["shm", "shm, in place", "gloo", "memcpy"]
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# name -> begins it on (result, other, group): the result is of the given size, the other of what goes with it.
COLLECTIVES: dict[str, tuple[float, Callable[[Tensor, Tensor, Any], Any]]] = {
    "all_reduce": (0, lambda result, other, group: dist.all_reduce(result, group=group)),
    "broadcast": (0, lambda result, other, group: dist.broadcast(result, 0, group=group)),
    "all_gather": (-1, lambda result, other, group: _gather(result, other, group=group)),
    "reduce_scatter": (1, lambda result, other, group: _scatter(result, other, group=group)),
    "all_to_all": (0, lambda result, other, group: dist.all_to_all_single(result, other, group=group)),
}


def measure(
    rank: Rank, names: list[str], sizes: list[int], blocks: int
) -> dict[tuple[str, int], dict[str, list[float]]]:
    """Return the seconds of a call for each collective, size and way, one for each block, on the slowest rank."""
    group = dist.new_group(backend="shm")
    backend = group._get_backend(torch.device("cpu"))
    found = {}
    for name in names:
        power, begin = COLLECTIVES[name]
        for size in sizes:
            numels = max(size // 4, rank.world_size), int(max(size // 4, rank.world_size) * rank.world_size**power)
            in_place = [backend.allocate_tensor(n, dtype=torch.float32, device=rank.device).zero_() for n in numels]
            plain = [torch.zeros(n) for n in numels]
            runs = {
                "shm": partial(begin, *plain, group),
                "shm, in place": partial(begin, *in_place, group),
                "gloo": partial(begin, *plain, None),
                "memcpy": partial(plain[0].copy_, torch.ones_like(plain[0])),
            }
            calls = max(1, min(200, (4 << 20) // size))
            times: dict[str, list[float]] = {way: [] for way in WAYS}
            for block in range(-1, blocks):  # the first one warms up
                for way in WAYS[block % 4 :] + WAYS[: block % 4]:
                    dist.barrier(group=group)
                    start = time.perf_counter()
                    for _ in range(calls):
                        runs[way]()
                    times[way].append((time.perf_counter() - start) / calls)
            slowest = torch.tensor([times[way][1:] for way in WAYS], dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            found[name, size] = dict(zip(WAYS, slowest.tolist(), strict=True))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collectives", nargs="+", choices=COLLECTIVES, default=list(COLLECTIVES), metavar="NAME")
    parser.add_argument("--sizes", nargs="+", type=positive_int, default=SIZES, help="bytes of the result")
    parser.add_argument("--world-size", type=positive_int, default=2)
    parser.add_argument("--blocks", type=positive_int, default=9)
    parser.add_argument("--output", choices=["text", "markdown"], default="text")
    args = parser.parse_args()
    results = run_ranks(measure, args.collectives, args.sizes, args.blocks, world_size=args.world_size, device="cpu")
    header = [
        "collective",
        "bytes",
        *(f"{way}, us" for way in WAYS),
        "gloo / shm",
        "gloo / in place",
        "in place / memcpy",
    ]
    rows = []
    for (name, size), times in results[0].items():

        def ratio(way: str, to: str, times: dict[str, list[float]] = times) -> str:
            return f"{statistics.median(a / b for a, b in zip(times[way], times[to], strict=True)):.2f}"

        medians = [f"{statistics.median(times[way]) * 1e6:.1f}" for way in WAYS]
        ratios = [ratio("gloo", "shm"), ratio("gloo", "shm, in place"), ratio("shm, in place", "memcpy")]
        rows.append([name, str(size), *medians, *ratios])
    print(format_table(header, rows, args.output))


if __name__ == "__main__":
    main()
