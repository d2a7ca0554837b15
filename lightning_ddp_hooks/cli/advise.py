"""``advise``: predict what each hook would make of a module's step on a network, and recommend one."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from dataclasses import asdict
from typing import Any

import torch

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.advisor.advice import (
    CHANGES,
    CHECKED_SECONDS,
    Advice,
    Option,
    advise,
    mb_text,
    ms_text,
    table,
    why_unknown,
)
from lightning_ddp_hooks.advisor.cost_model import predict, predict_averaging
from lightning_ddp_hooks.advisor.link_model import Link, bandwidth_text
from lightning_ddp_hooks.advisor.profile import BackwardProfile, slowest
from lightning_ddp_hooks.cli import common
from lightning_ddp_hooks.cli import network as network_options
from lightning_ddp_hooks.cli import target as target_options
from lightning_ddp_hooks.cli.candidates import CANDIDATES, DEFAULT
from lightning_ddp_hooks.cli.compute import measure_compute
from lightning_ddp_hooks.cli.hook_cost import MIB, measure_hooks
from lightning_ddp_hooks.reducer.config import DEFAULT_CAP_MB

DESCRIPTION = """\
Predict a training step of your LightningModule with each communication hook on your network, and recommend one.

A few steps are trained on this process alone to learn when gradients become ready; each hook's work is measured in a
simulated world; the network's part is computed. So no other machine is needed:

  python -m lightning_ddp_hooks advise --model train.MyModule --world-size 4 --bandwidth 1gbit --latency 0.1ms

What predictions were never compared with (GPUs, short steps, more than a few ranks) is refused: `bench` measures that.

Started with torchrun on the hosts it measures their link, and takes the slowest rank's steps:

  torchrun --nnodes 4 ... -m lightning_ddp_hooks advise --config config.yaml --measure-link
"""


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = common.add_command(commands, "advise", run, "predict which hook is fastest on your network", DESCRIPTION)
    target_options.add_arguments(parser)
    network_options.add_arguments(parser)
    group = parser.add_argument_group("what is asked")
    group.add_argument("--world-size", type=common.positive_int, metavar="N",
                       help="number of ranks (default: those of this run)")  # fmt: skip
    group.add_argument("--accept", choices=CHANGES, default="rounding",
                       help="how much of the maths the recommendation may change (default: rounding)")  # fmt: skip
    common.add_measuring_arguments(group)
    group.add_argument("--bucket-caps", nargs="+", type=common.positive_float, default=[1.0, 4.0, 25.0], metavar="MB",
                       help="bucket sizes to try (default: 1 4 25)")  # fmt: skip
    group.add_argument("--unchecked", action="store_true",
                       help="predict also what no prediction was compared with; ranges then mean nothing")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    if "allreduce" not in args.hooks:
        args.hooks = ["allreduce", *args.hooks]
    target = target_options.load_target(args)
    device = common.device_of(args)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    world_size = args.world_size or ranks
    if world_size < 2:
        raise ValueError("One rank has nothing to communicate: name the number of ranks by --world-size N.")
    if args.measure_link and ranks < 2:
        raise ValueError("--measure-link needs the other ranks: start one on each host with torchrun.")
    link = None if args.measure_link else network_options.link_of(args, None)  # before the time is spent
    _raise_if_unknown(args, CHECKED_SECONDS, world_size, device)
    profile = measure_compute(target, args.steps, device)
    if ranks > 1:
        profile, measured = _with_other_ranks(profile, args.measure_link, device)
        link = link or network_options.link_of(args, measured)
    assert link is not None
    _raise_if_unknown(args, profile.seconds, world_size, device)
    options = predict_options(args, profile, link, world_size, device)
    if int(os.environ.get("RANK", "0")) == 0:
        advice = advise(options, args.accept)
        print(_text(target.name, profile, link, world_size, options, advice, args), flush=True)
        print(f"\n{_bench_text(args, advice.option.bucket_cap_mb, world_size, device)}", flush=True)
        if args.json is not None:
            figures = {
                "profile": asdict(profile),
                "link": {"latency": link.latency, "bandwidth": link.bandwidth},
                "world_size": world_size,
                "options": [{**asdict(option), "span": option.span} for option in options],
                "recommended": advice.option.name,
                "beyond": None if advice.beyond is None else advice.beyond.name,
            }
            args.json.write_text(json.dumps(figures, indent=1))
    return 0


def _raise_if_unknown(args: argparse.Namespace, seconds: float, world_size: int, device: torch.device) -> None:
    if not args.unchecked and (reason := why_unknown(seconds, world_size, device.type)) is not None:
        raise ValueError(f"{reason}. Measure it instead.\n{_bench_text(args, None, world_size, device)}")


def _with_other_ranks(own: BackwardProfile, measure: bool, device: torch.device) -> tuple[BackwardProfile, Link | None]:
    """Return the profile of the slowest rank, and the link between the ranks, if it is asked for."""
    with common.world(device) as group:
        control = comm.new_group(group, cpu=True)
        profile = slowest(comm.all_gather_object(own, control))
        comm.destroy_group(control)
        return profile, network_options.measure_link(group, device) if measure else None


def predict_options(
    args: argparse.Namespace, profile: BackwardProfile, link: Link, world_size: int, device: torch.device
) -> list[Option]:
    """Predict each candidate's step, with the bucket size that suits it."""
    hooks = [name for name in args.hooks if CANDIDATES[name].averager is None]
    costs = measure_hooks(profile, hooks, args.bucket_caps, world_size, device=device)
    options = []
    for name in args.hooks:
        candidate = CANDIDATES[name]
        if candidate.averager is not None:
            cap = None
            predicted = predict_averaging(
                profile.compute_step([]), profile.gradient_bytes, link, world_size, period=candidate.period
            )
        else:
            by_cap = {
                size: predict(profile.compute_step(buckets), cost, link, world_size)
                for size, (buckets, cost) in costs[name].items()
            }
            best = min(by_cap, key=lambda size: by_cap[size].step)
            predicted = by_cap[best]
            # Where nothing reaches either limit, the buckets are those of the default: there is nothing to set.
            cap = None if profile.gradient_bytes <= min(best, DEFAULT_CAP_MB) * MIB else best
        options.append(
            Option(
                name=name, change=candidate.change, effect=candidate.effect, yaml=candidate.yaml(cap),
                bucket_cap_mb=cap, predicted=predicted,
            )
        )  # fmt: skip
    return options


def _text(
    name: str, profile: BackwardProfile, link: Link, world_size: int, options: list[Option], advice: Advice,
    args: argparse.Namespace,
) -> str:  # fmt: skip
    lines = [
        f"{name}: {mb_text(profile.gradient_bytes)} MB of gradients in {len(profile.names)} tensors",
        f"step without communication: {ms_text(profile.seconds)} ms (backward {ms_text(profile.backward)} ms), "
        f"measured over {profile.steps} steps",
        f"network: {world_size} ranks, {bandwidth_text(link.bandwidth)}, {1e3 * link.latency:.3g} ms; "
        f"{'measured' if args.measure_link else 'as given'}",
        "",
        table(options),
        "",
        f"Recommendation: {advice.option.name}. {advice.because}",
        "",
        advice.option.yaml,
    ]
    if advice.beyond is not None:
        faster = advice.option.predicted.step / advice.beyond.predicted.step
        lines += [
            "",
            f"If you can accept more than --accept {args.accept}: {advice.beyond.name} is predicted to be "
            f"{faster:.1f} times faster still, but: {advice.beyond.effect}. Try whether it trains as well.",
            "",
            advice.beyond.yaml,
        ]
    return "\n".join(lines)


def _bench_words(args: argparse.Namespace, bucket_cap_mb: float | None) -> list[str]:
    """Return what is typed after ``python -m lightning_ddp_hooks``; None for the default bucket size."""
    words = ["bench"]
    for option in ("model", "data", "config", "batch"):
        value = getattr(args, option)
        for one in value if isinstance(value, list) else [value] if value is not None else []:
            words += [f"--{option}", str(one)]
    if tuple(args.hooks) != DEFAULT:
        words += ["--hooks", *args.hooks]
    if bucket_cap_mb is not None:
        words += ["--bucket-cap-mb", f"{bucket_cap_mb:g}"]
    if args.steps != common.STEPS:
        words += ["--steps", str(args.steps)]
    if args.device is not None:
        words += ["--device", args.device]
    return words


def _bench_text(args: argparse.Namespace, bucket_cap_mb: float | None, world_size: int, device: torch.device) -> str:
    """Say how the prediction is checked: over loopback, which tells what the hooks cost, and over the network."""
    words = _bench_words(args, bucket_cap_mb)
    # This machine can hold a rank for each GPU, or for each core, but of these at least two.
    room = torch.cuda.device_count() if device.type == "cuda" else max(2, os.cpu_count() or 1)
    lines: list[str] = []
    if not common.launched() and (processes := min(world_size, room)) >= 2:
        command = shlex.join(["python", "-m", "lightning_ddp_hooks", *words, "--processes", str(processes)])
        lines += ["What the hooks themselves cost, without your network, is measured on this machine by:", "",
                  f"  {command}", ""]  # fmt: skip
    where = "" if common.launched() else f"--nnodes {world_size} --nproc-per-node 1 "
    start = f"torchrun {where}... -m lightning_ddp_hooks"
    lines += ["Steps over the network are measured on its hosts by:", "", f"  {start} {shlex.join(words)}"]
    return "\n".join(lines)
