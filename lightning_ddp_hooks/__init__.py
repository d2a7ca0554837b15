"""Data-parallel training for PyTorch Lightning with communication hooks, model averaging and uneven inputs."""

from lightning_ddp_hooks import averaging, callbacks, hooks, join, optim
from lightning_ddp_hooks.data_parallel import DataParallel
from lightning_ddp_hooks.fabric import FabricDDPHooksStrategy
from lightning_ddp_hooks.fabric import register as register_in_fabric
from lightning_ddp_hooks.reducer.bucket import GradBucket
from lightning_ddp_hooks.strategy import DDPHooksStrategy, register

__version__ = "0.1.0"
register()
register_in_fabric()

__all__ = [
    "DDPHooksStrategy",
    "DataParallel",
    "FabricDDPHooksStrategy",
    "GradBucket",
    "__version__",
    "averaging",
    "callbacks",
    "hooks",
    "join",
    "optim",
]
