"""Optimizers that know about other ranks."""

from lightning_ddp_hooks.optim.in_hook import OptimizerInHook
from lightning_ddp_hooks.optim.post_local_sgd import PostLocalSGDOptimizer
from lightning_ddp_hooks.optim.sharded_optimizer import ShardedOptimizer
from lightning_ddp_hooks.optim.zero_hooks import hook_with_zero_step, hook_with_zero_step_interleaved

__all__ = [
    "OptimizerInHook",
    "PostLocalSGDOptimizer",
    "ShardedOptimizer",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
]
