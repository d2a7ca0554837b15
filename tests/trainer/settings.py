"""The settings whose combinations are tested, axis by axis, and which of them go together.

The first setting of an axis is its default. `lightning_ddp_hooks.conflicts` says which two do not go
together; `covering` puts all others into as few runs as it can.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from lightning_ddp_hooks.averaging import DiLoCo, HierarchicalModelAverager, PeriodicModelAverager, SlowMo
from lightning_ddp_hooks.config import FitSettings
from lightning_ddp_hooks.conflicts import RULES
from lightning_ddp_hooks.hooks import (
    BlockQuantize,
    Cast,
    Noop,
    OneBit,
    PerParameter,
    PostLocalSGD,
    PowerSGD,
    Rule,
    Schedule,
    Stage,
    TopK,
)
from lightning_ddp_hooks.optim import OptimizerInHook

START = 2
"""The step from which on averagers average models, and post-local SGD gradients within subgroups."""


@dataclass(frozen=True, eq=False)
class Setting:
    """One setting of one axis.

    Attributes:
        axis: what it is a value of.
        name: as the documentation calls it.
        strategy: arguments of `DDPHooksStrategy`.
        trainer: arguments of the Trainer.
        inputs: arguments of `UnevenInputs`; None without it.
        module: what the module does, see `test_combinations.Module`.
        changes: what it does to the result: "nothing" to the last bit, something that the single process does as well
            ("follows"), or something of its own, so that the result is some way off that of the single process: a
            fraction of the way that the parameters have gone.
    """

    axis: str
    name: str
    strategy: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, str] | None = None
    module: Mapping[str, Any] = field(default_factory=dict)
    changes: str | float = "follows"

    def __str__(self) -> str:
        return f"{self.axis}: {self.name}"


Combination = tuple[Setting, ...]
"""One setting of each axis; those that are left out are the defaults."""


def scaled() -> dict[str, Any]:
    """Return what makes a Trainer use float16 with a GradScaler, which Lightning itself does not on the CPU."""
    return {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=256.0))]}


def settings_by_axis(world_size: int, period: int = 1) -> dict[str, list[Setting]]:
    """Return all settings.

    Args:
        world_size: the number of ranks.
        period: of averagers. With 1, and outer optimizers that take the mean, the mean over ranks of what momentum SGD
            does is what it does with the mean gradient, so that the single process is an exact reference.
    """
    made: dict[str, list[Setting]] = {}

    def add(axis: str, name: str, **parts: Any) -> None:
        made.setdefault(axis, []).append(Setting(axis, name, **parts))

    def hook(name: str, value: Any, changes: str | float) -> None:
        add("comm_hook", name, strategy={"comm_hook": value}, changes=changes)

    hook("None", None, "nothing")
    hook('"allreduce"', "allreduce", "nothing")
    hook("Cast", Cast(dtype="float16"), 0.002)
    hook("PowerSGD", PowerSGD(rank=2, start_iter=1, min_compression_rate=1), 0.2)
    hook("BlockQuantize", BlockQuantize(), 0.08)
    hook("OneBit", OneBit(start_iter=1), 1.5)
    hook("TopK", TopK(ratio=0.5), 0.5)
    hook("PerParameter", PerParameter([Rule("int8", ndim=2)], default="bf16"), 0.08)
    hook("Schedule", Schedule([Stage(0, None), Stage(2, "int8")]), 0.08)
    hook("a function", (None, allreduce_hook), "follows")
    hook("PostLocalSGD", PostLocalSGD(start_local_sgd_iter=START, subgroup_size=1), 0.8)
    hook("Noop", Noop(), 1.0)

    add("precision", '"64-true"', trainer={"precision": "64-true"})
    add("precision", '"32-true"', trainer={"precision": "32-true"}, changes=1e-5)
    add("precision", '"bf16-mixed"', trainer={"precision": "bf16-mixed"}, changes=0.03)
    add("precision", '"16-mixed"', trainer={"scaler": True}, changes=0.005)

    clip = "gradient_clip_val"
    add(clip, "None")
    add(clip, "by norm", trainer={clip: 0.5})
    add(clip, "by value", trainer={clip: 0.05, "gradient_clip_algorithm": "value"})

    add("accumulate_grad_batches", "1")
    add("accumulate_grad_batches", "2", trainer={"accumulate_grad_batches": 2})

    add("optimization", "automatic")
    add("optimization", "manual", module={"manual": True})

    every = {"warmup_steps": START}
    averagers = {
        "PeriodicModelAverager": PeriodicModelAverager(period=period, **every),
        "HierarchicalModelAverager": HierarchicalModelAverager(period_group_size_dict={period: world_size}, **every),
        "SlowMo": SlowMo(period=period, slowmo_factor=0.0, **every),
        "DiLoCo": DiLoCo(period=period, outer_lr=1.0, outer_momentum=0.0, **every),
    }
    add("averager", "None", changes="nothing")
    for name, averager in averagers.items():
        add("averager", name, strategy={"averager": averager}, changes="follows" if period == 1 else 1.0)

    modes: dict[str, dict[str, bool]] = {
        "shard=False": {},
        "shard=True": {"shard": True},
        "shard=True, interleaved=False": {"shard": True, "interleaved": False},
        "shard=True, shard_buckets=True": {"shard": True, "shard_buckets": True},
        "shard=True, overlap=False": {"shard": True, "overlap": False},
    }
    add("optimizer_in_hook", "None", changes="nothing")
    for name, mode in modes.items():
        add("optimizer_in_hook", name, strategy={"optimizer_in_hook": OptimizerInHook(**mode)}, changes="nothing")

    add("UnevenInputs", "without")
    for divisor in ("active", "samples", "world"):
        add("UnevenInputs", f'"join", "{divisor}"', inputs={"policy": "join", "divisor": divisor})
    add("UnevenInputs", '"stop", "active"', inputs={"policy": "stop"})
    add("UnevenInputs", '"stop", "samples"', inputs={"policy": "stop", "divisor": "samples"})
    add("UnevenInputs", '"error", "active"', inputs={"policy": "error"})

    def switch(name: str, values: Sequence[Any], **parts: Any) -> None:
        for value in values:
            add(name, str(value), strategy={name: value}, **{"changes": "nothing", **parts})

    switch("gradient_as_bucket_view", [True, False])
    switch("reducer_backend", ["python", "native"])
    switch("gradient_weighting", ["ranks", "samples"], changes="follows")
    switch("accumulation", ["lightning", "exact"], changes="follows")
    switch("skip_missing_loss", ["zeros", "all"], changes="follows")
    switch("find_unused_parameters", [False, True], changes="follows")
    switch("static_graph", [False, True])
    switch("detect_nonfinite", [False, True])
    switch("check_replicas_every_n_steps", [None, 1])
    return made


OTHER_RUNS = (
    FitSettings(
        averager=PeriodicModelAverager(period=4, warmup_steps=10), comm_hook=PostLocalSGD(start_local_sgd_iter=20)
    ),
    FitSettings(averager=PeriodicModelAverager(period=4), comm_hook=PowerSGD(rank=2)),
    FitSettings(optimizer_in_hook=OptimizerInHook(), late="MyModule overrides `optimizer_step`"),
    FitSettings(save_replicas=False),
    FitSettings(averager=PeriodicModelAverager(period=4), weight_averaging="EMAWeightAveraging"),
)
"""What the rules speak of besides the settings of these axes."""


# ---------------------------------------------------------------------- which go together


def merged(settings: Sequence[Setting], part: str) -> dict[str, Any]:
    """Return one kind of arguments of all settings."""
    return {key: value for setting in settings for key, value in (getattr(setting, part) or {}).items()}


def run_of(settings: Sequence[Setting]) -> FitSettings:
    """Return what the strategy would make of the settings."""
    strategy, trainer, inputs = merged(settings, "strategy"), merged(settings, "trainer"), merged(settings, "inputs")
    uneven = any(setting.inputs is not None for setting in settings)
    return FitSettings(
        **strategy,
        policy=inputs.get("policy", "join") if uneven else None,
        divisor=inputs.get("divisor", "active") if uneven else None,
        manual="manual" in merged(settings, "module"),
        gradient_clip_val=trainer.get("gradient_clip_val"),
        accumulate_grad_batches=trainer.get("accumulate_grad_batches", 1),
        scaler=trainer.get("scaler", False),
    )


def said(settings: Sequence[Setting], verdict: str) -> list[str]:
    """Return what the rules of a kind say of the settings."""
    run = run_of(settings)
    texts = [rule.found(run) for rule in RULES if rule.verdict == verdict]
    return [text for text in texts if text is not None]


def pairs(axes: Mapping[str, Sequence[Setting]]) -> Iterator[tuple[Setting, Setting]]:
    """Return all pairs of settings of two axes."""
    for one, other in combinations(axes, 2):
        yield from ((first, second) for first in axes[one] for second in axes[other])


def covering(axes: Mapping[str, Sequence[Setting]]) -> list[Combination]:
    """Return combinations in which every pair that goes together occurs; greedy, and the same in each process."""
    refused = {pair for pair in pairs(axes) if said(pair, "refused")}
    left = dict.fromkeys(pair for pair in pairs(axes) if pair not in refused)
    order = list(axes)

    def pair(one: Setting, other: Setting) -> tuple[Setting, Setting]:
        return (one, other) if order.index(one.axis) < order.index(other.axis) else (other, one)

    made = []
    while left:
        chosen = list(next(iter(left)))
        for axis in sorted(axes, key=lambda name: -len(axes[name])):
            if any(setting.axis == axis for setting in chosen):
                continue
            fits = [s for s in axes[axis] if not any(pair(s, other) in refused for other in chosen)]
            chosen.append(max(fits, key=lambda s: sum(pair(s, other) in left for other in chosen)))
        chosen.sort(key=lambda setting: order.index(setting.axis))
        for done in combinations(chosen, 2):
            left.pop(done, None)
        made.append(tuple(chosen))
    return made
