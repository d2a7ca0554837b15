"""Hooks made of hooks: by parameter, and by training step."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

from torch import Tensor

from lightning_ddp_hooks.hooks.allreduce import AllReduce
from lightning_ddp_hooks.hooks.cast import bind_for_wire
from lightning_ddp_hooks.hooks.contract import (
    BindContext,
    BoundHook,
    CommHook,
    Phases,
    Waitable,
    hook_name,
    is_done,
    phases_of,
)
from lightning_ddp_hooks.hooks.registry import HookLike, resolve_hook
from lightning_ddp_hooks.hooks.state import tagged, untagged
from lightning_ddp_hooks.hooks.values import require_types
from lightning_ddp_hooks.reducer.bucket import Bucket, GradBucket
from lightning_ddp_hooks.reducer.layout import BucketLayout


@dataclass(frozen=True)
class Rule:
    """A hook for the parameters that meet all the conditions given.

    Args:
        hook: a short name, a `CommHook`, a pair ``(state, hook)``, or None for the mean.
        pattern: what the name has to match, as a file name would (``"*.embed.*"``).
        min_numel: how many elements it must have at least.
        ndim: how many dimensions it must have.
    """

    hook: HookLike | None
    # Not by `KW_ONLY`, which Python 3.10 takes for a type that it cannot resolve, and so command lines lose all others.
    pattern: str | None = field(default=None, kw_only=True)
    min_numel: int | None = field(default=None, kw_only=True)
    ndim: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Check that the hook is one, and that something is asked for."""
        require_types(self, whole=("min_numel", "ndim"))
        if not isinstance(self.pattern, (str, type(None))):
            raise TypeError(f"Expected a text for `pattern`, got {self.pattern!r}.")
        resolve_hook(self.hook)
        if self.pattern is None and self.min_numel is None and self.ndim is None:
            raise ValueError(
                "Expected a rule to have a condition (`pattern`, `min_numel` or `ndim`); a hook for all other "
                "parameters is the `default` of PerParameter."
            )

    def matches(self, name: str, param: Tensor) -> bool:
        """Tell whether the rule is for this parameter."""
        return (
            (self.pattern is None or fnmatchcase(name, self.pattern))
            and (self.min_numel is None or param.numel() >= self.min_numel)
            and (self.ndim is None or param.dim() == self.ndim)
        )

    def text(self) -> str:
        """Name the rule in a message by what was asked for, without the hook's settings."""
        hook = self.hook[1] if isinstance(self.hook, (tuple, list)) else self.hook
        shown = repr(hook) if hook is None or isinstance(hook, str) else hook_name(hook)
        asked = ((name, getattr(self, name)) for name in ("pattern", "min_numel", "ndim"))
        return f"Rule({', '.join([shown, *(f'{name}={value!r}' for name, value in asked if value is not None)])})"


@dataclass(frozen=True)
class PerParameter(CommHook):
    """Different hooks for different parameters: matrices, norms, embeddings.

    The first rule that matches a parameter has it. Parameters of different rules lie in different buckets, so nothing
    is copied; every rule adds at least one bucket, and so at least one collective.

    Args:
        rules: asked in order.
        default: the hook for what no rule matches; None for the mean.

    Raises:
        TypeError: something that is no rule, or no hook.

    Example:
        >>> PerParameter([Rule(PowerSGD(rank=4), ndim=2, min_numel=65536), Rule("bf16", pattern="*.embed.*")])
    """

    rules: Sequence[Rule]
    default: HookLike | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Check rules and default."""
        if not isinstance(self.rules, Sequence):
            raise TypeError(f"Expected a list of Rule objects for `rules`, got {type(self.rules).__name__}.")
        for rule in self.rules:
            if not isinstance(rule, Rule):
                raise TypeError(f"Expected `rules` to consist of Rule objects, got {type(rule).__name__}.")
        resolve_hook(self.default)

    def inner_hooks(self) -> Sequence[HookLike | None]:
        """Return the hooks of the rules, and the default."""
        return [*(rule.hook for rule in self.rules), self.default]

    def bind(self, context: BindContext) -> BoundHook:
        """Bind the hook of each rule for its parameters."""
        return _BoundPerParameter(self, context)


class _BoundPerParameter(BoundHook):
    name = "PerParameter"
    casts_itself = True

    def __init__(self, config: PerParameter, context: BindContext) -> None:
        self._rules = list(config.rules)
        named = list(zip(context.names, context.params, strict=True))
        self._children: list[BoundHook] = []
        for position, hook in enumerate([*(rule.hook for rule in self._rules), config.default]):
            its_own = [(name, param) for name, param in named if self._rule_of(name, param) == position]
            if not its_own and position < len(self._rules) and context.rank == 0:
                rule = self._rules[position].text()
                warnings.warn(
                    f"No trainable parameter is left for rule {position} of PerParameter, {rule}.",
                    stacklevel=2,
                )
            part = replace(context, names=[name for name, _ in its_own], params=[param for _, param in its_own])
            self._children.append(bind_for_wire(resolve_hook(hook) or AllReduce(), part))
        self.one_at_a_time = any(child.one_at_a_time for child in self._children)
        self._parts: dict[int, tuple[tuple[str, ...], list[_Part]]] = {}

    def _rule_of(self, name: str, param: Tensor) -> int:
        """Return the position of the first rule that matches, or that of the default."""
        return next((n for n, rule in enumerate(self._rules) if rule.matches(name, param)), len(self._rules))

    def group_of(self, name: str, param: Tensor) -> Hashable:
        position = self._rule_of(name, param)
        return position, self._children[position].group_of(name, param)

    def reduce(self, bucket: GradBucket) -> Phases:
        known = self._parts.get(bucket.index())
        if known is None or not (known[0] is bucket.names or known[0] == bucket.names):
            known = self._parts[bucket.index()] = (bucket.names, self._split(bucket))
        parts = known[1]
        if len(parts) == 1:
            return (yield from phases_of(self._children[parts[0].child], bucket))
        return (yield from self._reduce_parts(bucket, parts))

    def _split(self, bucket: GradBucket) -> list[_Part]:
        params = bucket.parameters()
        owners = [self._rule_of(name, param) for name, param in zip(bucket.names, params, strict=True)]
        return [
            _Part(child, [n for n, owner in enumerate(owners) if owner == child], params)
            for child in sorted(set(owners))
        ]

    def _reduce_parts(self, bucket: GradBucket, parts: Sequence[_Part]) -> Phases:
        """Reduce a bucket whose parameters have different hooks, as torch's DDP makes them: in copies, side by side."""
        gradients = bucket.gradients()
        running: list[tuple[_Part, GradBucket, Phases]] = []
        for part in parts:
            storage = part.storage(bucket.buffer())
            for view, position in zip(storage.views, part.positions, strict=True):
                view.copy_(gradients[position])
            names = tuple(bucket.names[position] for position in part.positions)
            view_of_part = GradBucket(storage, bucket.index(), bucket.is_last(), names, bucket.divisor)
            view_of_part.unused = bucket.unused
            running.append((part, view_of_part, phases_of(self._children[part.child], view_of_part)))
        while running:
            handles: list[Waitable] = []
            going_on: list[tuple[_Part, GradBucket, Phases]] = []
            for part, its_bucket, phases in running:
                try:
                    handles.append(next(phases))
                    going_on.append((part, its_bucket, phases))
                except StopIteration as end:
                    part.finish(its_bucket, end.value, gradients)
            running = going_on
            if handles:
                yield _All(handles)
        return None

    def stats(self) -> dict[str, Any]:
        return {f"{n} {child.name}": child.stats() for n, child in enumerate(self._children)}

    def rescale(self, factor: float) -> None:
        for child in self._children:
            child.rescale(factor)

    def state_dict(self) -> dict[str, Any]:
        return tagged(self.name, {"hooks": [child.state_dict() for child in self._children]})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _load_children(self.name, self._children, state)


class _Part:
    """The parameters of a bucket that one hook has, with memory for a copy of their gradients."""

    def __init__(self, child: int, positions: list[int], params: Sequence[Tensor]) -> None:
        self.child = child
        self.positions = positions
        self._params = [params[position] for position in positions]
        self._storage: Bucket | None = None

    def storage(self, like: Tensor) -> Bucket:
        """Return the memory, made once."""
        if self._storage is None:
            layout = BucketLayout.build(range(len(self._params)), self._params)
            self._storage = Bucket(replace(layout, dtype=like.dtype), self._params)
        return self._storage

    def finish(self, bucket: GradBucket, result: Tensor | None, gradients: Sequence[Tensor]) -> None:
        """Copy the reduced gradients back."""
        if result is not None:
            bucket.set_buffer(result.view(-1))
        for gradient, position in zip(bucket.gradients(), self.positions, strict=True):
            gradients[position].copy_(gradient)


class _All:
    """Several collectives in flight, as one."""

    def __init__(self, handles: Sequence[Waitable]) -> None:
        self._handles = handles

    def done(self) -> bool:
        return all(is_done(handle) for handle in self._handles)

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()


@dataclass(frozen=True)
class Stage:
    """A hook and the training step from which it is used.

    Args:
        step: the first training step of the stage.
        hook: a short name, a `CommHook`, a pair ``(state, hook)``, or None for the mean.
    """

    step: int
    hook: HookLike | None

    def __post_init__(self) -> None:
        """Check both."""
        require_types(self, whole=("step",))
        if self.step < 0:
            raise ValueError(f"Expected `step` of at least 0, got {self.step}.")
        resolve_hook(self.hook)


@dataclass(frozen=True)
class Schedule(CommHook):
    """Different hooks at different times: exact while the model is young, compressed later.

    Steps are absolute: a hook's own ``start_iter`` counts from the beginning of training, not of its stage. What a hook
    with error feedback has not sent when its stage ends stays with it, and is sent if its turn comes again.

    Args:
        stages: by step, ascending; before the first one the mean is exact.

    Raises:
        TypeError: something that is no stage, or no hook.
        ValueError: no stage, or steps that do not ascend.

    Example:
        >>> Schedule([Stage(0, "bf16"), Stage(1000, PowerSGD(rank=2, start_iter=0))])
    """

    stages: Sequence[Stage]

    def __post_init__(self) -> None:
        """Check the stages."""
        if not isinstance(self.stages, Sequence):
            raise TypeError(f"Expected a list of Stage objects for `stages`, got {type(self.stages).__name__}.")
        for stage in self.stages:
            if not isinstance(stage, Stage):
                raise TypeError(f"Expected `stages` to consist of Stage objects, got {type(stage).__name__}.")
        steps = [stage.step for stage in self.stages]
        if not steps or any(later <= earlier for earlier, later in pairwise(steps)):
            raise ValueError(f"Expected one or more `stages` with ascending steps, got steps {steps}.")

    def inner_hooks(self) -> Sequence[HookLike | None]:
        """Return the hooks of the stages."""
        return [stage.hook for stage in self.stages]

    def bind(self, context: BindContext) -> BoundHook:
        """Bind the hooks of all stages."""
        return _BoundSchedule(self, context)


class _BoundSchedule(BoundHook):
    name = "Schedule"
    casts_itself = True

    def __init__(self, config: Schedule, context: BindContext) -> None:
        stages = list(config.stages)
        if stages[0].step > 0:
            stages.insert(0, Stage(0, None))
        self._first_steps = [stage.step for stage in stages]
        self._children = [bind_for_wire(resolve_hook(stage.hook) or AllReduce(), context) for stage in stages]
        self.one_at_a_time = any(child.one_at_a_time for child in self._children)
        self._step = context.step

    def _now(self) -> BoundHook:
        step = self._step()
        return self._children[max(n for n, first in enumerate(self._first_steps) if first <= step)]

    def group_of(self, name: str, param: Tensor) -> Hashable:
        # Buckets are laid out once, so they serve all stages.
        keys = tuple(child.group_of(name, param) for child in self._children)
        return keys if any(key is not None for key in keys) else None

    def reduce(self, bucket: GradBucket) -> Phases:
        return (yield from phases_of(self._now(), bucket))

    def stats(self) -> dict[str, Any]:
        return {f"{n} {child.name}": child.stats() for n, child in enumerate(self._children)}

    def rescale(self, factor: float) -> None:
        for child in self._children:
            child.rescale(factor)

    def state_dict(self) -> dict[str, Any]:
        return tagged(self.name, {"hooks": [child.state_dict() for child in self._children]})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _load_children(self.name, self._children, state)


def _load_children(name: str, children: Sequence[BoundHook], state: Mapping[str, Any]) -> None:
    if not state:
        return
    states = untagged(name, state)["hooks"]
    if len(states) != len(children):
        raise ValueError(f"Expected the state of {len(children)} hooks of {name}, found {len(states)}.")
    for child, its_state in zip(children, states, strict=True):
        child.load_state_dict(its_state)
