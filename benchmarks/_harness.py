"""What the benchmarks share: the variants they compare, the ranks they run on, the step they take, their tables.

A benchmark hands a module-level function to :func:`run_ranks`. Every rank calls it with its :class:`Rank`; there it
makes one :class:`Trainee` for each variant, and what it returns comes back to the parent, which prints it.
"""

import argparse
import logging
import os
import pickle
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from models import MODELS, Batch, BenchmarkModel
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

# --- variants -------------------------------------------------------------------------------------------------------


@cache
def _shm() -> dist.ProcessGroup:
    import lightning_ddp_hooks  # noqa: F401, which registers the backend

    return dist.new_group(backend="shm")  # type: ignore[no-any-return]


def _on_shm(wrap: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    return lambda module, **options: wrap(module, process_group=_shm(), **options)


def _torch_ddp(**settings: Any) -> Callable[..., nn.Module]:
    return lambda module, **options: DistributedDataParallel(module, **settings, **options)


def _ours(backend: Literal["python", "native"], **settings: Any) -> Callable[..., nn.Module]:
    def wrap(module: nn.Module, **options: Any) -> nn.Module:
        # Here, so that the variants of torch run without the package.
        from lightning_ddp_hooks import DataParallel

        wrapped = DataParallel(module, reducer_backend=backend, **settings, **options)
        if (found := wrapped.stats()["backend"]) != backend:
            # A figure under the wrong name would be worse than none.
            raise RuntimeError(f"asked for the {backend} backend, got {found}")
        return wrapped

    return wrap


DDP_DEFAULT = "ddp"
DDP_VARIANTS = (DDP_DEFAULT, "ddp-view")
NO_COMMUNICATION = "alone"
CONTROLS = ("ddp-again", NO_COMMUNICATION)  # run only when asked for

# name -> wrap(module, **options); the options are those that the command line passes on to every variant.
VARIANTS: dict[str, Callable[..., nn.Module]] = {
    DDP_DEFAULT: _torch_ddp(),
    "ddp-view": _torch_ddp(gradient_as_bucket_view=True),
    "python-copy": _ours("python", gradient_as_bucket_view=False),
    "python-view": _ours("python", gradient_as_bucket_view=True),
    "native-copy": _ours("native", gradient_as_bucket_view=False),
    "native-view": _ours("native", gradient_as_bucket_view=True),
    "native-shm": _on_shm(_ours("native", gradient_as_bucket_view=True)),  # ranks of one host talk through memory
    "ddp-shm": _on_shm(_torch_ddp(gradient_as_bucket_view=True)),
    "ddp-again": _torch_ddp(),  # the same once more: what the noise makes of no difference
    NO_COMMUNICATION: lambda module, **options: module,  # every rank for itself: the floor
}


def why_unavailable(variant: str, rank: "Rank") -> str | None:
    """Why ``variant`` cannot be run here, or None if it can; the same answer on every rank."""
    try:
        VARIANTS[variant](nn.Linear(2, 2).to(rank.device))
        reason = None
    except (ImportError, RuntimeError, ValueError) as error:  # what an absent package or backend raises
        reason = f"{type(error).__name__}: {error}"
    reasons: list[str | None] = [None] * rank.world_size
    dist.all_gather_object(reasons, reason)
    return next((r for r in reasons if r is not None), None)


# --- ranks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rank:
    """Where a benchmark function runs: one process of a world that is already initialized."""

    index: int
    world_size: int
    device: torch.device

    def synchronize(self) -> None:
        """Wait until the device has done what was asked of it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def run_ranks(fn: Callable[..., Any], *args: Any, world_size: int, device: str) -> list[Any]:
    """Call ``fn(rank, *args)`` on every rank of a fresh world; return what the ranks returned, in rank order.

    On the CPU the ranks talk by gloo over the loopback device and compute with one thread each; on ``"cuda"`` each has
    a GPU and they talk by NCCL, or they share GPUs over gloo if there are more ranks than GPUs. A rank that raises ends
    the others, and its traceback is raised here.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-") as tmp:
        arguments = (Path(tmp), world_size, device, fn, args)
        mp.spawn(_rank_main, arguments, nprocs=world_size)  # type: ignore[attr-defined, no-untyped-call]
        return [pickle.loads(_result_file(Path(tmp), index).read_bytes()) for index in range(world_size)]


def _result_file(tmp: Path, index: int) -> Path:
    return tmp / f"result-{index}"


def _rank_main(
    index: int, tmp: Path, world_size: int, device: str, fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    on_gpu = device == "cuda"
    shares_gpu = on_gpu and world_size > torch.cuda.device_count()  # NCCL takes no two ranks on one
    own = torch.device("cuda", index % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(own)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else matrix products need not repeat bit for bit
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    rank = Rank(index, world_size, own)
    dist.init_process_group(
        "nccl" if on_gpu and not shares_gpu else "gloo",
        init_method=f"file://{tmp}/rendezvous",
        rank=index,
        world_size=world_size,
        timeout=timedelta(minutes=5),  # longer than a build of the native backend
        device_id=own if on_gpu and not shares_gpu else None,
    )
    result = fn(rank, *args)
    _result_file(tmp, index).write_bytes(pickle.dumps(result))
    dist.barrier()  # a rank that leaves early must not break one that still reads
    dist.destroy_process_group()


def prepare_lightning(rank: Rank) -> None:
    """Let a Trainer find the world that this process is part of, and have it say nothing but errors."""
    os.environ.update(
        RANK=str(rank.index),
        LOCAL_RANK=str(rank.index),
        WORLD_SIZE=str(rank.world_size),
        LOCAL_WORLD_SIZE=str(rank.world_size),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
        TORCHELASTIC_RUN_ID="benchmark",
    )
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


# --- training -------------------------------------------------------------------------------------------------------


class Trainee:
    """A model wrapped by one variant, with its optimizer and its rank's batches.

    Every variant of a model starts from rank 0's weights and sees the same batches in the same order.
    """

    def __init__(self, model: BenchmarkModel, variant: str, rank: Rank, options: dict[str, Any]) -> None:
        torch.manual_seed(rank.index)  # unlike weights: taking rank 0's is the variant's task
        self.module = model.make_module().to(rank.device)
        self.wrapped = VARIANTS[variant](self.module, **options)
        self._optimizer = torch.optim.SGD(self.module.parameters(), lr=model.learning_rate)
        self._loss = model.loss
        self._batches = _make_batches(model, rank)
        self._taken = 0

    def backward(self) -> None:
        """Forward and backward on the next batch."""
        batch = self._batches[self._taken % len(self._batches)]
        self._taken += 1
        self._loss(self.wrapped(batch.inputs), batch.target).backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """One whole training step: forward, backward, SGD step, zero_grad."""
        self.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def state(self) -> list[Tensor]:
        """Weights and buffers, not copied."""
        return [t.detach() for t in (*self.module.parameters(), *self.module.buffers())]


def _make_batches(model: BenchmarkModel, rank: Rank, count: int = 4) -> list[Batch]:
    generator = torch.Generator().manual_seed(1000 + rank.index)
    return [model.make_batch(generator).to(rank.device) for _ in range(count)]


# --- command line ---------------------------------------------------------------------------------------------------


def make_parser(description: str | None, variants: Sequence[str]) -> argparse.ArgumentParser:
    """The options of every benchmark; ``variants`` are the ones it runs unless told otherwise."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME",
                        help=f"of {', '.join(MODELS)} (default: all)")  # fmt: skip
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(variants), metavar="NAME",
                        help=f"of {', '.join(VARIANTS)} (default: {' '.join(variants)})")  # fmt: skip
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--world-size", type=positive_int,
                        help="number of ranks (default: 2 on the CPU, one for each visible GPU on cuda); more ranks "
                             "than GPUs share them over gloo")  # fmt: skip
    parser.add_argument("--bucket-cap-mb", type=float,
                        help="bucket size of all variants (default: each one's own, 25); torch's DDP gives up its "
                             "small first bucket when this is set")  # fmt: skip
    parser.add_argument("--output", choices=["text", "markdown"], default="text", help="form of the tables")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line, with the world size filled in; end with a clear message where there is no GPU."""
    args = parser.parse_args()
    if args.device == "cuda":
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        args.world_size = args.world_size or gpus
        if not gpus:
            parser.error("--device cuda needs a GPU; none is visible here")
    else:
        args.world_size = args.world_size or 2
    return args


def positive_int(text: str) -> int:
    """An argparse type: a whole number from 1 up."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1 up, got {number}")
    return number


def wrap_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of the command line that are arguments of the variants."""
    return {} if args.bucket_cap_mb is None else {"bucket_cap_mb": args.bucket_cap_mb}


# --- output ---------------------------------------------------------------------------------------------------------


def describe_run(args: argparse.Namespace) -> str:
    """One line that says where the figures below it come from."""
    if args.device == "cuda":
        gpus = torch.cuda.device_count()
        ranks = f"{args.world_size} NCCL rank(s)" if args.world_size <= gpus else f"{args.world_size} gloo ranks"
        where = f"{ranks} on {min(gpus, args.world_size)} x {torch.cuda.get_device_name(0)}"
    else:
        where = f"{args.world_size} gloo rank(s) over loopback, one thread each, {os.cpu_count()} CPU cores"
    cap = "default buckets" if args.bucket_cap_mb is None else f"buckets of {args.bucket_cap_mb:g} MB"
    return f"torch {torch.__version__}, {where}, {cap}"


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], style: str) -> str:
    """``rows`` under ``header``, first column left-aligned and the others right-aligned, as text or markdown."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(cells, widths, strict=True))]
        return f"| {' | '.join(padded)} |" if style == "markdown" else "  ".join(padded)

    if style == "markdown":
        rule = "|" + "|".join("-" * (w + 1) + (":" if i else "-") for i, w in enumerate(widths)) + "|"
    else:
        rule = "  ".join("-" * w for w in widths)
    return "\n".join([line(header), rule, *map(line, rows)])
