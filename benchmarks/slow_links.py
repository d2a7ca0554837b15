"""What slow links cost, and what helps: torch DDP, its hooks, our hooks and averagers, trained over a shaped network.

Four hosts, each with one rank and a link of 100 Mbit/s or 1 Gbit/s (`netlab.py`), train

  * lm: the byte-level transformer of examples/language_model.py with 3.3 million parameters, 4 windows of 128 bytes a
    rank and step;
  * small: the same with 1 window a rank and step: hosts that compute faster, beside the same network;
  * digits: the network of examples/digits.py, 29 thousand parameters, 16 images a rank and step;

until the loss on held-out data reaches a target. All cells of a task have the same initial weights, batches, optimizer
and learning rate, which is tuned for none of them. Printed are:

  ms/step      of training steps after the warm-up, wall time, averaged over all of them
  MB/step      what a host's interface sent in such a step, with all headers, as the kernel counts it
  steps, s     to the target, the warm-up with its exact gradients included, time spent on evaluation not

"resnet" compares step times only: bucket sizes on the model of benchmarks/models.py, variants taking turns in blocks.

Four ranks share this machine's cores, so that a rank computes more slowly than a host of its own would: communication
weighs *less* here than it would there. Finished cells are kept in a file, and a further call goes on behind them.

    python benchmarks/slow_links.py --tasks lm --rates 100mbit --results slow_links.json      # all cells of one task
    python benchmarks/slow_links.py --tasks lm --cells ddp allreduce --minutes 5              # a part of it
    python benchmarks/slow_links.py --minutes 0 --output markdown                             # tables only
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from _harness import Rank, Trainee, format_table, positive_int
from netlab import Lab, LabError, report, why_impossible
from svg_plot import COLOURS, GREY, Bar, bars, page

ONE_BUCKET_MB = 1000.0

# --- cells ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One way to train.

    Attributes:
        torch_hook: makes torch DDP's (state, hook) from the number of warm-up steps; None for torch's plain mean.
        ours: makes our hook from the number of warm-up steps.
        averager: makes our averager from it.
        wrapper: "torch", "ours", or "none" (each rank by itself: what computing alone takes).
        bucket_mb: bucket size; None for the wrapper's default.
        warm: whether the first steps are exact.
    """

    wrapper: str = "ours"
    torch_hook: Callable[[int], tuple[Any, Any]] | None = None
    ours: Callable[[int], Any] | None = None
    averager: Callable[[int], Any] | None = None
    bucket_mb: float | None = None
    warm: bool = False


def _torch_fp16(_: int) -> tuple[Any, Any]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    return None, fp16_compress_hook


def _torch_powersgd(warm: int) -> tuple[Any, Any]:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    return PowerSGDState(None, 1, start_powerSGD_iter=max(2, warm)), powerSGD_hook


def _powersgd(rank: int) -> Callable[[int], Any]:
    def make(warm: int) -> Any:
        from lightning_ddp_hooks.hooks import PowerSGD

        return PowerSGD(rank=rank, start_iter=warm)

    return make


def _onebit(warm: int) -> Any:
    from lightning_ddp_hooks.hooks import OneBit

    return OneBit(start_iter=warm)


def _periodic(period: int) -> Callable[[int], Any]:
    def make(warm: int) -> Any:
        from lightning_ddp_hooks.averaging import PeriodicModelAverager

        return PeriodicModelAverager(period=period, warmup_steps=warm)

    return make


def _diloco(warm: int) -> Any:
    from lightning_ddp_hooks.averaging import DiLoCo

    return DiLoCo(period=16, warmup_steps=warm)


def _diloco_streamed(warm: int) -> Any:
    from lightning_ddp_hooks.averaging import DiLoCo

    return DiLoCo(period=16, warmup_steps=warm, fragments=4, delay=2, comm_hook="int8")


# fmt: off
CELLS: dict[str, Cell] = {
    "no communication": Cell("none"),
    "ddp": Cell("torch"),
    "ddp, 4 MB buckets": Cell("torch", bucket_mb=4),
    "ddp, fp16": Cell("torch", _torch_fp16, bucket_mb=4),
    "ddp, powersgd 1": Cell("torch", _torch_powersgd, bucket_mb=ONE_BUCKET_MB, warm=True),  # more buckets abort
    "allreduce": Cell(bucket_mb=1),
    "bf16": Cell(ours=lambda _: "bf16", bucket_mb=1),
    "int8": Cell(ours=lambda _: "int8", bucket_mb=1),
    "powersgd 1": Cell(ours=_powersgd(1), bucket_mb=4, warm=True),
    "powersgd 4": Cell(ours=_powersgd(4), bucket_mb=4, warm=True),
    "powersgd 4, at once": Cell(ours=lambda _: _powersgd(4)(0), bucket_mb=4),
    "onebit": Cell(ours=_onebit, bucket_mb=4, warm=True),
    "post-local SGD 8": Cell(averager=_periodic(8), bucket_mb=1, warm=True),
    "local SGD 16": Cell(averager=lambda _: _periodic(16)(0)),
    "int8, then local SGD 16": Cell(ours=lambda _: "int8", averager=_periodic(16), bucket_mb=1, warm=True),
    "DiLoCo 16": Cell(averager=_diloco, bucket_mb=1, warm=True),
    "DiLoCo 16, streamed int8": Cell(averager=_diloco_streamed, bucket_mb=1, warm=True),
}
# fmt: on
TORCH_CELLS = tuple(name for name, cell in CELLS.items() if cell.wrapper == "torch")
TORCH_HOOKS = ("ddp, fp16", "ddp, powersgd 1")
BASELINE = "ddp"

# --- tasks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A model, its data, and when it is done.

    Attributes:
        make: makes the module that maps a batch to its loss, the training batches of a rank, and the held-out batches
            of all ranks together.
        target: held-out loss at which a run is done.
        warm: exact steps of the cells that have a warm-up.
        limit: steps after which a run has failed.
        look_every: steps between two looks at the held-out loss.
        learning_rate: of AdamW, reached over the first ten steps.
    """

    make: Callable[[int, int], tuple[Any, Iterator[Any], list[Any]]]
    target: float
    warm: int
    limit: int
    look_every: int
    learning_rate: float


def _with_loss(module: Any, loss: Callable[[Any, Any], Any]) -> Any:
    from torch import nn

    class WithLoss(nn.Module):
        """So that any wrapper's forward gives the loss."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, batch: Any) -> Any:
            return loss(self.inner, batch)

    return WithLoss()


def _shares(count: int, batch: int, index: int, world_size: int) -> Iterator[Any]:
    """This rank's rows of each step, epoch after epoch."""
    import torch

    generator = torch.Generator().manual_seed(1)
    while True:
        order = torch.randperm(count, generator=generator)
        for start in range(0, count - batch * world_size + 1, batch * world_size):
            yield order[start + index * batch : start + (index + 1) * batch]


def _language_model(batch: int) -> Callable[[int, int], tuple[Any, Iterator[Any], list[Any]]]:
    def make(index: int, world_size: int) -> tuple[Any, Iterator[Any], list[Any]]:
        import torch
        from language_model import LanguageModel, StandardLibrary

        data = StandardLibrary(length=128)
        data.setup("fit")
        module = LanguageModel(width=256, depth=4, length=128)
        batches = (torch.stack([data.train[int(row)] for row in rows])
                   for rows in _shares(len(data.train), batch, index, world_size))  # fmt: skip
        held_out = [torch.stack([data.val[97 * row + n] for row in range(8)]) for n in range(8)]
        return _with_loss(module, lambda inner, windows: inner.loss(windows)), batches, held_out

    return make


def _digits(index: int, world_size: int) -> tuple[Any, Iterator[Any], list[Any]]:
    from digits import DigitsData, DigitsModel
    from torch.nn.functional import cross_entropy
    from torch.utils.data import default_collate

    data = DigitsData()
    data.setup("fit")
    batches = (default_collate([data.train[int(row)] for row in rows])
               for rows in _shares(len(data.train), 16, index, world_size))  # fmt: skip
    rest = [*data.val, *data.test]
    held_out = [default_collate(rest[start : start + 75]) for start in range(0, 600, 75)]
    module = DigitsModel()
    return _with_loss(module, lambda inner, batch: cross_entropy(inner.net(batch[0]), batch[1])), batches, held_out


TASKS: dict[str, Task] = {
    "lm": Task(_language_model(4), target=2.6, warm=8, limit=240, look_every=8, learning_rate=2e-3),
    "small": Task(_language_model(1), target=2.7, warm=8, limit=320, look_every=8, learning_rate=1e-3),
    "digits": Task(_digits, target=0.12, warm=10, limit=300, look_every=10, learning_rate=3e-3),
}

# --- on the ranks ---------------------------------------------------------------------------------------------------


def _sent() -> int:
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


class Run:
    """One cell of one task at work on this rank."""

    def __init__(self, task: Task, cell: Cell, rank: Rank) -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        torch.manual_seed(0)
        self.module, self._batches, self._held_out = task.make(rank.index, rank.world_size)
        self._rank, self._task = rank, task
        options = {} if cell.bucket_mb is None else {"bucket_cap_mb": cell.bucket_mb}
        self.wrapped: Any = self.module
        if cell.wrapper == "torch":
            self.wrapped = DistributedDataParallel(self.module, gradient_as_bucket_view=True, **options)
            if cell.torch_hook is not None:
                self.wrapped.register_comm_hook(*cell.torch_hook(task.warm))
        elif cell.wrapper == "ours":
            from lightning_ddp_hooks import DataParallel

            hook = None if cell.ours is None else cell.ours(task.warm)
            self.wrapped = DataParallel(self.module, comm_hook=hook, reducer_backend="native", **options)
        self._optimizer = torch.optim.AdamW(self.module.parameters(), lr=task.learning_rate)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, lambda step: min(1.0, (step + 1) / 10))
        self._averaging: Any = None
        if cell.averager is not None:
            from lightning_ddp_hooks.averaging.driver import Averaging

            self._averaging = Averaging(cell.averager(task.warm), self.module, lambda: [self._optimizer])

    def step(self) -> None:
        local = self._averaging is not None and not self._averaging.syncs_gradients()
        with self.wrapped.no_sync() if local else nullcontext():
            self.wrapped(next(self._batches)).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._schedule.step()
        if self._averaging is not None:
            self._averaging.after_step()

    def held_out_loss(self) -> float:
        """Of the averaged model, if there is one; ranks share the work."""
        import torch
        import torch.distributed as dist

        if self._averaging is not None:
            self._averaging.before_eval()
        own = self._held_out[self._rank.index :: self._rank.world_size]
        with torch.no_grad():
            total = torch.stack([self.module(batch) for batch in own]).sum()
        dist.all_reduce(total)
        if self._averaging is not None:
            self._averaging.after_eval()
        return float(total) / len(self._held_out)

    def close(self) -> None:
        if self._averaging is not None:
            self._averaging.close()
        if hasattr(self.wrapped, "detach"):
            self.wrapped.detach()


@dataclass
class Measured:
    """What a rank learns of a cell; becomes JSON."""

    steps: int = 0
    seconds: float = 0.0
    loss: float = math.inf
    warm_steps: int = 0
    warm_seconds: float = 0.0
    steady_steps: int = 0
    steady_seconds: float = 0.0
    steady_bytes: int = 0
    curve: list[tuple[int, float, float]] = field(default_factory=list)


def train(task: Task, cell: Cell, rank: Rank, limit: int | None) -> Measured:
    """Train to the target, or for ``limit`` steps."""
    import torch.distributed as dist

    run = Run(task, cell, rank)
    measured = Measured()
    if cell.wrapper == "none":
        limit = limit or 5 * task.look_every
    while measured.steps < (limit or task.limit):
        dist.barrier()
        start, sent = time.perf_counter(), _sent()
        for _ in range(task.look_every):
            run.step()
        dist.barrier()  # ranks that train for themselves are as slow as the slowest
        took, sent = time.perf_counter() - start, _sent() - sent
        measured.steps += task.look_every
        measured.seconds += took
        if measured.steps <= max(task.warm, task.look_every):  # the first steps also build what is built once
            measured.warm_steps += task.look_every
            measured.warm_seconds += took
        else:
            measured.steady_steps += task.look_every
            measured.steady_seconds += took
            measured.steady_bytes += sent
        if limit is None:
            measured.loss = run.held_out_loss()
            measured.curve.append((measured.steps, round(measured.seconds, 4), round(measured.loss, 4)))
            if measured.loss <= task.target:
                break
    run.close()
    return measured


def bucket_sizes(rank: Rank, caps: Sequence[float], rounds: int) -> dict[str, list[float]]:
    """Seconds of each variant's blocks on the resnet; variants take turns, in another order each round."""
    import torch.distributed as dist
    from models import MODELS

    model = MODELS["resnet"]
    trainees = {"ddp": Trainee(model, "ddp", rank, {}), "ddp-view": Trainee(model, "ddp-view", rank, {})}
    for cap in caps:
        trainees[f"ours, {cap:g} MB"] = Trainee(model, "native-view", rank, {"bucket_cap_mb": cap})
    seconds: dict[str, list[float]] = {name: [] for name in trainees}
    for trainee in trainees.values():
        for _ in range(3):
            trainee.step()
    names = list(trainees)
    for turn in range(rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            trainees[name].step()
            dist.barrier()
            start = time.perf_counter()
            for _ in range(4):
                trainees[name].step()
            dist.barrier()
            seconds[name].append((time.perf_counter() - start) / 4)
    return seconds


def work(job_file: str) -> None:
    """What each rank does: the cells of the job, one after the other."""
    import gc

    import torch
    import torch.distributed as dist

    job = json.loads(Path(job_file).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = Rank(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    done: dict[str, Any] = {}
    if job["task"] == "resnet":
        done = {"resnet": bucket_sizes(rank, job["caps"], job["rounds"])}
        report(done)
    for name in job["cells"]:
        go_on = torch.tensor(int(time.time() < job["deadline"]))
        dist.broadcast(go_on, 0)
        if not go_on:
            break
        measured = train(TASKS[job["task"]], CELLS[name], rank, job["steps"])
        gc.collect()
        done[name] = vars(measured)
        report(done)  # after each, so that a later failure does not lose it
        if rank.index == 0:
            print(f"{name}: {measured.steps} steps, {measured.seconds:.1f} s, loss {measured.loss:.3f}; steady "
                  f"{1e3 * measured.steady_seconds / max(1, measured.steady_steps):.0f} ms, "
                  f"{measured.steady_bytes / 1e6 / max(1, measured.steady_steps):.3f} MB", flush=True)  # fmt: skip
    dist.barrier()
    dist.destroy_process_group()


# --- in the parent --------------------------------------------------------------------------------------------------


def key_of(task: str, rate: str, hosts: int, cell: str) -> str:
    return f"{task} | {rate} | {hosts} hosts | {cell}"


def combine(task: str, rate: str, hosts: int, cell: str, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One record of what the ranks measured: rank 0's times (all wait for each other), the mean of the bytes."""
    first = ranks[0]
    steady = max(1, first["steady_steps"])
    return {
        "task": task, "rate": rate, "hosts": hosts, "cell": cell,
        "ms_per_step": 1e3 * first["steady_seconds"] / steady,
        "mb_per_step": statistics.mean(rank["steady_bytes"] for rank in ranks) / steady / 1e6,
        "steps": first["steps"], "seconds": first["seconds"], "loss": first["loss"],
        "reached": first["loss"] <= TASKS[task].target, "curve": first["curve"],
    }  # fmt: skip


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    return json.loads(path.read_text()) if path.exists() else {}


def keep(path: Path, fresh: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({**read_results(path), **fresh}, indent=1))
    partial.replace(path)


def run_cells(task: str, rate: str, args: argparse.Namespace, deadline: float) -> None:
    """Run what is not done yet; a cell that fails does not stop the others."""
    known = read_results(args.results)
    cells = [cell for cell in args.cells if args.again or key_of(task, rate, args.hosts, cell) not in known]
    if task == "resnet":
        cells = [] if key_of(task, rate, args.hosts, "resnet") in known and not args.again else ["resnet"]
    if not cells or time.time() > deadline:
        return
    job = {
        "task": task, "cells": [] if task == "resnet" else cells, "deadline": deadline, "steps": args.steps,
        "caps": args.caps, "rounds": args.rounds,
    }  # fmt: skip
    job_file = args.results.with_suffix(f".job-{task}-{rate}")
    job_file.write_text(json.dumps(job))
    command = ["--worker", str(job_file.absolute())]
    try:
        with Lab(args.hosts, None if rate == "none" else rate) as lab:
            ranks = lab.run(__file__, command, timeout=max(60.0, deadline - time.time() + 300), echo=True)
    finally:
        job_file.unlink()
    if task == "resnet":
        keep(args.results, {key_of(task, rate, args.hosts, "resnet"): {
            "task": task, "rate": rate, "hosts": args.hosts, "seconds": ranks[0]["resnet"]}})  # fmt: skip
        return
    for cell in ranks[0] or {}:  # None: the time was up before the first one
        record = combine(task, rate, args.hosts, cell, [rank[cell] for rank in ranks])
        keep(args.results, {key_of(task, rate, args.hosts, cell): record})


def table(results: dict[str, dict[str, Any]], task: str, rate: str, args: argparse.Namespace) -> str | None:
    records = {cell: results[key] for cell in CELLS if (key := key_of(task, rate, args.hosts, cell)) in results}
    if not records:
        return None
    base = records.get(BASELINE)
    rows = []
    for cell, record in records.items():
        trained = record["reached"] and cell != "no communication"
        ratio = base["ms_per_step"] / record["ms_per_step"] if base else math.nan
        sooner = base["seconds"] / record["seconds"] if base and base["reached"] and trained else math.nan
        rows.append([
            cell, f"{record['ms_per_step']:.0f}", f"{ratio:.2f}", f"{record['mb_per_step']:.3f}",
            f"{record['steps']}" if trained else "", f"{record['seconds']:.1f}" if trained else "",
            "" if math.isnan(sooner) else f"{sooner:.2f}",
        ])  # fmt: skip
    header = ["", "ms/step", "DDP / it", "MB/step", "steps", "s to target", "DDP / it"]
    return format_table(header, rows, args.output)


def resnet_table(results: dict[str, dict[str, Any]], rate: str, args: argparse.Namespace) -> str | None:
    record = results.get(key_of("resnet", rate, args.hosts, "resnet"))
    if record is None:
        return None
    seconds: dict[str, list[float]] = record["seconds"]
    rows = []
    for name, taken in seconds.items():
        ratios = [own / ddp for own, ddp in zip(taken, seconds["ddp"], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        rows.append([name, f"{1e3 * statistics.median(taken):.0f}", f"{statistics.median(ratios):.2f}",
                     f"{low:.2f} to {high:.2f}"])  # fmt: skip
    return format_table(["resnet", "ms/step", "of DDP", "quartiles"], rows, args.output)


def draw(results: dict[str, dict[str, Any]], args: argparse.Namespace) -> str | None:
    """Seconds to the target, cell by cell, a panel for each task and rate."""
    panels = []
    for task in args.tasks:
        for rate in args.rates:
            records = {cell: results[key] for cell in CELLS if (key := key_of(task, rate, args.hosts, cell)) in results}
            rows = [
                Bar(cell, record["seconds"], _colour(cell), "{steps} steps of {ms_per_step:.0f} ms".format(**record))
                for cell, record in records.items()
                if record["reached"]
            ]
            if rows:
                rows.sort(key=lambda row: row.value)
                target = f"{task}, {args.hosts} hosts at {rate}: seconds to a loss of {TASKS[task].target}"
                panels.append(bars(target, rows, "s", width=560))
    key = [("torch DDP", GREY), ("ours, gradients at every step", COLOURS[0]), ("ours, averaging models", COLOURS[2])]
    return page(panels, columns=2, width=560, key=key) if panels else None


def _colour(cell: str) -> str:
    return GREY if CELLS[cell].wrapper == "torch" else COLOURS[2] if CELLS[cell].averager is not None else COLOURS[0]


# --- command line ---------------------------------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    tasks = [*TASKS, "resnet"]
    parser.add_argument("--tasks", nargs="+", choices=tasks, default=list(TASKS), metavar="TASK",
                        help=f"of {', '.join(tasks)} (default: {' '.join(TASKS)})")  # fmt: skip
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"], metavar="RATE",
                        help="as tc writes them, or 'none' (default: 100mbit 1gbit)")  # fmt: skip
    parser.add_argument("--cells", nargs="+", choices=list(CELLS), default=list(CELLS), metavar="CELL",
                        help=f"of {', '.join(map(repr, CELLS))} (default: all)")  # fmt: skip
    parser.add_argument("--hosts", type=positive_int, default=4)
    parser.add_argument("--steps", type=positive_int, help="take so many steps, without looking at the loss")
    parser.add_argument("--caps", nargs="+", type=float, default=[1, 2, 4, 25], help="bucket sizes of resnet, MiB")
    parser.add_argument("--rounds", type=positive_int, default=10, help="of resnet")
    parser.add_argument("--minutes", type=float, default=30.0, help="begin no cell after this time (default: 30)")
    parser.add_argument("--again", action="store_true", help="run cells also that are done, and replace them")
    parser.add_argument("--results", type=Path, default=Path("slow_links.json"), help="finished cells")
    parser.add_argument("--output", choices=["text", "markdown"], default="text", help="form of the tables")
    parser.add_argument("--plot", type=Path, help="write a plot of the times to the target there, as SVG")
    parser.add_argument("--worker", metavar="JOB", help=argparse.SUPPRESS)
    return parser


def main() -> int:
    parser = make_parser()
    args = parser.parse_args()
    if args.worker:
        work(args.worker)
        return 0
    deadline = time.time() + 60 * args.minutes
    if args.minutes > 0 and (reason := why_impossible()) is not None:
        parser.exit(2, f"No network lab on this machine: {reason}.\n")
    failed = False
    for task in args.tasks:
        for rate in args.rates:
            try:
                run_cells(task, rate, args, deadline)
            except LabError as error:
                failed = True
                print(f"{task} at {rate}: {error}", file=sys.stderr)
    results = read_results(args.results)
    for task in args.tasks:
        for rate in args.rates:
            text = resnet_table(results, rate, args) if task == "resnet" else table(results, task, rate, args)
            if text is not None:
                target = f", to a loss of {TASKS[task].target}" if task in TASKS else ""
                print(f"\n{task}, {args.hosts} hosts at {rate}{target}\n\n{text}")
    if args.plot is not None and (drawn := draw(results, args)) is not None:
        args.plot.write_text(drawn)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
