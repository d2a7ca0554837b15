"""Several ranks on each of several hosts: what a host's link carries, and step times, beside torch DDP.

    python benchmarks/hierarchical.py --hosts 2 --ranks-per-host 2 --rate 100mbit

Needs the network lab (netlab.py: root on Linux). Variants take turns in blocks of steps in one run; the ratio to torch
DDP is the median over blocks.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch
import torch.distributed as dist
from netlab import Lab, report
from torch import nn

import lightning_ddp_hooks as ldh
from lightning_ddp_hooks.hooks import HierarchicalAllReduce
from lightning_ddp_hooks.reducer import shm_backend

VARIANTS = ("ddp", "allreduce", "hierarchical")
_STEPS = 4


def _make(variant: str, net: nn.Module) -> nn.Module:
    if variant == "ddp":
        return nn.parallel.DistributedDataParallel(net)
    return ldh.DataParallel(net, comm_hook=HierarchicalAllReduce() if variant == "hierarchical" else None)


def _train(blocks: int, only: str) -> None:
    shm_backend.make_world(lambda: dist.init_process_group("gloo"), named=False)
    torch.manual_seed(0)
    models = {}
    for variant in (only,) if only else VARIANTS:
        models[variant] = _make(variant, nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))))
    x, took = torch.randn(8, 512), {variant: [] for variant in models}
    for block in range(blocks + 1):
        for variant, model in models.items():
            dist.barrier()
            began = time.perf_counter()
            for _ in range(_STEPS):
                model.zero_grad()
                model(x).sum().backward()
            if block:  # the first one sets up
                took[variant].append((time.perf_counter() - began) / _STEPS)
    report(took)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=2)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--worker", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        _train(args.blocks, args.worker)
        return
    with Lab(args.hosts, args.rate, ranks_per_host=args.ranks_per_host) as lab:
        command = ["--blocks", str(args.blocks), "--worker"]
        times = lab.run(__file__, [*command, ""])[0]
        steps = (args.blocks + 1) * _STEPS
        print(f"{'':14}{'ms/step':>10}{'of DDP':>8}{'MB/step sent by a host':>25}")
        for variant in VARIANTS:
            before = lab.bytes()
            lab.run(__file__, [*command, variant])
            sent = [(now.sent - then.sent) / steps / 1e6 for now, then in zip(lab.bytes(), before, strict=True)]
            ratio = statistics.median(own / ddp for own, ddp in zip(times[variant], times["ddp"], strict=True))
            print(f"{variant:14}{1e3 * statistics.median(times[variant]):10.0f}{ratio:8.2f}{max(sent):25.2f}")


if __name__ == "__main__":
    sys.exit(main())
