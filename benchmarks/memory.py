"""Memory of gradients, and of the whole process, beside torch DDP's.

Each variant of each model runs in processes of its own. There it first trains a few steps, for the peak: resident
memory of the process on the CPU, allocated device memory on a GPU; and for its growth since just before the model was
made. Then a second instance trains with an all-reduce hook that notes the storage of every bucket it is given; after
the last backward all storages are counted:

    gradients   what the parameters' ``.grad`` live in
    buckets     what the hook was given
    together    both, each storage once: with views, gradients and buckets are the same bytes

Figures are in MiB, those of the rank whose peak is highest, in the run whose peak is the median: the allocator's mood
moves a peak by 20 MiB from run to run. Peaks hold libraries too and their growth the model and its
activations: compare them down a column. All processes import the package, so that none has its libraries ahead of the
others. What a reducer hides from both ``.grad`` and hook shows in the peak alone.
"""

import gc
import importlib
import resource
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _harness import (
    CONTROLS,
    DDP_DEFAULT,
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

STEPS = 4  # enough to pass the rebuild of the buckets


@dataclass(frozen=True)
class Footprint:
    """Bytes on one rank."""

    parameters: int
    gradients: int
    buckets: int
    together: int
    peak: int
    growth: int


def weigh(rank: Rank, model_name: str, variant: str, options: dict[str, Any]) -> Footprint | str:
    """The footprint of one variant, or why it cannot be run here."""
    if (reason := why_unavailable(variant, rank)) is not None:
        return reason
    with suppress(ImportError):
        importlib.import_module("lightning_ddp_hooks")
    peak, growth = _peak_of_training(rank, model_name, variant, options)
    gc.collect()

    trainee = Trainee(MODELS[model_name], variant, rank, options)
    buckets = _BucketStorages(rank.world_size)
    if variant != NO_COMMUNICATION:
        trainee.wrapped.register_comm_hook(buckets, _note_and_all_reduce)  # type: ignore[operator]
    for _ in range(STEPS - 1):
        trainee.step()
    trainee.backward()
    parameters = _storages(trainee.module.parameters())
    gradients = _storages(p.grad for p in trainee.module.parameters() if p.grad is not None)
    return Footprint(
        parameters=sum(parameters.values()),
        gradients=sum(gradients.values()),
        buckets=sum(buckets.noted.values()),
        together=sum((gradients | buckets.noted).values()),
        peak=peak,
        growth=growth,
    )


# --- storages -------------------------------------------------------------------------------------------------------


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Address and bytes of every storage, however many tensors share it."""
    storages = (t.untyped_storage() for t in tensors)
    return {s.data_ptr(): s.nbytes() for s in storages}


class _BucketStorages:
    """State of the noting hook: the storages of the buckets of the latest backward."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.noted: dict[int, int] = {}
        self._last_seen = True

    def note(self, bucket: dist.GradBucket) -> None:  # type: ignore[name-defined]
        """Take in one bucket; the first of a backward drops those of the backward before."""
        if self._last_seen:
            self.noted.clear()
        self._last_seen = bucket.is_last()
        self.noted |= _storages([bucket.buffer()])


def _note_and_all_reduce(
    state: _BucketStorages,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    state.note(bucket)
    work = dist.all_reduce(bucket.buffer().div_(state.world_size), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])  # type: ignore[no-any-return]


# --- peak -----------------------------------------------------------------------------------------------------------


def _peak_of_training(rank: Rank, model_name: str, variant: str, options: dict[str, Any]) -> tuple[int, int]:
    before = _restart_peak(rank)
    trainee = Trainee(MODELS[model_name], variant, rank, options)
    for _ in range(STEPS):
        trainee.step()
    rank.synchronize()
    peak = _peak(rank)
    return peak, peak - before


def _restart_peak(rank: Rank) -> int:
    """Let the peak begin at the present use, where the system can do that; return the peak as it is then."""
    if rank.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(rank.device)
    elif sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")
    return _peak(rank)


def _peak(rank: Rank) -> int:
    if rank.device.type == "cuda":
        return torch.cuda.max_memory_allocated(rank.device)
    if sys.platform == "linux":
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("VmHWM:")[1].split()[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


# --- report ---------------------------------------------------------------------------------------------------------

HEADER = ["parameters", "gradients", "buckets", "together", "peak", "growth", f"growth - {DDP_DEFAULT}'s"]


def _row(variant: str, footprint: Footprint, reference: Footprint) -> list[str]:
    f = footprint
    cells = [f"{n / 2**20:.2f}" for n in (f.parameters, f.gradients, f.buckets, f.together, f.peak, f.growth)]
    return [variant, *cells, f"{(f.growth - reference.growth) / 2**20:+.2f}"]


def main() -> int:
    """Weigh and print one model after the other."""
    parser = make_parser(__doc__, [v for v in VARIANTS if v not in CONTROLS])
    parser.add_argument("--repeats", type=positive_int, default=3,
                        help="fresh worlds for each variant; the median peak counts (default: 3)")  # fmt: skip
    args = parse(parser)
    print(f"{describe_run(args)}\nMiB after {STEPS} steps\n", flush=True)
    for model_name in args.models:
        footprints: dict[str, Footprint] = {}
        skipped: dict[str, str] = {}
        for variant in dict.fromkeys([DDP_DEFAULT, *args.variants]):
            peaks: list[Footprint] = []
            for _ in range(args.repeats):
                results = run_ranks(
                    weigh, model_name, variant, wrap_options(args), world_size=args.world_size, device=args.device
                )
                if isinstance(results[0], str):
                    skipped[variant] = results[0]
                    break
                peaks.append(max(results, key=lambda footprint: footprint.peak))
            if peaks:
                footprints[variant] = sorted(peaks, key=lambda footprint: footprint.peak)[len(peaks) // 2]
        rows = [_row(variant, footprint, footprints[DDP_DEFAULT]) for variant, footprint in footprints.items()]
        print(format_table([model_name, *HEADER], rows, args.output), end="\n\n")
        for variant, reason in skipped.items():
            print(f"skipped: {variant}, not available here ({reason})")
        print(flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
