"""Callbacks for the Trainer."""

from lightning_ddp_hooks.lightning.callbacks.comm_monitor import CommMonitor
from lightning_ddp_hooks.lightning.callbacks.model_averaging import ModelAveraging
from lightning_ddp_hooks.lightning.callbacks.uneven_inputs import UnevenInputs

__all__ = ["CommMonitor", "ModelAveraging", "UnevenInputs"]

for _callback in (CommMonitor, ModelAveraging, UnevenInputs):
    _callback.__module__ = __name__  # the path that configuration files and pickles name
