"""Communication hooks and model averagers on models that FSDP2 (``fully_shard``) has sharded."""

from lightning_ddp_hooks.fsdp.hooks import FSDPHooks as FSDPHooks
from lightning_ddp_hooks.fsdp.hooks import apply as apply

__all__ = ["FSDPHooks", "apply"]
