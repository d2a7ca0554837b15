"""Averages at fixed periods: over all ranks, or within small groups often and over all ranks rarely."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_ddp_hooks.averaging.averager import AveragingContext, BoundAverager, ModelAverager
from lightning_ddp_hooks.averaging.schedule import HierarchicalSchedule, PeriodicSchedule


@dataclass(frozen=True, kw_only=True)
class PeriodicModelAverager(ModelAverager):
    """Averages the model over all ranks every ``period`` steps; between them each rank trains for itself.

    For the first ``warmup_steps`` steps gradients are averaged at every step, since early on replicas drift apart
    fastest. This is post-local SGD.

    Args:
        period: Steps from one averaging to the next; step ``warmup_steps`` is the first that averages.
        warmup_steps: See `ModelAverager`.
        average_buffers: See `ModelAverager`.
        optimizer_state: See `ModelAverager`.

    Raises:
        TypeError: Value of the wrong type.
        ValueError: Period below 1, or a negative warm-up.

    Example:
        >>> Trainer(strategy=DDPHooksStrategy(averager=PeriodicModelAverager(period=8, warmup_steps=500)))

    Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", 2018, https://arxiv.org/abs/1808.07217.
    """

    period: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        PeriodicSchedule(self.period, self.warmup_steps)

    def bind(self, context: AveragingContext) -> BoundAverager:
        """Make the averager for these ranks."""
        return _BoundPeriodic(self, context)


class _BoundPeriodic(BoundAverager):
    def __init__(self, settings: PeriodicModelAverager, context: AveragingContext) -> None:
        super().__init__(settings, context)
        self._schedule = PeriodicSchedule(settings.period, settings.warmup_steps)

    def _average(self, step: int) -> bool:
        due = self._schedule.due(step)
        if due:
            self._average_model(self.group)
        return due


@dataclass(frozen=True, kw_only=True)
class HierarchicalModelAverager(ModelAverager):
    """Averages over groups of several sizes, each with a period of its own (hierarchical SGD).

    At a step the largest period that divides its number decides. Groups consist of consecutive ranks, such as those of
    one host, so that most averagings stay on fast links.

    Args:
        period_group_size_dict: Period -> number of ranks in each group. Periods and sizes increase, each size divides
            the next one, and the last one is the number of all ranks.
        warmup_steps: See `ModelAverager`.
        average_buffers: See `ModelAverager`.
        optimizer_state: See `ModelAverager`.

    Raises:
        TypeError: Value of the wrong type.
        ValueError: Numbers out of range or order, groups that do not nest, or at setup a last group that is not all
            ranks.

    Example:
        >>> HierarchicalModelAverager(period_group_size_dict={4: 8, 16: 64}, warmup_steps=100)

    Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", 2018, https://arxiv.org/abs/1808.07217 (section 5);
    Wang et al., "Demystifying Why Local Aggregation Helps", 2020, https://arxiv.org/abs/2010.12998.
    """

    period_group_size_dict: Mapping[int, int]

    def __post_init__(self) -> None:
        super().__post_init__()
        HierarchicalSchedule.build(self.period_group_size_dict, self.warmup_steps)

    def bind(self, context: AveragingContext) -> BoundAverager:
        """Make the groups."""
        return _BoundHierarchical(self, context)


class _BoundHierarchical(BoundAverager):
    def __init__(self, settings: HierarchicalModelAverager, context: AveragingContext) -> None:
        self._schedule = HierarchicalSchedule.build(settings.period_group_size_dict, settings.warmup_steps)
        self._schedule.check_world_size(context.world_size)
        super().__init__(settings, context)
        self._groups = {context.world_size: self.group}
        for _, size in self._schedule.levels[:-1]:
            parts = [range(first, first + size) for first in range(0, context.world_size, size)]
            self._groups[size] = self.split_group(context.group, parts)

    def _average(self, step: int) -> bool:
        size = self._schedule.group_size(step)
        if size is not None:
            self._average_model(self._groups[size])
        return size == self.context.world_size
