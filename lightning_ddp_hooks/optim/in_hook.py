"""The optimizer's step as a phase of a communication hook.

    bucket 0   [reduce] ............ [step][send]
    bucket 1        [reduce] .............. [step][send]          interleaved: as each bucket is reduced
    backward   ===========================>

    bucket 0   [reduce] ...                     [step][send]
    bucket 1        [reduce] ...                      [step][send]     not interleaved: behind the backward
    backward   ===========================>

Steps and sends happen in bucket order from one thread, so that all ranks issue the same broadcasts in the same order.
"""

# No postponed annotations: the fields are looked at when the declaration is made from YAML.
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.hooks.contract import (
    BindContext,
    BoundHook,
    CommHook,
    Phases,
    check_result,
    phases_of,
)
from lightning_ddp_hooks.optim.step import ShardedStep
from lightning_ddp_hooks.reducer.bucket import GradBucket


@dataclass(frozen=True, kw_only=True)
class OptimizerInHook:
    """Steps the optimizer while gradients are still being reduced, and shares its state among the ranks (ZeRO style).

    ``configure_optimizers`` stays as it is, and so does the result, to the last bit. Any optimizer will do whose update
    of a parameter depends only on that parameter, its state and the values of its group; others raise, by name.

    - ``OptimizerInHook()``: every rank steps each bucket as soon as it is reduced.
    - ``OptimizerInHook(shard=True)``: the bucket's owner does, and sends the parameters to the others; each rank holds
      about 1/N of the optimizer state.
    - ``OptimizerInHook(shard=True, interleaved=False)``: the same, but the updates follow the backward and overlap with
      the reductions that are still under way: for networks slower than compute.
    - ``OptimizerInHook(shard=True, overlap=False)``: two phases: backward, then each rank steps its parameters and all
      exchange them; with gradient clipping, GradScaler, manual optimisation.

    Args:
        shard: share parameters and optimizer state among the ranks.
        interleaved: step each bucket as soon as it is reduced, and not only behind the backward.
        shard_buckets: share the parameters of each bucket among several ranks: even shares, also with few buckets, but
            more and smaller broadcasts. Without it only buckets larger than a rank's share of the whole are divided.
        overlap: step while gradients are being reduced; False steps when all have been, in ``optimizer_step``.

    Raises:
        TypeError: a setting is not True or False.
        ValueError: settings that contradict each other.

    Example:
        >>> Trainer(strategy=DDPHooksStrategy(optimizer_in_hook=OptimizerInHook(shard=True)))

    Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020 (stage 1),
    https://arxiv.org/abs/1910.02054.
    """

    shard: bool = False
    interleaved: bool = True
    shard_buckets: bool = False
    overlap: bool = True

    def __post_init__(self) -> None:
        """Check each value, then their combination."""
        for name in ("shard", "interleaved", "shard_buckets", "overlap"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"Expected True or False for `{name}`, got {getattr(self, name)!r}.")
        if self.shard_buckets and not self.shard:
            raise ValueError("`shard_buckets=True` divides buckets among the ranks: it needs `shard=True`.")
        if self.overlap:
            return
        if not self.shard:
            raise ValueError(
                "`OptimizerInHook(shard=False, overlap=False)` is the optimizer as it is: leave `optimizer_in_hook` "
                "out."
            )
        for name, default in (("interleaved", True), ("shard_buckets", False)):
            if getattr(self, name) is not default:
                raise ValueError(
                    f"`{name}={getattr(self, name)}` says how steps overlap with the backward, and has no meaning with "
                    "`overlap=False`: leave it out."
                )


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What the hook knows of the run that it is in.

    Attributes:
        step: returns the step of the optimizer; None while gradients are only to be reduced.
        passes: returns the number of synchronised backwards so far.
        had_gradient: tells whether this rank got a gradient in this backward.
        claims: whether parameters get their owner as their bucket comes. Else `ShardedStep.rest` gives it to them, once
            buckets are laid out for good.
        at_once: whether all phases of a bucket run within one call, so that waiting says nothing of the backward's end.
        bucket_done: called with each bucket, once its update and its broadcasts have been issued.
    """

    step: Callable[[], ShardedStep | None]
    passes: Callable[[], int]
    had_gradient: Callable[[], bool] = lambda: True
    claims: bool = False
    at_once: bool = False
    bucket_done: Callable[[GradBucket], None] = lambda bucket: None


@dataclass(frozen=True, kw_only=True)
class StepInHook(CommHook):
    """A hook that steps the optimizer behind another hook.

    Args:
        inner: reduces the gradients; None for the plain mean.
        settings: how to step.
        surroundings: of the run; not part of what ranks compare.
    """

    inner: CommHook | None
    settings: OptimizerInHook
    surroundings: Surroundings = field(repr=False)

    def bind(self, context: BindContext) -> BoundHook:
        """Bind the inner hook."""
        inner = None if self.inner is None else self.inner.bind(context)
        at_once = self.surroundings.at_once or any(param.is_cuda for param in context.params)
        return _BoundStep(inner, context.group, self.settings, at_once, self.surroundings)


class _Line:
    """The buckets of one pass, waiting for their turn.

    Attributes:
        open: whether steps may be made; not before the end of the backward if they are not interleaved.
        next: the number of the bucket whose turn it is.
    """

    def __init__(self, is_open: bool) -> None:
        self.open = is_open
        self.next = 0


class _Turn:
    """A bucket's turn to step and to send: after all buckets before it."""

    def __init__(self, line: _Line, number: int) -> None:
        self._line = line
        self._number = number

    def done(self) -> bool:
        return self._line.open and self._line.next == self._number

    def wait(self) -> None:
        # The reducer waits for buckets one after the other, and only once the backward is over.
        self._line.open = True


class _BoundStep(BoundHook):
    def __init__(
        self,
        inner: BoundHook | None,
        group: comm.ProcessGroup,
        settings: OptimizerInHook,
        at_once: bool,
        surroundings: Surroundings,
    ) -> None:
        self.name = "AllReduce" if inner is None else inner.name
        self.takes_divided = inner is None or inner.takes_divided
        self.one_at_a_time = inner is not None and inner.one_at_a_time
        self.carries_tail = inner is None  # as the reducer does by itself
        self._inner = inner
        self._group = group
        self._interleaved = settings.interleaved
        self._apart = settings.shard_buckets
        self._at_once = at_once
        self._around = surroundings
        self._line = _Line(settings.interleaved)
        self._started = 0
        self._last = -1
        self._pass = -1
        self._held: list[tuple[GradBucket, list[Tensor]]] = []
        self._wires: dict[int, Tensor] = {}

    def take_wire(self, index: int, wire: Tensor) -> None:
        self._wires[index] = wire

    def reduce(self, bucket: GradBucket) -> Phases:
        storage, gradients = bucket.buffer(), bucket.gradients()
        step = self._around.step()
        if self._pass != self._around.passes() or bucket.index() <= self._last:
            self._begin(step)
        line, number = self._line, self._started
        self._started, self._last = number + 1, bucket.index()
        if self._inner is None:
            yield comm.all_reduce(self._wires.pop(bucket.index(), storage), self._group)
        else:
            result = yield from phases_of(self._inner, bucket)
            result = bucket.buffer() if result is None else check_result(self.name, bucket, result)
            if result.data_ptr() != storage.data_ptr() or result.dtype != storage.dtype:
                storage.copy_(result.reshape(-1))
            bucket.set_buffer(storage)
        if step is None or not step.begun:
            return storage
        if not self._interleaved and self._at_once:
            self._held.append((bucket, gradients))
            if bucket.is_last():
                yield from self._step_held(step)
            return storage
        yield _Turn(line, number)
        params = self._step(step, bucket, gradients)
        sent = step.send(params, bucket.index())
        line.next += 1
        if sent is not None:
            yield sent
            sent.wait()
        self._around.bucket_done(bucket)
        return storage

    def _begin(self, step: ShardedStep | None) -> None:
        self._line = _Line(self._interleaved)
        self._started = 0
        self._pass = self._around.passes()
        self._held = []
        if step is not None:
            step.begin(tentative=not self._around.had_gradient())

    def _step(self, step: ShardedStep, bucket: GradBucket, gradients: list[Tensor]) -> list[Tensor]:
        used = [
            (param, gradient)
            for param, name, gradient in zip(bucket.parameters(), bucket.names, gradients, strict=True)
            if name not in bucket.unused
        ]
        if self._around.claims:
            step.claim(bucket.parameters(), apart=self._apart)
        return step.early([param for param, _ in used], [gradient for _, gradient in used])

    def _step_held(self, step: ShardedStep) -> Phases:
        """Step all buckets of the pass; on a device this queues the work behind the last reduction."""
        sent = []
        for bucket, gradients in self._held:
            sent.append(step.send(self._step(step, bucket, gradients), bucket.index()))
        for (bucket, _), flight in zip(self._held, sent, strict=True):
            if flight is not None:
                yield flight
                flight.wait()
            self._around.bucket_done(bucket)
        self._held = []
        return None

    # ------------------------------------------------------------------ the inner hook's affairs

    def group_of(self, name: str, param: Tensor) -> Hashable:
        return None if self._inner is None else self._inner.group_of(name, param)

    def stats(self) -> dict[str, Any]:
        return {} if self._inner is None else self._inner.stats()

    def rescale(self, factor: float) -> None:
        if self._inner is not None:
            self._inner.rescale(factor)

    def state_dict(self) -> dict[str, Any]:
        return {} if self._inner is None else self._inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._inner is not None:
            self._inner.load_state_dict(state)
        else:
            super().load_state_dict(state)
