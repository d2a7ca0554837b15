"""The verbs of a strategy that mean something else once some ranks have run out of data.

They form a class between Lightning's `DDPStrategy` and ours, so that ours need not know of them; without `UnevenInputs`
each passes straight through.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_ddp_hooks import _compat, comm
from lightning_ddp_hooks.lightning.uneven.collectives import gathered, neutral, op_name, reduced
from lightning_ddp_hooks.lightning.uneven.run import UnevenRun, UnevenSettings
from lightning_ddp_hooks.strategy.loading import LoadingStrategy

if TYPE_CHECKING:
    import lightning.pytorch as pl


class UnevenStrategy(LoadingStrategy):
    """A `DDPStrategy` under which ranks may have dataloaders of different lengths."""

    _uneven: UnevenRun | None = None

    def use_uneven_inputs(self, settings: UnevenSettings, trainer: pl.Trainer) -> None:
        """Take part in a run with uneven inputs; called at setup, on all ranks."""
        self._uneven = UnevenRun(settings, trainer)

    def active_group(self) -> comm.ProcessGroup | None:
        """Return the ranks that run the current step, for collectives of your own in a ``*_step``; None means all.

        In manual optimisation a rank that has run out of data replays its last batch; there the group is that rank
        alone.
        """
        return None if self._uneven is None else self._uneven.active_group()

    @override
    def teardown(self) -> None:
        if self._uneven is not None:
            self._uneven.close()
            self._uneven = None
        super().teardown()

    # ------------------------------------------------------------------ data

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        dataloader = super().process_dataloader(dataloader)
        return dataloader if self._uneven is None else self._uneven.wrap(dataloader)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if self._uneven is not None:
            step = self._uneven.begin_batch()
            if step is not None and step.joined:
                return self._uneven.emptied_to_device(batch, device or self.root_device)
        return super().batch_to_device(batch, device, dataloader_idx)

    def _as_if_read(self, batch: Any) -> Any:
        """Do to a batch what the training loop does to one that it has just read."""
        batch = _compat.before_batch_transfer(self.lightning_module, self.precision_plugin.convert_input(batch))
        return super().batch_to_device(batch)

    # ------------------------------------------------------------------ steps

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._uneven is None:
            return self._training_step(*args, **kwargs)
        return self._uneven.run_step("training_step", self._training_step, args, kwargs, self._as_if_read)

    def _training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's step, as it is or in a replay."""
        output = super().training_step(*args, **kwargs)
        self._training_step_ran()
        return output

    def _training_step_ran(self) -> None:
        """Do what all ranks that were in the user's step do at its end, before anything else that is collective."""

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._uneven is None:
            return super().validation_step(*args, **kwargs)
        return self._uneven.run_step("validation_step", super().validation_step, args, kwargs, self._as_if_read)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._uneven is None:
            return super().test_step(*args, **kwargs)
        return self._uneven.run_step("test_step", super().test_step, args, kwargs, self._as_if_read)

    # ------------------------------------------------------------------ collectives

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        run = self._uneven
        if run is None or not isinstance(tensor, Tensor):
            return super().reduce(tensor, group, reduce_op)
        op, tail = op_name(reduce_op), run.tail
        if tail is not None and run.place() == "step":
            active = run.group_for(tail, group)
            return reduced(tensor, op, active, comm.world_size(active))
        whole = comm.resolve_group(group)
        count = comm.world_size(whole)
        if tail is not None and count == len(tail.active) and run.place() == "batch hook":
            count = len(tail.ranks)
            tensor = neutral(tensor, op) if tail.joined else tensor
        return reduced(tensor, op, whole, count)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        run = self._uneven
        if run is None:
            return super().reduce_boolean_decision(decision, all)
        # A decision is each rank's, whether it has data or not; what is decided inside a step is the active ranks'.
        group = comm.resolve_group(run.active_group())
        votes = int(reduced(torch.tensor(int(decision), device=self.root_device), "sum", group, 1))
        return votes == comm.world_size(group) if all else votes > 0

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        run = self._uneven
        if run is None:
            return super().all_gather(tensor, group=group, sync_grads=sync_grads)
        tail = run.tail if run.place() == "step" else None
        if tail is not None and tail.joined:  # a replay, whose values are thrown away: only the shape matters
            return torch.stack([tensor] * len(tail.ranks))
        whole = comm.resolve_group(group) if tail is None else run.group_for(tail, group)
        return gathered(tensor, whole, sync_grads=sync_grads)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        active = None if self._uneven is None else self._uneven.active_group()
        if active is None:
            super().barrier(*args, **kwargs)
        else:
            comm.barrier(active)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        active = None if self._uneven is None else self._uneven.active_group()
        if active is None:
            return super().broadcast(obj, src)
        ranks = comm.global_ranks(active)
        return comm.broadcast_object(obj, active, ranks.index(src) if src in ranks else 0)
