"""What a run needs to go on, beside models and optimizers, into and out of a checkpoint of Fabric's.

It lies under one key beside the user's own, by the names that the user gave to the models:

    checkpoint["lightning_ddp_hooks.fabric"] = {"model": {"format": 1, "step": 120, "hook": {...}, "averaging": None}}

It consists of tensors, str, int, float, bool, None, list and dict only, so that the checkpoint loads with
``weights_only=True``, and with plain ``strategy="ddp"``, which hands the key back with the remainder.
"""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities import rank_zero_warn
from torch.optim import Optimizer

from lightning_ddp_hooks.optim.driver import OptimizerDriver
from lightning_ddp_hooks.run import TrainingRun

FABRIC_KEY = "lightning_ddp_hooks.fabric"


def take_states(checkpoint: dict[str, Any], path: str) -> dict[str, dict[str, Any]]:
    """Take the states of runs, by the names of their models, out of a checkpoint."""
    entry = checkpoint.pop(FABRIC_KEY, {})
    if not isinstance(entry, dict) or not all(isinstance(state, dict) for state in entry.values()):
        raise ValueError(f"{path}: the checkpoint's entry {FABRIC_KEY!r} is damaged: expected a dict for each model.")
    return entry


def restore_run(run: TrainingRun, name: str, state: dict[str, Any] | None, path: str) -> None:
    """Have a run go on from its state in a checkpoint, once model and optimizers are loaded."""
    if state is not None:
        try:
            run.load_state_dict(state)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    elif run.keeps_state:
        rank_zero_warn(
            f"The checkpoint {path!r} holds no state of lightning_ddp_hooks for {name!r}: hook and averager go on as "
            f"they are, at training step {run.step}."
        )


class PartialOptimizer:
    """Stands for a sharded optimizer where Fabric loads a state: each rank takes its part."""

    def __init__(self, optimizer: Optimizer, driver: OptimizerDriver) -> None:
        self._optimizer = optimizer
        self._driver = driver

    def state_dict(self) -> dict[str, Any]:
        """Return the state; collective."""
        return self._driver.state_dict(self._optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a whole state in plain form."""
        self._driver.load_state_dict(self._optimizer, state)
