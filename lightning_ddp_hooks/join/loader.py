"""A loader that goes on with emptied batches until every rank has run out of its own.

    inner loader --> fetch a batch ahead --> agree on its step, unless that is certain --> yield it, or an emptied one

So all ranks see the same number of batches, and any loop over them stays in step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.join.agreement import UNCOUNTED, PendingRows, Step, StepAgreement
from lightning_ddp_hooks.join.data import certain_length, emptied, on_cpu

_NO_BATCH = object()
# The number of batches of a stream that are read ahead: those at hand certainly come, and ranks agree only once they
# are used up. Not more, since each takes memory, and what is read ahead is lost when an epoch is broken off.
_READ_AHEAD = 4


@dataclass(frozen=True)
class Announcement:
    """Says which step a batch belongs to, before the batch is yielded."""

    loader: JoinLoader
    step: Step
    current: Callable[[], bool]  # whether the loader is still in the same iteration over its batches


@dataclass(frozen=True, kw_only=True)
class LoaderContext:
    """What a `JoinLoader` needs of the run that it is part of."""

    agreement: StepAgreement  # shared by all loaders of the run, since they are used one after the other
    group: comm.ProcessGroup  # on the CPU, for rare exchanges: lengths, templates, positions
    announce: Callable[[Announcement], None]
    samples: Callable[[Any], int] | None = None  # counts the samples of a batch
    stop_at_shortest: bool = False  # end with the first rank that runs out, instead of with the last
    keep_batches: Callable[[], bool] = lambda: False  # whether joined ranks replay a real batch
    limit: int | None = None  # the loop takes no more batches than that; nothing is read beyond
    failed: Callable[[], bool] = lambda: False  # whether the run has failed, so that no collective is possible


class JoinLoader:
    """Yields the batches of a loader, and emptied ones from when it has run out until every rank has run out.

    The inner loader may be any iterable, with or without length; all other attributes are its own.
    """

    __slots__ = ("context", "ended", "inner", "iterations", "latest", "length", "needs_template")

    def __init__(self, loader: Iterable[Any], context: LoaderContext) -> None:
        self.inner: Any = loader
        self.context = context
        self.iterations = 0  # that were begun
        self.latest: Any = None  # the latest real batch of some rank, or only its structure; see `LoaderContext`
        self.needs_template = True  # this rank has never seen a batch
        self.ended = False  # the latest iteration has yielded all batches
        self.length: int | None = None  # on all ranks; None if some loader has no length
        try:
            own_length: int | None = len(loader)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            own_length = None
        lengths = comm.all_gather_object(own_length, context.group)
        if None not in lengths:
            self.length = min(lengths) if context.stop_at_shortest else max(lengths)

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("the loader of some rank has no length")
        return self.length

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # while copied or unpickled
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(type(self), name):
            object.__setattr__(self, name, value)
        else:  # Lightning shuts workers down by way of the inner loader's attributes
            setattr(self.inner, name, value)

    def __iter__(self) -> Iterator[Any]:
        return _Batches(self, iter(self.inner), read_ahead=True)

    def saw(self, batch: Any) -> None:
        """Note the latest real batch, or its structure where that is enough."""
        if self.needs_template:
            self.latest = emptied(batch)  # which raises at once if it cannot be
        if self.context.keep_batches():
            self.latest = batch
        self.needs_template = False

    def share_template(self, step: Step, batch: Any) -> None:
        """Send a batch of the lowest active rank to ranks that have never had one; collective."""
        sent = on_cpu(batch if self.context.keep_batches() else emptied(batch)) if step.rank == step.first else None
        received = comm.broadcast_object(sent, self.context.group, step.first)
        if self.needs_template:
            self.latest, self.needs_template = received, False


class StatefulJoinLoader(JoinLoader):
    """A `JoinLoader` over a loader that can resume: ranks stand at different positions, and all of them are saved.

    It is not read ahead, since its state would be one batch too far; agreements are awaited as soon as they are posted.
    """

    __slots__ = ("_exhausted", "_resumes_exhausted", "_unread")

    def __init__(self, loader: Iterable[Any], context: LoaderContext) -> None:
        super().__init__(loader, context)
        self._exhausted = self._resumes_exhausted = False
        # States before batches that were handed out and not yet used, where the loop itself reads ahead (no length).
        self._unread: list[tuple[Any, bool]] = []

    def __iter__(self) -> Iterator[Any]:
        self._exhausted, self._resumes_exhausted = self._resumes_exhausted, False
        self._unread.clear()
        return _Batches(self, self._record_positions(iter(() if self._exhausted else self.inner)), read_ahead=False)

    def _record_positions(self, inner: Iterator[Any]) -> Iterator[Any]:
        while True:
            if self.length is None:
                self._unread.append((self.inner.state_dict(), self._exhausted))
            try:
                batch = next(inner)
            except StopIteration:
                self._exhausted = True
                return
            yield batch

    def used(self) -> None:
        """Note that the oldest batch handed out is being used."""
        if self._unread:
            self._unread.pop(0)

    def state_dict(self) -> dict[str, Any]:
        """Return the positions of all ranks; collective, unless the run has failed."""
        state, exhausted = self._unread[0] if self._unread else (self.inner.state_dict(), self._exhausted)
        mine = {"loader": state, "exhausted": exhausted, "ended": self.ended}
        if self.context.failed():
            return {"ranks": [mine], "missing": True}
        return {"ranks": comm.all_gather_object(mine, self.context.group)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to this rank's position; one that had run out yields nothing until the next epoch, unless all had."""
        ranks = state.get("ranks")
        if not isinstance(ranks, list) or state.get("missing"):
            raise ValueError(
                "The checkpoint does not hold the positions of all ranks' dataloaders: it was saved after a failure, "
                "or without UnevenInputs. Resume from another one, or without UnevenInputs."
            )
        world_size = comm.world_size(self.context.group)
        if len(ranks) != world_size:
            raise ValueError(
                f"The checkpoint holds the dataloader positions of {len(ranks)} ranks, but this run has {world_size}. "
                "Resume with as many ranks, or from a checkpoint at the end of an epoch."
            )
        mine = ranks[comm.rank(self.context.group)]
        if not isinstance(mine, Mapping) or not mine.keys() >= {"ended", "exhausted", "loader"}:
            raise ValueError(
                f"The checkpoint's positions of dataloaders are damaged: expected `ended`, `exhausted` and `loader`, "
                f"found {mine!r:.80}."
            )
        if mine["ended"]:
            return
        self._resumes_exhausted = bool(mine["exhausted"])
        if not self._resumes_exhausted:
            self.inner.load_state_dict(mine["loader"])


class _Batches(Iterator[Any]):
    """One iteration over a `JoinLoader`."""

    def __init__(self, owner: JoinLoader, inner: Iterator[Any], *, read_ahead: bool) -> None:
        self._owner = owner
        self._inner = inner
        self._read_ahead = read_ahead
        owner.iterations += 1
        owner.ended = False
        self._number = owner.iterations
        self._length = certain_length(owner.inner) if owner.context.samples is None else None
        # The batches that have been fetched and not yielded; then how many there were in all.
        self._at_hand: deque[Any] = deque()
        self._fetched = self._yielded = 0
        self._exhausted = self._over = False
        self._uncounted: ValueError | None = None
        # What is agreed on: the next step while it is pending, and the latest one, which holds for further steps.
        self._prepared = False
        self._pending: PendingRows | None = None
        self._step: Step | None = None
        self._certain_steps = 0

    def __next__(self) -> Any:
        owner, context = self._owner, self._owner.context
        if self._over or self._yielded == context.limit:
            raise StopIteration
        if not self._prepared:
            self._prepare()
        batch = self._at_hand.popleft() if self._at_hand else _NO_BATCH
        self._prepared = False
        needs_template = False
        if self._pending is not None:
            self._step, needs_template, self._certain_steps = context.agreement.wait(self._pending)
            self._pending = None
        step = self._step
        assert step is not None
        self._certain_steps -= 1
        if min(step.samples) < 0:
            raise self._uncounted or ValueError(f"The samples of a batch cannot be counted on {step.uncounted_text}.")
        if not step.ranks or (step.tail and context.stop_at_shortest):
            self._over = owner.ended = True
            raise StopIteration
        if needs_template:
            owner.share_template(step, batch)
        if not step.joined:
            owner.saw(batch)
        self._yielded += 1
        owner.ended = self._yielded == owner.length
        if self._read_ahead and self._yielded != context.limit:
            self._prepare()
        context.announce(Announcement(owner, step, lambda: owner.iterations == self._number))
        return emptied(owner.latest) if step.joined else batch

    def _prepare(self) -> None:
        """Fetch the next batch, and post it to the others unless they know."""
        owner, context = self._owner, self._owner.context
        self._prepared = True
        if not self._at_hand:
            self._fetch()
        ahead = _READ_AHEAD if self._read_ahead and self._length is None and context.samples is None else 1
        # One more each time, so that no step waits for a whole row of them.
        if len(self._at_hand) < ahead and self._fetched != context.limit:
            self._fetch()
        has_batch = bool(self._at_hand)
        if self._certain_steps:
            if self._step is not None and has_batch == self._step.joined:
                who = f"The dataloader of rank {self._step.rank}"
                raise RuntimeError(f"{who} ended after {self._fetched} batches, but its length is {self._length}.")
            return
        samples = self._count(self._at_hand[0], context.samples) if has_batch and context.samples is not None else 0
        certain = len(self._at_hand) if self._length is None else self._length - self._fetched + 1
        self._pending = context.agreement.post(has_batch, samples, owner.needs_template, max(1, certain))

    def _count(self, batch: Any, count: Callable[[Any], int]) -> int:
        try:
            return count(batch)
        except ValueError as error:  # all ranks raise it, when the batch is due
            self._uncounted = error
            return UNCOUNTED

    def _fetch(self) -> None:
        if self._exhausted:
            return
        try:
            self._at_hand.append(next(self._inner))
            self._fetched += 1
        except StopIteration:
            self._exhausted = True
