"""Callbacks for the Trainer."""

from lightning_ddp_hooks.callbacks.comm_monitor import CommMonitor
from lightning_ddp_hooks.callbacks.model_averaging import ModelAveraging
from lightning_ddp_hooks.callbacks.uneven_inputs import UnevenInputs

__all__ = ["CommMonitor", "ModelAveraging", "UnevenInputs"]
