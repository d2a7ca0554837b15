"""Communication hooks: what is done with a full bucket of gradients."""

from lightning_ddp_hooks.hooks.contract import CommHook
from lightning_ddp_hooks.hooks.function_hook import TorchHook

__all__ = ["CommHook", "TorchHook"]
