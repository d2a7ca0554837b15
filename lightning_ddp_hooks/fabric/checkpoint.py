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

from lightning_ddp_hooks.fabric.model_run import ModelRun
from lightning_ddp_hooks.optim.driver import OptimizerDriver

FABRIC_KEY = "lightning_ddp_hooks.fabric"


def add_states(state: Mapping[str, Any], runs: Mapping[str, ModelRun]) -> dict[str, Any]:
    """Return what is to be saved with the states of runs in it; collective.

    Args:
        state: what the user saves.
        runs: for the key of a model in it, its run.
    """
    return {**state, FABRIC_KEY: {key: run.state() for key, run in runs.items()}} if runs else dict(state)


@dataclass(frozen=True)
class Restored:
    """States of runs as they were read.

    Attributes:
        states: for each run, its state; None if there is none.
        progress: how far the run was that wrote them, in words.
        path: of the file.
    """

    states: list[tuple[str, ModelRun, dict[str, Any] | None]]
    progress: str
    path: str

    def apply(self) -> Iterator[str]:
        """Have the runs go on from there, once models and optimizers are loaded; return warnings.

        Raises:
            ValueError: a state is damaged, or another hook's or averager's.
        """
        for key, run, state in self.states:
            if state is None:
                if run.keeps_state:
                    yield (
                        f"The checkpoint {self.path!r} holds no state of lightning_ddp_hooks for {key!r}: hook and "
                        f"averager go on as they are, at training step {run.step}."
                    )
                continue
            try:
                run.load_state(state)
            except ValueError as error:
                raise ValueError(f"{self.path}: {error}") from error


def take_states(checkpoint: dict[str, Any], runs: Mapping[str, ModelRun], path: str) -> Restored:
    """Take the states of runs out of a checkpoint.

    Args:
        checkpoint: what Fabric has left of it.
        runs: for the key of a model, its run.
        path: of the file.

    Raises:
        ValueError: the entry is damaged.
    """
    entry = checkpoint.pop(FABRIC_KEY, {}) if runs else {}
    if not isinstance(entry, dict) or not all(isinstance(state, dict) for state in entry.values()):
        raise ValueError(f"{path}: the checkpoint's entry {FABRIC_KEY!r} is damaged: expected a dict for each model.")
    steps = [f"{key!r} at training step {state.get('step')}" for key, state in entry.items()]
    return Restored([(key, run, entry.get(key)) for key, run in runs.items()], ", ".join(steps) or "no progress", path)


class LoadedInParts:
    """Stands for a sharded optimizer where Fabric loads a state: each rank takes its part.

    Args:
        optimizer: the optimizer.
        driver: steps it.
    """

    def __init__(self, optimizer: Optimizer, driver: OptimizerDriver) -> None:
        self._optimizer = optimizer
        self._driver = driver

    def state_dict(self) -> dict[str, Any]:
        """Return the state; collective."""
        return self._driver.state_dict(self._optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a whole state in plain form."""
        self._driver.load_state_dict(self._optimizer, state)
