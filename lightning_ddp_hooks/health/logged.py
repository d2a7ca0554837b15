"""Reduce over the ranks only what belongs together: values that are logged, and states of metrics.

Ranks that log different values would average what has nothing to do with each other. So each exchange carries what it
is about, which takes no more collectives than the reduction alone:

    rank 0:  digest("training_step", "loss", "mean")  "loss"  0.7
    rank 1:  digest("training_step", "acc", "mean")   "acc"   0.9    ->  all ranks raise, naming 0: loss and 1: acc
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.health.metric_states import sides
from lightning_ddp_hooks.reducer.stream import DeferredRead, start_read

_TEXT_BYTES = 80
_WORD = 8
_HEADER = 1 + _TEXT_BYTES // _WORD  # digest and text, in 64-bit words
_REDUCTIONS: dict[str, Any] = {"mean": torch.mean, "sum": torch.sum, "max": torch.amax, "min": torch.amin}


class LoggedValues:
    """Reduces logged values, and raises on all ranks if they do not log the same; collective.

    The host does not wait for an asynchronous device: there a difference is noticed at the next value.
    """

    def __init__(self, device: torch.device, step: Callable[[], int]) -> None:
        world = comm.resolve_group(None)
        # Groups of their own: what ranks that have parted ways send elsewhere cannot be taken for one of these values.
        self._host_group = comm.new_group(world, cpu=True)
        self._device_group = comm.new_group(world) if device.type != "cpu" else self._host_group
        self._step = step
        self._entry: str | None = None
        self._unread: list[tuple[DeferredRead, Tensor, comm.ProcessGroup]] = []
        self.waits_for = ""

    @contextmanager
    def entry(self, place: str, name: str) -> Iterator[None]:
        """Name what `reduce` is called for under this context: the hook that logs it, and its key."""
        before, self._entry = self._entry, f"{name!r} in {place}"
        try:
            yield
        finally:
            self._entry = before

    @property
    def open(self) -> bool:
        """Whether something is being logged or computed right now."""
        return self._entry is not None

    def reduce(self, tensor: Tensor, op: str, group: comm.ProcessGroup | None = None) -> Tensor:
        """Return a value reduced over the ranks, in float64; the mean of integers is of the default float type."""
        group = group or (self._host_group if tensor.device.type == "cpu" else self._device_group)
        bits = tensor.detach().reshape(1).to(torch.float64).view(torch.int64)
        header, headers, gathered = self._gather(op, bits, group)
        self.settle()
        self._unread.append((start_read((headers != header).any()), headers, group))
        if tensor.device.type == "cpu":
            self.settle()
        to_float = op == "mean" and not tensor.is_floating_point()
        reduced: Tensor = _REDUCTIONS[op](gathered.contiguous().view(torch.float64)).reshape(tensor.shape)
        return reduced.to(torch.get_default_dtype() if to_float else tensor.dtype)

    def agree_on_metric(self, metric: Metric) -> None:
        """Compare under which name the metric is computed, before its states are gathered; collective."""
        kind = type(metric).__name__
        header, headers, _ = self._gather(kind, torch.empty(0, dtype=torch.int64), self._host_group)
        if bool((headers == header).all()):
            return
        of_ranks = comm.all_gather_object((self._entry, kind), self._host_group)
        entries, ranks = [str(entry) for entry, _ in of_ranks], list(range(len(of_ranks)))
        if len(set(entries)) > 1:
            self._raise_different(entries, ranks)
        raise RuntimeError(
            f"The metric logged as {self._entry} is not the same on all ranks: its class is "
            f"{sides([kind for _, kind in of_ranks], ranks)}."
        )

    def settle(self) -> None:
        """Raise on all ranks if values reduced so far were of different things; waits for the device."""
        unread, self._unread = self._unread, []
        for differs, headers, group in unread:
            if any(differs.values()):
                texts = [bytes(text.view(torch.uint8).tolist()) for text in headers[:, 1:].cpu().contiguous()]
                entries = [text.rstrip(b"\0").decode(errors="replace") for text in texts]
                self._raise_different(entries, comm.global_ranks(group))

    def close(self, *, failed: bool = False) -> None:
        """Free the groups; after an error only gloo's, since other ranks may never finish what NCCL has begun."""
        self._unread.clear()
        for group in {self._host_group, self._device_group}:
            if not failed or comm.is_cpu_group(group):
                comm.destroy_group(group)

    def _gather(self, what: str, values: Tensor, group: comm.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
        """Return this exchange's header, and the headers and values of all ranks."""
        assert self._entry is not None
        header = _make_header(self._entry, what, values.device)
        self.waits_for = f"the value logged as {self._entry}"
        gathered = torch.stack(comm.all_gather(torch.cat([header, values]), group))
        self.waits_for = ""  # not after an error: that is where this rank was
        return header, gathered[:, :_HEADER], gathered[:, _HEADER:]

    def _raise_different(self, of_ranks: list[str], ranks: list[int]) -> None:
        raise RuntimeError(
            f"The ranks log different values at the same place, near step {self._step()}: {sides(of_ranks, ranks)}. "
            "With `sync_dist=True`, or a metric, each rank must log the same keys in the same order, with the same "
            "`reduce_fx`: log on all ranks, or with `rank_zero_only=True` and without `sync_dist`."
        )


@lru_cache(maxsize=1000)
def _make_header(entry: str, what: str, device: torch.device) -> Tensor:
    digest = hashlib.blake2b(f"{entry}\0{what}".encode(), digest_size=_WORD).digest()
    text = entry.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    return torch.frombuffer(bytearray(digest + text), dtype=torch.int64).to(device)
