"""Which hooks leave ranks with different gradients: a sharded optimizer cannot follow them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

from lightning_ddp_hooks.hooks.allreduce import Noop
from lightning_ddp_hooks.hooks.contract import CommHook, hook_name
from lightning_ddp_hooks.hooks.function_hook import TorchHook
from lightning_ddp_hooks.hooks.post_local_sgd import PostLocalSGD
from lightning_ddp_hooks.hooks.registry import resolve_hook

_FUNCTIONS = {"noop_hook", "post_local_sgd_hook", "post_localSGD_hook"}


def refuse_diverging(hook: CommHook | None) -> None:
    """Make sure that a hook gives all ranks the same gradients.

    Raises:
        ValueError: it does not, or a part of it; names it.
    """
    for part in _parts(hook):
        name = hook_name(part.hook) if isinstance(part, TorchHook) else type(part).__name__
        if isinstance(part, (Noop, PostLocalSGD)) or name in _FUNCTIONS:
            raise ValueError(
                f"Communication hook {name} leaves ranks with different gradients, but a sharded optimizer steps each "
                "parameter on one rank for all: use `OptimizerInHook(shard=False)`, or another hook."
            )


def _parts(value: object) -> Iterator[CommHook]:
    """Find the hooks in a declaration, which may be made of others."""
    if isinstance(value, CommHook):
        yield value
    if is_dataclass(value) and not isinstance(value, type):
        for entry in fields(value):
            part = getattr(value, entry.name)
            if entry.name in ("hook", "inner", "default") and isinstance(part, (str, tuple, list)):
                part = resolve_hook(part)
            yield from _parts(part)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _parts(item)
