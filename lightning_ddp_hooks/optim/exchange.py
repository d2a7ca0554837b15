"""Gradients to the owners of parameters, and parameters from them: each takes half of what an all-reduce sends.

On a CPU, where a further collective costs less than a copy, what is large travels as it lies in memory; but parameters
of more than two ranks, whose broadcasts leave most links idle, do not. Those, and all on other devices, travel in rows,
one for each rank and all at once, unless their lengths differ much.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_hooks import _compat
from lightning_ddp_hooks.hooks.workspace import SpareMemory
from lightning_ddp_hooks.optim.pieces import Piece, in_memory_order
from lightning_ddp_hooks.optim.sharding import ShardAssignment
from lightning_ddp_hooks.reducer import requests
from lightning_ddp_hooks.reducer.bucket import GradBucket
from lightning_ddp_hooks.reducer.real_values import as_real, is_lazy, write_real
from lightning_ddp_hooks.reducer.requests import Request

# From this size on a broadcast of its own costs less than copying the parameter into a flat buffer and out of it.
_DIRECT_NUMEL = 16384
# All rows are as long as the longest: so much more than what they hold may be sent.
_MOST_PADDING = 1.05

Requests = Generator[Request, Any, None]


class ShardExchange:
    """Exchanges gradients and parameters between owners and others, in memory that is used again and again."""

    def __init__(self, shards: ShardAssignment) -> None:
        self._shards = shards
        self._memory = SpareMemory()

    def clear(self) -> None:
        """Free the memory; between two steps."""
        self._memory.clear()

    # ------------------------------------------------------------------ gradients

    def reduce(self, bucket: GradBucket) -> Requests:
        """Sum a bucket's gradients over the ranks where their owners are; what others own is left as it is."""
        buffer, size, rank = bucket.buffer(), self._shards.world_size, self._shards.rank
        ranges = _ranges(bucket, self._shards)
        by_owner = [[buffer[begin:end] for owner, begin, end in ranges if owner == one] for one in range(size)]
        sizes = [sum(map(len, parts)) for parts in by_owner]
        own, before = sizes[rank], sum(sizes[:rank])
        if not buffer.is_cpu and _fit_into_rows(sizes):
            yield from self._reduce_rows(by_owner, max(sizes))
            return
        sent, packed = buffer, None
        if ranges != sorted(ranges):
            packed = self._memory.borrow(len(buffer), buffer.dtype, buffer.device)
            sent = packed[: len(buffer)]
            _copy([part for parts in by_owner for part in parts], into=sent)
        total, to_each, from_each = sent[before : before + own], list(sizes), [own] * size
        at_an_end = before == 0 or before + own == len(sent)
        if at_an_end:  # then what this rank keeps need not be copied by the collective
            sent = sent[own:] if before == 0 else sent[:before]
            to_each[rank] = from_each[rank] = 0
        memory = self._memory.borrow(sum(from_each), buffer.dtype, buffer.device)
        received = memory[: sum(from_each)]
        yield requests.AllToAll(sent, received, sizes=(to_each, from_each))
        if own:
            rows = list(received.view(-1, own))
            if at_an_end:
                rows.insert(rank, total)
            _sum(rows, total)
        self._memory.give_back(memory)
        if packed is not None:
            _copy(by_owner[rank], out_of=total)
            self._memory.give_back(packed)

    def _reduce_rows(self, by_owner: Sequence[Sequence[Tensor]], length: int) -> Requests:
        first = next(part for parts in by_owner for part in parts)
        memory = self._memory.borrow(len(by_owner) * length, first.dtype, first.device)
        rows = memory[: len(by_owner) * length]
        for parts, row in zip(by_owner, rows.split(length), strict=True):
            _copy(parts, into=row)
        total = yield requests.ReduceScatter(rows)
        _copy(by_owner[self._shards.rank], out_of=total)
        self._memory.give_back(memory)

    # ------------------------------------------------------------------ parameters

    def send(self, params: Iterable[Tensor]) -> Requests:
        """Send each piece of the parameters from its owner to all others."""
        size = self._shards.world_size
        if size == 1:
            return
        pieces = [(piece.owner, _values(param, piece)) for param in params for piece in self._shards.pieces(param)]
        pieces = [(owner, values) for owner, values in pieces if values.numel()]
        if len({(values.dtype, values.device) for _, values in pieces}) == 1:
            by_owner = [[values for owner, values in pieces if owner == one] for one in range(size)]
            sizes = [sum(as_real(values).numel() for values in its) for its in by_owner]
            if (size > 2 or not pieces[0][1].is_cpu) and _fit_into_rows(sizes):
                yield from self._send_rows(by_owner, max(sizes))
                return
        yield from self._send_each(pieces)

    def _send_each(self, pieces: Sequence[tuple[int, Tensor]]) -> Requests:
        broadcasts: list[list[Request]] = [[] for _ in range(self._shards.world_size)]
        borrowed: list[Tensor] = []
        received: list[tuple[list[Tensor], list[Tensor]]] = []
        small: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = {}
        with _compat.span("ldh::exchange_parameters"):
            for owner, values in pieces:
                tensor = as_real(values)
                if tensor.numel() >= _DIRECT_NUMEL and tensor.is_contiguous() and not is_lazy(values):
                    broadcasts[owner].append(requests.Broadcast(tensor, owner))
                else:
                    small.setdefault((owner, tensor.dtype, tensor.device), []).append(values)
            for (owner, dtype, device), its_values in small.items():
                tensors = [as_real(values) for values in its_values]
                numel = sum(tensor.numel() for tensor in tensors)
                borrowed.append(self._memory.borrow(numel, dtype, device))
                flat = borrowed[-1][:numel]
                parts = _compat.unflatten(flat, tensors)
                if owner == self._shards.rank:
                    _compat.foreach_copy_(parts, tensors)
                else:
                    received.append((its_values, parts))
                broadcasts[owner].append(requests.Broadcast(flat, owner))
        # In turns, since few are under way at a time: links work in both directions.
        in_turns = [request for turn in zip_longest(*broadcasts) for request in turn if request is not None]
        if in_turns:
            yield requests.Together(in_turns, purpose="parameters")
        for its_values, parts in received:
            write_real(its_values, parts)
        for memory in borrowed:
            self._memory.give_back(memory)

    def _send_rows(self, by_owner: Sequence[Sequence[Tensor]], length: int) -> Requests:
        own, real = self._shards.rank, as_real(next(values for its in by_owner for values in its))
        with _compat.span("ldh::exchange_parameters"):
            memory = self._memory.borrow(len(by_owner) * length, real.dtype, real.device)
            rows = memory[: len(by_owner) * length].view(len(by_owner), length)
            reals = [[as_real(values) for values in its] for its in by_owner]
            parts = [_compat.unflatten(row, its) if its else [] for row, its in zip(rows, reals, strict=True)]
            if by_owner[own]:
                _compat.foreach_copy_(parts[own], reals[own])
        yield requests.Together([requests.AllGather(rows[own], rows)], purpose="parameters")
        for owner, its_values in enumerate(by_owner):
            if its_values and owner != own:
                write_real(its_values, parts[owner])
        self._memory.give_back(memory)


def _ranges(bucket: GradBucket, shards: ShardAssignment) -> list[tuple[int, int, int]]:
    """Return the owner, begin and end of each part of a bucket that lies with one rank."""
    ranges: list[tuple[int, int, int]] = []
    begin = 0
    for param in bucket.parameters():
        reals = 2 if param.is_complex() else 1
        for owner, start, stop in shards.pieces(param):
            first = begin + reals * start
            if ranges and ranges[-1][0] == owner:
                first = ranges.pop()[1]
            ranges.append((owner, first, begin + reals * stop))
        begin += reals * param.numel()
    return ranges


def _values(param: Tensor, piece: Piece) -> Tensor:
    """Return a piece of a parameter; the parameter itself if it is whole."""
    return param if piece.stop - piece.start == param.numel() else in_memory_order(param)[piece.start : piece.stop]


def _fit_into_rows(sizes: Sequence[int]) -> bool:
    return len(sizes) * max(sizes) <= _MOST_PADDING * sum(sizes)


def _copy(parts: Sequence[Tensor], *, into: Tensor | None = None, out_of: Tensor | None = None) -> None:
    """Copy flat tensors into the beginning of another, one behind the other, or out of it."""
    lengths = [len(part) for part in parts]
    if not lengths:
        return
    if into is not None:
        _compat.foreach_copy_(into[: sum(lengths)].split(lengths), parts)
    if out_of is not None:
        _compat.foreach_copy_(parts, out_of[: sum(lengths)].split(lengths))


def _sum(rows: Sequence[Tensor], out: Tensor) -> None:
    """Sum what each rank has sent, in the order of ranks, rounding half precision once; overwrites the first."""
    first, *middle, last = rows
    if middle and out.dtype in (torch.float16, torch.bfloat16):
        first, last = first.float(), last.float()
    for row in middle:
        first.add_(row)
    if first.dtype is out.dtype:
        torch.add(first, last, out=out)
    else:
        out.copy_(first.add_(last))
