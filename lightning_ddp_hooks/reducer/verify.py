"""Check before anything else that all ranks were given the same model and the same settings."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from torch import Tensor

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.reducer.agreement import ranks_text


def check_same_on_all_ranks(
    named_tensors: Sequence[tuple[str, Tensor]], settings: Mapping[str, object], group: comm.ProcessGroup
) -> None:
    """Compare parameters and settings over the ranks; a collective call.

    Ranks compare a digest first, and exchange the long form only if that differs.

    Args:
        named_tensors: all parameters and buffers in order of registration.
        settings: what shapes the order of collectives, by argument name.
        group: a CPU group.

    Raises:
        RuntimeError: on every rank; names the first parameter (or setting) that differs, and the ranks on each side.
    """
    rows = [
        f"{name}: shape {tuple(tensor.shape)}, {tensor.dtype}, requires_grad={tensor.requires_grad}"
        for name, tensor in named_tensors
    ]
    rows += [f"argument {name}={value!r}" for name, value in settings.items()]
    digest = hashlib.sha256("\n".join(rows).encode()).hexdigest()
    digests = comm.all_gather_object(digest, group)
    if len(set(digests)) > 1:
        raise RuntimeError(_first_difference(comm.all_gather_object(rows, group)))


def _first_difference(rows_of_ranks: Sequence[Sequence[str]]) -> str:
    longest = max(len(rows) for rows in rows_of_ranks)
    for position in range(longest):
        seen: dict[str, list[int]] = {}
        for rank, rows in enumerate(rows_of_ranks):
            row = rows[position] if position < len(rows) else "nothing"
            seen.setdefault(row, []).append(rank)
        if len(seen) > 1:
            sides = "; ".join(f"{ranks_text(ranks)}: {row}" for row, ranks in seen.items())
            return (
                f"The ranks were given different models or settings; the first difference, at position {position}, is "
                f"{sides}. "
                "Build the same module in the same order, with the same arguments, on every rank."
            )
    raise AssertionError("digests differ but rows do not")
