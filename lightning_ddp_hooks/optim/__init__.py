"""Optimizers that know about other ranks."""

from lightning_ddp_hooks.optim.post_local_sgd import PostLocalSGDOptimizer

__all__ = ["PostLocalSGDOptimizer"]
