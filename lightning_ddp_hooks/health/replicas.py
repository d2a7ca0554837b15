"""Compare the parameters of all ranks, to the last bit and for little: they are meant to be the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.reducer.agreement import ranks_text

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_replicas(names: Sequence[str], params: Sequence[Tensor], group: comm.ProcessGroup, when: str) -> None:
    """Compare parameters over the ranks of a CPU group; a collective call.

    Each parameter's bits are summed as integers, which needs one pass over the memory and one wait for the device;
    ranks then exchange one number, and only if that differs the sum of each parameter. Two changes that cancel out
    exactly within one parameter go unnoticed.

    Raises:
        RuntimeError: on every rank; names the first parameter that differs, and the ranks on each side.
    """
    digests = _digests(params)
    mixed = torch.tensor([hash(tuple(digests))])
    if len({int(other) for other in comm.all_gather(mixed, group)}) == 1:
        return
    of_ranks = comm.all_gather_object(digests, group)
    different = [index for index in range(len(names)) if len({digests[index] for digests in of_ranks}) > 1]
    first = different[0]
    sides: dict[int, list[int]] = {}
    for rank, digests in enumerate(of_ranks):
        sides.setdefault(digests[first], []).append(rank)
    raise RuntimeError(
        f"The ranks' parameters have drifted apart {when}: {names[first]!r} differs between "
        f"{' and '.join(map(ranks_text, sides.values()))} ({len(different)} of {len(names)} parameters differ). "
        "Something changes them on some ranks only: a condition on the rank, a seed of its own, a failed device, or an "
        "optimizer with other settings."
    )


def _digests(params: Sequence[Tensor]) -> list[int]:
    sums = [_sum_of_bits(param.detach()) for param in params]
    return [int(value) for value in torch.stack([s.to(sums[0].device) for s in sums]).tolist()] if sums else []


def _sum_of_bits(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.view(_INTEGERS[real.element_size()]).sum(dtype=torch.int64)
