"""Whether gradients are finite and replicas alike: checks over the ranks, at little cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_ddp_hooks import _compat, comm
from lightning_ddp_hooks.reducer.agreement import ranks_text
from lightning_ddp_hooks.reducer.bucket import GradBucket
from lightning_ddp_hooks.reducer.real_values import as_real

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class NonfiniteGuard:
    """Finds out on which rank a gradient is infinite or not a number, before a sum makes it so on all of them.

    It looks at this rank's own gradients, without waiting for the device, until `check` reports over a CPU group.
    On the CPU one sum over each bucket is enough, since a bad gradient can be searched for at once. On other devices
    the bucket is overwritten before the host knows the sum, so each gradient's own sum is kept.
    """

    def __init__(self, group: comm.ProcessGroup) -> None:
        self.order: Sequence[str] = ()  # in which gradients become ready, if that is known
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
            real = [as_real(gradient) for gradient in gradients]
            self._seen.append((names, torch.stack(_compat.foreach_abs_sum(real, _wide(real[0].dtype)))))

    def check(self, step: int) -> None:
        """Raise on all ranks if a gradient of some rank was not finite since the last check; collective."""
        seen, self._seen = self._seen, []
        sums = [torch.isfinite(sums).to(seen[0][1].device) for _, sums in seen]
        finite = torch.cat(sums).tolist() if sums else []
        names = [name for part, _ in seen for name in part]
        found = list(dict.fromkeys(name for name, flag in zip(names, finite, strict=True) if not flag))
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


def check_replicas(names: Sequence[str], params: Sequence[Tensor], group: comm.ProcessGroup, when: str) -> None:
    """Raise on all ranks if their parameters differ; collective over a CPU group.

    Each parameter's bits are summed as integers, which reads the memory once and waits for the device once. Ranks then
    exchange one number, and only if that differs the sum of each parameter. Two changes that cancel out exactly within
    one parameter go unnoticed.
    """
    sums = [_sum_of_bits(param.detach()) for param in params]
    digests = [int(value) for value in torch.stack([s.to(sums[0].device) for s in sums]).tolist()] if sums else []
    mixed = torch.tensor([hash(tuple(digests))])
    if len({int(other) for other in comm.all_gather(mixed, group)}) == 1:
        return
    of_ranks = comm.all_gather_object(digests, group)
    different = [index for index in range(len(names)) if len({digests[index] for digests in of_ranks}) > 1]
    first, sides = different[0], dict[int, list[int]]()
    for rank, digests in enumerate(of_ranks):
        sides.setdefault(digests[first], []).append(rank)
    raise RuntimeError(
        f"The ranks' parameters have drifted apart {when}: {names[first]!r} differs between "
        f"{' and '.join(map(ranks_text, sides.values()))} ({len(different)} of {len(names)} parameters differ). "
        "Something changes them on some ranks only: a condition on the rank, a seed of its own, a failed device, or an "
        "optimizer with other settings."
    )


def _sum_of_bits(tensor: Tensor) -> Tensor:
    real = as_real(tensor)
    return real.view(_INTEGERS[real.element_size()]).sum(dtype=torch.int64)
