"""What `CommMonitor` costs a training step.

    python benchmarks/monitor_cost.py
    python benchmarks/monitor_cost.py --models mlp --blocks 100 --report some/folder

One Trainer trains a model of models.py; the monitor is on in every other block of steps and off in those between (then
its hooks return at once, the reducer has no observer, and nobody counts what is sent). The figure is the median over
pairs of neighbouring blocks of the ratio of their times, which noise that lasts longer than a block does not reach.
Processor time, of all threads, is told too. With ``--report`` the monitor's own report of the run is kept.
"""

import argparse
import statistics
import tempfile
import time
from typing import Any

import torch
from _harness import Rank, make_parser, parse, positive_int, prepare_lightning, run_ranks
from lightning.pytorch import Callback, LightningModule, Trainer
from models import MODELS, Batch
from torch.utils.data import DataLoader

from lightning_ddp_hooks import DDPHooksStrategy, traffic
from lightning_ddp_hooks.callbacks import CommMonitor

WARM_UP = 12  # the buckets are laid out anew, and what is built at first use is built


class Model(LightningModule):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.module = MODELS[name].make_module()

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return MODELS[self.name].loss(self.module(batch.inputs), batch.target)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.module.parameters(), lr=MODELS[self.name].learning_rate)


class Switch(Callback):
    """Turns the monitor on and off, and times the blocks from the first step's begin to the next block's."""

    def __init__(self, monitor: CommMonitor, steps: int) -> None:
        self.monitor = monitor
        self.steps = steps
        self.marks: list[tuple[float, float]] = []
        self._recorder: Any = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx < WARM_UP or (batch_idx - WARM_UP) % self.steps:
            return
        self._turn(trainer.strategy.reducer, on=len(self.marks) % 2 == 0)
        self.marks.append((time.perf_counter(), time.process_time()))

    def _turn(self, reducer: Any, *, on: bool) -> None:
        self._recorder = self.monitor._recorder or self._recorder
        self.monitor._recorder = self._recorder if on else None
        reducer.observer = self.monitor._recorder
        traffic.count_bytes(self._recorder._traffic if on else None)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._turn(trainer.strategy.reducer, on=True)  # so that the monitor ends as it should


def measure(rank: Rank, name: str, blocks: int, steps: int, options: dict[str, Any]) -> list[tuple[float, float]]:
    prepare_lightning(rank)
    generator = torch.Generator().manual_seed(1000 + rank.index)
    batches = [MODELS[name].make_batch(generator) for _ in range(4)]
    count = WARM_UP + 2 * blocks * steps + 1
    monitor = CommMonitor(options["report"], prog_bar=False, keep_steps=100_000)
    switch = Switch(monitor, steps)
    trainer = Trainer(
        strategy=DDPHooksStrategy(bucket_cap_mb=options["bucket_cap_mb"] or 25),
        accelerator="gpu" if rank.device.type == "cuda" else "cpu",
        devices=rank.world_size,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[switch, monitor],
        use_distributed_sampler=False,
    )
    torch.manual_seed(0)
    loader = DataLoader([batches[i % 4] for i in range(count)], batch_size=None)  # type: ignore[arg-type]
    trainer.fit(Model(name), loader)
    return [
        ((wall - wall_before) / steps, (cpu - cpu_before) / steps)
        for (wall_before, cpu_before), (wall, cpu) in zip(switch.marks, switch.marks[1:], strict=False)
    ]


def main() -> None:
    parser = make_parser(__doc__, [])
    parser.add_argument("--blocks", type=positive_int, default=25, help="pairs of blocks, one of them with the monitor")
    parser.add_argument("--steps", type=positive_int, default=10, help="steps of a block")
    parser.add_argument("--report", help="folder for the monitor's report; by default comm_monitor in a new folder")
    parser.set_defaults(models=["transformer"])
    args = parse(parser)
    for name in args.models:
        _measure_and_print(args, name)


def _measure_and_print(args: argparse.Namespace, name: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        options = {"report": args.report or scratch, "bucket_cap_mb": args.bucket_cap_mb}
        results = run_ranks(
            measure, name, args.blocks, args.steps, options, world_size=args.world_size, device=args.device
        )
    print(f"{name}: {args.world_size} ranks, {args.blocks} pairs of blocks of {args.steps} steps")
    for index, clock in enumerate(("time", "processor time")):
        # A step is as long as on its slowest rank.
        times = [max(values) for values in zip(*([block[index] for block in found] for found in results), strict=True)]
        on, off = times[0::2][: args.blocks], times[1::2][: args.blocks]
        ratios = [a / b for a, b in zip(on, off, strict=True)]
        lower, middle, upper = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        with_it, without = (1e3 * statistics.median(values) for values in (on, off))
        print(
            f"  {clock:<15} with {with_it:8.3f} ms  without {without:8.3f} ms  "
            f"ratio {middle:.4f} [{lower:.4f}, {upper:.4f}]"
        )


if __name__ == "__main__":
    main()
