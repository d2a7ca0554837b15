"""The hooks that a declaration is made of."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_ddp_hooks.hooks.contract import CommHook
from lightning_ddp_hooks.hooks.registry import resolve_hook


def parts_of(hook: CommHook | None) -> Iterator[CommHook]:
    """Walk a declaration and those that it is composed of; nothing for the plain mean."""
    if hook is None:
        return
    yield hook
    for inner in hook.inner_hooks():
        yield from parts_of(resolve_hook(inner))
