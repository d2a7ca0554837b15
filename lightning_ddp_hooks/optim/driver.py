"""Drives sharded or overlapped optimizers through a training run; what a strategy calls, and when.

    setup             OptimizerDriver(...); hook(inner) is what the reducer runs; attach(optimizers) once they exist
    each step         with stepping(): the closure, its backward with overlapping(); then `optimizer.step` goes on
    no loss anywhere  rollback()
    checkpoint        state_dict(optimizer), load_state_dict(optimizer, state)
    end               close()

All calls are made on all ranks alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.hooks.contract import CommHook
from lightning_ddp_hooks.optim.in_hook import OptimizerInHook, _StepInHook
from lightning_ddp_hooks.optim.partial_step import replace_step
from lightning_ddp_hooks.optim.sharded_step import ShardedStep, StateDict
from lightning_ddp_hooks.optim.sharding import ShardAssignment, bucket_params, refuse_diverging
from lightning_ddp_hooks.reducer.module_sync import check_same_on_all_ranks
from lightning_ddp_hooks.reducer.reducer import Reducer


class OptimizerDriver:
    """The optimizers of a training run, stepped in the hook or in two phases.

    Parameters are exchanged on the reducer's group between backwards. ``has_hook``: whether `hook` has been called.
    """

    def __init__(self, settings: OptimizerInHook, reducer: Reducer) -> None:
        self.settings = settings
        self._reducer: Reducer | None = reducer
        self._parent = reducer.parent_group
        self._control_group: comm.ProcessGroup | None = reducer.control_group
        sizes = (reducer.world_size, comm.rank(reducer.group)) if settings.shard else ()
        self._shards = ShardAssignment(*sizes)
        self._steps: dict[int, ShardedStep] = {}
        self._undo = ExitStack()
        self._stepping = False
        self._overlapping = False
        self.has_hook = False

    def hook(self, inner: CommHook | None) -> CommHook | None:
        """Return the hook for the reducer: ``inner`` (None: the mean), with the step behind it if steps overlap."""
        self.has_hook = True
        if self.settings.shard:
            refuse_diverging(inner)
        if not self.settings.overlap:
            return inner
        reducer = self._reducer
        assert reducer is not None
        return _StepInHook(
            inner=inner,
            settings=self.settings,
            step=lambda: next(iter(self._steps.values()), None) if self._overlapping else None,
            backwards=lambda: reducer.synced_backwards,
            had_gradient=reducer.had_gradient,
        )

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Take over the steps of the optimizers; the objects stay what they are."""
        if self.settings.overlap and len(optimizers) != 1:
            raise ValueError(
                f"`OptimizerInHook` steps one optimizer while gradients come, but there are {len(optimizers)}: use "
                "`OptimizerInHook(shard=True, overlap=False)`."
            )
        group = None
        if self._reducer is not None and self.settings.shard:
            group = self._reducer.group
            names = dict(zip(map(id, self._reducer.params), self._reducer.names, strict=True))
            texts = {f"optimizer {n}": _describe(optimizer, names) for n, optimizer in enumerate(optimizers)}
            check_same_on_all_ranks([], texts, self._reducer.control_group)
        self._undo.close()
        self._steps.clear()
        for optimizer in optimizers:
            step = ShardedStep(optimizer, self._shards, group, self._buckets)
            self._undo.callback(replace_step(optimizer, partial(self._end_step, step)))
            self._steps[id(optimizer)] = step

    @property
    def attached(self) -> bool:
        """Whether it has taken over the steps of some optimizers."""
        return bool(self._steps) and self._reducer is not None

    @property
    def begun(self) -> bool:
        """Whether a step has begun while gradients came, which ``optimizer.step()`` has yet to end."""
        return any(step.begun for step in self._steps.values())

    def _end_step(self, step: ShardedStep, arguments: Mapping[str, Any]) -> None:
        try:
            step.rest(arguments)
        except BaseException:
            if self._reducer is not None:
                self._reducer.aborted_work = True  # broadcasts may be in flight on its group
            raise

    def _buckets(self) -> Sequence[Sequence[Tensor]]:
        """Return the parameters of each bucket, if buckets are what is stepped."""
        if self._reducer is None or not self.settings.overlap:
            return ()
        return bucket_params(self._reducer)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Surround ``optimizer.step(closure)``: backwards under this context lead to a step."""
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    @contextmanager
    def overlapping(self) -> Iterator[None]:
        """Surround the backward of the loss; others, such as those in ``training_step``, step nothing."""
        self._overlapping = self._stepping
        try:
            yield
        finally:
            self._overlapping = False

    def rollback(self) -> None:
        """Undo the steps that were made early: no rank had a loss."""
        for step in self._steps.values():
            step.rollback()

    def state_dict(self, optimizer: Optimizer) -> StateDict:
        """Return an optimizer's state in plain form, whole on the first rank; collective, also after `close`."""
        step = self._steps.get(id(optimizer))
        if step is None:
            return optimizer.state_dict()
        group = self._control_group or comm.new_group(self._parent, cpu=True)
        state = step.state_dict(group)
        if self._control_group is None:
            comm.destroy_group(group)
        return state

    def load_state_dict(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Take up a state in plain form, whatever the number of ranks that it comes from; keep this rank's part."""
        step = self._steps.get(id(optimizer))
        if step is None:
            optimizer.load_state_dict(dict(state))
        else:
            step.load_state_dict(state)

    def close(self) -> None:
        """Give the optimizers their own ``step`` back; `state_dict` works on."""
        self._undo.close()
        for step in self._steps.values():
            step.close()
        self._reducer = self._control_group = None


def _describe(optimizer: Optimizer, names: Mapping[int, str]) -> str:
    """Describe an optimizer, alike on ranks that have the same one; ``names`` are those of parameters, by id."""
    groups = []
    for group in optimizer.param_groups:
        params = [names.get(id(param), f"{tuple(param.shape)} {param.dtype}") for param in group["params"]]
        values = {name: _plain(value) for name, value in group.items() if name not in ("params", "param_names")}
        groups.append((params, sorted(values.items())))
    return f"{type(optimizer).__name__} {groups}"


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value if isinstance(value, (int, float, str, bool, type(None))) else type(value).__name__
