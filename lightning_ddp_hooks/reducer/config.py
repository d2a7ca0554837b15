"""The reducer's settings, checked where the user wrote them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Literal

DEFAULT_CAP_MB = 25
BACKENDS = ("auto", "native", "python")
USED_CHANGES_AND_DOES_NOT = (
    "`find_unused_parameters=True` lets the used parameters change, `static_graph=True` promises that they do not: set "
    "one of them."
)


@dataclass(frozen=True, kw_only=True)
class ReducerConfig:
    """What shapes the reducer.

    Attributes:
        bucket_cap_mb: Size at which a bucket is closed, in MiB; ``"auto"`` picks it by the link, measured after the
            first backward.
        first_bucket_mb: Size of the first bucket, whose reduction starts earlier if it is small; None for 1 MiB, or for
            that of the others if they are smaller.
        gradient_as_bucket_view: Whether ``.grad`` is a slice of the bucket: no second copy of the gradients.
        find_unused_parameters: Whether ranks may leave out any parameters in any backward.
        static_graph: Whether the first backward shows for good which parameters are used.
        broadcast_buffers: Whether rank 0's buffers are sent to all ranks at construction and before forwards.
        reducer_backend: ``"auto"`` (native if it is built), ``"native"`` or ``"python"``.
    """

    bucket_cap_mb: float | Literal["auto"] = 25
    first_bucket_mb: float | None = None
    gradient_as_bucket_view: bool = True
    find_unused_parameters: bool = False
    static_graph: bool = False
    broadcast_buffers: bool = True
    reducer_backend: Literal["auto", "native", "python"] = "auto"

    def __post_init__(self) -> None:
        """Check each value, then their combination."""
        for name in ("bucket_cap_mb", "first_bucket_mb"):
            value = getattr(self, name)
            if value == ("auto" if name == "bucket_cap_mb" else None):
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"Expected a number of MiB for `{name}`, got {value!r}.")
            if not math.isfinite(value) or value <= 0:
                raise ValueError(f"Expected `{name}` to be a finite number of MiB above 0, got {value!r}.")
        for name in ("gradient_as_bucket_view", "find_unused_parameters", "static_graph", "broadcast_buffers"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(f"Expected True or False for `{name}`, got {value!r}.")
        if self.reducer_backend not in BACKENDS:
            raise ValueError(f"Expected `reducer_backend` to be one of {BACKENDS}, got {self.reducer_backend!r}.")
        if self.find_unused_parameters and self.static_graph:
            raise ValueError(USED_CHANGES_AND_DOES_NOT)

    def limits(self, auto_bytes: int | None = None) -> list[int]:
        """Return bucket sizes in bytes: of the first bucket, of all others."""
        cap = auto_bytes or _bytes(DEFAULT_CAP_MB if self.bucket_cap_mb == "auto" else self.bucket_cap_mb)
        return [min(_bytes(1), cap) if self.first_bucket_mb is None else _bytes(self.first_bucket_mb), cap]

    def settings(self) -> dict[str, object]:
        """Return the values that must be the same on all ranks, by name."""
        return asdict(self)


def _bytes(mb: float) -> int:
    return max(1, int(mb * (1 << 20)))
