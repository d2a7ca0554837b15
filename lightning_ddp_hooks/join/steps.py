"""Who takes part in one step, and with what weight. Pure: the numbers are exchanged in agreement.py.

Notation: W ranks, of which A are *active* (have a batch) in a step; rank r holds n_r samples. A rank that has run out
of batches has *joined*; a step in which some rank has joined belongs to the *tail*.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Divisor = Literal["active", "samples", "world"]
DIVISORS: tuple[Divisor, ...] = ("active", "samples", "world")


@dataclass(frozen=True)
class Step:
    """What all ranks know of one step.

    Attributes:
        rank: this process's rank.
        active: for each rank, whether it has a batch.
        samples: for each rank, how many samples its batch holds; zeros unless they are counted.
    """

    rank: int
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
        """Whether no rank has a batch: the epoch has ended before this step."""
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
        """Return by what an active rank scales its loss, so that the mean over all W ranks becomes the wanted mean.

        Args:
            divisor: ``"active"``: the mean over the active ranks, factor W / A; ``"samples"``: the mean over all
                samples of the step, factor W n_r / sum(n), for losses that are means over samples; ``"world"``: the sum
                over the active ranks divided by W, factor 1.
        """
        world_size = len(self.active)
        if divisor == "active":
            return world_size / len(self.ranks)
        if divisor == "samples":
            total = sum(self.samples)
            return world_size * self.samples[self.rank] / total if total else 0.0
        return 1.0
