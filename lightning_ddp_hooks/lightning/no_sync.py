"""`trainer.model.no_sync()`, as under "ddp", although the model is the LightningModule itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn


class NoSync:
    """Accumulates gradients without communication; a copy of it, with a copy of the module, cannot."""

    def __init__(self, enter: Callable[[], AbstractContextManager[None]] | None = None) -> None:
        self._enter = enter

    def __call__(self) -> AbstractContextManager[None]:
        """Return the context."""
        if self._enter is None:
            raise RuntimeError("`no_sync` belongs to a Trainer that is fitting; this module is a copy.")
        return self._enter()

    def __deepcopy__(self, memo: Any) -> NoSync:
        return NoSync()

    def __reduce__(self) -> tuple[Any, ...]:
        return NoSync, ()


def give_no_sync(module: nn.Module, enter: Callable[[], AbstractContextManager[None]]) -> Callable[[], None]:
    """Give a module `no_sync`, unless it has one; return what takes it away."""
    mine = NoSync(enter)

    def take_away() -> None:
        if vars(module).get("no_sync") is mine:
            del vars(module)["no_sync"]

    if not hasattr(module, "no_sync"):
        vars(module)["no_sync"] = mine
    return take_away
