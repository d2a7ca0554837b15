"""What a rank has to tell the others about each backward, in two numbers that travel with its gradients.

    status = [ mismatches: something went wrong on this rank | losses: this rank had a loss ]        each 0 or 1

Summed over the ranks it says whether they must talk (mismatches > 0), and whether nobody had a loss (losses == 0). It
costs no collective of its own where the last bucket is summed as it is; see queue.py.

[Note: one point] No rank acts on what the others cannot know at the same point of the program. Where the host waits for
collectives anyway (CPU, gloo), all ranks read the sum at the end of the same backward. Where it does not (a device
whose collectives are ordered by streams), the sum is copied to the host without waiting, and all ranks look at it at
the end of the *next* backward, or sooner where they meet and wait anyway (`BackwardEnd.settle_status`). Until then what
a rank lacks counts as zeros on all ranks alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_ddp_hooks.reducer.agreement import RankReport
from lightning_ddp_hooks.reducer.stream import DeferredRead


@dataclass(frozen=True)
class Status:
    """The sums over the ranks."""

    mismatches: int
    losses: int

    @classmethod
    def of(cls, read: DeferredRead) -> Status:
        """Take the sums from where they were read."""
        mismatches, losses = read.values()
        return cls(round(mismatches), round(losses))


@dataclass(frozen=True)
class PendingStatus:
    """A status that is yet to be looked at."""

    read: DeferredRead
    report: RankReport


class StatusWriter:
    """Writes this rank's status into the slot of a bucket, in one copy and without waiting for a device."""

    def __init__(self) -> None:
        self._constants: dict[tuple[bool, bool, torch.dtype, torch.device], Tensor] = {}

    def write(self, slot: Tensor, *, mismatch: bool, loss: bool) -> None:
        """Write the status; on the stream that fills the bucket."""
        key = (mismatch, loss, slot.dtype, slot.device)
        if key not in self._constants:
            self._constants[key] = torch.tensor([float(mismatch), float(loss)], dtype=slot.dtype).to(slot.device)
        slot.copy_(self._constants[key])
