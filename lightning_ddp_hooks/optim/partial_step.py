"""Steps some of an optimizer's parameters, with the optimizer's own ``step``: its groups hold only those meanwhile.

The result is the same if the update of a parameter depends only on that parameter, its state and its group's values.

[Note: one step in several calls] What belongs to the step and not to a parameter (a counter or a schedule in
``param_groups``, a number among the optimizer's attributes) must move on once for each step. So all calls but the last
one leave such values as they found them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ddp_hooks import _compat

_NOTHING: Mapping[Tensor, Tensor] = {}


class PartialStepper:
    """An optimizer that can be stepped in parts, below its step hooks and what a learning rate scheduler put on it.

    Attributes:
        advances: Whether values of its groups, or numbers among its attributes, change by stepping.
        by_element: Positions of the groups whose parameters may be cut: the update of an element depends on it alone.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.advances = True
        self.by_element: frozenset[int] = frozenset()
        self._step = _compat.unhooked_step(optimizer)
        self._lengths: list[int] = []
        self._group_of: dict[Tensor, int] = {}

    def notice_groups(self) -> None:
        """Look for groups that were added; before a step."""
        groups = self.optimizer.param_groups
        lengths = [len(group["params"]) for group in groups]
        if lengths != self._lengths:
            self._lengths = lengths
            self._group_of = {p: position for position, group in enumerate(groups) for p in group["params"]}

    def has(self, param: Tensor) -> bool:
        """Tell whether the parameter is one of the optimizer's."""
        return param in self._group_of

    def is_by_element(self, param: Tensor) -> bool:
        """Tell whether a parameter of the optimizer may be cut."""
        return self._group_of[param] in self.by_element

    def group(self, param: Tensor) -> Mapping[str, Any]:
        """Return the group of a parameter of the optimizer."""
        group: Mapping[str, Any] = self.optimizer.param_groups[self._group_of[param]]
        return group

    @torch.no_grad()
    def run(
        self,
        params: Iterable[Tensor],
        *,
        last: bool,
        arguments: Mapping[str, Any] | None = None,
        stand_ins: Mapping[Tensor, Tensor] = _NOTHING,
    ) -> None:
        """Step some of the optimizer's parameters.

        Args:
            params: The parameters.
            last: See [Note: one step in several calls].
            arguments: Keyword arguments of ``step``.
            stand_ins: For parameters of which only a part is stepped, that part; see [Note: stand-ins].
        """
        groups = self.optimizer.param_groups
        parts: dict[int, list[Tensor]] = {}
        for param in params:
            parts.setdefault(self._group_of[param], []).append(stand_ins.get(param, param))
        positions = range(len(groups)) if last and self.advances else sorted(parts)
        if not positions:
            return
        chosen = [groups[position] for position in positions]
        whole = [group["params"] for group in chosen]
        restore = _restorer(self.optimizer, chosen) if self.advances and not last else None
        try:
            for position, group in zip(positions, chosen, strict=True):
                group["params"] = parts.get(position, [])
            self.optimizer.param_groups = chosen
            for param, part in stand_ins.items():
                _rename(self.optimizer.state, param, part)
            with _compat.span("ldh::optimizer_step"):
                self._step(self.optimizer, **(arguments or {}))
        finally:
            for param, part in stand_ins.items():
                _rename(self.optimizer.state, part, param)
            self.optimizer.param_groups = groups
            for group, every in zip(chosen, whole, strict=True):
                group["params"] = every
        if restore is not None:
            restore()


def _rename(state: dict[Tensor, Any], old: Tensor, new: Tensor) -> None:
    if old in state:
        state[new] = state.pop(old)


def _restorer(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Callable[[], None]:
    """Return what brings back all that groups and optimizer now hold beside parameters."""
    numbers, values = numbers_of(optimizer), [values_of(group) for group in groups]

    def restore() -> None:
        for name in numbers_of(optimizer).keys() - numbers.keys():
            delattr(optimizer, name)
        vars(optimizer).update(numbers)
        for group, before in zip(groups, values, strict=True):
            for name in group.keys() - before.keys() - {"params"}:
                del group[name]
            for name, value in before.items():
                if isinstance(value, Tensor) and isinstance(group[name], Tensor):
                    group[name].copy_(value)  # others may hold the tensor itself, such as a captured graph
                else:
                    group[name] = value

    return restore


def values_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's values without its parameters; tensors are copied."""
    own = {name: value for name, value in group.items() if name != "params"}
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in own.items()}


def numbers_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return those attributes of an optimizer that are numbers, or True or False, and that may matter to its update."""
    numbers = {name: value for name, value in vars(optimizer).items() if isinstance(value, (int, float))}
    numbers.pop(_compat.FUSED_CHECK_FLAG, None)
    return numbers


def evaluate(closure: Callable[[], Any] | None) -> Any:
    """Return the loss of a step's closure, if there is one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def replace_step(optimizer: Optimizer, update: Callable[[Mapping[str, Any]], None]) -> Callable[[], None]:
    """Have ``optimizer.step(closure, **arguments)`` run the closure and then ``update(arguments)``; return an undo.

    Step hooks fire around the whole, once for each step; schedulers of learning rates see that a step was made.
    """

    def step(_: Optimizer, closure: Callable[[], Any] | None = None, **arguments: Any) -> Any:
        loss = evaluate(closure)
        update(arguments)
        return loss

    if not _compat.may_replace_step(optimizer):
        raise ValueError(
            f"`step` of this {type(optimizer).__name__} has been replaced on the object itself, so that parts of it "
            "cannot be stepped: put what it does into a subclass, or into hooks made by `register_step_pre_hook` and "
            "`register_step_post_hook`."
        )
    return _compat.replace_step(optimizer, step)
