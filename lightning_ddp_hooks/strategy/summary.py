"""What rank zero says at the start of a fit: who communicates what, in a few aligned lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def summary_text(facts: Mapping[str, Any], parts: Mapping[str, str | None]) -> str:
    """Return the lines.

    Args:
        facts: what `Reducer.stats` says before the first backward.
        parts: further lines by their label; None leaves one out.

    Example:
        >>> print(summary_text(reducer.stats(), {"hook": "PowerSGD(rank=1)", "averager": None}))
        lightning_ddp_hooks: 2 ranks over gloo, native reducer
          gradients  58.7 MiB of 150 parameters, in buckets of 1 and then 25 MiB
          a step     sends 58.7 MiB from each rank without a hook
          hook       PowerSGD(rank=1)
    """
    ranks, total = facts["world_size"], facts["total_parameter_size_bytes"]
    first, cap = facts["first_bucket_bytes"], facts["bucket_cap_bytes"]
    if total < 2 * min(first, cap):
        sizes = "one bucket"
    else:
        sizes = f"buckets of {mib(cap)}" if first == cap else f"buckets of {mib(first)} and then {mib(cap)}"
    # A ring all-reduce; see Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009.
    sent = 2 * (ranks - 1) / ranks * total
    lines = {
        "gradients": f"{mib(total)} of {facts['num_parameter_tensors']} parameters, in {sizes}",
        "a step": f"sends {mib(sent)} from each rank" + (" without a hook" if parts.get("hook") else ""),
        **{label: text for label, text in parts.items() if text is not None},
    }
    width = max(map(len, lines))
    who = "1 rank" if ranks == 1 else f"{ranks} ranks"
    head = f"lightning_ddp_hooks: {who} over {facts['comm_backend']}, {facts['backend']} reducer"
    return "\n".join([head, *(f"  {label.ljust(width)}  {text}" for label, text in lines.items())])


def mib(count: float) -> str:
    """Write a number of bytes in MiB."""
    size = count / (1 << 20)
    digits = 0 if size == int(size) else 1 if size >= 10 else 2 if size >= 0.1 else 4
    return f"{size:.{digits}f} MiB"
