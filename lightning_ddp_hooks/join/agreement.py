"""Ranks tell each other, one step ahead, who still has a batch: one small asynchronous collective.

A rank that knows how many batches it has left says so too; then it is certain for as many steps who is active, and
there is nothing to agree on in them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.join.steps import Step

_COLUMNS = 4
_FOR_EVER = 1 << 40


class Agreed(NamedTuple):
    """What the ranks have agreed on.

    Attributes:
        step: the step.
        needs_template: whether some rank that has never had a batch needs to be shown what one looks like.
        certain_steps: for how many steps, from this one on, the same ranks are active.
    """

    step: Step
    needs_template: bool
    certain_steps: int


class StepAgreement:
    """Agrees on steps over a CPU group.

    Each rank fills its row of a zero matrix with (has a batch, samples in it, needs a template, batches it certainly
    has); the sum over the ranks tells all rows to all. It is posted when the next batch is at hand and awaited when
    that batch is due, so that it costs next to nothing.

    Args:
        group: a CPU group that nothing else uses.
    """

    def __init__(self, group: comm.ProcessGroup) -> None:
        self.group = group
        self.count = 0
        self._rank, self._world_size = comm.rank(group), comm.world_size(group)
        self._posted: PendingStep | None = None

    def post(self, has_batch: bool, samples: int, needs_template: bool, certain: int = 1) -> PendingStep:
        """Tell the others about this rank's next step; a collective call.

        Args:
            has_batch: whether this rank has one for the step.
            samples: in that batch; 0 if nobody counts them.
            needs_template: whether this rank has never had a batch.
            certain: how many batches this rank surely has, that of the step included.
        """
        row = (int(has_batch), samples, int(needs_template), certain if has_batch else _FOR_EVER)
        numbers = [0] * (_COLUMNS * self._world_size)
        numbers[_COLUMNS * self._rank : _COLUMNS * (self._rank + 1)] = row
        rows = torch.tensor(numbers, dtype=torch.int64)
        self.count += 1
        self._posted = PendingStep(self._rank, rows, comm.start_sum(rows, self.group))
        return self._posted

    @property
    def pending(self) -> bool:
        """Whether other ranks have yet to say something."""
        return self._posted is not None and not self._posted.done()


class PendingStep:
    """A step on which the ranks are agreeing."""

    def __init__(self, rank: int, rows: torch.Tensor, work: comm.Work) -> None:
        self._rank = rank
        self._rows = rows
        self._work = work

    def done(self) -> bool:
        """Tell whether all ranks have posted."""
        return bool(self._work.is_completed())

    def wait(self) -> Agreed:
        """Return what was agreed on."""
        self._work.wait()
        numbers = self._rows.tolist()
        has_batch, samples, needs, certain = (numbers[column::_COLUMNS] for column in range(_COLUMNS))
        step = Step(self._rank, tuple(map(bool, has_batch)), tuple(samples))
        needs_template = any(lacks and not has for lacks, has in zip(needs, has_batch, strict=True))
        return Agreed(step, needs_template, min(certain))
