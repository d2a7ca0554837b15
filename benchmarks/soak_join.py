"""Random uneven runs under a Trainer, each against one process that trains on the union of each step's batches.

    python benchmarks/soak_join.py --worlds 20 --seed 1

Stops at the first run whose weights differ by more than float64 rounding, and prints its settings.
"""

import argparse
import logging
import random
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "tests" / part) for part in ("trainer", "")]

import torch  # noqa: E402
from ranks import run_ranks  # noqa: E402
from trainer_runs import assert_close  # noqa: E402
from uneven_runs import Shard, Stream, UnevenNet, UnionOfShards, fit_all, fit_union  # noqa: E402


@dataclass(frozen=True)
class Setting:
    """One random run."""

    counts: tuple[int, ...]
    sizes: tuple[int, ...]
    divisor: str
    lengths_known: bool
    manual: bool
    branch_every: int
    adam: bool
    epochs: int
    accumulate: int
    clip: float | None
    hook: str | None
    views: bool
    small_buckets: bool


class RandomRun(UnevenNet):
    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.setting = setting
        self.automatic_optimization = not setting.manual
        self.branch = torch.nn.Linear(8, 1)

    def train_dataloader(self) -> Any:
        setting = self.setting
        shards = [Shard(owner, count, setting.sizes) for owner, count in enumerate(setting.counts)]
        if self.trainer.world_size == 1:
            return UnionOfShards(shards)
        mine = shards[self.trainer.global_rank]
        return mine if setting.lengths_known else Stream(mine)

    def mean_over(self, function: Any, batch: Any) -> Any:
        total = self.over_batches(function, batch, self.setting.divisor)
        if isinstance(batch, dict) and self.setting.divisor == "world":
            return sum(map(function, batch["parts"])) / len(self.setting.counts)
        return total

    def configure_optimizers(self) -> Any:
        optimizer: Any = torch.optim.AdamW if self.setting.adam else partial(torch.optim.SGD, momentum=0.9)
        return optimizer(self.parameters(), lr=0.02)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        every = self.setting.branch_every

        def loss(part: Any) -> torch.Tensor:
            value = self.loss(part)
            return value + self.branch(part[0]).square().mean() if batch_idx % every == 0 else value

        value = self.mean_over(loss, batch)
        self.log("loss", value.detach(), sync_dist=True, on_epoch=True, batch_size=1)
        if not self.setting.manual:
            return value
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(value)
        optimizer.step()
        return None


def draw(rng: random.Random, world_size: int) -> Setting:
    manual = rng.random() < 0.3
    counts = [0] * world_size
    while not any(counts):
        counts = [rng.choice([0, 1, 2, 3, 5, 8]) for _ in range(world_size)]
    return Setting(
        counts=tuple(counts),
        sizes=tuple(rng.choices([1, 2, 3, 5], k=rng.randint(1, 3))),
        divisor=rng.choice(["active", "samples", "world"]),
        lengths_known=rng.random() < 0.6,
        manual=manual,
        branch_every=rng.choice([1, 1, 2, 3]),
        adam=rng.random() < 0.5,
        epochs=rng.randint(1, 3),
        accumulate=1 if manual else rng.choice([1, 1, 2, 3]),
        clip=None if manual else rng.choice([None, None, 0.1]),
        hook=rng.choice([None, None, "allreduce"]),
        views=rng.random() < 0.7,
        small_buckets=rng.random() < 0.5,
    )


def case_of(setting: Setting) -> tuple[Any, ...]:
    strategy: dict[str, Any] = {
        "comm_hook": setting.hook,
        "gradient_as_bucket_view": setting.views,
        "find_unused_parameters": setting.branch_every > 1,
    }
    if setting.small_buckets:
        strategy |= {"bucket_cap_mb": 2e-4, "first_bucket_mb": 2e-4}
    options: dict[str, Any] = {
        "max_epochs": setting.epochs,
        "accumulate_grad_batches": setting.accumulate,
        "gradient_clip_val": setting.clip,
    }
    return partial(RandomRun, setting), strategy, {"divisor": setting.divisor}, options


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, default=20, help="worlds to start")
    parser.add_argument("--runs", type=int, default=10, help="runs in each")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    rng, done = random.Random(args.seed), 0
    print(f"seed {args.seed}")
    for _ in range(args.worlds):
        world_size = rng.randint(2, 4)
        settings = [draw(rng, world_size) for _ in range(args.runs)]
        try:
            results = run_ranks(fit_all, [case_of(s) for s in settings], world_size=world_size, timeout=300)
        except BaseException:
            print("failed in one of:", *map(asdict, settings), sep="\n")
            raise
        for number, setting in enumerate(settings):
            module_class, _, _, options = case_of(setting)
            expected = fit_union(module_class, options)
            for rank, states in enumerate(results):
                try:
                    assert_close(states[number], expected)
                except AssertionError:
                    print(f"rank {rank} differs: {asdict(setting)}")
                    raise
            done += 1
        print(f"{done} runs agree", flush=True)
    print(f"{done} random uneven runs trained as one process on the union of their batches (seed {args.seed})")


if __name__ == "__main__":
    main()
