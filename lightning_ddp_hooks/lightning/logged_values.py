"""With ``check_logged_values=True`` ranks that log different values get an error, not a wrong average."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_ddp_hooks import _compat
from lightning_ddp_hooks.health.logged import LoggedValues
from lightning_ddp_hooks.lightning.uneven.collectives import op_name

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from torchmetrics import Metric


class LoggingCheck:
    """Follows what a Trainer's loops log and compute; collective to make and to use."""

    def __init__(self, trainer: pl.Trainer, device: torch.device, step: Callable[[], int]) -> None:
        self._values = LoggedValues(device, step)
        self._undo = [
            _compat.follow_logging(results, self._values.entry) for results in _compat.all_logged_results(trainer)
        ]

    def agree_on_metric(self, metric: Metric) -> None:
        """Raise on all ranks if a metric is computed for the log and others compute another; collective."""
        if self._values.open:
            self._values.agree_on_metric(metric)

    @property
    def waits_for(self) -> str:
        """The logged value that this rank waits for, in words; empty if for none."""
        return self._values.waits_for

    def takes(self, tensor: object) -> bool:
        """Tell whether a tensor that is to be reduced is a value that is being logged right now."""
        # What is logged has one element; a metric that is being computed may reduce more by itself.
        return self._values.open and isinstance(tensor, Tensor) and tensor.numel() == 1

    def reduce(self, tensor: Tensor, group: Any, reduce_op: Any) -> Tensor:
        """Return the value reduced over the ranks; collective."""
        return self._values.reduce(tensor, op_name(reduce_op), group)

    def close(self, *, failed: bool) -> None:
        """Stop to follow, and free the groups."""
        for undo in self._undo:
            undo()
        self._values.close(failed=failed)
