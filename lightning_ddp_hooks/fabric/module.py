"""What Fabric calls in the place of the user's module; it has torch DDP's form, so that Fabric treats it alike."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import nn

from lightning_ddp_hooks.fabric.model_run import ModelRun


class HookedModule(nn.Module):
    """A module whose forward tells its `ModelRun`, and else is the user's.

    Args:
        module: the user's.
        run: reduces its gradients.
        device: where inputs are moved to.

    Attributes:
        module: the user's.
        run: reduces its gradients.
    """

    def __init__(self, module: nn.Module, run: ModelRun, device: torch.device) -> None:
        super().__init__()
        self.module = module
        self.run = run
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
        self.run.forward_begins()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _end(self, output: Any) -> None:
        self.run.forward_ended(output)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied: process groups and hooks cannot be, and making new ones takes all ranks."""
        raise TypeError(
            "A model that Fabric has set up cannot be copied or pickled: copy its `.module`, and set up the copy."
        )
