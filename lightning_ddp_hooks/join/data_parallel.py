"""What a data-parallel module does in a Join context, on ranks with and without data."""

from __future__ import annotations

import torch

from lightning_ddp_hooks import _compat
from lightning_ddp_hooks.join.agreement import post_row
from lightning_ddp_hooks.join.context import JoinHook
from lightning_ddp_hooks.reducer.reducer import Reducer

FORWARD, BUFFERS, BACKWARD = range(3)
KINDS = ("a forward", "a forward that begins with a broadcast of buffers", "a backward that reduces gradients")
"""The kinds of events. A backward under ``no_sync`` announces nothing, a forward without buffers only to be counted."""


class HeldGradients:
    """Tells whether ``.grad`` still holds what the last synced backward left there, so that the next one adds to it.

    Joined ranks must know: only then do they send what they hold of it themselves.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self._left: list[tuple[int, int] | None] = []
        self._held: bool | None = None
        self.note()

    def note(self) -> None:
        """Look at what a synced backward has left; at its end."""
        self._held = None
        self._left = [_compat.memory_and_version(param.grad) for param in self._reducer.params]

    def look(self) -> bool:
        """Tell whether it is still there; what the first call after a `note` finds holds until the next one."""
        if self._held is None:
            now = (_compat.memory_and_version(param.grad) for param in self._reducer.params)
            # Whatever has cleared gradients has cleared all of them; a gradient that has come was added in place.
            self._held = any(
                before is not None and current is not None and current == (before[0], before[1] + came)
                for before, current, came in zip(self._left, now, self._reducer.used(), strict=False)
            )
        return self._held


class DataParallelJoinHook(JoinHook):
    """Shadows the collectives of a data-parallel module, then takes over the final model."""

    def __init__(self, reducer: Reducer, held: HeldGradients, *, divide_by_initial_world_size: bool) -> None:
        self._reducer = reducer
        self._held = held
        self._by_world_size = divide_by_initial_world_size
        self._shadowed = False

    def before_shadowing(self) -> None:
        """Bring this rank's last backward to its end."""
        self._reducer.finalize_pending_backward()

    def main_hook(self) -> None:
        """Broadcast buffers, or reduce through the registered hook: zeros, or what gradients are added to."""
        if self.event.kind == BUFFERS:
            self._reducer.buffers.refresh(self.event.active[0])
        elif self.event.kind == BACKWARD:
            if not self._by_world_size:
                self._reducer.set_divisor(len(self.event.active))
            # Divided by the active ranks alone, their sum is right by itself.
            self._reducer.shadow_backward(holds=bool(self.event.detail) and self._by_world_size)
            self._shadowed = True

    @torch.no_grad()
    def post_hook(self, is_last_joiner: bool) -> None:
        """Take the final model, and whether there are gradients, from the lowest of the last joiners."""
        reducer = self._reducer
        reducer.set_divisor(reducer.world_size)
        rows = post_row((is_last_joiner, self._held.look()), reducer.control_group).wait()
        source = next(rank for rank, (is_last, _) in enumerate(rows) if is_last)
        if self._shadowed and not rows[source][1]:
            for param in reducer.params:
                param.grad = None
        reducer.send_model(source)
