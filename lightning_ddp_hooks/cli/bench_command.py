"""The `bench` command that measures what `advise` has predicted: with those of its options that `bench` has too."""

from __future__ import annotations

import argparse
import os
import shlex

import torch

from lightning_ddp_hooks.cli.candidates import DEFAULT

STEPS = 12
"""How many steps both commands measure by default."""


def bench_words(args: argparse.Namespace, bucket_cap_mb: float | None) -> list[str]:
    """Return what is typed after ``python -m lightning_ddp_hooks``.

    Args:
        args: the options of `advise`.
        bucket_cap_mb: the bucket size of the recommended option; None for the default.
    """
    words = ["bench"]
    for option in ("model", "data", "config", "batch"):
        value = getattr(args, option)
        if value is not None:
            words += [f"--{option}", str(value)]
    if tuple(args.hooks) != DEFAULT:
        words += ["--hooks", *args.hooks]
    if bucket_cap_mb is not None:
        words += ["--bucket-cap-mb", f"{bucket_cap_mb:g}"]
    if args.steps != STEPS:
        words += ["--steps", str(args.steps)]
    if args.device is not None:
        words += ["--device", args.device]
    return words


def processes_here(world_size: int, device: torch.device) -> int:
    """Return how many ranks this machine can hold: one for each GPU, or for each core, but of these at least two."""
    room = torch.cuda.device_count() if device.type == "cuda" else max(2, os.cpu_count() or 1)
    return min(world_size, room)


def bench_text(args: argparse.Namespace, bucket_cap_mb: float | None, world_size: int, device: torch.device) -> str:
    """Say how what was predicted is measured: over loopback, which tells what the hooks cost, and over the network.

    Args:
        args: the options of `advise`.
        bucket_cap_mb: the bucket size of the recommended option; None for the default.
        world_size: number of ranks that was asked about.
        device: what is trained on.
    """
    words = bench_words(args, bucket_cap_mb)
    launched = "WORLD_SIZE" in os.environ
    lines = ["These are predictions."]
    if not launched and (processes := processes_here(world_size, device)) >= 2:
        command = shlex.join(["python", "-m", "lightning_ddp_hooks", *words, "--processes", str(processes)])
        lines += ["What the hooks themselves cost, without your network, is measured on this machine by:", "",
                  f"  {command}", ""]  # fmt: skip
    hosts = world_size // args.ranks_per_host
    start = f"torchrun --nnodes {hosts} --nproc-per-node {args.ranks_per_host} ... -m lightning_ddp_hooks"
    if launched:
        start = "torchrun ... -m lightning_ddp_hooks"
    lines += ["Steps over the network are measured on its hosts by:", "", f"  {start} {shlex.join(words)}"]
    return "\n".join(lines)
