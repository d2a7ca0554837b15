"""Data-parallel training for PyTorch Lightning with communication hooks, model averaging and uneven inputs."""

from lightning_ddp_hooks import averaging, callbacks, hooks, join, optim
from lightning_ddp_hooks.data_parallel import DataParallel
from lightning_ddp_hooks.reducer.bucket import GradBucket
from lightning_ddp_hooks.strategy import DDPHooksStrategy, register

__version__ = "0.1.0"
register()

__all__ = [
    "DDPHooksStrategy",
    "DataParallel",
    "GradBucket",
    "__version__",
    "averaging",
    "callbacks",
    "hooks",
    "join",
    "optim",
]
