"""When a training step ends in a loop that the user writes: once each optimizer of the model has stepped.

One that steps again before the others have begins the next step, so that the clock goes on whatever the loop does.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

from torch import nn
from torch.optim import Optimizer

from lightning_ddp_hooks.config import Settings
from lightning_ddp_hooks.hooks.contract import CommHook


class OptimizerClock:
    """Counts the steps of a model's optimizers, which it holds weakly."""

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer] = ()) -> None:
        self._module = module
        self._optimizers = weakref.WeakValueDictionary({id(optimizer): optimizer for optimizer in optimizers})
        self._stepped: set[int] = set()

    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers that train the model, in the order in which they were set up."""
        return list(self._optimizers.values())

    def has(self, optimizer: Optimizer) -> bool:
        """Tell whether an optimizer trains the model."""
        return self._optimizers.get(id(optimizer)) is optimizer

    def shares(self, optimizer: Optimizer) -> bool:
        """Tell whether an optimizer has parameters of the model."""
        own = {id(param) for param in self._module.parameters()}
        return any(id(param) in own for group in optimizer.param_groups for param in group["params"])

    def adopt(self, optimizer: Optimizer) -> None:
        """Count an optimizer among those that train the model, if it has parameters of it."""
        if not self.has(optimizer) and self.shares(optimizer):
            self._optimizers[id(optimizer)] = optimizer

    def has_stepped(self, optimizer: Optimizer) -> bool:
        """Tell whether an optimizer has stepped in this training step."""
        return id(optimizer) in self._stepped

    def count(self, optimizer: Optimizer) -> bool:
        """Count a step of an optimizer; return whether that ends the training step."""
        self._stepped.add(id(optimizer))
        return all(map(self.has_stepped, self.optimizers()))

    def warning(self, settings: Settings, hook: CommHook | None) -> str | None:
        """Say which settings wait for steps that are never counted, since no optimizer was set up; None if none do."""
        every = settings.check_replicas_every_n_steps or None
        values = {"comm_hook": hook, "averager": settings.averager, "check_replicas_every_n_steps": every}
        names = [f"`{name}`" for name, value in values.items() if value is not None]
        if not names or self.optimizers():
            return None
        return (
            f"No optimizer of this model was set up, so that no training step is ever counted, which "
            f"{' and '.join(names)} may wait for: use `fabric.setup(model, optimizer)` or "
            "`fabric.setup_optimizers(optimizer)`."
        )

    def restart(self, stepped: Iterable[int] = ()) -> None:
        """Begin a training step, in which the optimizers of some numbers have stepped already."""
        optimizers = self.optimizers()
        self._stepped = {id(optimizers[number]) for number in stepped if number < len(optimizers)}

    def stepped(self) -> list[int]:
        """Return the numbers of the optimizers that have stepped in this training step."""
        return [number for number, own in enumerate(self.optimizers()) if self.has_stepped(own)]
