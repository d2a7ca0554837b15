"""What a strategy does under `UnevenInputs`; without the callback each call passes straight through.

Where a collective is called from decides who takes part in it, see `UnevenRun.place`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.lightning.uneven.collectives import gathered, neutral, op_name, reduced
from lightning_ddp_hooks.lightning.uneven.run import UnevenRun, UnevenSettings

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_ddp_hooks.join.agreement import Step


class Inputs:
    """The inputs of a run: as many batches on all ranks, or not."""

    def __init__(self) -> None:
        self.uneven: UnevenRun | None = None

    def start(self, settings: UnevenSettings, trainer: pl.Trainer) -> None:
        """Begin a run with uneven inputs; collective."""
        self.uneven = UnevenRun(settings, trainer)

    def facts(self) -> dict[str, Any]:
        """Return what the callback adds to the settings; see `FitSettings`."""
        settings = None if self.uneven is None else self.uneven.settings
        return {} if settings is None else {"policy": settings.policy, "divisor": settings.divisor}

    def text(self) -> str | None:
        """Describe the callback's settings; None without it."""
        return ", ".join(f"{name}={value!r}" for name, value in self.facts().items()) or None

    @property
    def tail(self) -> Step | None:
        """The step now at hand if some rank has no batch in it."""
        return None if self.uneven is None else self.uneven.tail

    def active_group(self) -> comm.ProcessGroup | None:
        """Return the ranks that run the current step; None means all."""
        return None if self.uneven is None else self.uneven.active_group()

    def run_step(
        self, name: str, step: Callable[..., Any], args: Any, kwargs: Any, to_device: Callable[[Any], Any]
    ) -> Any:
        """Run the user's step of a name, as it is, not at all, or in a replay of a batch brought ``to_device``."""
        if self.uneven is None:
            return step(*args, **kwargs)
        return self.uneven.run_step(name, step, args, kwargs, to_device)

    def batch_to_device(self, batch: Any, device: torch.device, to_device: Callable[[], Any]) -> Any:
        """Turn to the step of a batch, and move it to the device, as ``to_device`` does if this rank has data."""
        step = None if self.uneven is None else self.uneven.begin_batch()
        if self.uneven is None or step is None or not step.joined:
            return to_device()
        return self.uneven.emptied_to_device(batch, device)

    def reduce(self, default: Callable[..., Any], tensor: Any, group: Any, reduce_op: Any) -> Any:
        """Return the reduction over the ranks that have something to say; see `Strategy.reduce`."""
        run = self.uneven
        if run is None or not isinstance(tensor, Tensor):
            return default(tensor, group, reduce_op)
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

    def decide(self, default: Callable[..., bool], decision: bool, all_of_them: bool, device: torch.device) -> bool:
        """Return what all or any of the ranks decide, whether they have data or not; in a step, the active ones."""
        if self.uneven is None:
            return default(decision, all_of_them)
        group = comm.resolve_group(self.active_group())
        votes = int(reduced(torch.tensor(int(decision), device=device), "sum", group, 1))
        return votes == comm.world_size(group) if all_of_them else votes > 0

    def all_gather(self, default: Callable[..., Tensor], tensor: Tensor, group: Any, sync_grads: bool) -> Tensor:
        """Return the tensors of the ranks that run the step, stacked; see `Strategy.all_gather`."""
        run = self.uneven
        if run is None:
            return default(tensor, group=group, sync_grads=sync_grads)
        tail = run.tail if run.place() == "step" else None
        if tail is not None and tail.joined:  # a replay, whose values are thrown away: only the shape matters
            return torch.stack([tensor] * len(tail.ranks))
        whole = comm.resolve_group(group) if tail is None else run.group_for(tail, group)
        return gathered(tensor, whole, sync_grads=sync_grads)

    def barrier(self, default: Callable[[], None]) -> None:
        """Wait for the ranks that run the step."""
        active = self.active_group()
        if active is None:
            default()
        else:
            comm.barrier(active)

    def broadcast(self, default: Callable[..., Any], obj: Any, src: int) -> Any:
        """Return the object of a rank, or in a step that it does not run, of the first one that does."""
        active = self.active_group()
        if active is None:
            return default(obj, src)
        ranks = comm.global_ranks(active)
        return comm.broadcast_object(obj, active, ranks.index(src) if src in ranks else 0)

    def fail(self, *, broken: bool) -> None:
        """Take note that this rank ends with an error; ``broken`` if groups may wait for anything."""
        if self.uneven is not None:
            self.uneven.failed, self.uneven.broken = True, broken

    def close(self) -> None:
        """End the run."""
        if self.uneven is not None:
            self.uneven.close()
            self.uneven = None
