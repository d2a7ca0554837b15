"""The Lightning strategy, from its base up: uneven inputs, model averaging, and the strategy that users name."""

from lightning_ddp_hooks.strategy.strategy import DDPHooksStrategy, register

__all__ = ["DDPHooksStrategy", "register"]
