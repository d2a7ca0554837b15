"""What the teardown test and the long teardown run share: fits in a loop, and what each leaves in the process."""

import gc
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import nn
from trainer_runs import Net, make_module, make_trainer
from uneven_runs import UnevenNet

from lightning_ddp_hooks import _compat
from lightning_ddp_hooks.averaging import DiLoCo, PeriodicModelAverager
from lightning_ddp_hooks.callbacks import CommMonitor, ModelAveraging, UnevenInputs
from lightning_ddp_hooks.hooks import PowerSGD
from lightning_ddp_hooks.optim import OptimizerInHook


@dataclass(frozen=True)
class Left:
    """What is in the process after a fit.

    Attributes:
        threads: of the operating system.
        python_threads: those that Python knows.
        files: open file descriptors.
        groups: process groups.
        tensors: that the garbage collector knows.
        objects: of this package's classes.
        hooks: on the parameters of the module that was trained.
        rss_kb: resident memory.
    """

    threads: int
    python_threads: int
    files: int
    groups: int
    tensors: int
    objects: int
    hooks: int
    rss_kb: int


def look(module: nn.Module) -> Left:
    """Collect garbage and count."""
    gc.collect()
    kinds = Counter(map(type, gc.get_objects()))
    own = sum(count for kind, count in kinds.items() if str(kind.__module__).startswith("lightning_ddp_hooks"))
    tensors = sum(count for kind, count in kinds.items() if issubclass(kind, torch.Tensor))
    return Left(
        threads=len(os.listdir("/proc/self/task")),
        python_threads=threading.active_count(),
        files=len(os.listdir("/proc/self/fd")),
        groups=len(_compat.process_groups()) if dist.is_initialized() else 0,
        tensors=tensors,
        objects=own,
        hooks=sum(len(getattr(p, name) or ()) for p in module.parameters() for name in _HOOKS),
        rss_kb=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024,
    )


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Raises(Net):
    """Ends with an error on all ranks alike."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            raise ValueError("a bad sample")
        return super().training_step(batch, batch_idx)


class RaisesInBackward(Net):
    """The same, with a backward that is broken off."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2:
            self.net[2].weight.register_hook(self._raise)
        return loss

    def _raise(self, _: torch.Tensor) -> None:
        raise ValueError("a bad sample")


class UnevenPair(UnevenNet):
    counts = (4, 2)
    val_counts = (2, 1)


def _trainer(strategy: dict[str, Any], **options: Any) -> Trainer:
    small = {"bucket_cap_mb": 0.001, "first_bucket_mb": 0.001, "failure_timeout": 1.5}
    return make_trainer({**small, **strategy}, max_epochs=1, **options)


KINDS: dict[str, Callable[[], tuple[Trainer, type[Net]]]] = {
    "plain": lambda: (_trainer({}), Net),
    "hook": lambda: (_trainer({"comm_hook": PowerSGD(rank=1, start_iter=1, min_compression_rate=1.1)}), Net),
    "hook, averager": lambda: (
        _trainer({"comm_hook": "fp16", "averager": PeriodicModelAverager(period=2, warmup_steps=1)}),
        Net,
    ),
    "DiLoCo": lambda: (_trainer({"averager": DiLoCo(period=2, warmup_steps=1, comm_hook="int8")}), Net),
    "sharded optimizer": lambda: (_trainer({"optimizer_in_hook": OptimizerInHook(shard=True)}), Net),
    "uneven, monitor": lambda: (
        _trainer({}, callbacks=[UnevenInputs(), CommMonitor()], precision="64-true"),
        UnevenPair,
    ),
    "checks": lambda: (_trainer({"check_replicas_every_n_steps": 1, "detect_nonfinite": True}), Net),
    "raises": lambda: (_trainer({}), Raises),
    "raises in backward": lambda: (_trainer({}), RaisesInBackward),
    "raises, averager": lambda: (_trainer({"averager": DiLoCo(period=2, warmup_steps=1)}), Raises),
    "raises, averaging on ddp": lambda: (
        make_trainer("ddp", max_epochs=1, callbacks=[ModelAveraging(PeriodicModelAverager(period=2, warmup_steps=1))]),
        Raises,
    ),
    "raises, sharded": lambda: (_trainer({"optimizer_in_hook": OptimizerInHook(shard=True)}), Raises),
    "raises, uneven": lambda: (_trainer({}, callbacks=[UnevenInputs(), CommMonitor()]), Raises),
}


def fit_once(kind: str) -> nn.Module:
    """Fit once, and return the module."""
    trainer, module_class = KINDS[kind]()
    module = make_module(module_class)
    with suppress(ValueError):
        trainer.fit(module)
    return module


def fit_in_turn(kinds: Sequence[str], rounds: int) -> dict[str, list[dict[str, int]]]:
    """Fit in each way in turn, ``rounds`` times, and look after each fit; for `run_ranks`."""
    found: dict[str, list[dict[str, int]]] = {kind: [] for kind in kinds}
    gc.freeze()  # what has been imported so far need not be looked at again and again
    before = os.getcwd()
    with tempfile.TemporaryDirectory(prefix="teardown-") as folder:
        os.chdir(folder)  # where reports go
        for _ in range(rounds):
            for kind in kinds:
                found[kind].append(asdict(look(fit_once(kind))))
        os.chdir(before)
    return found


def grown(found: Sequence[Mapping[str, int]]) -> dict[str, tuple[int, int]]:
    """Return what was more after the last fit than after the second one; the first may load what stays."""
    return {
        name: (value, found[-1][name])
        for name, value in found[1].items()
        if name != "rss_kb" and found[-1][name] > value
    }
