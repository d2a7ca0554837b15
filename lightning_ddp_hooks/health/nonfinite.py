"""Find out on which rank a gradient is infinite or not a number, before a sum makes it so on all of them.

The reducer has the guard `look` at each bucket before it is sent, and `look_at` a gradient that is in no bucket. Where
gradients are used without being reduced, the trainer calls `look_at_all`. After the backward `check` tells all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_ddp_hooks import _compat, comm
from lightning_ddp_hooks.reducer.bucket import GradBucket


class NonfiniteGuard:
    """Looks at this rank's own gradients, without waiting for the device, until `check` reports.

    On the CPU one sum over each bucket is enough, since a bad gradient can be searched for at once. On other devices
    the bucket is overwritten before the host knows the sum, so each gradient's own sum is kept. ``group`` is a CPU
    group; ``order`` says in which order gradients become ready, if that is known.
    """

    def __init__(self, group: comm.ProcessGroup) -> None:
        self.order: Sequence[str] = ()
        self._group = group
        self._seen: list[tuple[Sequence[str], Tensor]] = []

    def look(self, bucket: GradBucket) -> None:
        """Look at a full bucket before it is sent; the compute stream is current."""
        buffer = bucket.buffer()
        if buffer.device.type != "cpu" or not bool(torch.isfinite(buffer.sum(dtype=_wide(buffer.dtype)))):
            self._keep(bucket.names, bucket.gradients())

    def look_at(self, name: str, gradient: Tensor) -> None:
        """Look at one gradient, dense or sparse."""
        self._keep([name], [gradient.coalesce().values() if gradient.is_sparse else gradient])

    def look_at_all(self, named: Iterable[tuple[str, Tensor | None]]) -> None:
        """Look at gradients that no bucket holds; None stands for one that is missing."""
        dense: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
        for name, gradient in named:
            if gradient is not None and gradient.is_sparse:
                self.look_at(name, gradient)
            elif gradient is not None:
                dense.setdefault((gradient.device, gradient.dtype), {})[name] = gradient
        for gradients in dense.values():
            self._keep(list(gradients), list(gradients.values()))

    def _keep(self, names: Sequence[str], gradients: Sequence[Tensor]) -> None:
        """Keep the sum of each gradient's absolute values; all are of one dtype and on one device."""
        with torch.no_grad():
            real = [torch.view_as_real(gradient) if gradient.is_complex() else gradient for gradient in gradients]
            self._seen.append((names, torch.stack(_compat.foreach_abs_sum(real, _wide(real[0].dtype)))))

    def check(self, step: int) -> None:
        """Tell all ranks what was seen since the last check; a collective call.

        Raises:
            RuntimeError: on every rank, if a gradient of any rank was not finite; names those ranks, and for each the
                first parameter in the order of its backward.
        """
        seen, self._seen = self._seen, []
        sums = [torch.isfinite(sums).to(seen[0][1].device) for _, sums in seen]
        finite = torch.cat(sums).tolist() if sums else []
        names = [name for part, _ in seen for name in part]
        found = list(dict.fromkeys(name for name, flag in zip(names, finite, strict=True) if not flag))
        if found and self.order:
            places = {name: place for place, name in enumerate(self.order)}
            found.sort(key=lambda name: places.get(name, len(places)))
        if not int(comm.reduce_in_place(torch.tensor([len(found)]), "sum", self._group)):
            return
        lines = []
        for rank, (first, others) in enumerate(comm.all_gather_object((found[:1], len(found) - 1), self._group)):
            more = f" (and of {others} more parameters)" if others > 0 else ""
            lines += [f"rank {rank}: the gradient of {name!r}{more}" for name in first]
        raise RuntimeError(
            f"Gradients that are infinite or not a number in step {step}, before any exchange: {'; '.join(lines)}. "
            "Gradients come from the loss down: the parameter named is the first one that the backward reached."
        )

    def forget(self) -> None:
        """Forget what was seen since the last check."""
        self._seen.clear()


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to sum in, so that only sums beyond 1e38 of values that are finite would mislead."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
