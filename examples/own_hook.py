"""A communication hook of your own: each step sends one of four slices of every bucket, in turns.

    python examples/own_hook.py
    python examples/own_hook.py --parts 16

What is left out is kept and added to the next gradient (error feedback), until its slice has its turn. The slices are
the same on all processes, so a plain all-reduce will do. The last line is the accuracy on images that training has not
seen.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from digits import DigitsData, DigitsModel
from lightning.pytorch import Trainer, seed_everything

from lightning_ddp_hooks import DDPHooksStrategy, GradBucket
from lightning_ddp_hooks.hooks import BindContext, BoundHook, CommHook, ErrorFeedback, Phases, requests


@dataclass(frozen=True, kw_only=True)
class InTurns(CommHook):
    """What the user declares: no group, no buffers, so that it can be pickled and written in YAML."""

    parts: int = 4

    def bind(self, context: BindContext) -> BoundHook:
        return BoundInTurns(self, context)

    def replicas_differ_from(self) -> None:
        return None  # never: all processes get the same sum


class BoundInTurns(BoundHook):
    """The hook at work: it asks for sums, and remembers what it has not sent."""

    name = "InTurns"
    keeps_state = True  # what it sends depends on earlier gradients

    def __init__(self, declared: InTurns, context: BindContext) -> None:
        self._parts, self._context = declared.parts, context
        self._feedback = ErrorFeedback()  # by name of parameter: buckets may change, and runs may be resumed

    def reduce(self, bucket: GradBucket) -> Phases:
        buffer, owed = bucket.buffer(), self._feedback.of(bucket)
        owed += buffer
        turn = self._context.step() % self._parts
        mine = slice(turn * len(owed) // self._parts, (turn + 1) * len(owed) // self._parts)
        sent = owed[mine].to(buffer.dtype, copy=True)
        owed[mine] -= sent  # in 16 bits the rounding is owed, too
        total = yield requests.AllReduce(sent)  # the backward goes on meanwhile
        buffer.zero_()
        buffer[mine] = total / bucket.divisor
        return None  # the result is in the bucket

    def state_dict(self) -> dict[str, Any]:
        return self._feedback.state_dict(self._context.control_group)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._feedback.load_state_dict(state)

    def rescale(self, factor: float) -> None:  # a GradScaler has changed the scale of the loss
        self._feedback.rescale(factor)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()
    seed_everything(0)
    strategy = DDPHooksStrategy(comm_hook=InTurns(parts=args.parts))
    quiet = {"logger": False, "enable_checkpointing": False}
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=args.epochs, **quiet)
    model, data = DigitsModel(), DigitsData()
    trainer.fit(model, datamodule=data)
    trainer.test(model, datamodule=data)
    if trainer.is_global_zero:
        print(f"test_acc={trainer.callback_metrics['test_acc']:.4f}", flush=True)
