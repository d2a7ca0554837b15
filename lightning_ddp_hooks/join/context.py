"""Uneven inputs in plain PyTorch: ranks that run out of data shadow the collectives of those that have not.

    active rank:  ... notify(event) -> its collective -> notify(event) -> its collective ... leaves the context
    joined rank:  waits for an event -> main_hook of the joinable that sent it -> ... nobody is active -> post_hook

The interface is that of ``torch.distributed.algorithms.join``: `Join`, `Joinable`, `JoinHook`. One thing is finer:
there only the first joinable announces an iteration, and then all hooks run; here each joinable announces its own
collectives and only its own hook runs, so that a joinable may have any number of them in an iteration, or none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.join.agreement import active_text, post_row
from lightning_ddp_hooks.reducer.agreement import ranks_text

_THROW_HINT = "Leave out `throw_on_early_termination` to have the others shadow what they do."


@dataclass(frozen=True)
class Event:
    """One announcement: the ranks that made it, in ascending order, and what the joinable said about it.

    Attributes:
        active: Ranks that have data.
        kind: Which of its collectives come; the same on all of them.
        detail: What the lowest of them told besides.
    """

    active: tuple[int, ...]
    kind: int
    detail: int = 0


class JoinHook:
    """What a rank does for one joinable once it has run out of data.

    Attributes:
        event: What `main_hook` is called for.
    """

    event: Event

    def before_shadowing(self) -> None:
        """Finish what is still open on this rank; called once it has run out of data, while it still counts as active.

        Such as a backward that an exception has ended, and that the other ranks wait for.
        """

    def main_hook(self) -> None:
        """Do this rank's part of the collectives that an active rank has announced; called once for each event."""

    def post_hook(self, is_last_joiner: bool) -> None:
        """End the context, after all ranks have run out of data; called on all ranks.

        Args:
            is_last_joiner: Whether this rank was one of the last to run out, and so holds the latest state.
        """


class Joinable(ABC):
    """Something whose collectives can be shadowed.

    Before its collectives of an iteration it calls ``Join.notify(self)`` (or `Join.notify_join_context`).

    Attributes:
        join_kinds: What the kinds of its collectives are called in messages, by number.
    """

    join_kinds: tuple[str, ...] = ("",)
    _join: Join | None = None

    def _refuse(self, _: object) -> None:
        raise TypeError(
            f"{type(self).__name__} does not know torch's Join: use `lightning_ddp_hooks.join.Join` in its place (of a "
            "single model, `model.join()`)."
        )

    _join_config = property(None, _refuse)  # torch's Join sets it

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook for this context.

        Args:
            **kwargs: What was given to `Join`, for all joinables alike; each takes what it knows.
        """

    @property
    @abstractmethod
    def join_device(self) -> torch.device:
        """The device of its collectives."""

    @property
    @abstractmethod
    def join_process_group(self) -> comm.ProcessGroup:
        """The ranks that take part."""


class Join:
    """A context in which ranks may run out of data at different times.

    Args:
        joinables: What communicates in the loop; in the same order on all ranks.
        enable: False if it is known that all ranks have as much data; nothing is announced then.
        throw_on_early_termination: Raise on all ranks as soon as one has run out, instead of shadowing.
        **kwargs: Handed to each joinable's `Joinable.join_hook`.

    Raises:
        ValueError: No joinables, or they communicate over different ranks.
        RuntimeError: On leaving or announcing, with ``throw_on_early_termination``; or a joinable is in a context
            already.

    Example:
        >>> with Join([model], divide_by_initial_world_size=False):
        ...     for batch in loader:  # of a different length on each rank
        ...         loss(model(batch)).backward()
        ...         optimizer.step()
    """

    def __init__(
        self,
        joinables: Sequence[Joinable],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **kwargs: Any,
    ) -> None:
        if not joinables:
            raise ValueError("Join expects at least one joinable.")
        parents = [comm.global_ranks(joinable.join_process_group) for joinable in joinables]
        if any(ranks != parents[0] for ranks in parents):
            raise ValueError("Join expects joinables over the same ranks, got process groups that differ.")
        if any(joinable._join is not None for joinable in joinables):
            raise RuntimeError("A joinable is in a Join context already; contexts do not nest.")
        self._joinables = list(joinables)
        self._enable = enable
        self._throw = throw_on_early_termination
        self._kwargs = kwargs
        self._parent = joinables[0].join_process_group
        self._hooks: list[JoinHook] = []
        self._group: comm.ProcessGroup | None = None

    @staticmethod
    def notify_join_context(joinable: Joinable) -> None:
        """Announce a collective of ``joinable``; nothing happens outside a context. See `Join.notify`."""
        Join.notify(joinable)

    @staticmethod
    def notify(joinable: Joinable, kind: int = 0, *, detail: int = 0) -> Event | None:
        """Announce that collectives of ``joinable`` come next; called on all active ranks alike, which meet here.

        Args:
            joinable: Whose collectives they are.
            kind: A small number by which its hook tells different collectives apart; see `JoinHook.event`.
            detail: A number for hooks that shadow it; that of the lowest active rank counts.

        Returns:
            The event; None outside a context.

        Raises:
            RuntimeError: Ranks announced different collectives, or some rank has run out of data, with
                ``throw_on_early_termination``; on all ranks.
        """
        join = joinable._join
        if join is None:
            return None
        assert join._group is not None
        event, _ = join._meet((True, join._joinables.index(joinable), kind, detail))
        if join._throw and len(event.active) < comm.world_size(join._group):
            found = "Detected at least one rank that exhausted inputs. Throwing across all ranks"
            raise RuntimeError(f"{found}: {active_text(event.active)}. {_THROW_HINT}")
        return event

    @property
    def throws(self) -> bool:
        """Whether all ranks raise as soon as one has run out."""
        return self._throw

    def _meet(self, row: tuple[int, ...]) -> tuple[Event, int]:
        """Tell all ranks what comes on this one; return what does, and the position of the joinable; collective."""
        assert self._group is not None
        rows = post_row(row, self._group).wait()
        active = [rank for rank, (is_active, *_) in enumerate(rows) if is_active]
        if not active:
            return Event((), 0), 0
        by_what: dict[tuple[int, int], list[int]] = {}
        for rank in active:
            by_what.setdefault((rows[rank][1], rows[rank][2]), []).append(rank)
        if len(by_what) > 1:
            said = "; ".join(f"{ranks_text(ranks)}: {self._text(*what)}" for what, ranks in by_what.items())
            raise RuntimeError(
                f"Ranks announced different collectives ({said}): in a Join context all that have data communicate "
                "in the same order."
            )
        _, index, kind, detail = rows[active[0]]
        return Event(tuple(active), kind, detail), index

    def _text(self, index: int, kind: int) -> str:
        joinable = self._joinables[index]
        name = joinable.join_kinds[kind] if kind < len(joinable.join_kinds) else f"kind {kind}"
        return f"{name} of {type(joinable).__name__} (joinable {index})".removeprefix(" of ")

    def __enter__(self) -> Join:
        if self._enable:
            # A group of its own: what user code and joinables send cannot come in between.
            self._group = comm.new_group(self._parent, cpu=True)
            self._hooks = [joinable.join_hook(**self._kwargs) for joinable in self._joinables]
            for joinable in self._joinables:
                joinable._join = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Shadow the others until all have run out of data; after an exception, leave at once."""
        try:
            for hook in self._hooks if kind is None else ():
                hook.before_shadowing()
        finally:
            for joinable in self._joinables if self._enable else ():
                joinable._join = None
        if kind is not None or self._group is None:
            return
        is_last_joiner = True
        while True:
            event, index = self._meet((False, 0, 0, 0))
            if not event.active:
                break
            if self._throw:
                found = f"Rank {comm.rank(self._group)} exhausted all inputs"
                raise RuntimeError(f"{found}: {active_text(event.active)}. {_THROW_HINT}")
            is_last_joiner = False
            self._hooks[index].event = event
            self._hooks[index].main_hook()
        for hook in self._hooks:
            hook.post_hook(is_last_joiner)
        comm.destroy_group(self._group)
