"""Exact means: over samples when ranks hold batches of different sizes, and over all micro-batches of a window."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_ddp_hooks import comm

_UNCOUNTED = -(1 << 50)


class SampleWeights:
    """Tells each rank by what to scale its loss so that the mean over ranks becomes the mean over samples.

    The loss is scaled, and not the gradients, since that is right under accumulation and under every hook. The exchange
    is posted before the forward and awaited before the backward, so that it costs next to no time.
    """

    def __init__(self, group: comm.ProcessGroup) -> None:
        self._group = group
        self._own = 0
        self._total: torch.Tensor | None = None
        self._work: comm.Work | None = None

    def post(self, count: Callable[[], int]) -> None:
        """Tell the others how many samples this rank's micro-batch holds; collective.

        If ``count`` raises a ValueError, it is raised with `total`, on all ranks.
        """
        self._problem: ValueError | None = None
        try:
            self._own = count()
        except ValueError as error:
            self._own, self._problem = _UNCOUNTED, error
        self._total = torch.tensor([self._own], dtype=torch.int64)
        self._work = comm.all_reduce(self._total, self._group)

    @property
    def pending(self) -> bool:
        """Whether other ranks have yet to say how many samples they hold."""
        return self._work is not None and not self._work.is_completed()

    def total(self) -> int:
        """Return the number of samples of the micro-batch on all ranks."""
        assert self._total is not None, "post() comes first"
        assert self._work is not None
        self._work.wait()
        total = int(self._total)
        if total < 0:
            raise self._problem or ValueError("The samples of a batch cannot be counted on some other rank.")
        return total

    def factor(self) -> float:
        """Return the number of ranks times this rank's share of all samples of the micro-batch."""
        total = self.total()
        return comm.world_size(self._group) * self._own / total if total else 0.0


class AccumulationWindow:
    """Weighs micro-batches so that the gradient of their window becomes the mean over what they hold.

    Lightning divides each loss by the number N of micro-batches that a window may hold, and so gives too little weight
    to a shorter one, at the end of an epoch. How much a window holds is known only with its last micro-batch; until
    then losses are weighed relative to the first, and at the end all is scaled, if there is anything to scale.
    """

    def __init__(self) -> None:
        self._unit = self._held = 0

    def begin(self) -> None:
        """Begin a new window."""
        self._unit = self._held = 0

    def add(self, held: int, divided_by: int, *, last: bool) -> tuple[float, float]:
        """Add a micro-batch, which weighs ``held`` on all ranks, and whose loss is ``divided_by`` N already.

        Returns:
            The factors on its loss, and on the gradients that have been accumulated before it.
        """
        self._unit = self._unit or held
        self._held += held
        scale = divided_by * self._unit / self._held if last and self._held else 1.0
        return (held / self._unit * scale if self._unit else 0.0), scale
