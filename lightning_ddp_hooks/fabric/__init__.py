"""The strategy for Lightning Fabric: the same engine for training loops that users write themselves."""

from lightning_ddp_hooks.fabric.strategy import FabricDDPHooksStrategy, register

__all__ = ["FabricDDPHooksStrategy", "register"]
