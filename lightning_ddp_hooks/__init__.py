"""Data-parallel training for PyTorch Lightning with communication hooks, model averaging and uneven inputs."""

import sys
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_ddp_hooks import _lightning_package, averaging, hooks, join, optim
from lightning_ddp_hooks.data_parallel import DataParallel, DistributedDataParallel
from lightning_ddp_hooks.model_monitor import ModelMonitor
from lightning_ddp_hooks.reducer import shm_backend
from lightning_ddp_hooks.reducer.bucket import GradBucket

if TYPE_CHECKING:
    from lightning_ddp_hooks import callbacks, fsdp
    from lightning_ddp_hooks.lightning.fabric import FabricDDPHooksStrategy
    from lightning_ddp_hooks.lightning.fsdp_strategy import FSDPHooksStrategy
    from lightning_ddp_hooks.lightning.strategy import DDPHooksStrategy

__version__ = "0.1.0"
shm_backend.register()

__all__ = [
    "DDPHooksStrategy",
    "DataParallel",
    "DistributedDataParallel",
    "FSDPHooksStrategy",
    "FabricDDPHooksStrategy",
    "GradBucket",
    "ModelMonitor",
    "__version__",
    "averaging",
    "callbacks",
    "fsdp",
    "hooks",
    "join",
    "optim",
]

# Plain PyTorch does without Lightning, which takes seconds to load: what needs it is loaded where it is asked for.
_OF_LIGHTNING = {
    "DDPHooksStrategy": ".lightning.strategy",
    "FSDPHooksStrategy": ".lightning.fsdp_strategy",
    "FabricDDPHooksStrategy": ".lightning.fabric",
}


def __getattr__(name: str) -> Any:
    if name in ("callbacks", "fsdp"):  # FSDP2 is large, too
        return import_module(f"{__name__}.{name}")
    if name in _OF_LIGHTNING:
        return getattr(import_module(__name__ + _OF_LIGHTNING[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def _register() -> None:
    names = import_module(f"{__name__}.lightning.names")
    names.register(*map(__getattr__, _OF_LIGHTNING))


_lightning_package.when_imported("lightning", _register)
_lightning_package.when_imported("pytorch_lightning", _register)
# `pytorch_lightning` imports the other one on its way.
_lightning_package.when_imported("lightning_fabric", lambda: "pytorch_lightning" in sys.modules or _register())
