"""What Fabric calls in the place of the user's modules and optimizers, and what their runs put into its checkpoints.

Beside the models and optimizers a checkpoint has one key, by the names that the user gave to the models:

    checkpoint["lightning_ddp_hooks.fabric"] = {"model": {"format": 1, "step": 120, "hook": {...}, "averaging": None}}

It consists of tensors, str, int, float, bool, None, list and dict only, so that the checkpoint loads with
``weights_only=True``, and with plain ``strategy="ddp"``, which hands the key back with the remainder.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device, rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_ddp_hooks import _compat
from lightning_ddp_hooks.optim.driver import OptimizerDriver
from lightning_ddp_hooks.optimizer_clock import OptimizerClock
from lightning_ddp_hooks.run import TrainingRun

FABRIC_KEY = "lightning_ddp_hooks.fabric"
_CLOSED = (
    "This model's parameters belong to a model that was set up later: use what that `fabric.setup(...)` returned; "
    "models that share parameters have to be set up as one module that holds both."
)


class HookedModule(nn.Module):
    """A module whose forward tells its `TrainingRun`, and else is the user's; in torch DDP's form, for Fabric."""

    def __init__(self, module: nn.Module, run: TrainingRun, clock: OptimizerClock, device: torch.device) -> None:
        super().__init__()
        self.module = module
        self.run = run
        self.clock = clock
        self._device = device
        # Whoever lets go of the model lets go of its buckets and groups, without waiting for a garbage collection.
        weakref.finalize(self, run.close).atexit = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; with gradients enabled, prepare for the backward."""
        if self.run.closed:
            raise RuntimeError(_CLOSED)
        self.run.before_forward()
        if self._device.type != "cpu":  # as torch's DDP does
            args, kwargs = move_data_to_device((args, kwargs), self._device)
        with self.run.graphs_by_bucket():
            output = _compat.compilable(self.module)(*args, **kwargs)
        self.run.after_forward(output)
        return output

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied: process groups and hooks cannot be, and making new ones takes all ranks."""
        raise TypeError(
            "A model that Fabric has set up cannot be copied or pickled: copy its `.module`, and set up the copy."
        )


def take_states(checkpoint: dict[str, Any], path: str) -> dict[str, dict[str, Any]]:
    """Take the states of runs, by the names of their models, out of a checkpoint."""
    entry = checkpoint.pop(FABRIC_KEY, {})
    if not isinstance(entry, dict) or not all(isinstance(state, dict) for state in entry.values()):
        raise ValueError(f"{path}: the checkpoint's entry {FABRIC_KEY!r} is damaged: expected a dict for each model.")
    return entry


def restore(run: TrainingRun, name: str, state: dict[str, Any] | None, path: str) -> None:
    """Have a run go on from its state in a checkpoint, once model and optimizers are loaded."""
    if state is not None:
        try:
            run.load_state_dict(state)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    elif run.hook.declared is not None or run.averaging is not None:
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
