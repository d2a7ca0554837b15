"""Data-parallel training for PyTorch Lightning with communication hooks, model averaging and uneven inputs."""

from lightning_ddp_hooks import _lightning_package  # noqa: F401, I001  before anything imports Lightning
from lightning_ddp_hooks import averaging, callbacks, hooks, join, optim
from lightning_ddp_hooks.data_parallel import DataParallel
from lightning_ddp_hooks.lightning.fabric import FabricDDPHooksStrategy
from lightning_ddp_hooks.lightning.names import register
from lightning_ddp_hooks.lightning.strategy import DDPHooksStrategy
from lightning_ddp_hooks.reducer.bucket import GradBucket

__version__ = "0.1.0"
register(DDPHooksStrategy, FabricDDPHooksStrategy)

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
