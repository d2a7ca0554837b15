"""The optimizer's step as a phase of a communication hook.

    bucket 0   [reduce] ............ [step][send]
    bucket 1        [reduce] .............. [step][send]          interleaved: as each bucket is reduced
    backward   ===========================>

    bucket 0   [reduce] ...                     [step][send]
    bucket 1        [reduce] ...                      [step][send]     not interleaved: behind the backward
    backward   ===========================>

With ``shard=True`` and the plain mean, [reduce] sums gradients on the ranks that own their parameters, and [send]
gathers the parameters from there: together what an all-reduce sends. Steps are made in bucket order, and the queue
issues all exchanges in an order that is the same on all ranks.
"""

# No postponed annotations: the fields are looked at when the declaration is made from YAML.
from collections.abc import Callable, Generator, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_ddp_hooks.hooks.contract import BindContext, BoundHook, CommHook, Phases, check_result, phases_of
from lightning_ddp_hooks.hooks.registry import first_difference
from lightning_ddp_hooks.optim.sharded_step import ShardedStep
from lightning_ddp_hooks.reducer import requests
from lightning_ddp_hooks.reducer.bucket import GradBucket
from lightning_ddp_hooks.reducer.queue import PlainMean


@dataclass(frozen=True, kw_only=True)
class OptimizerInHook:
    """Steps the optimizer while gradients are still being reduced, and shares its state among the ranks (ZeRO style).

    ``configure_optimizers`` stays as it is, and so does the result. Any optimizer will do whose update of a parameter
    depends only on that parameter, its state and the values of its group; others raise, by name. Parameters whose
    elements are updated each by itself (as by Adam, SGD or Lion) are cut; others (as by Muon) stay whole.

    - ``OptimizerInHook()``: every rank steps each bucket as soon as it is reduced.
    - ``OptimizerInHook(shard=True)``: each rank steps its share of each bucket and sends it to the others; it holds 1/N
      of the optimizer state, and N ranks send no more than with an all-reduce.
    - ``OptimizerInHook(shard=True, interleaved=False)``: the same, but the updates follow the backward and overlap with
      the reductions that are still under way: for networks slower than compute.
    - ``OptimizerInHook(shard=True, overlap=False)``: two phases: backward, then each rank steps its parameters and all
      exchange them; with gradient clipping, GradScaler, manual optimization.

    With ``shard=True`` and ``overlap=True`` gradients go to the owners of their parameters alone, unless a
    communication hook compresses them; ``.grad`` is None after the step then. Sums over more than two ranks are rounded
    in another order than by an all-reduce.

    Args:
        shard: Whether to share parameters and optimizer state among the ranks.
        interleaved: Whether to step each bucket as soon as it is reduced, and not only after the backward.
        shard_buckets: torch's setting; every bucket is shared among all ranks, whether or not it is set.
        overlap: Whether to step while gradients are being reduced; False steps when all have been, in
            ``optimizer_step``.

    Raises:
        TypeError: A setting is not True or False.
        ValueError: Settings contradict each other.

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
class _StepInHook(CommHook):
    """A hook that steps the optimizer behind another hook (None: plain all-reduce).

    Once the parameters have owners, the plain mean is made for those alone. On torch's DDP all phases of a bucket run
    within one call, and parameters get owners when their bucket comes, since its layout is not known before.
    """

    inner: CommHook | None
    settings: OptimizerInHook
    step: Callable[[], ShardedStep | None] = field(repr=False)  # None while gradients are only to be reduced
    backwards: Callable[[], int] = field(repr=False)  # number of synced backwards so far
    had_gradient: Callable[[], bool] = field(default=lambda: True, repr=False)  # of this rank, in this backward
    on_torch_ddp: bool = field(default=False, repr=False)
    # Called with each bucket whose parameters are updated on all ranks.
    bucket_done: Callable[[GradBucket], None] = field(default=lambda bucket: None, repr=False)

    def replicas_differ_from(self) -> int | None:
        """Return what the inner hook says."""
        return first_difference([self.inner])

    def bind(self, context: BindContext) -> BoundHook:
        """Bind the inner hook."""
        return _BoundStep(self, _BoundMean() if self.inner is None else self.inner.bind(context))


class _BoundMean(PlainMean, BoundHook):
    """Plain all-reduce, where a hook is wanted."""


class _BoundStep(BoundHook):
    def __init__(self, declared: _StepInHook, inner: BoundHook) -> None:
        self._inner = inner
        self.name = self._inner.name
        self.takes_divided = self._inner.takes_divided
        self.one_at_a_time = self._inner.one_at_a_time
        self.keeps_state = True  # what was stepped before an error ended the backward is not undone
        self._declared = declared
        self._settings = declared.settings
        self._backward = self._last_index = -1
        self._is_mean = declared.inner is None or declared.inner.is_plain_mean
        self._delayed: list[tuple[GradBucket, list[Tensor], bool]] = []

    def reduce(self, bucket: GradBucket) -> Phases:
        storage, gradients = bucket.buffer(), bucket.gradients()
        step = self._begin_backward(bucket.index())
        if self._declared.on_torch_ddp and step is not None:
            step.assign(bucket.parameters())
        to_owners = step is not None and step.begun and self._is_mean and step.owns_all(bucket.parameters())
        if to_owners:
            assert step is not None
            yield from step.exchange.reduce(bucket)
        else:
            yield from self._reduce_for_all(bucket, storage)
        if step is None or not step.begun:
            return storage
        due = [(bucket, gradients, to_owners)]
        if self._declared.on_torch_ddp and not self._settings.interleaved:
            self._delayed += due
            due, self._delayed = (self._delayed, []) if bucket.is_last() else ([], self._delayed)
        elif not self._settings.interleaved:
            yield requests.EndOfBackward()
        yield requests.InOrder()
        for reduced, its_gradients, uses_up in due:
            stepped = self._step(step, reduced, its_gradients, uses_up)
            yield from step.exchange.send(stepped)
            self._declared.bucket_done(reduced)
        return storage

    def _reduce_for_all(self, bucket: GradBucket, storage: Tensor) -> Generator[requests.Request, Any, None]:
        """Have the inner hook reduce the bucket, and its result in the bucket's own memory."""
        result = yield from phases_of(self._inner, bucket)
        result = bucket.buffer() if result is None else check_result(self.name, bucket, result)
        if result.data_ptr() != storage.data_ptr() or result.dtype != storage.dtype:
            storage.copy_(result.reshape(-1))
        bucket.set_buffer(storage)

    def _begin_backward(self, index: int) -> ShardedStep | None:
        """Begin a step at the first bucket of a backward; return the step."""
        step = self._declared.step()
        if self._backward != self._declared.backwards() or index <= self._last_index:
            self._backward = self._declared.backwards()
            self._delayed = []
            if step is not None:
                step.begin(tentative=not self._declared.had_gradient())
        self._last_index = index
        return step

    def _step(self, step: ShardedStep, bucket: GradBucket, gradients: list[Tensor], uses_up: bool) -> list[Tensor]:
        used = [
            (param, gradient)
            for param, name, gradient in zip(bucket.parameters(), bucket.names, gradients, strict=True)
            if name not in bucket.unused
        ]
        return step.early([param for param, _ in used], [gradient for _, gradient in used], uses_up=uses_up)

    def group_of(self, name: str, param: Tensor) -> Hashable:
        return self._inner.group_of(name, param)

    def stats(self) -> dict[str, Any]:
        return self._inner.stats()

    def rescale(self, factor: float) -> None:
        self._inner.rescale(factor)

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._inner.load_state_dict(state)
