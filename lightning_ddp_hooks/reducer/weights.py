"""The exact mean over samples when ranks hold batches of different sizes."""

from __future__ import annotations

import torch

from lightning_ddp_hooks import comm


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

    def post(self, samples: int) -> None:
        """Tell the others how many samples this rank's micro-batch holds; collective."""
        self._own = samples
        self._total = torch.tensor([samples], dtype=torch.int64)
        self._work = comm.all_reduce(self._total, self._group)

    @property
    def pending(self) -> bool:
        """Whether other ranks have yet to say how many samples they hold."""
        return self._work is not None and not self._work.is_completed()

    def factor(self) -> float:
        """Return the number of ranks times this rank's share of all samples of the micro-batch."""
        assert self._total is not None, "post() comes first"
        assert self._work is not None
        self._work.wait()
        total = int(self._total)
        return comm.world_size(self._group) * self._own / total if total else 0.0
