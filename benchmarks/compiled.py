"""Step time of compiled models: this package's DataParallel beside torch's DDP, over loopback or a slower link.

Both split compiled graphs where buckets end, so that buckets are sent while the backward goes on (docs/internals.md).
Further variants split at other sizes, or not at all. All live in the same processes and take turns, as in step_time.py,
whose statistic and check of weights this is; graphs that are split elsewhere may differ in the last bits.

    python benchmarks/compiled.py                                       # loopback
    python benchmarks/compiled.py --rate 1gbit --bucket-cap-mb 4        # two hosts of netlab.py; takes root
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from _harness import (
    DDP_VARIANTS,
    VARIANTS,
    Rank,
    describe_run,
    make_parser,
    parse,
    positive_int,
    run_ranks,
    wrap_options,
)
from models import MODELS
from netlab import Lab, report
from step_time import Measured, measure, report_model
from torch import nn

ONE_GRAPH_MB = 1e6


def _ours_with_graphs_of(mb: float) -> Callable[..., nn.Module]:
    def wrap(module: nn.Module, **options: Any) -> nn.Module:
        from lightning_ddp_hooks import _compat

        wrapped = VARIANTS["native-view"](module, **options)
        wrapped._run.graphs_by_bucket = lambda: _compat.SplitGraphs(lambda: int(mb * 2**20))
        return wrapped

    return wrap


VARIANTS |= {
    "graphs-1": _ours_with_graphs_of(1),
    "graphs-5": _ours_with_graphs_of(5),
    "one-graph": _ours_with_graphs_of(ONE_GRAPH_MB),
}


def measure_compiled(
    rank: Rank, name: str, variants: list[str], blocks: int, steps: int, options: dict[str, Any]
) -> Measured:
    """Measure as `measure` does, with the model compiled anew for each variant."""
    model = MODELS[name]
    inductor = torch._dynamo.lookup_backend("inductor")

    def make_module() -> nn.Module:
        # A backend of its own: Dynamo would take the graphs of the variant before.
        return torch.compile(model.make_module(), backend=lambda *graph: inductor(*graph))

    MODELS[name] = replace(model, make_module=make_module)
    try:
        return measure(rank, name, variants, blocks, steps, options)
    finally:
        MODELS[name] = model


def _as_host(args: Any, variants: list[str]) -> None:
    """Measure as one of the lab's hosts."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = Rank(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    options = wrap_options(args)
    report({m: asdict(measure_compiled(rank, m, variants, args.blocks, args.steps, options)) for m in args.models})
    dist.barrier()
    dist.destroy_process_group()


def _in_lab(args: Any, variants: list[str]) -> dict[str, list[Measured]]:
    command = ["--models", *args.models, "--variants", *variants, f"--blocks={args.blocks}", f"--steps={args.steps}"]
    if args.bucket_cap_mb is not None:
        command.append(f"--bucket-cap-mb={args.bucket_cap_mb}")
    with Lab(args.world_size, args.rate) as lab:
        ranks = lab.run(__file__, command, timeout=1200)
    return {name: [Measured(**rank[name]) for rank in ranks] for name in args.models}


def main() -> int:
    """Measure and print one model after the other."""
    parser = make_parser(__doc__, ["python-view", "native-view", "graphs-1", "graphs-5", "one-graph"])
    parser.add_argument("--blocks", type=positive_int, default=12, help="blocks of each variant")
    parser.add_argument("--steps", type=positive_int, default=8, help="timed steps of a block")
    parser.add_argument("--rate", help="bandwidth of each host's link, as tc writes it; without it, loopback")
    parser.set_defaults(models=["transformer"])
    args = parse(parser)
    variants = list(dict.fromkeys([*DDP_VARIANTS, *args.variants]))
    if "NETLAB_RESULTS" in os.environ:
        _as_host(args, variants)
        return 0
    print(
        describe_run(args) if args.rate is None else f"torch {torch.__version__}, two hosts at {args.rate}", flush=True
    )
    if args.rate is not None:
        found = _in_lab(args, variants)
    else:
        found = {
            name: run_ranks(
                measure_compiled, name, variants, args.blocks, args.steps, wrap_options(args),
                world_size=args.world_size, device=args.device,
            )
            for name in args.models
        }  # fmt: skip
    for name, results in found.items():
        report_model(name, results, args.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
