"""A loader that goes on with emptied batches until every rank has run out of its own.

    inner loader --> fetch a batch ahead --> agree on its step, unless that is certain --> yield it, or an emptied one

All ranks so see the same number of batches, and whatever loop runs over them stays in step by construction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.join.agreement import PendingStep, StepAgreement
from lightning_ddp_hooks.join.batches import emptied, on_cpu
from lightning_ddp_hooks.join.steps import Step

_NO_BATCH = object()
# So many batches of a stream are read ahead: for those at hand it is certain that they come, and ranks agree only once
# they are used up. Not more, since each takes memory, and what is read ahead is lost when an epoch is broken off.
_READ_AHEAD = 4


@dataclass(frozen=True)
class Announcement:
    """Says which step a batch belongs to, before the batch is yielded.

    Attributes:
        loader: whose batch it is.
        step: the step.
        current: tells whether the loader is still in the same pass over its batches.
    """

    loader: JoinLoader
    step: Step
    current: Callable[[], bool]


@dataclass(frozen=True, kw_only=True)
class LoaderContext:
    """What a `JoinLoader` needs of the run that it is part of.

    Attributes:
        agreement: agrees on steps; all loaders of a run share it, since they are used one after the other.
        group: a CPU group for rare exchanges: lengths, templates, positions.
        announce: told of each batch, before it is yielded.
        samples: returns the number of samples of a batch; None if nobody asks.
        stop_at_shortest: end with the first rank that runs out, instead of with the last.
        keep_batches: returns whether joined ranks need a real batch (to replay it) and not only its structure.
        limit: how many batches the loop will take at most; nothing is read beyond.
        failed: returns whether the run has failed, so that no collective is possible.
    """

    agreement: StepAgreement
    group: comm.ProcessGroup
    announce: Callable[[Announcement], None]
    samples: Callable[[Any], int] | None = None
    stop_at_shortest: bool = False
    keep_batches: Callable[[], bool] = lambda: False
    limit: int | None = None
    failed: Callable[[], bool] = lambda: False


class JoinLoader:
    """Yields this rank's batches, then emptied ones until every rank has run out.

    Whatever else is asked of it (sampler, dataset, batch size, ...) is the inner loader's.

    Args:
        loader: any iterable, with or without length.
        context: the run.
    """

    def __init__(self, loader: Iterable[Any], context: LoaderContext) -> None:
        self._loader = loader
        self._context = context
        self._latest: Any = None
        self._has_latest = False
        self.passes = 0
        self.ended = False
        lengths = comm.all_gather_object(_length(loader), context.group)
        known = [length for length in lengths if length is not None]
        self._length: int | None = None
        if len(known) == len(lengths):
            self._length = min(known) if context.stop_at_shortest else max(known)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("the loader of some rank has no length")
        return self._length

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:  # Lightning shuts workers down by way of the loader's own attributes
            setattr(self._loader, name, value)

    def __iter__(self) -> Iterator[Any]:
        return _Batches(self, iter(self._loader), read_ahead=True)

    @property
    def length(self) -> int | None:
        """The number of batches on all ranks, as far as loaders say; None if some has no length."""
        return self._length

    @property
    def certain_length(self) -> int | None:
        """The number of batches on this rank, if it can be relied on."""
        return _certain_length(self._loader)

    @property
    def context(self) -> LoaderContext:
        """The run."""
        return self._context

    @property
    def needs_template(self) -> bool:
        """Whether this rank has never seen a batch."""
        return not self._has_latest

    def saw(self, batch: Any) -> None:
        """Note the latest real batch, or its structure where that is enough."""
        if self._context.keep_batches():
            self._latest = batch
        elif not self._has_latest:
            self._latest = emptied(batch)
        self._has_latest = True

    def share_template(self, step: Step, batch: Any) -> None:
        """Show ranks that have never had a batch one of the lowest active rank; collective."""
        sent = None
        if step.rank == step.first:
            sent = on_cpu(batch if self._context.keep_batches() else emptied(batch))
        received = comm.broadcast_object(sent, self._context.group, step.first)
        if not self._has_latest:
            self._latest, self._has_latest = received, True

    @property
    def latest(self) -> Any:
        """The latest real batch of this rank (or one of another rank), or only its structure; see `LoaderContext`."""
        return self._latest


_OWN = frozenset(
    {
        "_loader",
        "_context",
        "passes",
        "ended",
        "_latest",
        "_has_latest",
        "_length",
        "_exhausted",
        "_resumes_exhausted",
        "_unread",
    }
)


class StatefulJoinLoader(JoinLoader):
    """A `JoinLoader` over a loader that can resume: ranks stand at different positions, and all of them are saved.

    Such a loader is not read ahead of the step that is running, since its state would be one batch too far; the
    agreement is then awaited as soon as it is posted.
    """

    def __init__(self, loader: Iterable[Any], context: LoaderContext) -> None:
        super().__init__(loader, context)
        self._exhausted = False
        self._resumes_exhausted = False
        # States before batches that were handed out and not yet used, where the loop itself reads ahead (no length).
        self._unread: list[tuple[Any, bool]] = []

    def __iter__(self) -> Iterator[Any]:
        ended, self._resumes_exhausted = self._resumes_exhausted, False
        self._unread.clear()
        inner = iter(()) if ended else iter(self._loader)
        self._exhausted = ended
        return _Batches(self, inner, read_ahead=False)

    def before_fetch(self) -> None:
        """Note the position where the loop may read ahead."""
        if self._length is None:
            self._unread.append((self._loader.state_dict(), self._exhausted))  # type: ignore[attr-defined]

    def used(self) -> None:
        """Note that the oldest batch handed out is being used."""
        if self._unread:
            self._unread.pop(0)

    def ran_out(self) -> None:
        """Note that this rank has no further batch in this epoch."""
        self._exhausted = True

    def state_dict(self) -> dict[str, Any]:
        """Return the positions of all ranks; collective, unless the run has failed."""
        state, exhausted = self._unread[0] if self._unread else (self._loader.state_dict(), self._exhausted)  # type: ignore[attr-defined]
        mine = {"loader": state, "exhausted": exhausted, "ended": self.ended}
        if self._context.failed():
            return {"ranks": [mine], "missing": True}
        return {"ranks": comm.all_gather_object(mine, self._context.group)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to this rank's position.

        A rank that had run out yields nothing in the rest of that epoch, and begins the next one afresh; if all had,
        all begin afresh.

        Raises:
            ValueError: the state was saved by another number of ranks, or after a failure.
        """
        ranks = state.get("ranks")
        if not isinstance(ranks, list) or state.get("missing"):
            raise ValueError(
                "The checkpoint does not hold the positions of all ranks' dataloaders: it was saved after a failure, "
                "or without UnevenInputs. Resume from another one, or without UnevenInputs."
            )
        world_size = comm.world_size(self._context.group)
        if len(ranks) != world_size:
            raise ValueError(
                f"The checkpoint holds the dataloader positions of {len(ranks)} ranks, but this run has {world_size}. "
                "Resume with as many ranks, or from a checkpoint at the end of an epoch."
            )
        mine = ranks[comm.rank(self._context.group)]
        if not isinstance(mine, Mapping) or not mine.keys() >= {"ended", "exhausted", "loader"}:
            raise ValueError(
                f"The checkpoint's positions of dataloaders are damaged: expected `ended`, `exhausted` and `loader`, "
                f"found {mine!r:.80}."
            )
        if mine["ended"]:
            return
        self._resumes_exhausted = bool(mine["exhausted"])
        if not self._resumes_exhausted:
            self._loader.load_state_dict(mine["loader"])  # type: ignore[attr-defined]


class _Batches(Iterator[Any]):
    """One pass over a `JoinLoader`."""

    def __init__(self, owner: JoinLoader, inner: Iterator[Any], *, read_ahead: bool) -> None:
        self._owner = owner
        owner.passes += 1
        owner.ended = False
        self._pass = owner.passes
        self._inner = inner
        self._read_ahead = read_ahead
        self._at_hand: deque[Any] = deque()
        self._fetched = self._yielded = 0
        self._ended = False
        self._over = False
        self._length = owner.certain_length if owner.context.samples is None else None
        self._prepared = False
        self._pending: PendingStep | None = None
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
            self._step, needs_template, self._certain_steps = self._pending.wait()
            self._pending = None
        step = self._step
        assert step is not None
        self._certain_steps -= 1
        if step.over or (step.tail and context.stop_at_shortest):
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
        context.announce(Announcement(owner, step, lambda: owner.passes == self._pass))
        return emptied(owner.latest) if step.joined else batch

    def _prepare(self) -> None:
        """Fetch the next batch, and tell the others unless they know."""
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
                raise RuntimeError(
                    f"The dataloader of rank {self._step.rank} ended after {self._fetched} batches, but its length is "
                    f"{self._length}."
                )
            return
        samples = context.samples(self._at_hand[0]) if has_batch and context.samples is not None else 0
        certain = len(self._at_hand) if self._length is None else self._length - self._fetched + 1
        self._pending = context.agreement.post(has_batch, samples, owner.needs_template, max(1, certain))

    def _fetch(self) -> None:
        owner = self._owner
        if self._ended:
            return
        if isinstance(owner, StatefulJoinLoader):
            owner.before_fetch()
        try:
            self._at_hand.append(next(self._inner))
            self._fetched += 1
        except StopIteration:
            self._ended = True
            if isinstance(owner, StatefulJoinLoader):
                owner.ran_out()


def _length(loader: object) -> int | None:
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


# Samplers of torch that yield as many indices as their length says.
_EXACT_SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)


def _certain_length(loader: object) -> int | None:
    """Return a loader's length if it can be relied on.

    Not on that of streams, of samplers and loaders of the user's own: what they say may be an estimate.
    """
    exact = (
        type(loader) is DataLoader
        and not isinstance(loader.dataset, IterableDataset)
        and type(loader.batch_sampler) in (BatchSampler, type(None))
        and type(loader.sampler) in _EXACT_SAMPLERS
    )
    return len(loader) if exact else None  # type: ignore[arg-type]
