"""The step of error feedback, left out where a gradient is not finite.

[Note: non-finite gradients] An Inf or a NaN in a residual would come back in every later step. A residual is therefore
brought up to date only when the bucket's *reduced* result is known to be finite. Every rank has that result, so all
ranks decide alike and without a collective; the result itself stays non-finite, for a gradient scaler to see. Where the
scaler skips the step, the residuals are what they were before it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class CarryOver:
    """Brings residuals up to date, and counts the buckets for which that was left out."""

    def __init__(self) -> None:
        self._counts: dict[torch.device, Tensor] = {}

    @property
    def left_out(self) -> int:
        """How many buckets had a non-finite gradient so far; waits for the device."""
        return sum(int(count) for count in self._counts.values())

    @left_out.setter
    def left_out(self, value: Any) -> None:
        self._counts = {torch.device("cpu"): torch.tensor(int(value))}

    def count(self, finite: Tensor) -> None:
        """Note whether a bucket's result was finite (one boolean on the bucket's device)."""
        known = self._counts.get(finite.device)
        if known is None:
            known = self._counts[finite.device] = torch.zeros((), dtype=torch.int64, device=finite.device)
        known.add_(~finite)

    def update(self, residual: Tensor, gradient: Tensor, sent: Tensor, finite: Tensor) -> None:
        """Set ``residual`` to ``residual + gradient - sent`` in place, if ``finite``.

        Args:
            residual: what was left of earlier gradients.
            gradient: what has come to it.
            sent: what the others got.
            finite: one boolean on the same device; a device's boolean is not brought to the host.
        """
        if residual.is_cpu:
            if finite:
                residual.add_(gradient).sub_(sent)
        else:
            torch.where(finite, (residual + gradient).sub_(sent), residual, out=residual)
