"""What the cost model says of more ranks than this machine can play: up to 1,024, and across data centres.

THESE ARE PREDICTIONS, not measurements. Measured are, on this machine, the steps of one process (the transformer of
models.py, 15.4 million parameters) and what each hook computes as one of so many ranks; the network is computed.
`advice.py` says how far predictions of 2 and 4 ranks are from what a network lab measures.

    python benchmarks/scaling.py --plot docs/scaling.svg
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import lab_models
import torch
from _harness import format_table
from svg_plot import COLOURS, GREY, Line, lines, page

from lightning_ddp_hooks.advisor.cost_model import BucketCost, predict, predict_averaging
from lightning_ddp_hooks.advisor.link_model import Algorithm, Link, Network
from lightning_ddp_hooks.advisor.profile import BackwardProfile
from lightning_ddp_hooks.cli.candidates import CANDIDATES
from lightning_ddp_hooks.cli.compute import measure_compute
from lightning_ddp_hooks.cli.hook_cost import measure_hooks
from lightning_ddp_hooks.cli.target import Target

WORLD_SIZES = [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
HOOKS = ["allreduce", "bf16", "int8", "powersgd-4"]
AVERAGERS = {"periodic-8": 8, "diloco-16": 16}
CAP_MB = 25.0


@dataclass(frozen=True)
class Setting:
    """A network; the number of ranks varies."""

    title: str
    link: Link
    ranks_per_host: int = 1
    inner: Link | None = None
    algorithm: Algorithm = "ring"

    def network(self, world_size: int) -> Network:
        return Network(link=self.link, ranks_per_host=min(self.ranks_per_host, world_size), inner=self.inner,
                       algorithm=self.algorithm)  # fmt: skip


SETTINGS = [
    Setting("1 Gbit/s Ethernet, ring", Link(latency=5e-5, bandwidth=1.25e8)),
    Setting("25 Gbit/s Ethernet, ring", Link(latency=2e-5, bandwidth=3.125e9)),
    Setting("25 Gbit/s Ethernet, tree", Link(latency=2e-5, bandwidth=3.125e9), algorithm="tree"),
    Setting(
        "sites of 32 ranks, 1 Gbit/s and 30 ms between them",
        Link(latency=0.03, bandwidth=1.25e8), 32, Link(latency=2e-5, bandwidth=3.125e9), "hierarchical",
    ),
]  # fmt: skip


def profile_of_transformer(steps: int) -> BackwardProfile:
    torch.set_num_threads(1)
    return measure_compute(Target(lab_models.transformer), steps, torch.device("cpu"))


def undisturbed(by_size: dict[int, list[BucketCost]]) -> dict[int, list[BucketCost]]:
    """The costs with the shortest computing that was measured for any number of ranks.

    What a rank computes hardly depends on that number (only what it sends does); what else the machine did, does.
    """

    def shortest(bucket: int, phase: int) -> float:
        return min(costs[bucket].phases[phase].compute for costs in by_size.values())

    return {
        n: [
            BucketCost(
                tuple(replace(phase, compute=shortest(b, p)) for p, phase in enumerate(cost.phases)),
                min(costs[b].finish for costs in by_size.values()),
            )
            for b, cost in enumerate(costs_of_n)
        ]
        for n, costs_of_n in by_size.items()
    }


def predictions(profile: BackwardProfile) -> dict[str, dict[str, dict[int, float]]]:
    """Step seconds by setting, hook and number of ranks."""
    device = torch.device("cpu")
    measured = {n: measure_hooks(profile, HOOKS, [CAP_MB], n, device=device) for n in WORLD_SIZES}
    costs = {name: undisturbed({n: measured[n][name][CAP_MB][1] for n in WORLD_SIZES}) for name in HOOKS}
    step = profile.compute_step([])
    found: dict[str, dict[str, dict[int, float]]] = {}
    for setting in SETTINGS:
        by_hook: dict[str, dict[int, float]] = {}
        for name in HOOKS:
            by_hook[name] = {}
            for n in WORLD_SIZES:
                buckets = measured[n][name][CAP_MB][0]
                by_hook[name][n] = predict(profile.compute_step(buckets), costs[name][n], setting.network(n), n).step
        for name, period in AVERAGERS.items():
            by_hook[name] = {
                n: predict_averaging(step, profile.gradient_bytes, setting.network(n), n, period=period).step
                for n in WORLD_SIZES
            }
        found[setting.title] = by_hook
    return found


def draw(found: dict[str, dict[str, dict[int, float]]], alone: float) -> str:
    panels = []
    for number, (title, by_hook) in enumerate(found.items()):
        curves = [
            Line(name, [(n, 1e3 * seconds) for n, seconds in by_n.items()], COLOURS[index])
            for index, (name, by_n) in enumerate(by_hook.items())
        ]
        curves.append(Line("no communication", [(n, 1e3 * alone) for n in WORLD_SIZES], GREY, dashed=True))
        panels.append(lines(title, curves, x_label="ranks", y_label="ms a step", legend=number == 3))
    note = ("Predicted by the cost model, not measured. Transformer of 15.4 million parameters, "
            f"{1e3 * alone:.0f} ms a step on one process; each rank keeps its batch.")  # fmt: skip
    return page(panels, columns=2, note=note)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=10, help="to measure (default: 10)")
    parser.add_argument("--profile", type=Path, help="keep the measured steps there, and use them if they are there")
    parser.add_argument("--plot", type=Path, help="write a plot there, as SVG")
    parser.add_argument("--output", choices=["text", "markdown"], default="text", help="form of the tables")
    args = parser.parse_args()
    if args.profile is not None and args.profile.exists():
        profile = BackwardProfile(**json.loads(args.profile.read_text()))
    else:
        profile = profile_of_transformer(args.steps)
        if args.profile is not None:
            args.profile.write_text(json.dumps(asdict(profile)))
    found = predictions(profile)
    print(f"PREDICTED, not measured: ms a step; {1e3 * profile.seconds:.0f} without communication")
    for title, by_hook in found.items():
        sizes = [2, 8, 32, 128, 1024]
        rows = [[name, *(f"{1e3 * by_n[n]:.0f}" for n in sizes)] for name, by_n in by_hook.items()]
        print(f"\n{title}\n\n{format_table(['ranks', *map(str, sizes)], rows, args.output)}")
    if args.plot is not None:
        args.plot.write_text(draw(found, profile.seconds))
    assert set(AVERAGERS) <= set(CANDIDATES)


if __name__ == "__main__":
    main()
