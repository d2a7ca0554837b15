"""How long a collective takes on a link: latency and bandwidth, and what each algorithm makes of them. Pure.

With n ranks, S bytes put in by each rank, a latency of a seconds for each message and a bandwidth of B bytes per second
and direction:

=============== ================ ===================================================================================
collective      algorithm        seconds
=============== ================ ===================================================================================
all-reduce      ring             ``2 (n - 1) (a + S / (n B))``
reduce-scatter  ring             ``(n - 1) (a + S / (n B))``
all-gather      ring             ``(n - 1) (a + S / B)``
all-to-all      direct           ``a + (n - 1) S / (n B)``: all messages are under way at once
broadcast       binomial tree    ``ceil(log2 n) (a + S / B)``
gather          direct           ``a + (n - 1) S / B``
=============== ================ ===================================================================================

This is the model of Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005.
It leaves out contention between switches, lost packets, and ranks that come late.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from lightning_ddp_hooks.traffic import Collective


@dataclass(frozen=True, kw_only=True)
class Link:
    """What each rank has toward the others."""

    latency: float  # seconds until an empty message has arrived, including the time that software takes
    bandwidth: float  # bytes per second in each direction

    def seconds(self, collective: Collective, nbytes: float, world_size: int) -> float:
        """Return how long a collective takes on links that nothing else uses, if each rank puts in ``nbytes``."""
        n, a, transfer = world_size, self.latency, nbytes / self.bandwidth
        if n == 1:
            return 0.0
        if collective == "all_reduce":
            return 2 * (n - 1) * (a + transfer / n)
        if collective == "reduce_scatter":
            return (n - 1) * (a + transfer / n)
        if collective == "all_gather":
            return (n - 1) * (a + transfer)
        if collective == "all_to_all":
            return a + (n - 1) * transfer / n
        if collective == "broadcast":
            return math.ceil(math.log2(n)) * (a + transfer)
        return a + (n - 1) * transfer


def link_of_ring(small: tuple[int, float], large: tuple[int, float], world_size: int) -> Link:
    """Return the link over which ring all-reduces take the measured time, given as bytes and seconds of two sizes."""
    (small_bytes, small_seconds), (large_bytes, large_seconds) = small, large
    if world_size < 2 or large_bytes <= small_bytes:
        raise ValueError(
            f"Expected 2 or more ranks and two ascending sizes, got {world_size}, {small_bytes} and {large_bytes}."
        )
    hops = 2 * (world_size - 1)
    per_byte = max(large_seconds - small_seconds, 1e-9) / (large_bytes - small_bytes)
    latency = max(0.0, small_seconds - per_byte * small_bytes) / hops
    return Link(latency=latency, bandwidth=hops / world_size / per_byte)


_PREFIXES = {"k": 1e3, "m": 1e6, "g": 1e9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_bandwidth(text: str) -> float:
    """Return bytes per second for ``"1gbit"``, ``"100Mbit/s"``, ``"10Gbps"`` (bits) or ``"12.5GB/s"`` (bytes)."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+) ?([kKmMgG])([bB]it|b|B)(/s|ps)?", text.strip())
    if match is None or not float(match[1]):
        raise ValueError(f"Expected a bandwidth such as 1gbit, 100mbit or 12.5GB/s, got {text!r}.")
    return float(match[1]) * _PREFIXES[match[2].lower()] / (1 if match[3] == "B" else 8)


def parse_latency(text: str) -> float:
    """Return seconds for ``"50us"``, ``"0.1ms"`` or ``"1s"``."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+) ?(us|ms|s)", text.strip().lower())
    if match is None:
        raise ValueError(f"Expected a latency such as 50us or 0.1ms, got {text!r}.")
    return float(match[1]) * _SECONDS[match[2]]


def bandwidth_text(bandwidth: float) -> str:
    """Write bytes per second as they are sold: ``1 Gbit/s``, ``100 Mbit/s``."""
    bits = 8 * bandwidth
    factor, unit = next(((f, u) for f, u in ((1e9, "Gbit/s"), (1e6, "Mbit/s")) if bits >= 0.9995 * f), (1e3, "kbit/s"))
    return f"{float(f'{bits / factor:.3g}'):,g} {unit}"
