"""The module's buffers (such as running statistics), which one rank's forward would let drift from another's."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import torch
from torch import Tensor, nn

from lightning_ddp_hooks import _compat, comm
from lightning_ddp_hooks.reducer.replicate import broadcast_tensors


class Buffers:
    """Keeps the buffers of all ranks those of one.

    Args:
        module: whose buffers they are.
        ignored: names of buffers that are left alone.
        group: the ranks.
        broadcasts: whether they are sent at all.

    Attributes:
        each_keeps_its_own: do not send them for now: replicas that train for themselves keep their own.
    """

    def __init__(
        self, module: nn.Module, ignored: AbstractSet[str], group: comm.ProcessGroup, *, broadcasts: bool
    ) -> None:
        self._tables = _compat.buffer_tables(module)
        self._ignored = ignored
        self._group = group
        self._broadcasts = broadcasts
        self._stale = False
        self.each_keeps_its_own = False

    def now(self) -> list[Tensor]:
        """List the buffers, once each; between two steps any of them may have been replaced by another tensor."""
        if not self._broadcasts:
            return []
        found = {
            id(buffer): buffer
            for prefix, table in self._tables
            for name, buffer in table.items()
            if buffer is not None and f"{prefix}.{name}".lstrip(".") not in self._ignored
        }
        return list(found.values())

    def changed(self) -> None:
        """Note that a step has been taken, in which they may have changed."""
        self._stale = self._broadcasts

    @property
    def refresh_due(self) -> bool:
        """Whether the coming forward begins with a broadcast."""
        return self._stale and not self.each_keeps_its_own and torch.is_grad_enabled()

    def refresh(self, src: int = 0) -> None:
        """Take over the buffers of one rank; a collective call. Nothing happens if each rank keeps its own.

        Args:
            src: the rank whose buffers are up to date; rank 0's are not once it has run out of data.
        """
        self._stale = False
        if not self.each_keeps_its_own and (buffers := self.now()):
            with _compat.span("ldh::broadcast_buffers"), comm.counted_as("buffers"):
                broadcast_tensors(buffers, self._group, src)
