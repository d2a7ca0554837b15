"""To be removed: `parts_of` is in registry.py."""

from lightning_ddp_hooks.hooks.registry import parts_of as parts_of
