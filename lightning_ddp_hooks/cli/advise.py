"""``advise``: predict what each hook would make of a module's step on a network, and recommend one."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.advisor.advice import CHANGES, Advice, Option, advise, mb_text, ms_text, table
from lightning_ddp_hooks.advisor.cost_model import predict, predict_averaging
from lightning_ddp_hooks.advisor.link_model import Link, Network, bandwidth_text
from lightning_ddp_hooks.advisor.profile import BackwardProfile, slowest
from lightning_ddp_hooks.cli import network as network_options
from lightning_ddp_hooks.cli import target as target_options
from lightning_ddp_hooks.cli.bench_command import STEPS, bench_text
from lightning_ddp_hooks.cli.candidates import CANDIDATES, DEFAULT
from lightning_ddp_hooks.cli.compute import measure_compute
from lightning_ddp_hooks.cli.hook_cost import MIB, measure_hooks
from lightning_ddp_hooks.reducer.config import DEFAULT_CAP_MB

DESCRIPTION = """\
Predict a training step of your LightningModule with each communication hook on your network, and recommend one.

A few steps are trained on this process alone to learn when gradients become ready; each hook's work is measured in a
simulated world; the network's part is computed. So no other machine is needed:

  python -m lightning_ddp_hooks advise --model train.MyModule --world-size 8 --bandwidth 1gbit --latency 0.1ms

Started with torchrun on the hosts it measures their link, and takes the slowest rank's steps:

  torchrun --nnodes 4 ... -m lightning_ddp_hooks advise --config config.yaml --measure-link
"""


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "advise", help="predict which hook is fastest on your network", description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    target_options.add_arguments(parser)
    network_options.add_arguments(parser)
    group = parser.add_argument_group("what is asked")
    group.add_argument("--world-size", type=positive_int, metavar="N",
                       help="number of ranks (default: those of this run)")  # fmt: skip
    group.add_argument("--accept", choices=CHANGES, default="rounding",
                       help="how much of the maths the recommendation may change (default: rounding)")  # fmt: skip
    add_shared_arguments(group)
    group.add_argument("--bucket-caps", nargs="+", type=positive_float, default=[1.0, 4.0, 25.0], metavar="MB",
                       help="bucket sizes to try (default: 1 4 25)")  # fmt: skip
    parser.set_defaults(run=run)


def add_shared_arguments(group: Any) -> None:
    """Add the options that `bench` has too."""
    group.add_argument("--hooks", nargs="+", choices=list(CANDIDATES), default=list(DEFAULT), metavar="NAME",
                       help=f"of {', '.join(CANDIDATES)} (default: {' '.join(DEFAULT)})")  # fmt: skip
    group.add_argument("--steps", type=positive_int, default=STEPS, metavar="N",
                       help=f"steps to measure (default: {STEPS})")  # fmt: skip
    group.add_argument("--device", choices=["cpu", "cuda"],
                       help="where to train (default: cuda if there is one)")  # fmt: skip
    group.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")


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
    """Return this process's device.

    Raises:
        ValueError: a GPU was asked for, and there is none.
    """
    kind = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here.")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    if "allreduce" not in args.hooks:
        args.hooks = ["allreduce", *args.hooks]
    target = target_options.load_target(args)
    device = device_of(args)
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    world_size = args.world_size or launched
    if world_size < 2:
        raise ValueError("One rank has nothing to communicate: name the number of ranks by --world-size N.")
    if args.measure_link and launched < 2:
        raise ValueError("--measure-link needs the other ranks: start one on each host with torchrun.")
    if not args.measure_link:
        network_options.network_of(args, world_size, None)  # before the time is spent
    own = measure_compute(target, args.steps, device)
    profile, link = (own, None) if launched < 2 else _with_others(own, args.measure_link, device)
    network = network_options.network_of(args, world_size, link)
    options = predict_options(args, profile, network, world_size, device)
    if int(os.environ.get("RANK", "0")) == 0:
        advice = advise(options, args.accept)
        print(_text(target.name, profile, network, world_size, link is not None, options, advice, args), flush=True)
        print(f"\n{bench_text(args, advice.option.bucket_cap_mb, world_size, device)}", flush=True)
        if args.json is not None:
            figures = {
                "profile": profile.as_dict(),
                "link": {"latency": network.link.latency, "bandwidth": network.link.bandwidth},
                "world_size": world_size,
                "options": [option.as_dict() for option in options],
                "recommended": advice.option.name,
                "beyond": None if advice.beyond is None else advice.beyond.name,
            }
            args.json.write_text(json.dumps(figures, indent=1))
    return 0


def _with_others(own: BackwardProfile, measure: bool, device: torch.device) -> tuple[BackwardProfile, Link | None]:
    """Join the other ranks of this run: the slowest one counts, and the link between them, if it is asked for."""
    with network_options.world(device) as group:
        control = comm.new_group(group, cpu=True)
        profile = slowest([BackwardProfile.from_dict(v) for v in comm.all_gather_object(own.as_dict(), control)])
        comm.destroy_group(control)
        return profile, network_options.measure_link(group, device) if measure else None


def predict_options(
    args: argparse.Namespace, profile: BackwardProfile, network: Network, world_size: int, device: torch.device
) -> list[Option]:
    """Predict each candidate's step, with the bucket size that suits it."""
    hooks = [name for name in args.hooks if CANDIDATES[name].averager is None]
    caps = args.bucket_caps
    costs = measure_hooks(profile, hooks, caps, world_size, device=device)
    options = []
    for name in args.hooks:
        candidate = CANDIDATES[name]
        if candidate.averager is not None:
            cap, memory = None, candidate.copies * profile.gradient_bytes
            predicted = predict_averaging(
                profile.compute_step([]), profile.gradient_bytes, network, world_size, period=candidate.period
            )
        else:
            by_cap = {
                size: predict(profile.compute_step(buckets), cost, network, world_size, on_stream=device.type == "cuda")
                for size, (buckets, cost, _) in costs[name].items()
            }
            best = min(by_cap, key=lambda size: by_cap[size].step)
            predicted, memory = by_cap[best], costs[name][best][2]
            # Where nothing reaches either limit, the buckets are those of the default: there is nothing to set.
            cap = None if profile.gradient_bytes <= min(best, DEFAULT_CAP_MB) * MIB else best
        options.append(
            Option(
                name=name, change=candidate.change, effect=candidate.effect, yaml=candidate.yaml(cap),
                bucket_cap_mb=cap, memory=memory, predicted=predicted,
            )
        )  # fmt: skip
    return options


def _text(
    name: str, profile: BackwardProfile, network: Network, world_size: int, measured: bool, options: list[Option],
    advice: Advice, args: argparse.Namespace,
) -> str:  # fmt: skip
    link = network.link
    hosts = f", {network.ranks_per_host} to a host" if network.ranks_per_host > 1 else ""
    lines = [
        f"{name}: {mb_text(profile.gradient_bytes)} MB of gradients in {len(profile.names)} tensors",
        f"step without communication: {ms_text(profile.seconds)} ms (backward {ms_text(profile.backward)} ms), "
        f"measured over {profile.steps} steps",
        f"network: {world_size} ranks{hosts}, {bandwidth_text(link.bandwidth)}, {1e3 * link.latency:.3g} ms, "
        f"{network.algorithm}; {'measured' if measured else 'as given'}",
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
