"""When a step averages, and over how many ranks: pure arithmetic, no tensors and no groups.

A step is counted from 0, and averaging comes after the optimizer of that step (W = warmup_steps, P = period):

    step         0 ...... W-1 |  W   W+1 ... W+P-1 | W+P  ...
    gradients    all ranks    |  subgroup or none
    averaging    -            | yes   -         -  | yes

    hierarchical {2: 2, 4: 8}, W = 0:  step 0: 8 ranks, 1: -, 2: 2 ranks, 3: -, 4: 8 ranks, ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class PeriodicSchedule:
    """Averages every ``period`` steps from step ``warmup_steps`` on."""

    period: int
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        require_int("period", self.period, 1)

    def due(self, step: int) -> bool:
        """Tell whether ``step`` averages."""
        return step >= self.warmup_steps and (step - self.warmup_steps) % self.period == 0


@dataclass(frozen=True)
class HierarchicalSchedule:
    """Averages over groups of several sizes; the largest period that divides the step decides."""

    levels: tuple[tuple[int, int], ...]  # period and group size, both increasing
    warmup_steps: int = 0

    @classmethod
    def build(cls, period_group_size_dict: Mapping[int, int], warmup_steps: int = 0) -> HierarchicalSchedule:
        """Check a specification, period -> number of ranks in each group, and return the schedule."""
        name = "period_group_size_dict"
        if not isinstance(period_group_size_dict, Mapping):
            raise TypeError(f"Expected a dict of period to group size for `{name}`, got {period_group_size_dict!r}.")
        if not period_group_size_dict:
            raise ValueError(f"Expected at least one period with its group size in `{name}`, got none.")
        levels = tuple(period_group_size_dict.items())
        for period, size in levels:
            require_int(f"{name} (period)", period, 1)
            require_int(f"{name} (group size)", size, 1)
        for (period, size), (next_period, next_size) in pairwise(levels):
            if next_period <= period:
                raise ValueError(f"Periods in `{name}` must increase, got {next_period} after {period}.")
            if next_size <= size:
                raise ValueError(
                    f"Group sizes in `{name}` must increase with the period, got {next_size} (period {next_period}) "
                    f"after {size} (period {period})."
                )
            if next_size % size:
                raise ValueError(
                    f"Groups in `{name}` must nest: {size} (period {period}) does not divide {next_size} "
                    f"(period {next_period})."
                )
            if size == 1:
                raise ValueError(f"A group of 1 rank has nothing to average with (period {period} in `{name}`).")
        return cls(levels, warmup_steps)

    def check_world_size(self, world_size: int) -> None:
        """Raise ValueError unless the largest group is all ``world_size`` ranks."""
        period, size = self.levels[-1]
        if size != world_size:
            raise ValueError(
                f"The last group size must be the number of ranks, {world_size}, got {size} (period {period} in "
                "`period_group_size_dict`): replicas would never become equal."
            )

    def group_size(self, step: int) -> int | None:
        """Return the number of ranks that ``step`` averages over, or None if it does not average."""
        if step < self.warmup_steps:
            return None
        return next((size for period, size in reversed(self.levels) if step % period == 0), None)


@dataclass(frozen=True)
class FragmentSchedule:
    """Sends one fragment of the model at a time, each once a period, and lands it ``delay`` steps later.

    With one fragment and no delay these are the steps of `PeriodicSchedule`. The outer parameters begin as the mean of
    the replicas at step W:

        period 8, fragments 2, delay 1, W = 0
        step        0    1   2   3    4        5       ...  8        9       ...  12
                    all              send 0   land 0        send 1   land 1       send 0
    """

    period: int
    warmup_steps: int = 0
    fragments: int = 1
    delay: int = 0

    def __post_init__(self) -> None:
        for name, minimum in (("period", 1), ("fragments", 1), ("delay", 0)):
            require_int(name, getattr(self, name), minimum)
        if self.fragments > self.period:
            raise ValueError(
                f"{self.fragments} fragments do not fit into a period of {self.period} steps: a step sends at most one."
            )
        offsets = [*self.offsets, self.offsets[0] + self.period]
        gap = min(b - a for a, b in pairwise(offsets))
        if self.delay > gap:
            raise ValueError(
                f"With period={self.period} and fragments={self.fragments} a fragment is sent every {gap} steps; "
                f"delay={self.delay} would let it arrive after the next one has been sent."
            )

    @property
    def offsets(self) -> tuple[int, ...]:
        """Step within a period, from 1 to ``period``, at which each fragment is sent."""
        return tuple((index + 1) * self.period // self.fragments for index in range(self.fragments))

    def fragment(self, step: int) -> int | None:
        """Return which fragment ``step`` sends, or None."""
        since = step - self.warmup_steps
        if since <= 0:
            return None
        within = (since - 1) % self.period + 1
        return self.offsets.index(within) if within in self.offsets else None


def split_fragments(weights: Sequence[int], fragments: int) -> list[list[int]]:
    """Cut a sequence into consecutive parts of about equal weight, some maybe empty; return the positions in each."""
    total, before = sum(weights), 0
    parts: list[list[int]] = [[] for _ in range(fragments)]
    for position, weight in enumerate(weights):
        # An item belongs to the part in which its middle lies.
        middle = before + weight / 2
        parts[min(fragments - 1, int(middle * fragments / total)) if total else 0].append(position)
        before += weight
    return parts


def require_int(name: str, value: object, minimum: int) -> None:
    """Raise TypeError or ValueError unless ``value`` is a whole number of at least ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"Expected a whole number for `{name}`, got {value!r}.")
    if value < minimum:
        raise ValueError(f"Expected `{name}` to be at least {minimum}, got {value}.")


def require_positive(name: str, value: object) -> None:
    """Raise TypeError or ValueError unless ``value`` is a finite number above 0."""
    if not _number(name, value) > 0:
        raise ValueError(f"Expected `{name}` to be above 0, got {value}.")


def require_share(name: str, value: object, why: str = "") -> None:
    """Raise TypeError or ValueError unless ``value`` is a number from 0 to below 1."""
    if not 0 <= _number(name, value) < 1:
        raise ValueError(f"Expected `{name}` to be at least 0 and below 1, got {value}{why}.")


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"Expected a number for `{name}`, got {value!r}.")
    if abs(value) == float("inf"):
        raise ValueError(f"Expected a finite number for `{name}`, got {value!r}.")
    return value
