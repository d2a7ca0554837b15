"""What compression and rarer averaging cost in quality: real training runs, beside the plain all-reduce.

Each cell is one way to exchange gradients or models: every communication hook and every averager. It trains with the
Trainer on two tasks:

  * digits: the model and the data of examples/digits.py; the score is the accuracy on all 600 held-out images;
  * language model: that of examples/language_model.py with 0.28 million parameters; the score is the loss in nats per
    byte on files that training has not seen.

All cells of one seed have the same initial weights, the same batches in the same order, the same number of steps and
the same learning rate, which is tuned for none of them. A difference is taken between two runs of one seed; printed are
its mean over the seeds and, behind the sign, the largest distance of a seed from that mean. The limits are 0.5 points
of accuracy and 0.02 nats. Cells with an error of their own start with exact gradients for a tenth of the steps, as the
hooks advise, where the name says "warm".

"kB/step" is what a rank hands to collectives for others in an average step after that tenth, in kilobytes, counted in
the run itself, as the collectives are usually built (a ring for sums); flags and buffers are in it too.

Finished runs are kept in a file, and a further call goes on behind them: --minutes cuts the work into slices.

    python benchmarks/convergence.py --minutes 9 --results convergence.json
    python benchmarks/convergence.py --minutes 0 --results convergence.json --output markdown    # tables only
"""

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _harness import Rank, format_table, positive_int, run_ranks
from hooks import counted_bytes
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.utilities import disable_possible_user_warnings
from torch.utils.data import ConcatDataset, DataLoader

import lightning_ddp_hooks as ldh
from lightning_ddp_hooks.averaging import DiLoCo, HierarchicalModelAverager, PeriodicModelAverager, SlowMo
from lightning_ddp_hooks.hooks import (
    BatchedPowerSGD,
    Cast,
    OneBit,
    PerParameter,
    PostLocalSGD,
    PowerSGD,
    Rule,
    Schedule,
    Stage,
    TopK,
)

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from digits import DigitsData, DigitsModel
from language_model import LanguageModel, StandardLibrary

GLOBAL_BATCH = {"digits": 64, "language model": 16}
BASELINE = "allreduce"

# --- what is compared -----------------------------------------------------------------------------------------------


def _after(warm: int, hook: Any) -> Schedule:
    """The plain mean until step ``warm``."""
    return Schedule([Stage(0, None), Stage(warm, hook)])


def _matrices_only(warm: int) -> PerParameter:
    """Low rank for what has two dimensions or more, 16 bits for the rest."""
    return PerParameter([Rule(PowerSGD(rank=2, start_iter=warm), min_numel=1024)], default="bf16")


def _hook(hook: Any) -> Callable[[int], dict[str, Any]]:
    return lambda warm: {"comm_hook": hook(warm) if callable(hook) else hook}


def _averager(averager_class: Any, **settings: Any) -> Callable[[int], dict[str, Any]]:
    return lambda warm: {"averager": averager_class(warmup_steps=warm, **settings)}


# name -> the strategy's arguments, given the number of steps of the warm-up.
HOOKS: dict[str, Callable[[int], dict[str, Any]]] = {
    BASELINE: _hook(None),
    "fp16": _hook("fp16"),
    "bf16": _hook("bf16"),
    "fp16, float32 sum": _hook(Cast(dtype="float16", accumulate="float32")),
    "bf16, float32 sum": _hook(Cast(dtype="bfloat16", accumulate="float32")),
    "powersgd 1, warm": _hook(lambda warm: PowerSGD(rank=1, start_iter=warm)),
    "powersgd 4, warm": _hook(lambda warm: PowerSGD(rank=4, start_iter=warm)),
    "powersgd 16, warm": _hook(lambda warm: PowerSGD(rank=16, start_iter=warm)),
    "powersgd 4 in bf16, warm": _hook(lambda warm: Cast(PowerSGD(rank=4, start_iter=warm), "bfloat16")),
    "batched_powersgd, warm": _hook(lambda warm: BatchedPowerSGD(start_iter=warm)),
    "quantize_per_tensor": _hook("quantize_per_tensor"),
    "quantize_per_channel": _hook("quantize_per_channel"),
    "int8": _hook("int8"),
    "fp8": _hook("fp8"),
    "onebit, warm": _hook(lambda warm: OneBit(start_iter=warm)),
    "topk 1%": _hook("topk"),
    "topk 1%, warm": _hook(lambda warm: _after(warm, TopK(ratio=0.01))),
    "topk 10%, warm": _hook(lambda warm: _after(warm, TopK(ratio=0.1))),
    "matrices powersgd 2, rest bf16, warm": _hook(_matrices_only),
    "noop": _hook("noop"),
}
AVERAGERS: dict[str, Callable[[int], dict[str, Any]]] = {
    "periodic 4": _averager(PeriodicModelAverager, period=4),
    "periodic 16": _averager(PeriodicModelAverager, period=16),
    "slowmo 16": _averager(SlowMo, period=16),
    "diloco 16": _averager(DiLoCo, period=16),
    "diloco 16, 2 fragments, delay 2, int8": _averager(DiLoCo, period=16, fragments=2, delay=2, comm_hook="int8"),
}
# These need subgroups; they take the same samples in each step as two ranks do.
FOUR_RANKS: dict[str, Callable[[int], dict[str, Any]]] = {
    BASELINE: _hook(None),
    "hierarchical {2: 2, 8: 4}": _averager(HierarchicalModelAverager, period_group_size_dict={2: 2, 8: 4}),
    "post_local_sgd by 2, periodic 8": lambda warm: {
        "comm_hook": PostLocalSGD(start_local_sgd_iter=warm, subgroup_size=2),
        "averager": PeriodicModelAverager(period=8, warmup_steps=warm),
    },
}
WORLDS: dict[int, dict[str, Callable[[int], dict[str, Any]]]] = {2: {**HOOKS, **AVERAGERS}, 4: FOUR_RANKS}

# --- tasks ----------------------------------------------------------------------------------------------------------


class Digits(DigitsModel):
    """Scored on all images that are not trained on."""

    limit = 0.5
    unit = "points"

    def score(self, metrics: dict[str, Any]) -> float:
        return 100 * float(metrics["test_acc"])


class HeldOutDigits(DigitsData):
    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.test = ConcatDataset([self.val, self.test])


class SmallLanguageModel(LanguageModel):
    limit = 0.02
    unit = "nats"

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def score(self, metrics: dict[str, Any]) -> float:
        return float(metrics["test_loss"])


class ShortText(StandardLibrary):
    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.val, 64)


def make_task(task: str, world_size: int) -> tuple[LightningModule, LightningDataModule]:
    """Model and data; a step takes the same samples in a world of any size."""
    batch = GLOBAL_BATCH[task] // world_size
    if task == "digits":
        return Digits(), HeldOutDigits(batch)
    return SmallLanguageModel(width=96, depth=2, length=64), ShortText(length=64, batch_size=batch)


class CountBytes(Callback):
    """Counts what this rank sends from the end of the warm-up to the last step."""

    def __init__(self, warm: int) -> None:
        self._warm = warm
        self._open = ExitStack()
        self._sent = [0.0]
        self._steps = 0

    def on_train_batch_start(self, *_: Any) -> None:
        if self._steps == self._warm:
            self._sent = self._open.enter_context(counted_bytes())

    def on_train_batch_end(self, *_: Any) -> None:
        self._steps += 1

    def on_train_end(self, *_: Any) -> None:
        self._open.close()

    @property
    def per_step(self) -> float:
        return self._sent[0] / (self._steps - self._warm)


def train(task: str, cell: str, seed: int, steps: int, world_size: int) -> dict[str, float]:
    """One run: its score, and how many bytes a rank sent per step."""
    warm = steps // 10
    seed_everything(seed, verbose=False)
    module, data = make_task(task, world_size)
    counter = CountBytes(warm)
    settings = WORLDS[world_size][cell](warm)
    trainer = Trainer(
        # Everything that the Python backend sends is counted; the native one sends the same.
        strategy=ldh.DDPHooksStrategy(reducer_backend="python", **settings),
        accelerator="cpu",
        devices=world_size,
        max_steps=steps,
        limit_val_batches=0,
        limit_test_batches=1.0 if task == "digits" else 20 // world_size,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[counter],
    )
    start = time.perf_counter()
    trainer.fit(module, datamodule=data)
    assert trainer.global_step == steps
    trainer.test(module, datamodule=data, verbose=False)
    assert isinstance(module, (Digits, SmallLanguageModel))
    return {
        "score": module.score(trainer.callback_metrics),
        "bytes_per_step": counter.per_step,
        "seconds": time.perf_counter() - start,
        "parameters": sum(param.numel() for param in module.parameters()),
    }


# --- slices of the work ---------------------------------------------------------------------------------------------

Job = tuple[str, str, str, int, int]  # key, task, cell, seed, steps


def key_of(task: str, world_size: int, cell: str, seed: int, steps: int) -> str:
    return f"{task} | {world_size} ranks | {cell} | seed {seed} | {steps} steps"


def run_slice(rank: Rank, jobs: Sequence[Job], results_file: str, deadline: float) -> None:
    """Do jobs until the time is up; rank 0 keeps the file."""
    _quiet()
    os.environ.update(
        RANK=str(rank.index), LOCAL_RANK=str(rank.index), WORLD_SIZE=str(rank.world_size),
        LOCAL_WORLD_SIZE=str(rank.world_size), GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0",
        TORCHELASTIC_RUN_ID="convergence",
    )  # fmt: skip
    for key, task, cell, seed, steps in jobs:
        # One clock decides for all.
        go_on = torch.tensor(int(time.time() < deadline))
        dist.broadcast(go_on, 0)
        if not go_on:
            return
        result = train(task, cell, seed, steps, rank.world_size)
        if rank.index == 0:
            path = Path(results_file)
            known = read_results(path)
            known[key] = result
            partial_file = path.with_suffix(".partial")
            partial_file.write_text(json.dumps(known, indent=1))
            partial_file.replace(path)
            print(f"{key}: {result['score']:.4f}, {result['seconds']:.1f} s", flush=True)


def _quiet() -> None:
    import logging

    disable_possible_user_warnings()
    warnings.filterwarnings("ignore", category=FutureWarning)
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_ddp_hooks"):
        logging.getLogger(name).setLevel(logging.ERROR)


def read_results(path: Path) -> dict[str, dict[str, float]]:
    return json.loads(path.read_text()) if path.exists() else {}


# --- tables ---------------------------------------------------------------------------------------------------------


def verdict(limit: float, unit: str, losses: Sequence[float], cell: str) -> str:
    """``losses``: by how much each seed is worse than the plain all-reduce."""
    if cell == BASELINE:
        return ""
    mean = statistics.mean(losses)
    return "within" if mean <= limit else f"misses by {mean - limit:.{2 if unit == 'points' else 3}f}"


def table(results: dict[str, dict[str, float]], task: str, world_size: int, args: argparse.Namespace) -> str | None:
    """The cells of one task and world, as far as they are done."""
    module_class = Digits if task == "digits" else SmallLanguageModel
    sign = -1 if task == "digits" else 1  # less accuracy is worse, and so is more loss
    digits = 2 if task == "digits" else 3
    steps = args.steps[task]
    done = {
        cell: {seed: results[key] for seed in range(args.seeds)
               if (key := key_of(task, world_size, cell, seed, steps)) in results}
        for cell in WORLDS[world_size]
    }  # fmt: skip
    baseline = done[BASELINE]
    rows = []
    for cell, runs in done.items():
        seeds = sorted(runs.keys() & baseline.keys())
        if not seeds:
            continue
        changes = [runs[seed]["score"] - baseline[seed]["score"] for seed in seeds]
        mean = statistics.mean(changes)
        sent = statistics.mean(runs[seed]["bytes_per_step"] for seed in seeds)
        whole = statistics.mean(baseline[seed]["bytes_per_step"] for seed in seeds)
        rows.append(
            [
                cell,
                f"{statistics.mean(runs[seed]['score'] for seed in seeds):.{digits}f}",
                "" if cell == BASELINE else f"{mean:+.{digits}f} ± {max(abs(c - mean) for c in changes):.{digits}f}",
                f"{sent / 1000:.1f}",
                f"{sent / whole:.3f}",
                str(len(seeds)),
                verdict(module_class.limit, module_class.unit, [sign * change for change in changes], cell),
            ]
        )
    if not rows:
        return None
    score = "accuracy, %" if task == "digits" else "loss, nats"
    header = [f"{world_size} ranks", score, f"to all-reduce, {module_class.unit}", "kB/step", "of all-reduce", "seeds",
              f"limit {module_class.limit}"]  # fmt: skip
    return format_table(header, rows, args.output)


# --- command line ---------------------------------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--tasks", nargs="+", choices=list(GLOBAL_BATCH), default=list(GLOBAL_BATCH), metavar="TASK",
                        help=f"of {', '.join(map(repr, GLOBAL_BATCH))} (default: all)")  # fmt: skip
    parser.add_argument("--world-sizes", nargs="+", type=int, choices=list(WORLDS), default=list(WORLDS))
    parser.add_argument("--cells", nargs="+", metavar="NAME", help="only these, beside the plain all-reduce")
    parser.add_argument("--seeds", type=positive_int, default=3)
    parser.add_argument("--digits-steps", type=positive_int, default=190, help="(default: 190, ten epochs)")
    parser.add_argument("--language-model-steps", type=positive_int, default=200)
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no run after this time (default: 60)")
    parser.add_argument("--results", type=Path, default=Path("convergence.json"), help="finished runs")
    parser.add_argument("--output", choices=["text", "markdown"], default="text", help="form of the tables")
    return parser


def main() -> None:
    args = make_parser().parse_args()
    args.steps = {"digits": args.digits_steps, "language model": args.language_model_steps}
    known = read_results(args.results)
    deadline = time.time() + 60 * args.minutes
    for world_size in args.world_sizes:
        jobs = [
            (key, task, cell, seed, args.steps[task])
            for task in args.tasks
            for seed in range(args.seeds)
            for cell in WORLDS[world_size]
            if args.cells is None or cell in (BASELINE, *args.cells)
            if (key := key_of(task, world_size, cell, seed, args.steps[task])) not in known
        ]
        if jobs and time.time() < deadline:
            run_ranks(run_slice, jobs, str(args.results), deadline, world_size=world_size, device="cpu")
    results = read_results(args.results)
    print(f"torch {torch.__version__}, gloo over loopback, one thread for each rank")
    for task in args.tasks:
        print(f"\n{task}, {args.steps[task]} steps of {GLOBAL_BATCH[task]} samples")
        for world_size in args.world_sizes:
            if (text := table(results, task, world_size, args)) is not None:
                print(f"\n{text}")


if __name__ == "__main__":
    main()
