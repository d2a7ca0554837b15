"""Data-parallel training for PyTorch Lightning with communication hooks, model averaging and uneven inputs."""

from lightning_ddp_hooks import averaging, callbacks, hooks, join, optim
from lightning_ddp_hooks.data_parallel import DataParallel, DistributedDataParallel
from lightning_ddp_hooks.lightning.fabric import FabricDDPHooksStrategy
from lightning_ddp_hooks.lightning.names import register
from lightning_ddp_hooks.lightning.strategy import DDPHooksStrategy
from lightning_ddp_hooks.reducer import shm_backend
from lightning_ddp_hooks.reducer.bucket import GradBucket

__version__ = "0.1.0"
register(DDPHooksStrategy, FabricDDPHooksStrategy)
shm_backend.register()

__all__ = [
    "DDPHooksStrategy",
    "DataParallel",
    "DistributedDataParallel",
    "FabricDDPHooksStrategy",
    "GradBucket",
    "__version__",
    "averaging",
    "callbacks",
    "hooks",
    "join",
    "optim",
]
