"""Which ranks take part in a step, and how they agree on it: one small asynchronous collective, one step ahead.

Notation: W ranks, of which A are *active* (have a batch) in a step; rank r holds n_r samples. A rank that has run out
of batches has *joined*; a step in which some rank has joined belongs to the *tail*.

A rank that knows how many batches it has left says so too; for as many steps the active ranks are certain, and nothing
is exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.reducer.agreement import ranks_text

Divisor = Literal["active", "samples", "world"]
DIVISORS: tuple[Divisor, ...] = ("active", "samples", "world")
_COLUMNS = 4
_UNBOUNDED = 1 << 40


@dataclass(frozen=True)
class Step:
    """What all ranks know of one step: who has a batch, and the number of samples in it (0 unless they are counted)."""

    rank: int  # of this process
    active: tuple[bool, ...]
    samples: tuple[int, ...]

    @cached_property
    def joined(self) -> bool:
        """Whether this rank has no batch."""
        return not self.active[self.rank]

    @cached_property
    def tail(self) -> bool:
        """Whether some rank has no batch."""
        return not all(self.active)

    @property
    def over(self) -> bool:
        """Whether no rank has a batch: the epoch ended before this step."""
        return not any(self.active)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The active ranks."""
        return tuple(rank for rank, has_batch in enumerate(self.active) if has_batch)

    @property
    def first(self) -> int:
        """The lowest active rank, which speaks for all of them."""
        return self.ranks[0]

    def loss_factor(self, divisor: Divisor) -> float:
        """Return the factor on an active rank's loss that makes the mean over all W ranks the wanted mean.

        That is W / A for ``"active"``, the mean over the active ranks; W n_r / sum(n) for ``"samples"``, the mean over
        all samples of the step if losses are means over samples; 1 for ``"world"``, the sum divided by W.
        """
        world_size = len(self.active)
        if divisor == "active":
            return world_size / len(self.ranks)
        if divisor == "samples":
            total = sum(self.samples)
            return world_size * self.samples[self.rank] / total if total else 0.0
        return 1.0


def active_text(ranks: tuple[int, ...]) -> str:
    """Name the active ranks in a message."""
    return f"only {ranks_text(ranks)} still {'has' if len(ranks) == 1 else 'have'} data"


class StepAgreement:
    """Agrees on steps over a CPU group that nothing else uses.

    Each rank fills its row of a zero matrix with (has a batch, samples in it, needs a template, batches it certainly
    has); the sum over the ranks gives all rows to all. It is posted when the next batch has been fetched and awaited
    when that batch is due, so that its latency is hidden.
    """

    def __init__(self, group: comm.ProcessGroup) -> None:
        self.group = group
        self.count = 0
        self._rank, self._world_size = comm.rank(group), comm.world_size(group)
        self._posted: PendingStep | None = None

    def post(self, has_batch: bool, samples: int, needs_template: bool, certain: int = 1) -> PendingStep:
        """Tell the others about this rank's next step, and how many batches it ``certain``-ly has; collective."""
        row = (int(has_batch), samples, int(needs_template), certain if has_batch else _UNBOUNDED)
        numbers = [0] * (_COLUMNS * self._world_size)
        numbers[_COLUMNS * self._rank : _COLUMNS * (self._rank + 1)] = row
        rows = torch.tensor(numbers, dtype=torch.int64)
        self.count += 1
        self._posted = PendingStep(self._rank, rows, comm.start_sum(rows, self.group))
        return self._posted

    @property
    def pending(self) -> bool:
        """Whether other ranks have yet to post."""
        return self._posted is not None and not self._posted.work.is_completed()


class PendingStep(NamedTuple):
    """A step on which the ranks are agreeing."""

    rank: int
    rows: torch.Tensor
    work: comm.Work

    def wait(self) -> tuple[Step, bool, int]:
        """Wait for all ranks.

        Returns:
            The step; whether a rank that has never had a batch must be shown the structure of one; and the number of
            steps, from this one on, with the same active ranks.
        """
        self.work.wait()
        numbers = self.rows.tolist()
        has_batch, samples, needs, certain = (numbers[column::_COLUMNS] for column in range(_COLUMNS))
        needs_template = any(lacks and not has for lacks, has in zip(needs, has_batch, strict=True))
        return Step(self.rank, tuple(map(bool, has_batch)), tuple(samples)), needs_template, min(certain)
