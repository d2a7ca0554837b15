"""What Fabric calls in the place of the user's module; it has torch DDP's form, so that Fabric treats it alike."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import nn

from lightning_ddp_hooks.optimizer_clock import OptimizerClock
from lightning_ddp_hooks.run import TrainingRun

_CLOSED = (
    "This model's parameters belong to a model that was set up later: use what that `fabric.setup(...)` returned; "
    "models that share parameters have to be set up as one module that holds both."
)


class HookedModule(nn.Module):
    """A module whose forward tells its `TrainingRun`, and else is the user's."""

    def __init__(self, module: nn.Module, run: TrainingRun, clock: OptimizerClock, device: torch.device) -> None:
        super().__init__()
        self.module = module
        self.run = run
        self.clock = clock
        self._device = device
        # Whoever lets go of the model lets go of its buckets and groups, without waiting for a garbage collection.
        weakref.finalize(self, run.close).atexit = False

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        self._begin()
        if self._device.type != "cpu":  # as torch's DDP does
            args, kwargs = move_data_to_device((args, kwargs), self._device)
        output = self.module(*args, **kwargs)
        self._end(output)
        return output

    # Fabric compiles this module, and not the user's, if the user's was compiled. The compiler is to see the user's
    # code alone: of ours it could make nothing.
    forward = torch.compiler.disable(_forward, recursive=False)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begin(self) -> None:
        if self.run.closed:
            raise RuntimeError(_CLOSED)
        self.run.before_forward()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _end(self, output: Any) -> None:
        self.run.after_forward(output)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied: process groups and hooks cannot be, and making new ones takes all ranks."""
        raise TypeError(
            "A model that Fabric has set up cannot be copied or pickled: copy its `.module`, and set up the copy."
        )
