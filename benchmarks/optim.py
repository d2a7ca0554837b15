"""Step time and optimizer memory of sharded and overlapped optimizers beside torch's.

A step is forward, backward, AdamW step and zero_grad. As in step_time.py all variants live in the same processes and
take turns, a block of steps at a time; printed is the median of the ratios within a block, with quartiles. Before
anything is timed, every variant takes the same few steps, and its weights must be bitwise those of torch's DDP with the
unsharded optimizer, on two ranks (more add up gradients in another order); the exit status is 1 if they are not.

torch's own hook_with_zero_step is tried too; where it refuses (gloo), that is said. ZeroRedundancyOptimizer runs
with its ordinary step in any case.
"""

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from _harness import Rank, describe_run, format_table, make_parser, parse, positive_int, run_ranks
from models import MODELS, BenchmarkModel
from step_time import Ratios, _order
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step_interleaved as torchs_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

DEFAULTS: dict[str, Any] = {"lr": 1e-3, "fused": True}
REFERENCE = "ddp + AdamW"
UNSHARDED_MUON = "ddp + Muon and AdamW"
PARITY_STEPS = 4
UNTIMED_STEPS = 2

Made = tuple[nn.Module, Any]


def _ddp(module: nn.Module, cap: dict[str, Any]) -> Made:
    return DistributedDataParallel(module, gradient_as_bucket_view=True, **cap), torch.optim.AdamW(
        module.parameters(), **DEFAULTS
    )


def _torch_zero(module: nn.Module, cap: dict[str, Any]) -> Made:
    return DistributedDataParallel(module, gradient_as_bucket_view=True, **cap), ZeroRedundancyOptimizer(
        module.parameters(), torch.optim.AdamW, **DEFAULTS
    )


def _torch_zero_hook(module: nn.Module, cap: dict[str, Any]) -> Made:
    ddp = DistributedDataParallel(module, **cap)
    # It takes one of torch's functional optimizers, and those have no fused form.
    zero = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=DEFAULTS["lr"])
    ddp.register_comm_hook(None, torchs_hook(allreduce_hook, ddp, zero))
    return ddp, zero


def _ours(module: nn.Module, cap: dict[str, Any]) -> Made:
    from lightning_ddp_hooks import DataParallel

    return DataParallel(module, **cap), torch.optim.AdamW(module.parameters(), **DEFAULTS)


class _Both:
    """Muon for the matrices, AdamW for the rest."""

    def __init__(self, module: nn.Module, make: Callable[..., Any]) -> None:
        matrices = [param for param in module.parameters() if param.dim() == 2]
        others = [param for param in module.parameters() if param.dim() != 2]
        self.inner = [make(matrices, torch.optim.Muon, lr=1e-3), make(others, torch.optim.AdamW, **DEFAULTS)]

    def step(self) -> None:
        for optimizer in self.inner:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.inner:
            optimizer.zero_grad()


def _muon(*, sharded: bool) -> Callable[[nn.Module, dict[str, Any]], Made]:
    def make(module: nn.Module, cap: dict[str, Any]) -> Made:
        from lightning_ddp_hooks import DataParallel, optim

        def unsharded(params: Any, rule: Any, **settings: Any) -> Any:
            return rule(params, **settings)

        wrapped = DataParallel(module, **cap) if sharded else _ddp(module, cap)[0]
        return wrapped, _Both(module, optim.ShardedOptimizer if sharded else unsharded)

    return make


def _zero(way: str) -> Callable[[nn.Module, dict[str, Any]], Made]:
    def make(module: nn.Module, cap: dict[str, Any]) -> Made:
        from lightning_ddp_hooks import DataParallel, optim

        ddp = DataParallel(module, **cap)
        overlaps = way != "step"
        zero = optim.ShardedOptimizer(module.parameters(), torch.optim.AdamW, overlap_with_ddp=overlaps, **DEFAULTS)
        if overlaps:
            hook = {"hook": optim.hook_with_zero_step, "interleaved": optim.hook_with_zero_step_interleaved}[way]
            ddp.register_comm_hook(None, hook(None, ddp, zero))
        return ddp, zero

    return make


VARIANTS: dict[str, Callable[[nn.Module, dict[str, Any]], Made]] = {
    REFERENCE: _ddp,
    "torch ZeRO": _torch_zero,
    "torch ZeRO hook": _torch_zero_hook,
    "ours + AdamW": _ours,
    "sharded, two phases": _zero("step"),
    "sharded": _zero("hook"),
    "sharded, interleaved": _zero("interleaved"),
    UNSHARDED_MUON: _muon(sharded=False),
    "sharded Muon and AdamW": _muon(sharded=True),
}


def _reference(name: str) -> str:
    """Return the variant that has the same weights."""
    return UNSHARDED_MUON if "Muon" in name else REFERENCE


class _Trainee:
    def __init__(self, model: BenchmarkModel, variant: str, rank: Rank, cap: dict[str, Any]) -> None:
        torch.manual_seed(rank.index)
        self.module = model.make_module().to(rank.device)
        self.wrapped, self.optimizer = VARIANTS[variant](self.module, cap)
        generator = torch.Generator().manual_seed(1000 + rank.index)
        self._batches = [model.make_batch(generator).to(rank.device) for _ in range(4)]
        self._loss = model.loss
        self._taken = 0

    def step(self) -> None:
        batch = self._batches[self._taken % len(self._batches)]
        self._taken += 1
        self._loss(self.wrapped(batch.inputs), batch.target).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state_bytes(self) -> int:
        made = getattr(self.optimizer, "inner", [self.optimizer])
        states = [entries for one in made for entries in getattr(one, "optim", one).state.values()]
        return sum(value.nbytes for entries in states for value in entries.values() if isinstance(value, Tensor))


@dataclass(frozen=True)
class Measured:
    """What one rank knows about one model."""

    block_seconds: dict[str, list[float]]
    state_bytes: dict[str, int]
    differing: list[str]
    skipped: dict[str, str]


def measure(rank: Rank, model_name: str, blocks: int, steps: int, cap: dict[str, Any], variants: list[str]) -> Measured:
    """Check parity, then time ``blocks`` blocks of ``steps`` steps of each variant."""
    trainees: dict[str, _Trainee] = {}
    skipped: dict[str, str] = {}
    for name in variants:
        reason = None
        try:
            trainees[name] = _Trainee(MODELS[model_name], name, rank, cap)
        except (RuntimeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
        reasons: list[str | None] = [None] * rank.world_size
        dist.all_gather_object(reasons, reason)
        if any(reasons):
            trainees.pop(name, None)
            skipped[name] = next(r for r in reasons if r)
    for trainee in trainees.values():
        for _ in range(PARITY_STEPS):
            trainee.step()
    differing = [
        name
        for name, trainee in trainees.items()
        for pairs in [zip(trainee.module.parameters(), trainees[_reference(name)].module.parameters(), strict=True)]
        if not all(torch.equal(p, q) for p, q in pairs)
    ]
    held = {name: trainee.state_bytes() for name, trainee in trainees.items()}
    names = list(trainees)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.freeze()
    for block in range(blocks):
        for name in _order(names, block):
            seconds[name].append(_time_block(trainees[name], steps, rank))
    slowest = torch.tensor([seconds[name] for name in names], dtype=torch.float64, device=rank.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return Measured(dict(zip(names, slowest.tolist(), strict=True)), held, differing, skipped)


def _time_block(trainee: _Trainee, steps: int, rank: Rank) -> float:
    for _ in range(UNTIMED_STEPS):
        trainee.step()
    rank.synchronize()
    dist.barrier()
    rank.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        trainee.step()
    rank.synchronize()
    return (time.perf_counter() - start) / max(1, steps)


def _report(model_name: str, results: list[Measured], style: str) -> bool:
    seconds = results[0].block_seconds
    rows = [
        [
            name,
            f"{1e3 * torch.tensor(times).median().item():.2f}",
            str(Ratios.of(times, seconds[REFERENCE])),
            str(Ratios.of(times, seconds["torch ZeRO"])),
        ]
        for name, times in seconds.items()
    ]
    header = [model_name, "ms/step", f"ratio to {REFERENCE} [quartiles]", "ratio to torch ZeRO [quartiles]"]
    print(format_table(header, rows, style), end="\n\n")
    differing = sorted({name for result in results for name in result.differing})
    print(f"parity: NOT the weights of the unsharded: {', '.join(differing)}" if differing else "parity: bitwise equal")
    for name, reason in results[0].skipped.items():
        print(f"skipped: {name} ({reason})")
    print(flush=True)
    return not [name for name in differing if not name.startswith("torch")]


def _report_memory(model_name: str, by_world: dict[int, list[Measured]], style: str) -> None:
    names = list(next(iter(by_world.values()))[0].state_bytes)
    rows = [
        [name] + [f"{max(r.state_bytes[name] for r in results) / 2**20:.2f}" for results in by_world.values()]
        for name in names
    ]
    header = [f"{model_name}: MiB of optimizer state, largest rank", *(f"{n} rank(s)" for n in by_world)]
    print(format_table(header, rows, style), end="\n\n", flush=True)


def _parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__, ["ddp"])
    parser.add_argument("--blocks", type=positive_int, default=8, help="blocks of each variant (default: 8)")
    parser.add_argument("--steps", type=positive_int, default=5, help="timed steps of a block (default: 5)")
    parser.add_argument("--only", nargs="*", choices=VARIANTS, default=list(VARIANTS), metavar="NAME",
                        help="only these, beside torch's (default: all)")  # fmt: skip
    parser.add_argument("--memory-worlds", type=positive_int, nargs="*", default=[1, 2, 4],
                        help="world sizes for the table of memory (default: 1 2 4)")  # fmt: skip
    parser.set_defaults(models=["resnet", "transformer"])
    return parse(parser)


def main() -> int:
    """Measure and print one model after the other."""
    args = _parse_args()
    cap = {} if args.bucket_cap_mb is None else {"bucket_cap_mb": args.bucket_cap_mb}
    variants = [name for name in VARIANTS if name in [REFERENCE, UNSHARDED_MUON, "torch ZeRO", *args.only]]
    print(describe_run(args), flush=True)
    good = True
    for name in args.models:
        print(f"{args.blocks} blocks of {args.steps} steps\n", flush=True)
        world = {"world_size": args.world_size, "device": args.device}
        results = run_ranks(measure, name, args.blocks, args.steps, cap, variants, **world)
        good &= _report(name, results, args.output)
        by_world = {
            count: run_ranks(measure, name, 1, 1, cap, variants, world_size=count, device=args.device)
            for count in args.memory_worlds
        }
        if by_world:
            _report_memory(name, by_world, args.output)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
