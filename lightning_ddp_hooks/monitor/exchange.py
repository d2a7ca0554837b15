"""Sends each rank's steps to all others, without waiting in a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_ddp_hooks import comm, traffic
from lightning_ddp_hooks.monitor.skew import RankStep, StepTable, pack, unpack
from lightning_ddp_hooks.monitor.timeline import StepTiming
from lightning_ddp_hooks.traffic import ByteTotal

_CAPACITY = 4096  # numbers that a rank sends at a time
_UNDER_WAY = 4  # exchanges; of one that is so old it may be waited for


class StepExchange:
    """Gathers steps on a CPU group of its own: begun on all ranks at the same steps, and looked at when it is done.

    Args:
        group: Group that nobody else uses.
    """

    def __init__(self, group: comm.ProcessGroup) -> None:
        self.group = group
        self._table = StepTable(comm.world_size(group))
        self._unsent: list[RankStep] = []
        self._under_way: deque[tuple[Tensor, Tensor, comm.Work]] = deque()

    def add(self, steps: Sequence[StepTiming]) -> None:
        """Add steps of this rank."""
        self._unsent += map(RankStep.of, steps)

    def begin(self) -> None:
        """Begin to send what was added; on all ranks."""
        own = torch.tensor(pack(self._unsent, _CAPACITY), dtype=torch.float64, device="cpu")
        self._unsent.clear()
        everyone = own.new_empty(comm.world_size(self.group) * _CAPACITY)
        with traffic.counted_in(ByteTotal()):  # not the run's own traffic
            self._under_way.append((everyone, own, comm.start_all_gather(everyone, own, self.group)))

    @property
    def is_under_way(self) -> bool:
        """Whether a rank may still be sending."""
        return not all(work.is_completed() for _, _, work in self._under_way)

    def take(self, *, wait: bool = False) -> list[list[RankStep]]:
        """Return the steps of all ranks that have come by now; with ``wait``, all that were sent."""
        found: list[list[RankStep]] = []
        while self._under_way:
            everyone, _, work = self._under_way[0]
            if wait or len(self._under_way) > _UNDER_WAY:
                work.wait()
            elif not comm.succeeded(work):
                break
            self._under_way.popleft()
            found += self._table.add(map(unpack, everyone.view(-1, _CAPACITY).tolist()))
        return found
