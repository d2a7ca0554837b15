"""Make all replicas equal to rank 0's and keep them so: comparison, flat broadcasts, buffers.

Tensors of one dtype and device travel together, flattened, in chunks (159 buffers of a ResNet: 0.3 ms instead of 64 ms
one by one).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_ddp_hooks import _compat, comm, traffic
from lightning_ddp_hooks.reducer.agreement import ranks_text
from lightning_ddp_hooks.reducer.real_values import as_real, write_real

CHUNK_BYTES = 250 << 20
_MODELS_DIFFER = (
    "The ranks were given different models or settings",
    "Build the same module in the same order, with the same arguments, on every rank.",
)


def check_same_on_all_ranks(
    named_tensors: Sequence[tuple[str, Tensor]],
    settings: Mapping[str, object],
    group: comm.ProcessGroup,
    *,
    texts: tuple[str, str] = _MODELS_DIFFER,
) -> None:
    """Compare parameters and settings over the ranks; a collective call.

    Ranks compare a digest first, and exchange the long form only if that differs. ``texts``: what is wrong then, and
    what to do.
    """
    rows = [
        f"{name}: shape {tuple(tensor.shape)}, {tensor.dtype}, requires_grad={tensor.requires_grad}"
        for name, tensor in named_tensors
    ]
    rows += [f"argument {name}={value!r}" for name, value in settings.items()]
    digest = hashlib.sha256("\n".join(rows).encode()).hexdigest()
    digests = comm.all_gather_object(digest, group)
    if len(set(digests)) > 1:
        wrong, advice = texts
        difference = _first_difference(comm.all_gather_object(rows, group))
        raise RuntimeError(f"{wrong}; the first difference, at position {difference}. {advice}")


def _first_difference(rows_of_ranks: Sequence[Sequence[str]]) -> str:
    longest = max(len(rows) for rows in rows_of_ranks)
    for position in range(longest):
        seen: dict[str, list[int]] = {}
        for rank, rows in enumerate(rows_of_ranks):
            row = rows[position] if position < len(rows) else "nothing"
            seen.setdefault(row, []).append(rank)
        if len(seen) > 1:
            sides = "; ".join(f"{ranks_text(ranks)}: {row}" for row, ranks in seen.items())
            return f"{position}, is {sides}"
    raise AssertionError("digests differ but rows do not")


@torch.no_grad()
def broadcast_tensors(tensors: Sequence[Tensor], group: comm.ProcessGroup, src: int = 0) -> None:
    """Copy the tensors of one rank to all others, in place; a collective call."""
    sends = comm.rank(group) == src
    before: _Sent | None = None
    for chunk in _chunks(tensors, CHUNK_BYTES):  # while one travels, the next one is packed
        now = _Sent.start(chunk, group, src, sends)
        if before is not None:
            before.finish(sends)
        before = now
    if before is not None:
        before.finish(sends)


class _Sent(NamedTuple):
    """A chunk on its way."""

    chunk: list[Tensor]
    parts: list[Tensor]
    flat: Tensor
    work: comm.Work

    @classmethod
    def start(cls, chunk: list[Tensor], group: comm.ProcessGroup, src: int, sends: bool) -> _Sent:
        parts = [as_real(tensor) for tensor in chunk]
        flat = _compat.flatten(parts) if sends else parts[0].new_empty(sum(part.numel() for part in parts))
        return cls(chunk, parts, flat, comm.broadcast(flat, group, src))

    def finish(self, sends: bool) -> None:
        self.work.wait()
        if not sends:
            with _compat.preserve_versions(self.chunk):
                write_real(self.chunk, _compat.unflatten(self.flat, self.parts))


def _chunks(tensors: Iterable[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """Split into runs of one dtype and device, of at most ``limit`` bytes or of one tensor."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        key = (tensor.dtype, tensor.device)
        nbytes = tensor.numel() * tensor.element_size()
        if key in kinds and sizes[key] + nbytes > limit:
            yield kinds.pop(key)
            sizes[key] = 0
        kinds.setdefault(key, []).append(tensor)
        sizes[key] = sizes.get(key, 0) + nbytes
    yield from kinds.values()


class Buffers:
    """Keeps the buffers of all ranks those of one.

    They travel when torch's DDP sends them: before the first forward, and before each one, also an evaluation, that
    follows a forward whose backward is reduced.

    [Note: buffers that are replaced] A module may put another tensor in a buffer's place. Ranks broadcast what they
    have agreed on, by name, shape and dtype. In place of a buffer that is not that any more, a rank sends or receives
    the tensor that was there before, so that nobody receives what does not fit. It says so in its next synced backward,
    where all ranks compare what they have by then.

    Attributes:
        due: Whether the coming forward begins with a broadcast, if they are sent at all.
        each_keeps_its_own: Whether nothing is sent, since replicas train for themselves.
        replaced: Whether a buffer is not what ranks have agreed on.
    """

    def __init__(
        self, module: nn.Module, ignored: AbstractSet[str], group: comm.ProcessGroup, *, broadcasts: bool
    ) -> None:
        self._tables = [(f"{name}." if name else "", table) for name, table in _compat.buffer_tables(module)]
        self._ignored = ignored
        self._group = group
        self.due = self._broadcasts = broadcasts
        self.each_keeps_its_own = False
        self.replaced = False
        self._agreed: dict[str, tuple[_Kind, Tensor]] = {}
        self._agree()
        for name, (_, buffer) in self._agreed.items():
            # Sending or writing it would raise on some ranks only, and the others wait.
            if buffer.layout is not torch.strided or (buffer.numel() and 0 in _strides(buffer)):
                raise ValueError(
                    f"Buffer {name!r} is sparse, or an expanded tensor, and cannot be overwritten by rank 0's: clone "
                    "or densify it, set `broadcast_buffers=False`, or put its name in the module's "
                    "`_ddp_params_and_buffers_to_ignore`."
                )

    def named(self) -> dict[str, Tensor]:
        """Return the buffers that are there now, once each, by name; none if they are not sent."""
        found: dict[int, tuple[str, Tensor]] = {}
        for prefix, table in self._tables if self._broadcasts else ():
            for name, buffer in table.items():
                if buffer is not None and (full := prefix + name) not in self._ignored:
                    found.setdefault(id(buffer), (full, buffer))
        return dict(found.values())

    def to_send(self) -> list[Tensor]:
        """Return what travels: a tensor for each buffer that ranks have agreed on."""
        now, sent = self.named(), []
        self.replaced |= now.keys() != self._agreed.keys()
        for name, (kind, before) in self._agreed.items():
            buffer = now.get(name)
            if buffer is None or _kind(buffer) != kind:
                self.replaced = True
                shape, dtype, device = kind
                buffer = before if _kind(before) == kind else torch.zeros(shape, dtype=dtype, device=device)
            self._agreed[name] = (kind, buffer)
            sent.append(buffer)
        return sent

    def agree(self, control_group: comm.ProcessGroup) -> None:
        """Compare the buffers that are there now over the ranks; a collective call."""
        check_same_on_all_ranks(list(self.named().items()), {}, control_group, texts=_BUFFERS_DIFFER)
        self._agree()

    def _agree(self) -> None:
        self.replaced = False
        self._agreed = {name: (_kind(buffer), buffer) for name, buffer in self.named().items()}

    def changed(self) -> None:
        """Note that the forward of a synced backward has run, in which they may have changed."""
        self.due = self._broadcasts

    @property
    def refresh_due(self) -> bool:
        """Whether the coming forward begins with a broadcast; not one that runs within a backward."""
        return self.due and not self.each_keeps_its_own and _compat.current_backward_id() == -1

    def refresh(self, src: int = 0) -> None:
        """Take over the buffers of one rank; a collective call. Nothing happens if each rank keeps its own."""
        self.due = False
        if not self.each_keeps_its_own and (buffers := self.to_send()):
            with _compat.span("ldh::broadcast_buffers"), traffic.counted_as("buffers"):
                broadcast_tensors(buffers, self._group, src)


_Kind = tuple[torch.Size, torch.dtype, torch.device]
_BUFFERS_DIFFER = (
    "Buffers have become different on the ranks",
    "Give a buffer the same shape on all ranks, or let each rank keep its own: set `broadcast_buffers=False`, or put "
    "its name in the module's `_ddp_params_and_buffers_to_ignore`.",
)


def _kind(buffer: Tensor) -> _Kind:
    return buffer.shape, buffer.dtype, buffer.device


def _strides(buffer: Tensor) -> list[int]:
    return [stride for size, stride in zip(buffer.shape, buffer.stride(), strict=True) if size > 1]
