"""Hooks made of hooks: by parameter, and by training step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Generator, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

from torch import Tensor

from lightning_ddp_hooks.hooks.allreduce import AllReduce
from lightning_ddp_hooks.hooks.cast import bind_with_cast
from lightning_ddp_hooks.hooks.contract import (
    BindContext,
    BoundHook,
    CommHook,
    Phases,
    hook_name,
    phases_of,
    require_types,
)
from lightning_ddp_hooks.hooks.registry import HookLike, first_difference, resolve_hook
from lightning_ddp_hooks.hooks.state import tagged, untagged
from lightning_ddp_hooks.hooks.workspace import PerBucket
from lightning_ddp_hooks.reducer import requests
from lightning_ddp_hooks.reducer.bucket import Bucket, GradBucket
from lightning_ddp_hooks.reducer.layout import BucketLayout


@dataclass(frozen=True)
class Rule:
    """A hook for the parameters that meet all the conditions given.

    Args:
        hook: A short name, a `CommHook`, a pair ``(state, hook)``, or None for the mean.
        pattern: Pattern that the name has to match, as a file name would (``"*.embed.*"``).
        min_numel: Least number of elements.
        ndim: Number of dimensions.
    """

    hook: HookLike | None
    # Not by `KW_ONLY`, which Python 3.10 takes for a type that it cannot resolve, and so command lines lose all others.
    pattern: str | None = field(default=None, kw_only=True)
    min_numel: int | None = field(default=None, kw_only=True)
    ndim: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
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
        named = self.pattern is None or fnmatchcase(name, self.pattern)
        large = self.min_numel is None or param.numel() >= self.min_numel
        return named and large and (self.ndim is None or param.dim() == self.ndim)

    def text(self) -> str:
        """Name the rule in a message, without the hook's settings."""
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
        rules: Rules, asked in order.
        default: Hook for what no rule matches; None for the mean.

    Raises:
        TypeError: Something that is no rule, or no hook.

    Example:
        >>> PerParameter([Rule(PowerSGD(rank=4), ndim=2, min_numel=65536), Rule("bf16", pattern="*.embed.*")])
    """

    rules: Sequence[Rule]
    default: HookLike | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.rules, Sequence):
            raise TypeError(f"Expected a list of Rule objects for `rules`, got {type(self.rules).__name__}.")
        for rule in self.rules:
            if not isinstance(rule, Rule):
                raise TypeError(f"Expected `rules` to consist of Rule objects, got {type(rule).__name__}.")
        resolve_hook(self.default)

    def inner_hooks(self) -> Sequence[HookLike | None]:
        """Return the hooks of the rules, and the default."""
        return [*(rule.hook for rule in self.rules), self.default]

    def replicas_differ_from(self) -> int | None:
        """Return the least of what the hooks say."""
        return first_difference(self.inner_hooks())

    def bind(self, context: BindContext) -> BoundHook:
        """Bind the hook of each rule for its parameters."""
        return _BoundPerParameter(self, context)


class _Composed(BoundHook):
    """Several bound hooks, with one state."""

    casts_itself = True

    def __init__(self, children: Sequence[BoundHook]) -> None:
        self._children = children
        self.one_at_a_time = any(child.one_at_a_time for child in children)
        self.keeps_state = any(child.keeps_state for child in children)

    def stats(self) -> dict[str, Any]:
        return {f"{n} {child.name}": child.stats() for n, child in enumerate(self._children)}

    def rescale(self, factor: float) -> None:
        for child in self._children:
            child.rescale(factor)

    def state_dict(self) -> dict[str, Any]:
        return tagged(self.name, {"hooks": [child.state_dict() for child in self._children]})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not state:
            return
        states = untagged(self.name, state)["hooks"]
        if len(states) != len(self._children):
            raise ValueError(f"Expected the state of {len(self._children)} hooks of {self.name}, found {len(states)}.")
        for child, its_state in zip(self._children, states, strict=True):
            child.load_state_dict(its_state)


class _BoundPerParameter(_Composed):
    name = "PerParameter"

    def __init__(self, config: PerParameter, context: BindContext) -> None:
        self._rules = list(config.rules)
        named = list(zip(context.names, context.params, strict=True))
        children: list[BoundHook] = []
        for position, hook in enumerate(config.inner_hooks()):
            its_own = [(name, param) for name, param in named if self._rule_of(name, param) == position]
            if not its_own and position < len(self._rules) and context.rank == 0:
                rule = f"rule {position} of PerParameter, {self._rules[position].text()}"
                warnings.warn(f"No trainable parameter is left for {rule}.", stacklevel=2)
            part = replace(context, names=[name for name, _ in its_own], params=[param for _, param in its_own])
            children.append(bind_with_cast(resolve_hook(hook) or AllReduce(), part))
        super().__init__(children)
        self._parts = PerBucket(self._split)

    def _rule_of(self, name: str, param: Tensor) -> int:
        """Return the position of the first rule that matches, or that of the default."""
        return next((n for n, rule in enumerate(self._rules) if rule.matches(name, param)), len(self._rules))

    def group_of(self, name: str, param: Tensor) -> Hashable:
        position = self._rule_of(name, param)
        return position, self._children[position].group_of(name, param)

    def reduce(self, bucket: GradBucket) -> Phases:
        parts = self._parts.of(bucket)
        if len(parts) == 1:
            return (yield from phases_of(self._children[parts[0].child], bucket))
        gradients = bucket.gradients()
        yield from _side_by_side([part.reduce(self._children[part.child], bucket, gradients) for part in parts])
        return None

    def _split(self, bucket: GradBucket) -> list[_Part]:
        params = bucket.parameters()
        owners = [self._rule_of(name, param) for name, param in zip(bucket.names, params, strict=True)]
        positions = {child: [n for n, owner in enumerate(owners) if owner == child] for child in sorted(set(owners))}
        return [_Part(child, its_own, params) for child, its_own in positions.items()]


class _Part:
    """Parameters of a bucket that one hook has, where several share it, as on torch's DDP; works on copies."""

    def __init__(self, child: int, positions: list[int], params: Sequence[Tensor]) -> None:
        self.child = child
        self._positions = positions
        self._params = [params[position] for position in positions]
        self._storage: Bucket | None = None

    def reduce(self, hook: BoundHook, bucket: GradBucket, gradients: Sequence[Tensor]) -> Phases:
        """Run the part's hook on a bucket with copies of its gradients, and copy the reduced ones back."""
        if self._storage is None:
            layout, buffer = BucketLayout.build(range(len(self._params)), self._params), bucket.buffer()
            self._storage = Bucket(replace(layout, dtype=buffer.dtype, device=buffer.device), self._params)
        for view, position in zip(self._storage.views, self._positions, strict=True):
            view.copy_(gradients[position])
        names = tuple(bucket.names[position] for position in self._positions)
        part = GradBucket(self._storage, bucket.index(), bucket.is_last(), names, bucket.divisor)
        part.unused = bucket.unused
        result = yield from phases_of(hook, part)
        if result is not None:
            part.set_buffer(result.view(-1))
        for gradient, position in zip(part.gradients(), self._positions, strict=True):
            gradients[position].copy_(gradient)
        return None


def _side_by_side(running: Sequence[Phases]) -> Generator[requests.Request, Any, None]:
    """Run several generators of requests, each one's next request together with the others'."""
    places = (requests.InOrder, requests.EndOfBackward)  # in the order of buckets, which all parts share
    answers: dict[int, Any] = dict.fromkeys(range(len(running)))
    while answers:
        asked: dict[int, requests.Request] = {}
        for n, answer in answers.items():
            with suppress(StopIteration):
                asked[n] = running[n].send(answer)
        answers = dict.fromkeys(asked)
        for kind in places:
            if any(isinstance(request, kind) for request in asked.values()):
                yield kind()
        together = {n: request for n, request in asked.items() if not isinstance(request, places)}
        if together:
            answers.update(zip(together, (yield requests.Together(list(together.values()))), strict=True))


@dataclass(frozen=True)
class Stage:
    """A hook and the training step from which it is used.

    Args:
        step: First training step of the stage.
        hook: A short name, a `CommHook`, a pair ``(state, hook)``, or None for the mean.
    """

    step: int
    hook: HookLike | None

    def __post_init__(self) -> None:
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
        stages: Stages by step, ascending; before the first one the mean is exact.

    Raises:
        TypeError: Something that is no stage, or no hook.
        ValueError: No stage, or steps that do not ascend.

    Example:
        >>> Schedule([Stage(0, "bf16"), Stage(1000, PowerSGD(rank=2, start_iter=0))])
    """

    stages: Sequence[Stage]

    def __post_init__(self) -> None:
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

    def replicas_differ_from(self) -> int | None:
        """Return the first step at which the hook of a stage, while it lasts, says so."""
        ends = [*(stage.step for stage in self.stages[1:]), math.inf]
        starts = [
            max(stage.step, step)
            for stage, end in zip(self.stages, ends, strict=True)
            if (step := first_difference([stage.hook])) is not None and step < end
        ]
        return min(starts, default=None)

    def bind(self, context: BindContext) -> BoundHook:
        """Bind the hooks of all stages."""
        return _BoundSchedule(self, context)


class _BoundSchedule(_Composed):
    name = "Schedule"

    def __init__(self, config: Schedule, context: BindContext) -> None:
        stages = list(config.stages)
        if stages[0].step > 0:
            stages.insert(0, Stage(0, None))
        super().__init__([bind_with_cast(resolve_hook(stage.hook) or AllReduce(), context) for stage in stages])
        self._first_steps = [stage.step for stage in stages]
        self._step = context.step

    def group_of(self, name: str, param: Tensor) -> Hashable:
        # Buckets are laid out once, so they serve all stages.
        keys = tuple(child.group_of(name, param) for child in self._children)
        return keys if any(key is not None for key in keys) else None

    def reduce(self, bucket: GradBucket) -> Phases:
        step = self._step()
        now = max(n for n, first in enumerate(self._first_steps) if first <= step)
        return (yield from phases_of(self._children[now], bucket))
