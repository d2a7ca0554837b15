"""What a run needs to go on, beside models and optimizers, into and out of a checkpoint of Fabric's.

It lies under one key beside the user's own, by the names that the user gave to the models:

    checkpoint["lightning_ddp_hooks.fabric"] = {"model": {"format": 1, "step": 120, "hook": {...}, "averaging": None}}

It consists of tensors, str, int, float, bool, None, list and dict only, so that the checkpoint loads with
``weights_only=True``, and with plain ``strategy="ddp"``, which hands the key back with the remainder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from lightning_ddp_hooks.optim.driver import OptimizerDriver
from lightning_ddp_hooks.run import TrainingRun

FABRIC_KEY = "lightning_ddp_hooks.fabric"


def add_states(state: Mapping[str, Any], runs: Mapping[str, TrainingRun]) -> dict[str, Any]:
    """Return what the user saves with the states of the runs of its models in it; collective."""
    return {**state, FABRIC_KEY: {key: run.state_dict() for key, run in runs.items()}} if runs else dict(state)


@dataclass(frozen=True)
class Restored:
    """States of runs as they were read."""

    states: list[tuple[str, TrainingRun, dict[str, Any] | None]]
    progress: str
    path: str

    def apply(self) -> Iterator[str]:
        """Have the runs go on from there, once models and optimizers are loaded; return warnings."""
        for key, run, state in self.states:
            if state is None:
                if run.keeps_state:
                    yield (
                        f"The checkpoint {self.path!r} holds no state of lightning_ddp_hooks for {key!r}: hook and "
                        f"averager go on as they are, at training step {run.step}."
                    )
                continue
            try:
                run.load_state_dict(state)
            except ValueError as error:
                raise ValueError(f"{self.path}: {error}") from error


def take_states(checkpoint: dict[str, Any], runs: Mapping[str, TrainingRun], path: str) -> Restored:
    """Take the states of runs, by the names of their models, out of a checkpoint."""
    entry = checkpoint.pop(FABRIC_KEY, {}) if runs else {}
    if not isinstance(entry, dict) or not all(isinstance(state, dict) for state in entry.values()):
        raise ValueError(f"{path}: the checkpoint's entry {FABRIC_KEY!r} is damaged: expected a dict for each model.")
    steps = [f"{key!r} at training step {state.get('step')}" for key, state in entry.items()]
    return Restored([(key, run, entry.get(key)) for key, run in runs.items()], ", ".join(steps) or "no progress", path)


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
