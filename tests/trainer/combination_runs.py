"""Fits with any combination of settings, and what each is compared with.

Of a combination that works:

* *replicas*: all ranks end with the same model, to the last bit, unless the hook leaves them different for good;
* *twin*: settings that are to change nothing (views, engine, where the optimizer is stepped, checks) change nothing, to
  the last bit: the same run without them ends with the same model; this where the next comparison is not exact;
* *single process*: one process that trains on the union of each step's batches ends with the same model, up to the
  rounding of float64; or, under a setting that rounds, compresses or averages otherwise, near it: within a fraction
  (`Setting.changes`) of the way that the parameters have gone.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from ranks import run_ranks
from settings import Combination, Setting, merged, scaled
from torch import Tensor, nn
from trainer_runs import EXACT, State, assert_close, assert_same, make_module, make_trainer, rank, state_of
from uneven_runs import Shard, UnevenNet, UnionOfShards

from lightning_ddp_hooks.callbacks import UnevenInputs
from lightning_ddp_hooks.hooks import Noop, PostLocalSGD

STEPS = 5
SHORTEST = 3
"""Whole steps of the last rank where inputs are uneven."""
QUICK = {"bucket_cap_mb": 0.001, "first_bucket_mb": 0.0005, "failure_timeout": None}
"""Several buckets, and no thread that looks after the other ranks."""


@dataclass(frozen=True)
class Training:
    """What the module and its data do.

    Attributes:
        world_size: of the run that is tested.
        uneven: whether the last rank runs out of data before the others.
        stop: whether training ends there.
        divisor: what a single process has to take the mean over.
        accumulate: micro-batches of a step.
        exact_windows: whether a step is the mean over what it holds, however many micro-batches that is.
        manual: whether optimization is manual.
        leaves_out: whether a layer is unused in every second step.
        lacks_loss: whether the last rank has no loss in step 1, which all skip.
    """

    world_size: int
    uneven: bool
    stop: bool
    divisor: str
    accumulate: int
    exact_windows: bool
    manual: bool
    leaves_out: bool
    lacks_loss: bool


class Module(UnevenNet):
    """Does what `Training` says, on ranks, or in one process on the union of their batches."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        self.does = training
        self.automatic_optimization = not training.manual
        self.branch = nn.Linear(8, 1)

    def train_dataloader(self) -> Any:
        does = self.does
        counts = [STEPS * does.accumulate] * does.world_size
        if does.uneven:  # with accumulation in the middle of a step
            counts[-1] = SHORTEST * does.accumulate + does.accumulate // 2
        shards = [Shard(owner, count, (3, 2)) for owner, count in enumerate(counts)]
        if "RANK" in os.environ:
            return shards[rank()]
        union = UnionOfShards(shards, does.stop)
        for index, step in enumerate(union.steps):
            step["index"] = index
        union.steps = [step for step in union.steps if not (does.lacks_loss and step["index"] // does.accumulate == 1)]
        if does.exact_windows:
            windows = [union.steps[start : start + does.accumulate] for start in range(0, len(union), does.accumulate)]
            union.steps = [
                {**steps[0], "parts": [part for step in steps for part in step["parts"]], "count": len(steps)}
                for steps in windows
            ]
        return union

    def mean_loss(self, batch: Any, step: int) -> Tensor:
        def loss(part: Any) -> Tensor:
            part = [tensor.to(self.branch.weight.dtype) for tensor in part]
            value = self.loss(part)
            unused = self.does.leaves_out and step % 2
            return value if unused else value + self.branch(part[0]).square().mean()

        if isinstance(batch, dict) and self.does.divisor == "world":
            return sum(map(loss, batch["parts"])) / (self.does.world_size * batch.get("count", 1))
        return self.over_batches(loss, batch, self.does.divisor)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        does = self.does
        step = (batch["index"] if isinstance(batch, dict) else batch_idx) // does.accumulate
        if does.lacks_loss and step == 1 and rank() == does.world_size - 1:
            return None
        loss = self.mean_loss(batch, step)
        if not does.manual:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None


def training_of(combination: Combination, world_size: int) -> Training:
    strategy, inputs = merged(combination, "strategy"), merged(combination, "inputs")
    trainer = merged(combination, "trainer")
    by_samples = "samples" in (strategy.get("gradient_weighting"), inputs.get("divisor"))
    return Training(
        world_size=world_size,
        uneven=inputs.get("policy") in ("join", "stop"),
        stop=inputs.get("policy") == "stop",
        divisor="samples" if by_samples else inputs.get("divisor", "active"),
        accumulate=trainer.get("accumulate_grad_batches", 1),
        exact_windows=by_samples or strategy.get("accumulation") == "exact",
        manual="manual" in merged(combination, "module"),
        leaves_out=strategy.get("find_unused_parameters", False),
        lacks_loss=strategy.get("skip_missing_loss") == "all",
    )


def _options(combination: Sequence[Setting]) -> dict[str, Any]:
    options = {**EXACT, "max_epochs": 1, **merged(combination, "trainer")}
    if options.pop("scaler", False):
        del options["precision"]
        options |= scaled()
    return options


def fit_combination(combination: Combination, world_size: int) -> State:
    """Fit on this rank."""
    uneven = any(setting.inputs is not None for setting in combination)
    callbacks = [UnevenInputs(**merged(combination, "inputs"))] if uneven else []
    module = make_module(lambda: Module(training_of(combination, world_size)))
    trainer = make_trainer({**QUICK, **merged(combination, "strategy")}, callbacks=callbacks, **_options(combination))
    trainer.fit(module)
    return state_of(module)


def fit_combinations(chosen: Sequence[Combination], world_size: int) -> list[State | str]:
    """Fit each on this rank; for `run_ranks`. An error is returned as a text."""
    results: list[State | str] = []
    for combination in chosen:
        try:
            results.append(fit_combination(combination, world_size))
        except Exception as error:  # which on all ranks comes alike, or else they do not meet again
            results.append(f"{type(error).__name__}: {error}")
    return results


def fit_alone(combination: Combination, world_size: int) -> tuple[State, State]:
    """Fit in this process on the union of the ranks' batches; return the state before and after."""
    assert "RANK" not in os.environ
    torch.manual_seed(0)
    module = Module(training_of(combination, world_size)).double()
    axes = ("gradient_clip_val", *(() if module.does.exact_windows else ("accumulate_grad_batches",)))
    only = [setting for setting in combination if setting.axis in axes]
    start = state_of(module)
    make_trainer("auto", **{**_options(only), "devices": 1}).fit(module)
    return start, state_of(module)


# ---------------------------------------------------------------------- what is compared


def twin_of(combination: Combination, axes: Mapping[str, Sequence[Setting]]) -> Combination:
    """Return the combination without what is to change nothing."""
    neutral = [axis for axis in axes if all(setting.changes == "nothing" for setting in axes[axis])]
    return tuple(axes[s.axis][0] if s.axis in neutral else s for s in combination)


def tolerance(combination: Combination) -> float:
    """Return how far off the single process the result may be; 0 for rounding."""
    strategy, trainer = merged(combination, "strategy"), merged(combination, "trainer")
    averager = strategy.get("averager")
    off = 0.0
    for setting in combination:
        if isinstance(setting.changes, float):
            exact = averager is not None and isinstance(setting.strategy.get("comm_hook"), PostLocalSGD)
            off += 0.0 if exact else setting.changes
    if averager is not None and trainer.get("gradient_clip_val"):
        off += 0.5  # each rank clips its own gradient
    return off


def leaves_ranks_different(combination: Combination) -> bool:
    strategy = merged(combination, "strategy")
    return strategy.get("averager") is None and isinstance(strategy.get("comm_hook"), (Noop, PostLocalSGD))


def distance(found: Sequence[State], expected: State, start: State) -> float:
    """Return how far the mean of the ranks' models is from what was expected, as a fraction of the way gone."""
    off = way = 0.0
    for name, tensor in expected.items():
        mean = sum(state[name].double() for state in found) / len(found)
        off += float((mean - tensor).square().sum())
        way += float((tensor - start[name]).square().sum())
    return (off / way) ** 0.5


def problems(
    combination: Combination, found: Sequence[State | str], twins: Sequence[State | str], alone: tuple[State, State]
) -> list[str]:
    """Compare what the ranks ended with; return what is wrong, if anything."""
    errors = [state for state in (*found, *twins) if isinstance(state, str)]
    if errors:
        return [f"raised {errors[0]}"]
    wrong = []
    try:
        if not leaves_ranks_different(combination):
            for state in found[1:]:
                assert_same(state, found[0])  # type: ignore[arg-type]
    except AssertionError as error:
        wrong.append(f"replicas differ: {error}")
    try:
        for state, twin in zip(found, twins, strict=True):
            assert_same(state, twin)  # type: ignore[arg-type]
    except AssertionError as error:
        wrong.append(f"not as without what is to change nothing: {error}")
    start, expected = alone
    allowed = tolerance(combination)
    try:
        if not allowed:
            for state in found:
                assert_close(state, expected)  # type: ignore[arg-type]
        elif not (off := distance(found, expected, start)) <= allowed:  # type: ignore[arg-type]
            wrong.append(f"{off:.2g} of the way off the single process, at most {allowed:.2g} expected")
    except AssertionError as error:
        wrong.append(f"not as in a single process: {error}")
    return wrong


def name_of(combination: Combination, axes: Mapping[str, Sequence[Setting]]) -> str:
    """Name a combination by what is not the default."""
    return ", ".join(str(s) for s in combination if s is not axes[s.axis][0]) or "defaults"


def judge_all(chosen: Sequence[Combination], axes: Mapping[str, Sequence[Setting]], world_size: int) -> list[str]:
    """Run combinations and what they are compared with; return what is wrong, each with its name."""
    twins = {c: twin_of(c, axes) if tolerance(c) else c for c in chosen}
    runs = list(dict.fromkeys([*chosen, *twins.values()]))
    results = run_ranks(fit_combinations, runs, world_size, world_size=world_size, timeout=600)
    found = {run: [result[number] for result in results] for number, run in enumerate(runs)}
    alone: dict[Any, tuple[State, State]] = {}
    wrong = []
    for combination in chosen:
        clip = next((str(s) for s in combination if s.axis == "gradient_clip_val"), "")
        key = (training_of(combination, world_size), clip)
        if key not in alone:
            alone[key] = fit_alone(combination, world_size)
        for text in problems(combination, found[combination], found[twins[combination]], alone[key]):
            wrong.append(f"{name_of(combination, axes)}: {text}")
    return wrong
