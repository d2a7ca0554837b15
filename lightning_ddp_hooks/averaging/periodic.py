"""Average all replicas every few steps (post-local SGD)."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_ddp_hooks.averaging.averager import AveragingContext, BoundAverager, ModelAverager
from lightning_ddp_hooks.averaging.schedule import PeriodicSchedule


@dataclass(frozen=True, kw_only=True)
class PeriodicModelAverager(ModelAverager):
    """Averages the model over all ranks every ``period`` steps; between them each rank trains for itself.

    For the first ``warmup_steps`` steps gradients are averaged at every step, since early on replicas drift apart
    fastest.

    Args:
        period: steps from one averaging to the next; step ``warmup_steps`` is the first that averages.
        warmup_steps: see `ModelAverager`.
        average_buffers: see `ModelAverager`.
        optimizer_state: see `ModelAverager`.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: a period below 1, or a negative warm-up.

    Example:
        >>> Trainer(strategy=DDPHooksStrategy(averager=PeriodicModelAverager(period=8, warmup_steps=500)))

    Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", 2018, https://arxiv.org/abs/1808.07217.
    """

    period: int

    def __post_init__(self) -> None:
        """Check the numbers."""
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
