"""The classes behind `lightning_ddp_hooks.callbacks`."""
