"""Step time of this package's DataParallel beside torch DDP's.

A step is forward, backward, SGD step and zero_grad. All variants live in the same processes and take turns, a block of
steps at a time, in an order that changes from block to block; so whatever slows the machine for a while slows all of
them alike. A block's time is the mean over its steps on the slowest rank. Printed are the median of the blocks and the
median of the *ratios within a block*, with quartiles: ratios hold on a noisy machine, absolute times do not.

Before anything is timed, every variant takes the same few steps, and its weights and buffers must be bitwise those of
torch's DDP on every rank; the exit status is 1 if they are not.
"""

import argparse
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from _harness import (
    CONTROLS,
    DDP_DEFAULT,
    DDP_VARIANTS,
    NO_COMMUNICATION,
    VARIANTS,
    Rank,
    Trainee,
    describe_run,
    format_table,
    make_parser,
    parse,
    positive_int,
    run_ranks,
    why_unavailable,
    wrap_options,
)
from models import MODELS
from torch.nn.attention import SDPBackend, sdpa_kernel

PARITY_STEPS = 6  # enough to pass the rebuild of the buckets; they warm up as well
UNTIMED_STEPS = 2  # at the start of each block: another variant has just had the caches


@dataclass(frozen=True)
class Measured:
    """What one rank knows about one model."""

    block_seconds: dict[str, list[float]]  # seconds a step, one for each block; on the slowest rank
    differing: dict[str, str]  # variants whose weights are not torch DDP's, with how far they are off
    skipped: dict[str, str]  # variants that cannot be run here, with the reason


def measure(
    rank: Rank, model_name: str, variants: list[str], blocks: int, steps: int, options: dict[str, Any]
) -> Measured:
    """Check parity, then time ``blocks`` blocks of ``steps`` steps of each variant."""
    skipped = {v: reason for v in variants if (reason := why_unavailable(v, rank)) is not None}
    names = [v for v in variants if v not in skipped]
    trainees = {v: Trainee(MODELS[model_name], v, rank, options) for v in names}
    differing = _check_parity(trainees, rank)

    seconds: dict[str, list[float]] = {v: [] for v in names}
    gc.collect()
    gc.freeze()  # what lives now lives to the end: no collection inside a block has to walk it
    for block in range(blocks):
        for name in _order(names, block):
            seconds[name].append(_time_block(trainees[name], steps, rank))
    slowest = torch.tensor([seconds[v] for v in names], dtype=torch.float64, device=rank.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return Measured(dict(zip(names, slowest.tolist(), strict=True)), differing, skipped)


def _order(names: list[str], block: int) -> list[str]:
    """Rotate by one each block and turn round every other one: no variant keeps its place or its predecessor."""
    shift = block % len(names)
    rotated = names[shift:] + names[:shift]
    return rotated[::-1] if block % 2 else rotated


def _time_block(trainee: Trainee, steps: int, rank: Rank) -> float:
    for _ in range(UNTIMED_STEPS):
        trainee.step()
    rank.synchronize()
    dist.barrier()
    rank.synchronize()  # on a GPU the barrier itself is work of the device
    start = time.perf_counter()
    for _ in range(steps):
        trainee.step()
    rank.synchronize()
    return (time.perf_counter() - start) / steps


@contextmanager
def _repeatable(rank: Rank) -> Iterator[None]:
    """On a GPU, keep to kernels that always add in the same order: bits can only be compared without the others."""
    if rank.device.type == "cpu":
        yield
        return
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False


def _check_parity(trainees: dict[str, Trainee], rank: Rank) -> dict[str, str]:
    with _repeatable(rank):
        for trainee in trainees.values():
            for _ in range(PARITY_STEPS):
                trainee.step()

    expected = trainees[DDP_DEFAULT].state()
    differing = {}
    for name, trainee in trainees.items():
        if name == NO_COMMUNICATION:
            continue
        pairs = list(zip(trainee.state(), expected, strict=True))
        # As bytes: equal bits, be they NaN or negative zero.
        off = [
            (a, b)
            for a, b in pairs
            if not torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        ]
        if off:
            worst = max((a.double() - b.double()).abs().max().item() for a, b in off)
            differing[name] = f"{len(off)} of {len(pairs)} tensors, by at most {worst:.2e}"
    return differing


# --- report ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ratios:
    """The per-block ratios of one variant to another: their quartiles."""

    lower: float
    median: float
    upper: float

    @classmethod
    def of(cls, variant: list[float], reference: list[float]) -> "Ratios":
        """From the block times of both."""
        ratios = torch.tensor(variant, dtype=torch.float64) / torch.tensor(reference, dtype=torch.float64)
        lower, median, upper = ratios.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
        return cls(lower, median, upper)

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.lower:.3f}, {self.upper:.3f}]"


def _median(values: list[float]) -> float:
    return torch.tensor(values, dtype=torch.float64).quantile(0.5).item()


def _better_ddp(measured: Measured) -> str:
    return min(DDP_VARIANTS, key=lambda v: _median(measured.block_seconds[v]))


def report_model(model_name: str, results: list[Measured], style: str) -> bool:
    """Print one model's table and parity; True if all weights are as they should be."""
    measured = results[0]
    seconds = measured.block_seconds
    better = _better_ddp(measured)
    rows = [
        [
            name,
            f"{1e3 * _median(times):.3f}",
            str(Ratios.of(times, seconds[DDP_DEFAULT])),
            str(Ratios.of(times, seconds[better])),
        ]
        for name, times in seconds.items()
    ]
    header = [model_name, "ms/step", f"ratio to {DDP_DEFAULT} [quartiles]", f"ratio to {better}, DDP's better"]
    print(format_table(header, rows, style), end="\n\n")

    compared = [v for v in seconds if v not in (DDP_DEFAULT, NO_COMMUNICATION)]
    differing = [f"{v} on rank {rank}: {off}" for rank, r in enumerate(results) for v, off in r.differing.items()]
    if differing:
        print(f"parity: NOT torch DDP's weights after {PARITY_STEPS} steps: {'; '.join(differing)}")
    else:
        print(f"parity: weights and buffers bitwise torch DDP's after {PARITY_STEPS} steps: {', '.join(compared)}")
    for name, reason in measured.skipped.items():
        print(f"skipped: {name}, not available here ({reason})")
    print(flush=True)
    return not differing


def _report_summary(all_measured: dict[str, Measured], style: str) -> None:
    """Print median ratios to DDP's better setting, models side by side."""
    measured = list(all_measured.values())
    rows = [
        [name] + [f"{Ratios.of(m.block_seconds[name], m.block_seconds[_better_ddp(m)]).median:.2f}" for m in measured]
        for name in measured[0].block_seconds
    ]
    print(format_table(["median ratio to DDP's better", *all_measured], rows, style))


def _parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__, [v for v in VARIANTS if v not in CONTROLS])
    parser.add_argument("--blocks", type=positive_int,
                        help="blocks of each variant (default: 20 to 100, by model)")  # fmt: skip
    parser.add_argument("--steps", type=positive_int,
                        help="timed steps of a block (default: 10 to 30, by model)")  # fmt: skip
    return parse(parser)


def main() -> int:
    """Measure and print one model after the other."""
    args = _parse_args()
    variants = list(dict.fromkeys([*DDP_VARIANTS, *args.variants]))  # the ratios need both of DDP's
    print(describe_run(args))
    all_equal = True
    all_measured = {}
    for name in args.models:
        steps = args.steps or MODELS[name].block_steps
        blocks = args.blocks or MODELS[name].blocks
        print(f"{blocks} blocks of {steps} steps\n", flush=True)
        results = run_ranks(
            measure, name, variants, blocks, steps, wrap_options(args),
            world_size=args.world_size, device=args.device,
        )  # fmt: skip
        all_equal &= report_model(name, results, args.output)
        all_measured[name] = results[0]
    if len(all_measured) > 1:
        _report_summary(all_measured, args.output)
    return 0 if all_equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
