"""``bench``: measure a module's step with each hook, on the ranks of this run or on some processes of this machine."""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.advisor.advice import align, ms_text
from lightning_ddp_hooks.advisor.link_model import bandwidth_text
from lightning_ddp_hooks.cli import common
from lightning_ddp_hooks.cli import target as target_options
from lightning_ddp_hooks.cli.candidates import CANDIDATES
from lightning_ddp_hooks.cli.compute import StepCallback, train
from lightning_ddp_hooks.cli.network import measure_link
from lightning_ddp_hooks.cli.target import Target
from lightning_ddp_hooks.lightning.strategy import DDPHooksStrategy
from lightning_ddp_hooks.reducer.config import DEFAULT_CAP_MB

DESCRIPTION = """\
Measure a training step of your LightningModule with each of several communication hooks, in one run.

On several processes of this machine, over loopback, which tells what the hooks themselves cost:

  python -m lightning_ddp_hooks bench --model train.MyModule --processes 2

Started with torchrun on the hosts, over their network, which tells which one to take:

  torchrun --nnodes 4 ... -m lightning_ddp_hooks bench --config config.yaml
"""

_WARM_STEPS = 5
_TOO_LITTLE = 0.03  # less gain than this is no reason to change the maths


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = common.add_command(commands, "bench", run, "measure which hook is fastest on your network", DESCRIPTION)
    target_options.add_arguments(parser)
    group = parser.add_argument_group("what is asked")
    common.add_measuring_arguments(group)
    common.add_processes_argument(group)
    group.add_argument("--bucket-cap-mb", type=common.positive_float, default=25.0, metavar="MB",
                       help="of all hooks (default: 25)")  # fmt: skip
    group.add_argument("--rounds", type=common.positive_int, default=2, metavar="N",
                       help="how often each hook has its turn; the best one counts (default: 2)")  # fmt: skip
    group.add_argument("--yaml", type=Path, metavar="FILE",
                       help="also write the best hook there, as a part of a LightningCLI's configuration")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    target = target_options.load_target(args)  # also before processes are started, to say once what is wrong
    if not common.launched():
        return common.start_processes(args.processes or 2)
    device = common.device_of(args)
    with common.world(device, args.processes) as group, _warnings_only():
        link = measure_link(group, device)
        seconds: dict[str, list[float]] = {name: [] for name in args.hooks}
        for turn in range(args.rounds):  # there and back, so that a drift of the machine meets all alike
            for name in args.hooks if turn % 2 == 0 else reversed(args.hooks):
                seconds[name].append(_time_steps(target, name, args, device, group))
        if comm.rank(group) == 0:
            where = f"{comm.world_size(group)} ranks over {comm.backend_name(group)}, {bandwidth_text(link.bandwidth)}"
            _show(seconds, args, f"{target.name}, {where}", comm.world_size(group))
    return 0


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


class _StepTimer(StepCallback):
    """Times steps from one optimizer step to the next, after some to warm up; then stops the training."""

    def __init__(self, steps: int, group: comm.ProcessGroup) -> None:
        super().__init__()
        self._count = steps
        self._group = group
        self._begin = 0.0
        self.seconds: float | None = None

    @override
    def step_ended(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.steps not in (_WARM_STEPS, _WARM_STEPS + self._count):
            return
        common.synchronize(pl_module.device)
        comm.barrier(self._group)  # ranks may train on their own
        if self.steps == _WARM_STEPS:
            self._begin = time.perf_counter()
        else:
            self.seconds = (time.perf_counter() - self._begin) / self._count
            trainer.should_stop = True


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
    train(
        target, module, data, timer, device, strategy=strategy,
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")), num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
    )  # fmt: skip
    if timer.seconds is None:
        raise ValueError(f"The data ends before step {_WARM_STEPS + steps}: ask for fewer --steps.")
    return timer.seconds


def _show(seconds: dict[str, list[float]], args: argparse.Namespace, what: str, world_size: int) -> None:
    fastest = {name: min(times) for name, times in seconds.items()}
    plain = fastest.get("allreduce")
    rows = [("hook", "step ms", "of mean", "rounds ms", "what it changes")]
    for name in sorted(fastest, key=lambda name: fastest[name]):
        ratio = "" if plain is None else f"{fastest[name] / plain:.2f}"
        rounds = " ".join(ms_text(value) for value in seconds[name])
        rows.append((name, ms_text(fastest[name]), ratio, rounds, CANDIDATES[name].effect))
    caps = args.bucket_cap_mb
    print(f"Your step, your model, this network: {what}, buckets of {caps:g} MB")
    print(f"{args.steps} steps, {args.rounds} round(s) of which the best one counts\n")
    print(align(rows, right=(1, 2)))
    best = min(fastest, key=fastest.__getitem__)
    print(f"\nFastest for this module on this network: {best}. What it changes: {CANDIDATES[best].effect}.")
    if plain is not None and best != "allreduce" and fastest[best] > (1 - _TOO_LITTLE) * plain:
        print(f"That is less than {_TOO_LITTLE:.0%} faster than the plain mean, which changes nothing: take that.")
        best = "allreduce"
    averages = CANDIDATES[best].averager is not None
    yaml = CANDIDATES[best].yaml(None if averages or caps == DEFAULT_CAP_MB else caps)
    print(f"\n{yaml}", flush=True)
    if args.yaml is not None:
        args.yaml.write_text(f"{yaml}\n", encoding="utf-8")
    if args.json is not None:
        args.json.write_text(json.dumps({"world_size": world_size, "seconds": seconds}, indent=1))
