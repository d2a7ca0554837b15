"""What `UnevenInputs` costs in a step in which all ranks have data, and in one of the tail.

    python benchmarks/join_cost.py
    python benchmarks/join_cost.py --step-ms 5 --steps 60 --blocks 12

One run of processes trains in blocks that alternate between a Trainer without and one with the callback, on the same
even data; the figure is the median over pairs of neighbouring blocks. The step is a matrix product repeated until it
takes about ``--step-ms``, so that the cost is put in relation to a step of a known length. The processor time that a
step takes, of all threads, is told too: it does not depend on what else runs on the machine.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from _harness import Rank, positive_int, prepare_lightning, run_ranks
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, IterableDataset

from lightning_ddp_hooks.callbacks import UnevenInputs

# name -> (loader is a stream, with the callback, in the tail)
CASES = {
    "sized": (False, False, False),
    "sized, UnevenInputs": (False, True, False),
    "sized, UnevenInputs, in tail": (False, True, True),
    "stream": (True, False, False),
    "stream, UnevenInputs": (True, True, False),
}


class Work(LightningModule):
    def __init__(self, repeats: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(256, 256)
        self.repeats = repeats

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch
        for _ in range(self.repeats):
            x = torch.tanh(self.layer(x))
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Stream(IterableDataset):
    """Without a length, so that ranks agree on each step."""

    def __init__(self, batches: list[torch.Tensor]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.batches)


class Clock(Callback):
    """Times each step from batch to batch, without the first ones."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.cpu: list[float] = []
        self._before = self._cpu_before = 0.0

    def on_train_batch_end(self, *_: Any) -> None:
        now, cpu = time.perf_counter(), time.process_time()
        self.times.append(now - self._before)
        self.cpu.append(cpu - self._cpu_before)
        self._before, self._cpu_before = now, cpu


def block(repeats: int, steps: int, own_steps: int, stream: bool, callbacks: list[Callback]) -> tuple[float, float]:
    """Train for one block; return the median time of a step, and of its processor time, in ms."""
    clock = Clock()
    trainer = Trainer(
        strategy="ddp_hooks",
        accelerator="cpu",
        devices=torch.distributed.get_world_size(),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks, clock],
        use_distributed_sampler=False,
    )
    torch.manual_seed(0)
    batches = [torch.randn(32, 256) for _ in range(own_steps)]
    trainer.fit(Work(repeats), DataLoader(Stream(batches) if stream else batches, batch_size=None))  # type: ignore[arg-type]
    return statistics.median(clock.times[5:steps]) * 1e3, statistics.median(clock.cpu[5:steps]) * 1e3


def measure(rank: Rank, step_ms: float, steps: int, blocks: int) -> dict[str, list[tuple[float, float]]]:
    prepare_lightning(rank)
    repeats = 1
    while True:
        own = torch.tensor([block(repeats, 20, 20, False, [])[0]])
        torch.distributed.all_reduce(own, op=torch.distributed.ReduceOp.MAX)  # alike on all ranks
        if float(own) >= step_ms:
            break
        repeats += max(1, int(repeats * min(2.0, step_ms / float(own) - 1)))
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in CASES}
    for _ in range(blocks):
        for name, (stream, join, tail) in CASES.items():
            # In the tail all but the last rank have one batch only.
            own_steps = 1 if tail and rank.index < rank.world_size - 1 else steps
            found[name].append(block(repeats, steps, own_steps, stream, [UnevenInputs()] if join else []))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world-size", type=positive_int, default=2)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--steps", type=positive_int, default=60)
    parser.add_argument("--blocks", type=positive_int, default=10)
    args = parser.parse_args()
    found = run_ranks(measure, args.step_ms, args.steps, args.blocks, world_size=args.world_size, device="cpu")[-1]
    print(f"{args.world_size} gloo ranks, {args.blocks} blocks of {args.steps} steps each, alternating, medians in ms")
    for name, (stream, join, _) in CASES.items():
        plain = "stream" if stream else "sized"
        for index, clock in enumerate(("time", "processor time")):
            ours, base = ([times[index] for times in found[case]] for case in (name, plain))
            ratio = statistics.median(one / two for one, two in zip(ours, base, strict=True))
            print(f"{name:<28} {clock:<15} {statistics.median(ours):7.3f}" + (f"  ratio {ratio:.3f}" if join else ""))


if __name__ == "__main__":
    main()
