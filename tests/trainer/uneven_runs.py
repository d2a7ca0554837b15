"""What the tests of uneven inputs share: shards of different lengths, and one process that trains on their union.

Each rank reads its own shard. The single process reads, step by step, the list of the batches that the ranks have in
that step, and means over them; both run the same LightningModule in a Trainer.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule
from ranks import run_ranks
from torch import Tensor
from trainer_runs import EXACT, WIDTH, Net, State, make_module, make_trainer, rank, state_of

from lightning_ddp_hooks.callbacks import UnevenInputs

WORLD = 3
COUNTS = [(7, 5, 2), (2, 5, 7), (0, 4, 2)]
Batch = tuple[Tensor, Tensor]


def make_batch(owner: int, index: int, size: int = 3) -> Batch:
    generator = torch.Generator().manual_seed(1000 * owner + index)
    x = torch.randn(size, WIDTH, generator=generator, dtype=torch.float64)
    return x, x.sin().sum(1, keepdim=True)


class Shard:
    """One rank's batches."""

    def __init__(self, owner: int, count: int, sizes: Sequence[int] = (3,)) -> None:
        self.batches = [make_batch(owner, index, sizes[(owner + index) % len(sizes)]) for index in range(count)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Stream:
    """The same without a length."""

    def __init__(self, shard: Any) -> None:
        self.shard = shard

    def __iter__(self) -> Iterator[Any]:
        return iter(self.shard)


class Position:
    """A shard that can resume."""

    def __init__(self, shard: Any) -> None:
        self.shard, self.position, self.resumed = list(shard), 0, False

    def __len__(self) -> int:
        return len(self.shard)

    def __iter__(self) -> Iterator[Any]:
        self.position, self.resumed = (self.position if self.resumed else 0), False
        while self.position < len(self.shard):
            self.position += 1
            yield self.shard[self.position - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position, self.resumed = state["position"], True


class PositionStream(Position):
    """The same without a length."""

    __len__ = None  # type: ignore[assignment]


class UnionOfShards:
    """For each step the batches that the ranks have in it."""

    def __init__(self, shards: Sequence[Shard], stop: bool = False, window: int = 1) -> None:
        count = (min if stop else max)(map(len, shards))
        self.steps = [
            {"parts": [shard.batches[index] for shard in shards if index < len(shard)]} for index in range(count)
        ]
        if window > 1:  # the batches of a whole accumulation window
            windows = [self.steps[start : start + window] for start in range(0, count, window)]
            self.steps = [{"parts": [part for step in steps for part in step["parts"]]} for steps in windows]

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.steps)


class UnevenNet(Net):
    """Trains on shards; what the tests vary is a method or a class attribute.

    Attributes:
        counts: of batches, for each rank.
        val_counts: the same for validation and test.
        sizes: of batches, in turn.
        kind: wraps a rank's shard.
        divisor: as in `UnevenInputs`, for the single process.
        stop: end with the shortest shard.
        window: of accumulation; the single process takes all its batches in one step.
    """

    counts: ClassVar[Sequence[int]] = COUNTS[0]
    val_counts: ClassVar[Sequence[int]] = (2, 3, 1)
    sizes: ClassVar[Sequence[int]] = (3,)
    kind: ClassVar[Callable[[Any], Any]] = staticmethod(lambda shard: shard)
    divisor: ClassVar[str] = "active"
    stop: ClassVar[bool] = False
    window: ClassVar[int] = 1

    def loader(self, counts: Sequence[int], offset: int = 0, stop: bool = False) -> Any:
        shards = [Shard(owner + offset, count, self.sizes) for owner, count in enumerate(counts)]
        if self.trainer.world_size == 1:
            return UnionOfShards(shards, stop, self.window)
        return type(self).kind(shards[rank()])

    def train_dataloader(self) -> Any:
        return self.loader(self.counts, stop=self.stop)

    def over_batches(self, function: Callable[[Batch], Tensor], batch: Any, divisor: str | None = None) -> Tensor:
        """Apply ``function`` to the batch of a rank, or mean over all of them in a single process."""
        if not isinstance(batch, dict):
            return function(batch)
        parts, divisor = batch["parts"], divisor or self.divisor
        if divisor == "samples":
            return sum(function(part) * len(part[0]) for part in parts) / sum(len(part[0]) for part in parts)
        return sum(map(function, parts)) / (WORLD if divisor == "world" else len(parts))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.over_batches(self.loss, batch)


def fit_uneven(
    module_class: type[LightningModule], strategy: Any, settings: Mapping[str, Any], options: Mapping[str, Any]
) -> State:
    """Fit a fresh module on this rank's shard."""
    module, callbacks = make_module(module_class), list(options.get("callbacks", ()))
    trainer = make_trainer(strategy, **{**EXACT, **options, "callbacks": [UnevenInputs(**settings), *callbacks]})
    trainer.fit(module)
    return state_of(module)


def fit_union(module_class: type[LightningModule], options: Mapping[str, Any]) -> State:
    """Fit in this process alone."""
    assert "WORLD_SIZE" not in os.environ
    torch.manual_seed(0)
    module: Any = module_class()
    options = {**EXACT, **options, "devices": 1}
    make_trainer("auto", **options | ({"accumulate_grad_batches": 1} if module.window > 1 else {})).fit(module)
    return state_of(module)


def fit_all(cases: Sequence[tuple[Any, ...]]) -> list[State]:
    return [fit_uneven(*case) for case in cases]


def run_uneven(*cases: tuple[Any, ...], world_size: int = WORLD) -> list[list[State]]:
    """Fit each ``(module class, strategy, settings of UnevenInputs, Trainer options)``; states by case, then rank."""
    results = run_ranks(fit_all, cases, world_size=world_size)
    return [[result[number] for result in results] for number in range(len(cases))]
