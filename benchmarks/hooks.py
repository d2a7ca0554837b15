"""Cost, volume and error of each communication hook, beside torch's counterpart and the plain mean.

What is timed is the reduction of one backward's buckets: from the first full bucket to the last reduced one, without
the forward and backward around it, so nothing is hidden behind computation. Ours, torch's and the plain mean take
turns in the same processes on the same gradients, through the same pipeline. Printed are medians over the rounds of
the slowest rank's time per MB of gradient, and medians of the *ratios within a round*: ratios hold on a noisy
machine, absolute times do not.

The gradients are those of a real batch, another one on each rank. "error" is the relative error of one reduction
without any history, against the mean in float64; "error of 10" is that of the sum of ten reductions of the same
gradients, where error feedback shows. "B/element" is what a rank sends for each element of the gradient, as the
collectives are usually built (a ring for sums); for 2 ranks a float32 all-reduce sends 4 bytes.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from _harness import Rank, describe_run, format_table, make_parser, parse, positive_int, run_ranks
from models import MODELS
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks

import lightning_ddp_hooks.hooks as ldh_hooks
from lightning_ddp_hooks import comm
from lightning_ddp_hooks.hooks.contract import BindContext
from lightning_ddp_hooks.hooks.registry import resolve_hook
from lightning_ddp_hooks.reducer.bucket import Bucket, GradBucket
from lightning_ddp_hooks.reducer.layout import initial_layout
from lightning_ddp_hooks.reducer.queue import CollectiveQueue

MIB = 1 << 20


def _torch_powersgd(rank: int) -> tuple[Any, Any]:
    state = powerSGD_hook.PowerSGDState(None, rank, start_powerSGD_iter=2)
    state.iter = 2  # compress from the first call on
    return state, powerSGD_hook.powerSGD_hook


def _powersgd(rank: int, **settings: Any) -> Any:
    return ldh_hooks.PowerSGD(rank=rank, start_iter=0, **settings)


@dataclass(frozen=True)
class Case:
    """A hook of ours and, if torch has one, its counterpart."""

    ours: Callable[[], Any]
    torch: Callable[[], Any] | None = None


# name -> hooks. The factories run on the ranks.
CASES: dict[str, Case] = {
    "allreduce": Case(lambda: ldh_hooks.AllReduce(), lambda: (None, default_hooks.allreduce_hook)),
    "fp16": Case(lambda: "fp16", lambda: (None, default_hooks.fp16_compress_hook)),
    "bf16": Case(lambda: "bf16", lambda: (None, default_hooks.bf16_compress_hook)),
    "fp16, float32 sum": Case(lambda: ldh_hooks.Cast(dtype="float16", accumulate="float32")),
    "bf16, float32 sum": Case(lambda: ldh_hooks.Cast(dtype="bfloat16", accumulate="float32")),
    "powersgd 1": Case(lambda: _powersgd(1), lambda: _torch_powersgd(1)),
    "powersgd 2": Case(lambda: _powersgd(2), lambda: _torch_powersgd(2)),
    "powersgd 4": Case(lambda: _powersgd(4), lambda: _torch_powersgd(4)),
    "powersgd 4, bf16": Case(lambda: ldh_hooks.Cast(_powersgd(4), "bfloat16")),
    "batched_powersgd 1": Case(lambda: ldh_hooks.BatchedPowerSGD(start_iter=0)),
    "quantize_per_tensor": Case(
        lambda: "quantize_per_tensor", lambda: (None, quantization_hooks.quantization_pertensor_hook)
    ),
    "quantize_per_channel": Case(
        lambda: "quantize_per_channel", lambda: (None, quantization_hooks.quantization_perchannel_hook)
    ),
    "int8": Case(lambda: "int8"),
    "fp8": Case(lambda: "fp8"),
    "onebit": Case(lambda: "onebit"),
    "topk": Case(lambda: "topk"),
}


# --- one hook at work -----------------------------------------------------------------------------------------------


class Subject:
    """A hook bound to a world, with buckets of its own."""

    def __init__(self, hook: Any, gradients: list[Tensor], cap_mb: float, device: torch.device) -> None:
        self._gradients = gradients
        layouts = initial_layout(gradients, [int(cap_mb * MIB)])
        self._buckets = [Bucket(layout, gradients) for layout in layouts]
        self.names = [tuple(f"p{i}" for i in layout.indices) for layout in layouts]
        self._divisor = float(dist.get_world_size())
        group = dist.new_group()
        self._queue = CollectiveQueue(group, at_once=comm.is_stream_ordered(group, device))
        context = BindContext(
            subgroup=self._queue.subgroup,
            control_group=dist.new_group(backend="gloo"),
            names=[f"p{i}" for i in range(len(gradients))],
            params=gradients,
            step=lambda: 1_000_000,  # past every warm-up
        )
        declared = resolve_hook(hook) or ldh_hooks.AllReduce()
        self._queue.hook = declared.bind(context)

    def fill(self) -> None:
        """Put the gradients into the buckets; divided, if the hook takes them so."""
        scale = 1.0 / self._divisor if self._queue.hook.takes_divided else 1.0
        for bucket in self._buckets:
            for slot, view in zip(bucket.layout.slots, bucket.views, strict=True):
                torch.mul(self._gradients[slot.index], scale, out=view)

    def reduce(self) -> None:
        """Launch all buckets, wait for all, copy back what lies elsewhere."""
        last = len(self._buckets) - 1
        pending = [
            self._queue.launch(GradBucket(bucket, n, n == last, self.names[n], self._divisor), bucket)
            for n, bucket in enumerate(self._buckets)
        ]
        self._queue.end_launches()
        for bucket, task in zip(self._buckets, pending, strict=True):
            result = task.wait()
            if isinstance(result, Tensor) and result.data_ptr() != bucket.buffer.data_ptr():
                bucket.buffer.copy_(result.view(-1))
        self._queue.end_round()

    def result(self) -> Tensor:
        """The reduced gradients in float64, in the order of the buckets."""
        return torch.cat([bucket.buffer.double() for bucket in self._buckets])


@contextmanager
def counted_bytes() -> Iterator[list[float]]:
    """Count the bytes that this rank sends in the collectives under the context."""
    sent = [0.0]
    originals = {}

    def counting(name: str, volume: Callable[..., float]) -> None:
        original = originals[name] = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            sent[0] += volume(dist.get_world_size(kwargs.get("group")), *args)
            return original(*args, **kwargs)

        setattr(dist, name, call)

    def nbytes(tensor: Tensor) -> int:
        return tensor.numel() * tensor.element_size()

    counting("all_reduce", lambda n, tensor, *_: 2 * (n - 1) / n * nbytes(tensor))
    counting("all_to_all_single", lambda n, _, tensor, *__: (n - 1) / n * nbytes(tensor))
    for name in ("all_gather", "all_gather_into_tensor", "all_gather_single"):
        if hasattr(dist, name):
            counting(name, lambda n, _, tensor, *__: (n - 1) * nbytes(tensor))
    for name in ("reduce_scatter_tensor", "reduce_scatter_single"):
        if hasattr(dist, name):
            counting(name, lambda n, _, tensor, *__: (n - 1) / n * nbytes(tensor))
    try:
        yield sent
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


# --- measuring ------------------------------------------------------------------------------------------------------


@dataclass
class Figures:
    """What one subject came to."""

    seconds: list[float] = field(default_factory=list)
    bytes_per_element: float = 0.0
    error: float = 0.0
    error_of_ten: float = 0.0
    failure: str | None = None


def measure(rank: Rank, model_name: str, case_names: list[str], rounds: int, cap_mb: float) -> dict[str, Any]:
    """Figures of each case: (ours, torch's, the plain mean in the same rounds)."""
    warnings.simplefilter("ignore")  # advice of torch for its own hooks
    gradients = _real_gradients(rank, model_name)
    results: dict[str, Any] = {}
    for name in case_names:
        case = CASES[name]
        makers = {"ours": case.ours, "torch": case.torch, "mean": lambda: ldh_hooks.AllReduce()}
        subjects: dict[str, Subject] = {}
        figures = {key: Figures() for key in makers}
        for key, make in makers.items():
            if make is None:
                figures[key].failure = "-"
                continue
            try:
                subjects[key] = Subject(make(), gradients, cap_mb, rank.device)
                _accuracy(subjects[key], gradients, figures[key])
            except Exception as error:  # torch's quantization hooks raise on gloo, on all ranks alike
                figures[key].failure = type(error).__name__
                subjects.pop(key, None)
        for round_number in range(rounds):
            order = list(subjects)
            shift = round_number % len(order)
            for key in order[shift:] + order[:shift]:
                figures[key].seconds.append(_time(subjects[key], rank))
        results[name] = figures
    results["numel"] = sum(g.numel() for g in gradients)
    return results


def _real_gradients(rank: Rank, model_name: str) -> list[Tensor]:
    torch.manual_seed(0)  # the same weights everywhere
    model = MODELS[model_name]
    module = model.make_module().to(rank.device)
    batch = model.make_batch(torch.Generator().manual_seed(1000 + rank.index)).to(rank.device)
    model.loss(module(batch.inputs), batch.target).backward()  # type: ignore[no-untyped-call]
    return [p.grad.detach().clone() for p in module.parameters() if p.grad is not None]


def _accuracy(subject: Subject, gradients: list[Tensor], figures: Figures) -> None:
    subject.fill()
    exact = subject.result() * (subject._divisor if subject._queue.hook.takes_divided else 1.0)
    dist.all_reduce(exact)
    exact /= dist.get_world_size()
    with counted_bytes() as sent:
        subject.reduce()
    figures.bytes_per_element = sent[0] / exact.numel()
    total = subject.result()
    figures.error = float((total - exact).norm() / exact.norm())
    for _ in range(9):
        subject.fill()
        subject.reduce()
        total += subject.result()
    figures.error_of_ten = float((total / 10 - exact).norm() / exact.norm())


def _time(subject: Subject, rank: Rank) -> float:
    subject.fill()
    rank.synchronize()
    dist.barrier()
    start = time.perf_counter()
    subject.reduce()
    rank.synchronize()
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=rank.device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


# --- output ---------------------------------------------------------------------------------------------------------


def table(results: dict[str, Any], style: str) -> str:
    """The figures of one model."""
    mb = results["numel"] * 4 / MIB
    rows = []
    for name, figures in results.items():
        if name == "numel":
            continue
        ours, other, mean = figures["ours"], figures["torch"], figures["mean"]
        if ours.failure:
            rows.append([name, ours.failure, *[""] * 9])
            continue

        def ratio(a: Figures, b: Figures) -> str:
            return f"{statistics.median(x / y for x, y in zip(a.seconds, b.seconds, strict=True)):.2f}"

        def per_mb(f: Figures) -> str:
            return f"{statistics.median(f.seconds) * 1e3 / mb:.2f}" if f.failure is None else f.failure

        there = other.failure is None
        rows.append(
            [
                name,
                per_mb(ours),
                per_mb(other),
                ratio(ours, other) if there else "",
                ratio(ours, mean),
                f"{ours.bytes_per_element:.3f}",
                f"{other.bytes_per_element:.3f}" if there else "",
                f"{ours.error:.1e}",
                f"{other.error:.1e}" if there else "",
                f"{ours.error_of_ten:.1e}",
                f"{other.error_of_ten:.1e}" if there else "",
            ]
        )
    header = [
        "hook",
        "ms/MB",
        "torch",
        "ratio",
        "to mean",
        "B/element",
        "torch",
        "error",
        "torch",
        "error of 10",
        "torch",
    ]
    return format_table(header, rows, style)


def main() -> None:
    parser = make_parser(__doc__, [])
    parser.add_argument("--hooks", nargs="+", choices=CASES, default=list(CASES), metavar="NAME",
                        help=f"of {', '.join(CASES)} (default: all)")  # fmt: skip
    parser.add_argument("--rounds", type=positive_int, default=15, help="timed reductions of each (default: 15)")
    args: argparse.Namespace = parse(parser)
    print(describe_run(args))
    for model in args.models:
        cap_mb = args.bucket_cap_mb or 25.0
        results = run_ranks(
            measure, model, args.hooks, args.rounds, cap_mb, world_size=args.world_size, device=args.device
        )[0]
        print(f"\n{model}: {results['numel'] * 4 / MIB:.1f} MB of gradients, buckets of {cap_mb:g} MB")
        print(table(results, args.output))


if __name__ == "__main__":
    main()
