"""Which hooks leave ranks with different gradients: a sharded optimizer cannot follow them."""

from __future__ import annotations

from lightning_ddp_hooks.hooks.allreduce import Noop
from lightning_ddp_hooks.hooks.contract import CommHook, hook_name
from lightning_ddp_hooks.hooks.function_hook import TorchHook
from lightning_ddp_hooks.hooks.parts import parts_of
from lightning_ddp_hooks.hooks.post_local_sgd import PostLocalSGD

_FUNCTIONS = {"noop_hook", "post_local_sgd_hook", "post_localSGD_hook"}


def diverging_part(hook: CommHook | None) -> str | None:
    """Name a hook, or a part of it, that leaves ranks with different gradients; None if they all get the same."""
    for part in parts_of(hook):
        name = hook_name(part.hook) if isinstance(part, TorchHook) else type(part).__name__
        if isinstance(part, (Noop, PostLocalSGD)) or name in _FUNCTIONS:
            return name
    return None


def diverging_text(name: str) -> str:
    """Say why such a hook does not go with a sharded optimizer."""
    return (
        f"Communication hook {name} leaves ranks with different gradients, but a sharded optimizer steps each "
        "parameter on one rank for all: use `OptimizerInHook(shard=False)`, or another hook."
    )


def refuse_diverging(hook: CommHook | None) -> None:
    """Make sure that a hook gives all ranks the same gradients.

    Raises:
        ValueError: it does not, or a part of it; names it.
    """
    if (name := diverging_part(hook)) is not None:
        raise ValueError(diverging_text(name))
