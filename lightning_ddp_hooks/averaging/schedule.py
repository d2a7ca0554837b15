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
    """Averages every ``period`` steps from step ``warmup_steps`` on.

    Attributes:
        period: steps from one averaging to the next.
        warmup_steps: steps before the first one; meanwhile gradients are averaged over all ranks.

    Raises:
        TypeError: not whole numbers.
        ValueError: a period below 1, or a negative warm-up.
    """

    period: int
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        """Check both numbers."""
        require_int("period", self.period, 1)
        require_int("warmup_steps", self.warmup_steps, 0)

    def due(self, step: int) -> bool:
        """Tell whether ``step`` averages."""
        return step >= self.warmup_steps and (step - self.warmup_steps) % self.period == 0


@dataclass(frozen=True)
class HierarchicalSchedule:
    """Averages over groups of several sizes, larger ones more rarely; the largest period that divides the step decides.

    Attributes:
        levels: pairs of period and group size, both increasing.
        warmup_steps: steps before the first averaging.
    """

    levels: tuple[tuple[int, int], ...]
    warmup_steps: int = 0

    @classmethod
    def build(cls, period_group_size_dict: Mapping[int, int], warmup_steps: int = 0) -> HierarchicalSchedule:
        """Check the specification and return the schedule.

        Args:
            period_group_size_dict: period -> number of ranks in each group, in increasing order of both.
            warmup_steps: steps before the first averaging.

        Raises:
            TypeError: not a mapping of whole numbers.
            ValueError: an empty one, numbers out of range or order, or groups that do not nest; with the numbers.
        """
        require_int("warmup_steps", warmup_steps, 0)
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
        """Raise ValueError unless the last group is all ``world_size`` ranks."""
        period, size = self.levels[-1]
        if size != world_size:
            raise ValueError(
                f"The last group size must be the number of ranks, {world_size}, got {size} (period {period} in "
                "`period_group_size_dict`): replicas would never become equal."
            )

    def group_size(self, step: int) -> int | None:
        """Return over how many ranks ``step`` averages, or None if it does not."""
        if step < self.warmup_steps:
            return None
        return next((size for period, size in reversed(self.levels) if step % period == 0), None)


@dataclass(frozen=True)
class FragmentSchedule:
    """Sends one fragment of the model at a time, each once a period, and lands it ``delay`` steps later.

    With one fragment and no delay these are the steps of `PeriodicSchedule`:

        period 8, fragments 2, delay 1, W = 0
        step        0    1   2   3    4        5       ...  8        9       ...  12
                    all              send 0   land 0        send 1   land 1       send 0

    Attributes:
        period: steps from one sending of a fragment to its next.
        warmup_steps: the step at which the outer parameters begin as the mean of the replicas.
        fragments: into how many parts the model is cut.
        delay: steps from sending to landing; meanwhile training goes on.

    Raises:
        TypeError: not whole numbers.
        ValueError: numbers out of range, or a fragment that would still be on its way when the next one is sent.
    """

    period: int
    warmup_steps: int = 0
    fragments: int = 1
    delay: int = 0

    def __post_init__(self) -> None:
        """Check the numbers, then their combination."""
        require_int("period", self.period, 1)
        require_int("warmup_steps", self.warmup_steps, 0)
        require_int("fragments", self.fragments, 1)
        require_int("delay", self.delay, 0)
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
        """The step of each fragment's sending within a period, from 1 to ``period``."""
        return tuple((index + 1) * self.period // self.fragments for index in range(self.fragments))

    def begins(self, step: int) -> bool:
        """Tell whether the outer parameters begin at ``step``."""
        return step == self.warmup_steps

    def fragment(self, step: int) -> int | None:
        """Return which fragment ``step`` sends, or None."""
        since = step - self.warmup_steps
        if since <= 0:
            return None
        within = (since - 1) % self.period + 1
        return self.offsets.index(within) if within in self.offsets else None


def split_fragments(weights: Sequence[int], fragments: int) -> list[list[int]]:
    """Cut a sequence into consecutive parts of about equal weight.

    Args:
        weights: of the items, such as the number of elements of each parameter.
        fragments: how many parts; some may be empty if there are few items.

    Returns:
        For each part the positions of its items.
    """
    total, before = sum(weights), 0
    parts: list[list[int]] = [[] for _ in range(fragments)]
    for position, weight in enumerate(weights):
        # An item belongs to the part in which its middle lies.
        middle = before + weight / 2
        parts[min(fragments - 1, int(middle * fragments / total)) if total else 0].append(position)
        before += weight
    return parts


def require_int(name: str, value: object, minimum: int) -> None:
    """Raise unless ``value`` is a whole number of at least ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"Expected a whole number for `{name}`, got {value!r}.")
    if value < minimum:
        raise ValueError(f"Expected `{name}` to be at least {minimum}, got {value}.")


def require_number(name: str, value: object) -> None:
    """Raise TypeError unless ``value`` is a number, ValueError if it is infinite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"Expected a number for `{name}`, got {value!r}.")
    if abs(value) == float("inf"):
        raise ValueError(f"Expected a finite number for `{name}`, got {value!r}.")
