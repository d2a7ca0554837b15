"""Reduce over the ranks only what belongs together: values that are logged, and states of metrics.

Ranks that log other values, or in another order, take part in the same collectives all the same, and average what has
nothing to do with each other. So each exchange carries what it is about:

    rank 0:  digest("training_step", "loss", "mean")  "loss"  0.7
    rank 1:  digest("training_step", "acc", "mean")   "acc"   0.9    ->  all ranks raise, naming 0: loss and 1: acc

which takes no more collectives than the reduction alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_ddp_hooks import _compat, comm
from lightning_ddp_hooks.reducer.agreement import ranks_text
from lightning_ddp_hooks.reducer.stream import DeferredRead, start_read

_NAME_BYTES = 64
_WORD = 8
_HEAD = 1 + _NAME_BYTES // _WORD  # digest and name, in 64-bit words
_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": torch.mean,
    "sum": torch.sum,
    "max": torch.amax,
    "min": torch.amin,
}


@dataclass
class _Entry:
    """What is being logged or computed.

    Attributes:
        place: the hook that logged it.
        name: its key.
        exchanges: how many there were for it so far.
    """

    place: str
    name: str
    exchanges: int = 0


class LoggedValues:
    """Reduces logged values, and raises on all ranks if they do not log the same.

    Collective to make and to use: all ranks have one, each with the same settings.

    Args:
        device: where values are; on a CUDA device a difference is noticed at the next value, so that the host need not
            wait.
        step: tells the training step, for messages.
    """

    def __init__(self, device: torch.device, step: Callable[[], int]) -> None:
        world = comm.resolve_group(None)
        # Groups of their own: what ranks that have parted ways send elsewhere cannot be taken for one of these values.
        self._host_group = comm.new_group(world, cpu=True)
        self._device_group = comm.new_group(world) if device.type == "cuda" else self._host_group
        self._step = step
        self._entry: _Entry | None = None
        self._heads: dict[tuple[str, ...], Tensor] = {}
        self._unread: list[tuple[DeferredRead, Tensor, comm.ProcessGroup]] = []
        self.waits_for = ""

    @contextmanager
    def entry(self, place: str, name: str) -> Iterator[None]:
        """Say what `reduce` is called for under this context.

        Args:
            place: the hook that logs it, such as ``"training_step"``.
            name: its key.
        """
        before, self._entry = self._entry, _Entry(place, name)
        try:
            yield
        finally:
            self._entry = before

    @property
    def open(self) -> bool:
        """Whether something is being logged or computed right now."""
        return self._entry is not None

    def reduce(self, tensor: Tensor, op: str, group: comm.ProcessGroup | None = None) -> Tensor:
        """Return the value reduced over the ranks; a collective call.

        Args:
            tensor: a value of one element.
            op: ``"mean"``, ``"sum"``, ``"max"`` or ``"min"``.
            group: the ranks, if not all.

        Returns:
            A new tensor in the shape of the old one, computed in float64; the mean of integers is of the default float
            type, and exact.

        Raises:
            RuntimeError: on every rank, if they log different things; names ranks and keys.
        """
        assert self._entry is not None
        own = self._device_group if tensor.device.type == "cuda" else self._host_group
        head = self._head(tensor.device, op)
        value = tensor.detach().reshape(1).to(torch.float64).view(torch.int64)
        with self._waiting():
            gathered = torch.stack(comm.all_gather(torch.cat([head, value]), group or own))
        self._compare(gathered[:, :_HEAD], head, group or own)
        values = gathered[:, _HEAD].contiguous().view(torch.float64)
        found = _REDUCTIONS[op](values)
        whole = op == "mean" and not tensor.is_floating_point()
        return found.reshape(tensor.shape).to(torch.get_default_dtype() if whole else tensor.dtype)

    def agree_on_metric(self, path: str, metric: Metric) -> None:
        """Compare the states of a metric before they are gathered one by one; a collective call.

        Args:
            path: where it is within the metric that was logged; empty if it is that one.
            metric: the one that is about to gather.

        Raises:
            RuntimeError: on every rank, if the states cannot be gathered; names ranks, key and state.
        """
        assert self._entry is not None
        states = {"": type(metric).__name__, **_state_texts(path, metric)}
        head = self._head(torch.device("cpu"), repr(states))
        with self._waiting():
            heads = torch.stack(comm.all_gather(head, self._host_group))
            if bool((heads == head).all()):
                return
            of_ranks = comm.all_gather_object((self._entry.place, self._entry.name, states), self._host_group)
        if len({entry[:2] for entry in of_ranks}) > 1:
            self._raise_different([f"{name!r} in {place}" for place, name, _ in of_ranks])
        texts = [states for _, _, states in of_ranks]
        state = next(key for key in {k: None for t in texts for k in t} if len({t.get(key) for t in texts}) > 1)
        found = [text.get(state, "no such state") for text in texts]
        what = f"its state {state!r}" if state else "its class"
        raise RuntimeError(
            f"The metric logged as {self._entry.name!r} in {self._entry.place} is not the same on all ranks: {what} is "
            f"{_sides(found)}. Gathered, it would be wrong or never end: update the metric on all ranks, with values "
            "of the same type and number of dimensions."
        )

    def settle(self) -> None:
        """Look at what has not been looked at, waiting for the device if need be.

        Raises:
            RuntimeError: ranks have logged different things.
        """
        unread, self._unread = self._unread, []
        for differs, heads, group in unread:
            if any(differs.values()):
                self._raise_different([_text(head) for head in heads.cpu()], comm.global_ranks(group))

    def close(self, *, failed: bool = False) -> None:
        """Free the groups.

        Args:
            failed: whether this rank ends with an error; others may never finish what NCCL has begun then.
        """
        self._unread.clear()
        for group in {self._host_group, self._device_group}:
            if not failed or comm.backend_name(group) == "gloo":
                comm.destroy_group(group)

    # ------------------------------------------------------------------

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        assert self._entry is not None
        self.waits_for = f"the value logged as {self._entry.name!r} in {self._entry.place}"
        yield
        self.waits_for = ""  # not after an error: that is where this rank was

    def _head(self, device: torch.device, what: str) -> Tensor:
        """Return digest and name of the exchange that comes next."""
        entry = self._entry
        assert entry is not None
        key = (str(device), entry.place, entry.name, str(entry.exchanges), what)
        entry.exchanges += 1
        head = self._heads.get(key)
        if head is None:
            name = f"{entry.name}\0{entry.place}".encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
            digest = hashlib.blake2b("\0".join(key[1:]).encode(), digest_size=_WORD).digest()
            head = torch.frombuffer(bytearray(digest + name), dtype=torch.int64).to(device)
            if len(self._heads) >= 10_000:  # of somebody who logs a new name in each step
                self._heads.clear()
            self._heads[key] = head
        return head

    def _compare(self, heads: Tensor, head: Tensor, group: comm.ProcessGroup) -> None:
        self.settle()
        differs = (heads != head).any()
        self._unread.append((start_read(differs), heads, group))
        if heads.device.type != "cuda":
            self.settle()

    def _raise_different(self, of_ranks: list[str], ranks: Sequence[int] | None = None) -> None:
        raise RuntimeError(
            f"The ranks log different values at the same place, near step {self._step()}: {_sides(of_ranks, ranks)}. "
            "With `sync_dist=True`, or a metric, each rank must log the same keys in the same order, with the same "
            "`reduce_fx`: log on all ranks, or with `rank_zero_only=True` and without `sync_dist`."
        )


def _text(head: Tensor) -> str:
    text = bytes(head[1:].contiguous().view(torch.uint8).tolist()).rstrip(b"\0").decode(errors="replace")
    name, _, place = text.partition("\0")
    return f"{name!r} in {place}" if place else repr(name)


def _sides(of_ranks: list[str], ranks: Sequence[int] | None = None) -> str:
    sides: dict[str, list[int]] = {}
    for rank, text in zip(ranks or range(len(of_ranks)), of_ranks, strict=True):
        sides.setdefault(text, []).append(rank)
    return ", ".join(f"{text} on {ranks_text(ranks)}" for text, ranks in sides.items())


def _state_texts(path: str, metric: Metric) -> dict[str, str]:
    """Describe what the states of a metric must have in common to be gathered."""
    dtype = getattr(metric, "dtype", torch.get_default_dtype())  # older torchmetrics has none
    return {
        f"{path}.{name}" if path else name: _state_text(value, concatenated, dtype)
        for name, (value, concatenated) in _compat.metric_states(metric).items()
    }


def _state_text(value: Tensor | list[Tensor], concatenated: bool, dtype: torch.dtype) -> str:
    if isinstance(value, Tensor):
        return _kind(value.dtype, value.dim()) if concatenated else f"{value.dtype} of shape {tuple(value.shape)}"
    if not concatenated:
        kinds = sorted({_kind(item.dtype, item.dim()) for item in value})
        return f"a list of {len(value)} tensors" + (f" ({', '.join(kinds)})" if kinds else "")
    if not value:  # torchmetrics gathers an empty vector of its own dtype in its place
        return _kind(dtype, 1)
    return _kind(value[0].dtype, max(1, value[0].dim()))


def _kind(dtype: torch.dtype, dimensions: int) -> str:
    return f"{dtype} with {dimensions} dimension{'' if dimensions == 1 else 's'}"
