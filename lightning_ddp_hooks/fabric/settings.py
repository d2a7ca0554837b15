"""What a user has set for all models of a Fabric, checked value by value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta

from lightning_ddp_hooks.arguments import (
    require_check_interval,
    require_failure_timeout,
    require_flag,
    require_timeout,
)
from lightning_ddp_hooks.averaging.averager import ModelAverager
from lightning_ddp_hooks.hooks.contract import CommHook, declaration_text
from lightning_ddp_hooks.optim.in_hook import OptimizerInHook
from lightning_ddp_hooks.reducer.config import ReducerConfig
from lightning_ddp_hooks.strategy.combinations import Run


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of `FabricDDPHooksStrategy` that shape training.

    Attributes:
        config: of the reducer.
        hook: the communication hook; None for the mean.
        averager: likewise as in `FabricDDPHooksStrategy`.
        save_replicas: likewise.
        optimizer_in_hook: likewise.
        timeout: likewise.
        failure_timeout: likewise.
        check_replicas_every_n_steps: likewise.
        detect_nonfinite: likewise.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: a value out of range.
    """

    config: ReducerConfig
    hook: CommHook | None
    averager: ModelAverager | None
    save_replicas: bool
    optimizer_in_hook: OptimizerInHook | None
    timeout: timedelta | None
    failure_timeout: float | None
    check_replicas_every_n_steps: int | None
    detect_nonfinite: bool

    def __post_init__(self) -> None:
        """Check each value."""
        if self.averager is not None and not isinstance(self.averager, ModelAverager):
            raise TypeError(f"Expected a ModelAverager for `averager`, got {type(self.averager).__name__}.")
        if self.optimizer_in_hook is not None and not isinstance(self.optimizer_in_hook, OptimizerInHook):
            raise TypeError(
                f"Expected an OptimizerInHook for `optimizer_in_hook`, got {type(self.optimizer_in_hook).__name__}."
            )
        require_flag("save_replicas", self.save_replicas)
        require_timeout(self.timeout)
        require_failure_timeout(self.failure_timeout)
        require_check_interval(self.check_replicas_every_n_steps)
        require_flag("detect_nonfinite", self.detect_nonfinite)

    def run(self, hook: CommHook | None, *, scaler: bool = False) -> Run:
        """Return what the table of combinations is asked about.

        Args:
            hook: of the model.
            scaler: whether a GradScaler scales the loss.
        """
        return Run(
            hook=hook,
            averager=self.averager,
            save_replicas=self.save_replicas,
            optimizer_in_hook=self.optimizer_in_hook,
            find_unused_parameters=self.config.find_unused_parameters,
            static_graph=self.config.static_graph,
            detect_nonfinite=self.detect_nonfinite,
            check_replicas_every_n_steps=self.check_replicas_every_n_steps,
            scaler=scaler,
        )

    def with_hook(self, hook: CommHook) -> Settings:
        """Return the same settings with a hook."""
        return replace(self, hook=hook)

    def to_agree_on(self) -> dict[str, object]:
        """Return what must be the same on all ranks, by name."""
        return {
            "comm_hook": declaration_text(self.hook),
            "averager": declaration_text(self.averager),
            "save_replicas": self.save_replicas if self.averager is not None else None,
            "optimizer_in_hook": repr(self.optimizer_in_hook),
            "failure_timeout": self.failure_timeout,
            "check_replicas_every_n_steps": self.check_replicas_every_n_steps,
            "detect_nonfinite": self.detect_nonfinite,
        }
