"""One loss scale for ranks whose gradients differ: an overflow on one of them lowers the scale of all.

A GradScaler lowers the scale after a step with an overflow, and raises it after many without. Where gradients are the
same on all ranks, so are scales; once ranks train for themselves, each would go its own way. So what they find is added
up behind the training:

    step t      rank 0: overflow, leaves its step out      rank 1: steps        sums of both begin to travel
    step t + 1  ...                                        at its end both scales are halved

Nobody waits for the others' present step, neither host nor device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_hooks import _compat, comm


class SharedScale:
    """Keeps the scale of a GradScaler, the same on all ranks of a group at first, the same."""

    def __init__(self, scaler: torch.amp.GradScaler, parent: comm.ProcessGroup) -> None:
        self._scaler = scaler
        self._parent = parent
        self._group: comm.ProcessGroup | None = None
        self._sent: tuple[Tensor, Tensor, comm.Work | None] | None = None  # what was found, at which scale
        self._detach: Callable[[], None] | None = None

    def watch(self, may_differ: Callable[[], bool]) -> None:
        """From now on let each update of the scaler heed all ranks, where their gradients ``may_differ``.

        There a rank may also have no gradient at all: its step does nothing, but it hears of the others' overflows.
        """

        def before_update(flags: Sequence[Tensor]) -> None:
            if may_differ():
                self.exchange(flags)

        self._detach = _compat.watch_scaler(self._scaler, before_update, may_differ)

    @torch.no_grad()
    def exchange(self, flags: Sequence[Tensor]) -> None:
        """Send what this rank has found in this step, and replace it by what all ranks found in the last; collective.

        An overflow at a higher scale than the present one has been answered already.
        """
        scale = _compat.loss_scale(self._scaler)
        device = scale.device if isinstance(scale, Tensor) else torch.device("cpu")
        scale = torch.as_tensor(scale, device=device).clone()
        found = torch.zeros((), dtype=torch.float32, device=device)
        for flag in flags:
            found += flag.to(device, non_blocking=True)
        if self._group is None:
            self._group = comm.new_group(self._parent)
        answer = torch.zeros_like(found)
        if self._sent is not None:
            count, at = self._arrived()
            answer = torch.where(at.to(device) <= scale, count.to(device), answer)
        self._sent = (found, scale, comm.all_reduce(found, self._group))
        for number, flag in enumerate(flags):
            flag.copy_(answer if number == 0 else answer.new_zeros(()), non_blocking=True)

    def _arrived(self) -> tuple[Tensor, Tensor]:
        """Return what was sent last, summed over the ranks, and at which scale it was found."""
        assert self._sent is not None
        found, scale, work = self._sent
        if work is not None:
            work.wait()
        self._sent = (found, scale, None)
        return found, scale

    def state(self) -> list[float] | None:
        """Return what is on its way: the number of ranks that found an overflow, and at which scale."""
        return None if self._sent is None else [float(value) for value in self._arrived()]

    def restore(self, state: Sequence[float] | None) -> None:
        """Go on from what `state` returned."""
        self._sent = None if state is None else (*torch.tensor(state, dtype=torch.float32), None)

    def close(self, *, failed: bool = False) -> None:
        """Leave the scaler to itself, and free the group."""
        if self._detach is not None:
            self._detach()
            self._detach = None
        if self._group is not None and failed:
            comm.free_after_error([self._group], in_flight=self._sent is not None and self._sent[2] is not None)
        elif self._group is not None:
            self.state()  # a collective may be on its way
            comm.destroy_group(self._group)
        self._group = None


def scaler_text(scaler: Any) -> str | None:
    """Describe what of a GradScaler must be the same on all ranks; waits for the device."""
    if scaler is None or not scaler.is_enabled():
        return None
    facts = {name.lstrip("_"): value for name, value in scaler.state_dict().items()}
    return f"GradScaler({', '.join(f'{name}={value}' for name, value in sorted(facts.items()))})"


def follow_scale(scaler: torch.amp.GradScaler | None, is_source: bool, control_group: comm.ProcessGroup) -> None:
    """Give a GradScaler the scale, and what it has counted, of the first source that has one; collective."""
    own = scaler.state_dict() if is_source and scaler is not None else None
    state = next(filter(None, comm.all_gather_object(own, control_group)), None)
    if scaler is not None and state is not None and not is_source:
        scaler.load_state_dict(state)
