"""Which ranks take part in a step, and how they agree on it: one small asynchronous collective, one step ahead.

Of W ranks A are *active* (have a batch) in a step; rank r holds n_r samples. A rank that has run out of batches has
*joined*. A rank that knows how many batches it has left says so too; for as many steps the active ranks are certain,
and nothing is exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.reducer.agreement import ranks_text

Divisor = Literal["active", "samples", "world"]
DIVISORS: tuple[Divisor, ...] = ("active", "samples", "world")
_UNBOUNDED = 1 << 40
UNCOUNTED = -1
"""The number of samples of a batch that does not say."""


@dataclass(frozen=True)
class Step:
    """What all ranks know of one step: who has a batch, and the number of samples in it (0 unless they are counted)."""

    rank: int  # of this process
    active: tuple[bool, ...]
    samples: tuple[int, ...]

    @property
    def joined(self) -> bool:
        """Whether this rank has no batch."""
        return not self.active[self.rank]

    @property
    def tail(self) -> bool:
        """Whether some rank has no batch."""
        return not all(self.active)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The active ranks."""
        return tuple(rank for rank, has_batch in enumerate(self.active) if has_batch)

    @property
    def uncounted_text(self) -> str:
        """The ranks that do not know how many samples their batch holds."""
        return ranks_text([rank for rank, samples in enumerate(self.samples) if samples == UNCOUNTED])

    @property
    def first(self) -> int:
        """The lowest active rank, which speaks for all of them."""
        return self.ranks[0]

    def loss_factor(self, divisor: Divisor) -> float:
        """Return the factor on an active rank's loss that makes the mean over all W ranks the wanted mean.

        ``"active"``: W / A, the mean over the active ranks. ``"samples"``: W n_r / sum(n), the mean over all samples of
        the step if losses are means over samples. ``"world"``: 1, the sum divided by W.
        """
        if divisor == "samples":
            total = sum(self.samples)
            return len(self.active) * self.samples[self.rank] / total if total else 0.0
        return len(self.active) / len(self.ranks) if divisor == "active" else 1.0

    def held(self, divisor: Divisor) -> int:
        """Return how much the step weighs among those of an accumulation window: batches, samples, or as any other."""
        if divisor == "samples":
            return sum(self.samples)
        return len(self.ranks) if divisor == "active" else 1


def active_text(ranks: tuple[int, ...]) -> str:
    """Name the active ranks in a message."""
    return f"only {ranks_text(ranks)} still {'has' if len(ranks) == 1 else 'have'} data"


class PendingRows(NamedTuple):
    """A row of numbers from each rank, while they are exchanged."""

    table: torch.Tensor
    work: comm.Work

    def wait(self) -> list[list[int]]:
        """Wait for all ranks and return their rows."""
        self.work.wait()
        rows: list[list[int]] = self.table.tolist()
        return rows


def post_row(row: Sequence[int], group: comm.ProcessGroup) -> PendingRows:
    """Send a row of numbers to all ranks: each fills its own row of a zero matrix, which is summed; collective."""
    table = torch.zeros(comm.world_size(group), len(row), dtype=torch.int64)
    table[comm.rank(group)] = torch.tensor(row)
    return PendingRows(table, comm.start_sum(table, group))


class StepAgreement:
    """Agrees on steps over a CPU group that nothing else uses.

    A row is posted when the next batch has been fetched, and the others' are awaited when it is due: no latency shows.
    """

    def __init__(self, group: comm.ProcessGroup) -> None:
        self.group = group
        self.count = 0
        self._posted: PendingRows | None = None

    def post(self, has_batch: bool, samples: int, needs_template: bool, certain: int = 1) -> PendingRows:
        """Tell the others about this rank's next step, and how many batches it ``certain``-ly has; collective."""
        self.count += 1
        row = (has_batch, samples, needs_template, certain if has_batch else _UNBOUNDED)
        self._posted = post_row(row, self.group)
        return self._posted

    def wait(self, posted: PendingRows) -> tuple[Step, bool, int]:
        """Wait for all ranks, and return their step and the number of steps, from it on, with the same active ranks.

        Between them stands whether a rank that has never had a batch must be shown the structure of one.
        """
        has_batch, samples, needs, certain = zip(*posted.wait(), strict=True)
        needs_template = any(lacks and not has for lacks, has in zip(needs, has_batch, strict=True))
        return Step(comm.rank(self.group), tuple(map(bool, has_batch)), samples), needs_template, min(certain)

    @property
    def pending(self) -> bool:
        """Whether other ranks have yet to post."""
        return self._posted is not None and not self._posted.work.is_completed()
