"""What several commands share: options, the device, and the ranks of a run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.cli.candidates import CANDIDATES, DEFAULT

STEPS = 12
"""How many steps are measured by default."""


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str, description: str
) -> argparse.ArgumentParser:
    """Add a command; ``text`` is its line in the list of commands."""
    raw = argparse.RawDescriptionHelpFormatter
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=description, formatter_class=raw, allow_abbrev=False
    )
    parser.set_defaults(run=run)
    return parser


def add_measuring_arguments(group: Any) -> None:
    """Add the options that `advise` and `bench` have in common."""
    group.add_argument("--hooks", nargs="+", choices=list(CANDIDATES), default=list(DEFAULT), metavar="NAME",
                       help=f"of {', '.join(CANDIDATES)} (default: {' '.join(DEFAULT)})")  # fmt: skip
    group.add_argument("--steps", type=positive_int, default=STEPS, metavar="N",
                       help=f"steps to measure (default: {STEPS})")  # fmt: skip
    group.add_argument("--device", choices=["cpu", "cuda"], help="where to train (default: cuda if there is one)")
    group.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")


def add_processes_argument(group: Any) -> None:
    """Add the option that starts processes."""
    group.add_argument("--processes", type=positive_int, metavar="N",
                       help="how many to start on this machine; not under torchrun (default: 2)")  # fmt: skip


def positive_int(text: str) -> int:
    """Read a whole number from 1 up, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1 up, got {number}")
    return number


def positive_float(text: str) -> float:
    """Read a number above 0, for argparse."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
    return number


def device_of(args: argparse.Namespace) -> torch.device:
    """Return this process's device; raises ValueError where a GPU was asked for, and there is none."""
    if (args.device or ("cuda" if torch.cuda.is_available() else "cpu")) == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here.")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def synchronize(device: torch.device) -> None:
    """Wait for all work that was queued on the device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def launched() -> bool:
    """Tell whether torchrun has started this process."""
    return "WORLD_SIZE" in os.environ


@contextmanager
def world(device: torch.device, processes: int | None = None) -> Iterator[comm.ProcessGroup]:
    """Join the ranks that torchrun has started, if no number of processes to start was given too."""
    if processes is not None:
        raise ValueError(
            "--processes starts ranks on this machine, but torchrun has started them already: leave it out."
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    joined = not comm.is_initialized()
    if joined:
        comm.join_world(device)
    try:
        yield comm.resolve_group(None)
    finally:
        if joined:
            comm.leave_world()


def start_processes(count: int) -> int:
    """Run this same command line on processes of this machine, which take the place of this one and end with it."""
    if count < 2:
        raise ValueError(f"Expected --processes of 2 or more, got {count}: one rank has nothing to communicate.")
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // count)), **os.environ}
    words = sys.argv[1:]
    if "--processes" in words:
        at = words.index("--processes")
        del words[at : at + 2]
    words = [word for word in words if not word.startswith("--processes=")]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    sys.stdout.flush()
    os.execve(sys.executable, [*command, "-m", "lightning_ddp_hooks", *words], environment)
