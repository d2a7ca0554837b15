"""SlowMo: slow momentum over periodic averaging."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_hooks.averaging.averager import AveragingContext, BoundAverager, ModelAverager
from lightning_ddp_hooks.averaging.outer import OuterModel
from lightning_ddp_hooks.averaging.replicas import copy_to_cpu
from lightning_ddp_hooks.averaging.schedule import PeriodicSchedule, require_positive, require_share
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
        period: Steps from one averaging to the next; the paper uses 12 to 48.
        slowmo_factor: Share of the slow momentum that is kept; the paper uses 0.4 to 0.8.
        slowmo_lr: Learning rate of the slow step.
        warmup_steps: See `ModelAverager`.
        average_buffers: See `ModelAverager`.
        optimizer_state: See `ModelAverager`.

    Raises:
        TypeError: Value of the wrong type.
        ValueError: Value out of range.

    Differences from the paper: where the learning rate changes within a period, lr is its mean over the period's steps;
    a parameter that no optimizer has counts with lr 1, which changes nothing as long as the rate is constant.

    Wang et al., "SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum", 2019,
    https://arxiv.org/abs/1910.00643.
    """

    period: int = 12
    slowmo_factor: float = 0.5
    slowmo_lr: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        PeriodicSchedule(self.period, self.warmup_steps)
        require_share("slowmo_factor", self.slowmo_factor)
        require_positive("slowmo_lr", self.slowmo_lr)

    def bind(self, context: AveragingContext) -> BoundAverager:
        """Make the averager for these ranks."""
        return _BoundSlowMo(self, context)


class _BoundSlowMo(BoundAverager):
    def __init__(self, settings: SlowMo, context: AveragingContext) -> None:
        super().__init__(settings, context)
        self._slow = settings
        self._schedule = PeriodicSchedule(settings.period, settings.warmup_steps)
        self._outer = OuterModel(context)
        self._momentum: dict[int, Tensor] = {}
        # Learning rates of parameter groups, summed over the steps since the last averaging.
        self._rate_sums: dict[str, Any] = {}
        self._rate_steps = 0

    def _average(self, step: int) -> bool:
        if step >= self._slow.warmup_steps:
            for key, group in self._param_groups():
                # A rate may be a tensor on a device, which is not asked for its value in each step.
                rate = group["lr"].detach() if isinstance(group["lr"], Tensor) else group["lr"]
                self._rate_sums[key] = self._rate_sums.get(key, 0.0) + rate
            self._rate_steps += 1
        if not self._schedule.due(step):
            return False
        self._average_model(self.group)
        self._slow_step()
        self._rate_sums, self._rate_steps = {}, 0
        return True

    @torch.no_grad()
    def _slow_step(self) -> None:
        rates = self._mean_rates()
        for index in self.trainable_indices():
            start = self._outer.values.get(index)
            if start is None:
                self._outer.begin([index])
                self._momentum[index] = torch.zeros_like(self._outer.values[index], requires_grad=False)
                continue
            param, rate = self.context.params[index], rates.get(id(self.context.params[index]), 1.0)
            if rate == 0.0:  # nothing was learned in this period, so there is no direction to remember either
                start.copy_(param)
                continue
            moved = (start - param).div_(rate)
            momentum = self._momentum[index].mul_(self._slow.slowmo_factor).add_(moved)
            start.sub_(momentum, alpha=self._slow.slowmo_lr * rate)
            self._outer.write(index)

    def _mean_rates(self) -> dict[int, float]:
        """Return the mean rate since the last averaging of each parameter that an optimizer has, by id."""
        rates: dict[int, float] = {}
        for key, group in self._param_groups():
            rate = float(self._rate_sums.get(key, 0.0)) / max(1, self._rate_steps)
            rates.update((id(param), rate) for param in group["params"])
        return rates

    def _param_groups(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for number, optimizer in enumerate(self.context.optimizers()):
            for position, group in enumerate(optimizer.param_groups):
                if "lr" in group:
                    yield f"{number}.{position}", group

    def _extra_state(self) -> dict[str, Any]:
        momentum = {self.context.names[index]: value for index, value in sorted(self._momentum.items())}
        sums = {key: float(value) for key, value in self._rate_sums.items()}
        return {
            "outer": self._outer.state_dict(),
            "momentum": copy_to_cpu(momentum),
            "rates": {"sums": sums, "steps": self._rate_steps},
        }

    def _load_extra_state(self, state: Mapping[str, Any]) -> None:
        self._outer.load_state_dict(state["outer"])
        self._momentum = {
            index: torch.empty_like(value, requires_grad=False).copy_(state["momentum"][self.context.names[index]])
            for index, value in self._outer.values.items()
        }
        self._rate_sums = {str(key): float(value) for key, value in state["rates"]["sums"].items()}
        self._rate_steps = whole_number(state["rates"]["steps"])
