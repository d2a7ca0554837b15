"""What a joined rank does for data parallelism: shadows the collectives of the reducer, then takes over the model."""

from __future__ import annotations

import torch

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.join.context import JoinHook
from lightning_ddp_hooks.reducer.module_sync import broadcast_tensors
from lightning_ddp_hooks.reducer.reducer import Reducer

FORWARD, FORWARD_WITH_BUFFERS, BACKWARD = range(3)
"""The kinds of events: a backward under ``no_sync`` announces nothing, so joined ranks need not be told of it."""


class DataParallelJoinHook(JoinHook):
    """Shadows forwards and backwards of a data-parallel module.

    Args:
        module: the module inside.
        reducer: its reducer.
        divide_by_initial_world_size: whether gradients are divided by the number of all ranks, joined ones too.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        reducer: Reducer,
        *,
        divide_by_initial_world_size: bool,
    ) -> None:
        self._module = module
        self._reducer = reducer
        self._by_world_size = divide_by_initial_world_size

    def main_hook(self) -> None:
        """Broadcast buffers, or reduce zeros through the registered hook."""
        event = self.event
        if event.kind == FORWARD_WITH_BUFFERS:
            self._reducer.buffers.refresh(event.active[0])
        elif event.kind == BACKWARD:
            if not self._by_world_size:
                self._reducer.set_divisor(len(event.active))
            self._reducer.shadow_backward()

    @torch.no_grad()
    def post_hook(self, is_last_joiner: bool) -> None:
        """Take the final model from the lowest of the last joiners."""
        reducer = self._reducer
        reducer.on_backward_begin = None
        reducer.set_divisor(reducer.world_size)
        flags = torch.zeros(reducer.world_size, dtype=torch.int64)
        flags[comm.rank(reducer.group)] = int(is_last_joiner)
        comm.all_reduce(flags, reducer.control_group).wait()
        source = int(flags.argmax())
        broadcast_tensors([*self._module.parameters(), *self._module.buffers()], reducer.group, source)
