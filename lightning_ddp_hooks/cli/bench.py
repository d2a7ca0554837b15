"""``bench``: measure a module's step with each hook, on the ranks of this run or on some processes of this machine."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.cli import target as target_options
from lightning_ddp_hooks.cli.advise import add_shared_arguments, device_of, positive_float, positive_int
from lightning_ddp_hooks.cli.candidates import CANDIDATES
from lightning_ddp_hooks.cli.compute import PLENTY, QUIET, fit_arguments
from lightning_ddp_hooks.cli.network import world
from lightning_ddp_hooks.cli.target import Target
from lightning_ddp_hooks.lightning.strategy import DDPHooksStrategy
from lightning_ddp_hooks.monitor.advisor import align, ms_text

DESCRIPTION = """\
Measure a training step of your LightningModule with each communication hook.

On several processes of this machine, over loopback, which tells what the hooks themselves cost:

  python -m lightning_ddp_hooks bench --model train.MyModule --processes 2

Started with torchrun on the hosts, over their network, which tells which one to take:

  torchrun --nnodes 4 ... -m lightning_ddp_hooks bench --config config.yaml
"""

_WARM_STEPS = 5


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "bench", help="measure which hook is fastest on your network", description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    target_options.add_arguments(parser)
    group = parser.add_argument_group("what is asked")
    add_shared_arguments(group)
    group.add_argument("--processes", type=positive_int, metavar="N",
                       help="how many to start on this machine; not under torchrun (default: 2)")  # fmt: skip
    group.add_argument("--bucket-cap-mb", type=positive_float, default=25.0, metavar="MB",
                       help="of all hooks (default: 25)")  # fmt: skip
    group.add_argument("--rounds", type=positive_int, default=2, metavar="N",
                       help="how often each hook has its turn; the best one counts (default: 2)")  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    if "WORLD_SIZE" not in os.environ:
        target_options.load_target(args)  # say what is wrong once, and before processes are started
        return start_processes(args.processes or 2)
    if args.processes is not None:
        raise ValueError(
            "--processes starts ranks on this machine, but torchrun has started them already: leave it out."
        )
    target = target_options.load_target(args)
    device = device_of(args)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with world(device) as group, _warnings_only():
        seconds: dict[str, list[float]] = {name: [] for name in args.hooks}
        for turn in range(args.rounds):  # there and back, so that a drift of the machine meets all alike
            for name in args.hooks if turn % 2 == 0 else reversed(args.hooks):
                seconds[name].append(_time_steps(target, name, args, device, group))
        if comm.rank(group) == 0:
            _show(seconds, args, comm.world_size(group))
    return 0


def start_processes(count: int) -> int:
    """Run this same command line on several processes of this machine; returns the exit status.

    They take the place of this process, so that they end when it is ended.
    """
    if count < 2:
        raise ValueError(f"Expected --processes of 2 or more, got {count}: one rank has nothing to communicate.")
    environment = {**os.environ}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    arguments = []
    skip = False
    for word in sys.argv[1:]:
        if skip or word == "--processes" or word.startswith("--processes="):
            skip = word == "--processes"
            continue
        arguments.append(word)
    sys.stdout.flush()
    os.execve(sys.executable, [*command, "-m", "lightning_ddp_hooks", *arguments], environment)


@contextmanager
def _warnings_only() -> Iterator[None]:
    """Leave out what every fit says about devices, hook and buckets, which would bury the table; warnings stay."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(max(logger.level, logging.WARNING))
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


class _StepTimer(Callback):
    """Times steps from one optimizer step to the next, after some to warm up; then stops the training."""

    def __init__(self, steps: int, group: comm.ProcessGroup) -> None:
        self._steps = steps
        self._group = group
        self._taken = 0
        self._step_before = 0
        self._begin = 0.0
        self.seconds = float("nan")

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step_before = trainer.global_step

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == self._step_before and pl_module.automatic_optimization:
            return
        self._step_before = trainer.global_step
        self._taken += 1
        if self._taken == _WARM_STEPS:
            self._meet(pl_module.device)
            self._begin = time.perf_counter()
        elif self._taken == _WARM_STEPS + self._steps:
            self._meet(pl_module.device)
            self.seconds = (time.perf_counter() - self._begin) / self._steps
            trainer.should_stop = True

    def _meet(self, device: torch.device) -> None:
        """Wait for what the device has to do, and for the other ranks, which may train on their own."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        comm.barrier(self._group)


def _time_steps(
    target: Target, name: str, args: argparse.Namespace, device: torch.device, group: comm.ProcessGroup
) -> float:
    """Train with one candidate, and return the seconds of its average step."""
    candidate = CANDIDATES[name]
    module, data = target.make()
    strategy = DDPHooksStrategy(
        comm_hook=None if candidate.hook is None else candidate.hook(),
        averager=None if candidate.averager is None else candidate.averager(),
        bucket_cap_mb=args.bucket_cap_mb,
    )
    steps = -(-args.steps // candidate.period) * candidate.period  # whole periods
    timer = _StepTimer(steps, group)
    trainer = Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        strategy=strategy,
        max_steps=PLENTY,
        max_epochs=-1,
        callbacks=[timer],
        **QUIET,
        **target.trainer,
    )
    trainer.fit(module, **fit_arguments(data))
    if timer.seconds != timer.seconds:
        raise ValueError(f"The data ends before step {_WARM_STEPS + steps}: ask for fewer --steps.")
    return timer.seconds


def _show(seconds: dict[str, list[float]], args: argparse.Namespace, world_size: int) -> None:
    best = {name: min(times) for name, times in seconds.items()}
    plain = best.get("allreduce")
    rows = [("hook", "step ms", "of mean", "rounds ms", "what it changes")]
    for name in sorted(best, key=lambda name: best[name]):
        ratio = "" if plain is None else f"{best[name] / plain:.2f}"
        rounds = " ".join(ms_text(value) for value in seconds[name])
        rows.append((name, ms_text(best[name]), ratio, rounds, CANDIDATES[name].effect))
    what = f"{world_size} ranks, buckets of {args.bucket_cap_mb:g} MB, {args.steps} steps"
    print(f"{what}, {args.rounds} round(s) of which the best one counts\n")
    print(align(rows, right=(1, 2)), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps({"world_size": world_size, "seconds": seconds}, indent=1))
