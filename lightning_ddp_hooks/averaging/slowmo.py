"""SlowMo: slow momentum over periodic averaging."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_hooks.averaging.averager import AveragingContext, BoundAverager, ModelAverager
from lightning_ddp_hooks.averaging.outer import OuterModel
from lightning_ddp_hooks.averaging.schedule import PeriodicSchedule, require_number
from lightning_ddp_hooks.hooks.state import whole_number


@dataclass(frozen=True, kw_only=True)
class SlowMo(ModelAverager):
    """Averages the replicas every ``period`` steps and adds momentum over what they have moved since the last time.

    With x0 the model after the last averaging, x the mean of the replicas now, and lr the inner learning rate:

        u  <- slowmo_factor * u + (x0 - x) / lr
        x0 <- x0 - slowmo_lr * lr * u

    ``slowmo_factor=0, slowmo_lr=1`` is periodic averaging. The outer parameters begin at step ``warmup_steps`` as the
    mean of the replicas. Two more copies of the model are kept.

    Args:
        period: steps from one averaging to the next; the paper uses 12 to 48.
        slowmo_factor: how much of the slow momentum is kept; the paper uses 0.4 to 0.8.
        slowmo_lr: how far the slow step goes.
        warmup_steps: see `ModelAverager`.
        average_buffers: see `ModelAverager`.
        optimizer_state: see `ModelAverager`.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: a value out of range.

    Differences from the paper: where the learning rate changes within a period, lr is its mean over the period's steps;
    a parameter that no optimizer has counts with lr 1, which changes nothing as long as the rate is constant.

    Wang et al., "SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum", 2019,
    https://arxiv.org/abs/1910.00643.
    """

    period: int
    slowmo_factor: float = 0.5
    slowmo_lr: float = 1.0

    def __post_init__(self) -> None:
        """Check the numbers."""
        super().__post_init__()
        PeriodicSchedule(self.period, self.warmup_steps)
        require_number("slowmo_factor", self.slowmo_factor)
        require_number("slowmo_lr", self.slowmo_lr)
        if not 0 <= self.slowmo_factor < 1:
            raise ValueError(f"Expected `slowmo_factor` to be at least 0 and below 1, got {self.slowmo_factor}.")
        if not self.slowmo_lr > 0:
            raise ValueError(f"Expected `slowmo_lr` to be above 0, got {self.slowmo_lr}.")

    def bind(self, context: AveragingContext) -> BoundAverager:
        """Make the averager for these ranks."""
        return _BoundSlowMo(self, context)


class _BoundSlowMo(BoundAverager):
    def __init__(self, settings: SlowMo, context: AveragingContext) -> None:
        super().__init__(settings, context)
        self._slow = settings
        self._schedule = PeriodicSchedule(settings.period, settings.warmup_steps)
        self._outer = OuterModel(context.names, context.params)
        self._momentum: dict[int, Tensor] = {}
        self._rates = _MeanRates(context)

    def _average(self, step: int) -> bool:
        if step >= self._slow.warmup_steps:
            self._rates.note()
        if not self._schedule.due(step):
            return False
        self._average_model(self.group)
        self._slow_step()
        self._rates.restart()
        return True

    @torch.no_grad()
    def _slow_step(self) -> None:
        rates = self._rates.means()
        for index in self.trainable_indices():
            start = self._outer.values.get(index)
            if start is None:
                self._outer.begin([index])
                self._momentum[index] = torch.zeros_like(self._outer.values[index], requires_grad=False)
                continue
            param, rate = self.context.params[index], rates.get(index, 1.0)
            if rate == 0.0:  # nothing was learnt in this period, so there is no direction to remember either
                start.copy_(param)
                continue
            moved = (start - param).div_(rate)
            momentum = self._momentum[index].mul_(self._slow.slowmo_factor).add_(moved)
            start.sub_(momentum, alpha=self._slow.slowmo_lr * rate)
            self._outer.write(index)

    def _extra_state(self) -> dict[str, Any]:
        names = self.context.names
        return {
            "outer": self._outer.state_dict(),
            "momentum": {names[i]: u.to("cpu", copy=True) for i, u in sorted(self._momentum.items())},
            "rates": self._rates.state_dict(),
        }

    def _load_extra_state(self, state: Mapping[str, Any]) -> None:
        self._outer.load_state_dict(state["outer"])
        names = self.context.names
        self._momentum = {
            index: torch.empty_like(value, requires_grad=False).copy_(state["momentum"][names[index]])
            for index, value in self._outer.values.items()
        }
        self._rates.load_state_dict(state["rates"])


class _MeanRates:
    """The mean learning rate of each parameter over the steps since the last averaging."""

    def __init__(self, context: AveragingContext) -> None:
        self._context = context
        self._sums: dict[str, float] = {}
        self._steps = 0

    def note(self) -> None:
        """Add this step's rates."""
        for key, group in self._groups():
            self._sums[key] = self._sums.get(key, 0.0) + float(group["lr"])
        self._steps += 1

    def means(self) -> dict[int, float]:
        """Return parameter position -> mean rate, for the parameters that an optimizer has."""
        positions = {id(param): index for index, param in enumerate(self._context.params)}
        means: dict[int, float] = {}
        for key, group in self._groups():
            rate = self._sums.get(key, 0.0) / max(1, self._steps)
            for param in group["params"]:
                if id(param) in positions:
                    means[positions[id(param)]] = rate
        return means

    def restart(self) -> None:
        """Begin a new period."""
        self._sums.clear()
        self._steps = 0

    def _groups(self) -> list[tuple[str, dict[str, Any]]]:
        return [
            (f"{number}.{position}", group)
            for number, optimizer in enumerate(self._context.optimizers())
            for position, group in enumerate(optimizer.param_groups)
            if "lr" in group
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the sums so far."""
        return {"sums": dict(self._sums), "steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` returned."""
        self._sums = {str(key): float(value) for key, value in state["sums"].items()}
        self._steps = whole_number(state["steps"])
