"""The separability check: whether an optimizer may be stepped parameter by parameter.

What decides is a trial: two small copies of the optimizer take the same few steps, one on all parameters together and
one on a parameter at a time. Where an optimizer cannot be copied or uses random numbers, a list of names decides.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ddp_hooks.averaging.replicas import optimizer_params
from lightning_ddp_hooks.optim.partial_step import PartialStepper, numbers_of, values_of
from lightning_ddp_hooks.optim.pieces import Piece, cut_state, may_be_cut, stand_in

_STEPS = 6
_GROUPS = 4  # of that many groups two parameters each are tried
_CROSSES_PARAMETERS = {
    *("Prodigy", "ProdigyPlusScheduleFree", "DAdaptAdaGrad", "DAdaptAdam", "DAdaptAdan", "DAdaptLion", "DAdaptSGD"),
    *("DoG", "LDoG", "MADGRAD_DAdapt", "Mechanize"),
}
_TAKES_A_CLOSURE = {"LBFGS", "SAM", "ASAM", "GSAM", "WSAM", "BSAM", "LookSAM"}
_QUANTIZE_STATE = ("bitsandbytes", "torchao")  # by blocks of elements, and not that of small parameters
_WRAPS = {"PostLocalSGDOptimizer", "ZeroRedundancyOptimizer", "ShardedOptimizer", "SWALR", "AveragedModel"}


def check_separable(optimizer: Optimizer, stepper: PartialStepper, *, sharded: bool) -> None:
    """Raise ValueError unless an optimizer can be stepped in parts; set the attributes of ``stepper``.

    ``sharded``: ranks are to hold parts of its state.
    """
    name = type(optimizer).__name__
    if name in _WRAPS or "param_groups" not in vars(optimizer):
        raise ValueError(
            f"{name} wraps another optimizer, and cannot be stepped in parts or sharded: give the inner optimizer."
        )
    if name in _TAKES_A_CLOSURE or _requires_closure(optimizer):
        raise ValueError(
            f"{name} evaluates the loss again within its step, after gradients were reduced: it cannot be stepped in "
            "parts or sharded. Leave out `optimizer_in_hook` (or ShardedOptimizer) for it."
        )
    if sharded and all(callable(getattr(optimizer, method, None)) for method in ("train", "eval")):
        raise ValueError(
            f"{name} has methods `train` and `eval` that change parameters by its state, which no rank has whole when "
            "it is sharded: use `OptimizerInHook(shard=False)`, or the optimizer as it is."
        )
    try:
        crosses, stepper.advances = (True, True) if name in _CROSSES_PARAMETERS else _try_out(optimizer)
        if sharded and not crosses:
            stepper.by_element = _groups_by_element(optimizer, stepper.advances)
    except _NoTrialError:
        if not type(optimizer).__module__.startswith("torch."):
            _warn_untried(name)
        return
    if crosses:
        raise ValueError(
            f"{name} cannot be stepped in parts or sharded: its update of a parameter depends on other parameters (a "
            "norm over all of them, an estimated learning rate, or the like). Leave out `optimizer_in_hook` (or "
            "ShardedOptimizer) for it, or switch off what couples parameters."
        )


class _NoTrialError(Exception):
    """The optimizer cannot be tried out; that says nothing about it."""


@cache
def _warn_untried(name: str) -> None:
    warnings.warn(
        f"{name} could not be tried out on small parameters: stepping it in parts gives the right result only if its "
        "update of a parameter depends on nothing but that parameter, its state and the values of its group.",
        stacklevel=2,
    )


def _requires_closure(optimizer: Optimizer) -> bool:
    closure = inspect.signature(inspect.unwrap(type(optimizer).step)).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def _try_out(optimizer: Optimizer) -> tuple[bool, bool]:
    """Return whether parameters depend on each other, and whether values of the groups advance."""
    with _undisturbed(optimizer):
        whole = _Trial(optimizer)
        if whole.differs_from(_Trial(optimizer, seed=2)):
            raise _NoTrialError  # it uses random numbers
        try:
            apart = _Trial(optimizer, apart=True, advances=whole.advances)
            crosses = whole.moved_otherwise(apart)
            # A value that is only written, such as the rate of the parameter that came last, couples nothing.
            if not crosses and (written := whole.differing_values(apart)):
                crosses = whole.differs_from(_Trial(optimizer, advances=whole.advances, spoils=written))
        except _NoTrialError:
            return True, True
        return crosses, whole.advances


@contextmanager
def _undisturbed(optimizer: Optimizer) -> Iterator[None]:
    """Leave random numbers as they are, and what optimizers warn of unsaid."""
    first = next(optimizer_params(optimizer), None)
    if first is None:
        raise _NoTrialError
    devices, kind = ([], "cuda") if first.is_cpu else ([first.device], first.device.type)
    with torch.random.fork_rng(devices, device_type=kind), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _groups_by_element(optimizer: Optimizer, advances: bool) -> frozenset[int]:
    """Return the positions of the groups in which the update of an element depends on that element alone."""
    if type(optimizer).__module__.startswith(_QUANTIZE_STATE):
        return frozenset()
    by_element: dict[str, bool] = {}  # groups that differ in numbers alone, such as their rates, are alike

    def is_by_element(position: int) -> bool:
        group = optimizer.param_groups[position]
        chosen = {_kind(optimizer, param): param for param in group["params"] if param.numel()}
        values = {name: value for name, value in group.items() if not isinstance(value, (float, Tensor))}
        key = f"{sorted(chosen)} {sorted((name, repr(value)) for name, value in values.items() if name != 'params')}"
        if key not in by_element:
            params = {position: list(chosen.values())}
            try:
                whole = _Trial(optimizer, params=params, advances=advances)
                by_element[key] = not whole.moved_otherwise(
                    _Trial(optimizer, params=params, cut=True, advances=advances)
                )
            except _NoTrialError:
                by_element[key] = False
        return by_element[key]

    with _undisturbed(optimizer):
        return frozenset(filter(is_by_element, range(len(optimizer.param_groups))))


def _kind(optimizer: Optimizer, param: Tensor) -> str:
    """Describe by what an optimizer may tell parameters apart that it updates in different ways."""
    marks = optimizer.state[param].items() if param in optimizer.state else ()
    return f"{min(param.dim(), 2)} {param.dtype} {sorted((k, v) for k, v in marks if isinstance(v, (bool, str)))}"


class _Trial:
    """A small copy of an optimizer after a few steps."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        seed: int = 1,
        params: Mapping[int, Sequence[Tensor]] | None = None,  # to try, by the positions of groups; None for some
        apart: bool = False,
        cut: bool = False,  # in two halves
        advances: bool = True,
        spoils: Set[str] = frozenset(),  # values that are overwritten before each step
    ) -> None:
        try:
            some = _some_params(optimizer) if params is None else params
            clone, small = _small_copy(optimizer, some, in_float32=params is not None)
            self.start = [param.detach().clone() for param in small]
            before = _facts(clone)
            stepper = PartialStepper(clone)
            stepper.advances = advances
            stepper.notice_groups()
            generator = torch.Generator().manual_seed(0)
            torch.manual_seed(seed)
            halves = _halves(clone, small) if cut else []
            for number in range(_STEPS):
                for values in (vars(clone), *clone.param_groups) if spoils else ():
                    for name in values.keys() & spoils:
                        values[name] = 1.0 if values[name] is None else 2.0 * values[name] + 1.0
                for index, param in enumerate(small):
                    # Of different sizes over parameters and steps, so that whatever couples parameters shows.
                    scale = (0.1, 1.0, 1e4)[(index + number) % 3]
                    gradient = torch.randn(param.shape, generator=generator, dtype=torch.float32).mul_(scale)
                    param.grad = gradient.to(param.dtype).to(param.device)
                for param in small if apart else ():
                    stepper.run([param], last=False)
                for half in halves:
                    half.step(stepper, last=half is halves[-1])
                if not halves:
                    stepper.run([] if apart else small, last=True)
            _check_by_element(halves)
        except Exception as error:
            raise _NoTrialError from error
        self.end = [param.detach() for param in small]
        self.values = _facts(clone)
        self.advances = not _same(before, self.values)

    def differs_from(self, other: _Trial) -> bool:
        """Tell whether parameters or values differ by more than rounding."""
        return bool(self.differing_values(other)) or self.moved_otherwise(other)

    def differing_values(self, other: _Trial) -> set[str]:
        """Name the values of groups, and the optimizer's own, that differ."""
        pairs = list(zip(self.values, other.values, strict=True))
        names = {name for mine, theirs in pairs for name in mine.keys() | theirs.keys()}
        return {name for name in names if not all(_same(a.get(name), b.get(name)) for a, b in pairs)}

    def moved_otherwise(self, other: _Trial) -> bool:
        """Tell whether parameters differ by more than rounding."""
        for start, mine, theirs in zip(self.start, self.end, other.end, strict=True):
            moved = (mine - start).abs().max()
            rounding = torch.finfo(mine.real.dtype if mine.is_complex() else mine.dtype).eps * start.abs().max()
            if not (mine - theirs).abs().max() <= 1e-3 * moved + 64 * rounding:
                return True
        return False


class _Half:
    """The first or second part of each parameter of a trial, with its state."""

    def __init__(self, params: Sequence[Tensor], pieces: Sequence[Piece], state: dict[Tensor, Any]) -> None:
        self._pieces = dict(zip(params, pieces, strict=True))
        self.states = {p: cut_state(state[p], p, piece) for p, piece in self._pieces.items() if p in state}

    def step(self, stepper: PartialStepper, *, last: bool) -> None:
        state = stepper.optimizer.state
        for param in self._pieces:
            state.pop(param, None)
        state.update(self.states)
        stand_ins = {param: stand_in(param, piece) for param, piece in self._pieces.items()}
        stepper.run(self._pieces, last=last, stand_ins=stand_ins)
        self.states = {param: state.pop(param) for param in self._pieces if param in state}

    def lengths(self) -> list[int]:
        return [piece.stop - piece.start for piece in self._pieces.values()]


def _halves(clone: Optimizer, params: Sequence[Tensor]) -> list[_Half]:
    if not all(map(may_be_cut, params)):
        raise ValueError("These parameters cannot be cut.")
    middles = [param.numel() // 2 for param in params]
    first = [Piece(0, 0, middle) for middle in middles]
    second = [Piece(1, middle, param.numel()) for param, middle in zip(params, middles, strict=True)]
    return [_Half(params, pieces, clone.state) for pieces in (first, second)]


def _check_by_element(halves: Sequence[_Half]) -> None:
    """Raise ValueError unless the state of a half has a number for each element, or is the same for both halves."""
    for one, other in zip(*(half.states.values() for half in halves), strict=True) if halves else ():
        for name, value in one.items():
            whole = isinstance(value, Tensor) and value.dim() == other[name].dim() == 1
            if not whole and not _same(value, other[name]):
                raise ValueError(f"`{name}` of the optimizer's state is no value for each element.")


def _some_params(optimizer: Optimizer) -> dict[int, list[Tensor]]:
    groups = enumerate(optimizer.param_groups[:_GROUPS])
    return {position: [p for p in group["params"] if p.numel()][:2] for position, group in groups}


def _small_copy(
    optimizer: Optimizer, chosen: Mapping[int, Sequence[Tensor]], *, in_float32: bool = False
) -> tuple[Optimizer, list[Tensor]]:
    """Copy an optimizer with small parameters in the place of the chosen ones of its own, and without state.

    ``in_float32`` is for those of half precision, whose rounding hides a lot.
    """
    generator = torch.Generator().manual_seed(1)
    nothing = torch.nn.Parameter(torch.zeros(0, dtype=torch.float32))
    memo: dict[int, Any] = {id(param): nothing for param in optimizer_params(optimizer)}
    groups: list[dict[str, Any]] = []
    params: list[Tensor] = []
    for position, its_params in chosen.items():
        group, small = optimizer.param_groups[position], []
        for param in its_params:
            shape = [min(size, 3) for size in param.shape]
            values = torch.randn(shape, generator=generator, dtype=torch.float32).mul_(1e-2)
            dtype = torch.float32 if in_float32 and param.dtype in (torch.float16, torch.bfloat16) else param.dtype
            small.append(torch.nn.Parameter(values.to(dtype).to(param.device)))
            memo[id(param)] = small[-1]
        if small:
            own = {name: copy.deepcopy(value, memo) for name, value in group.items() if name != "params"}
            if isinstance(own.get("lr"), (int, float)) and own["lr"] == 0:  # a warm-up begins there
                own["lr"] = 1e-2
            groups.append({**own, "params": small})
            params += small
    clone = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks"):
            vars(clone)[name] = OrderedDict()
        elif name not in ("state", "param_groups", "step"):
            vars(clone)[name] = copy.deepcopy(value, memo)
    vars(clone)["state"] = defaultdict(dict)
    vars(clone)["param_groups"] = groups
    states: dict[Any, dict[str, Any]] = dict(optimizer.state)
    for param, entries in states.items():  # some optimizers make their state when they are made
        if not isinstance(param, Tensor):
            clone.state[param] = copy.deepcopy(entries)
        elif (copied := memo.get(id(param), nothing)) is not nothing:
            clone.state[copied] = {
                name: torch.zeros_like(copied)
                if isinstance(value, Tensor) and value.shape == param.shape and value.dim()
                else copy.deepcopy(value)
                for name, value in entries.items()
            }
    return clone, params


def _facts(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [numbers_of(optimizer), *(values_of(group) for group in optimizer.param_groups)]


def _same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and bool(torch.allclose(one, other, rtol=1e-5, equal_nan=True))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= 1e-6 * max(abs(one), abs(other)) or one != one
    try:
        return bool(one == other)
    except Exception:
        return True
