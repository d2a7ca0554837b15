"""Model averaging: replicas that train for themselves and are brought together now and then."""

from lightning_ddp_hooks.averaging.averager import AveragingContext, BoundAverager, ModelAverager
from lightning_ddp_hooks.averaging.diloco import DiLoCo
from lightning_ddp_hooks.averaging.names import AveragerLike as AveragerLike
from lightning_ddp_hooks.averaging.periodic import HierarchicalModelAverager, PeriodicModelAverager
from lightning_ddp_hooks.averaging.slowmo import SlowMo

__all__ = [
    "AveragingContext",
    "BoundAverager",
    "DiLoCo",
    "HierarchicalModelAverager",
    "ModelAverager",
    "PeriodicModelAverager",
    "SlowMo",
]
