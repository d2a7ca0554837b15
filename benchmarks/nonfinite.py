"""What `detect_nonfinite` costs a training step of a model with very many small parameters.

    python benchmarks/nonfinite.py
    python benchmarks/nonfinite.py --layers 100 --width 256

Two ranks train a stack of linear layers; the guard is there in every other step. The figure is the median over pairs of
neighbouring steps of the ratio of their times; a step is as long as on its slowest rank. What the guard itself takes on
a rank, in the backward and in its collective check, is told too.
"""

import argparse
import statistics
import time
from typing import Any

import torch
from _harness import Rank, positive_int, run_ranks
from torch import nn

from lightning_ddp_hooks import DataParallel
from lightning_ddp_hooks.health.checks import NonfiniteGuard
from lightning_ddp_hooks.reducer.bucket import GradBucket

WARM_UP = 10


class TimedGuard(NonfiniteGuard):
    """Adds up the time that it takes."""

    seconds = 0.0

    def look(self, bucket: GradBucket) -> None:
        begin = time.perf_counter()
        super().look(bucket)
        self.seconds += time.perf_counter() - begin


def measure(rank: Rank, layers: int, width: int, pairs: int) -> list[tuple[float, float, float]]:
    """Return for each step its time, and of that what looking at gradients and the check took."""
    torch.manual_seed(0)
    model = DataParallel(nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    inputs = torch.randn(4, width)
    guard = TimedGuard(model.reducer.control_group)
    times = []
    for step in range(WARM_UP + 2 * pairs):
        on = step % 2 == 0
        model.reducer.finalize_pending_backward()
        model.reducer.nonfinite = guard if on else None
        guard.seconds, check_s = 0.0, 0.0
        begin = time.perf_counter()
        model(inputs).sum().backward()
        if on:
            before = time.perf_counter()
            guard.check(step)
            check_s = time.perf_counter() - before
        optimizer.step()
        optimizer.zero_grad()
        times.append((time.perf_counter() - begin, guard.seconds, check_s))
    return times[WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=positive_int, default=1000)
    parser.add_argument("--width", type=positive_int, default=8)
    parser.add_argument("--pairs", type=positive_int, default=100)
    args = parser.parse_args()
    results: list[Any] = run_ranks(measure, args.layers, args.width, args.pairs, world_size=2, device="cpu")
    slowest = [max(steps, key=lambda step: step[0]) for steps in zip(*results, strict=True)]
    on, off = slowest[0::2], slowest[1::2]
    ratio = statistics.median(a[0] / b[0] for a, b in zip(on, off, strict=True))
    columns = [1e3 * statistics.median(column) for column in (*zip(*on, strict=True), [step[0] for step in off])]
    print(
        f"{args.layers} Linear({args.width}, {args.width}): with {columns[0]:.2f} ms  without {columns[3]:.2f} ms  "
        f"ratio {ratio:.3f}; looking {columns[1]:.3f} ms, check {columns[2]:.3f} ms"
    )


if __name__ == "__main__":
    main()
