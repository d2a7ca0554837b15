"""What is wrong by itself is refused where it is given, and the message says what was expected and what was found.

For arguments of the strategy see test_strategy_arguments.py, for settings that contradict each other
test_combinations.py.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from settings import pairs, said, settings_by_axis
from test_strategy_arguments import WRONG
from torch import nn

from lightning_ddp_hooks.averaging import DiLoCo, HierarchicalModelAverager, PeriodicModelAverager, SlowMo
from lightning_ddp_hooks.callbacks import CommMonitor, ModelAveraging, UnevenInputs
from lightning_ddp_hooks.hooks import (
    BatchedPowerSGD,
    BlockQuantize,
    Cast,
    OneBit,
    PerParameter,
    PostLocalSGD,
    PowerSGD,
    QuantizePerChannel,
    Rule,
    Schedule,
    Stage,
    TopK,
    TorchHook,
)
from lightning_ddp_hooks.optim import OptimizerInHook, PostLocalSGDOptimizer, ShardedOptimizer

AVERAGER = PeriodicModelAverager(period=2)
PARAMS = [nn.Parameter(torch.zeros(1))]

Wrong = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], type[Exception], str]


def by(kind: Callable[..., Any], error: type[Exception], message: str, *args: Any, **settings: Any) -> Wrong:
    return kind, args, settings, error, message


VALUES: list[Wrong] = [
    # Hooks.
    by(PowerSGD, TypeError, "a whole number for `rank`, got '2'", rank="2"),
    by(PowerSGD, TypeError, "a whole number for `rank`, got 1.5", rank=1.5),
    by(PowerSGD, ValueError, "`rank` of at least 1, got 0", rank=0),
    by(PowerSGD, TypeError, "a whole number for `start_iter`, got True", start_iter=True),
    by(PowerSGD, ValueError, "`start_iter` of at least 0, got -1", start_iter=-1),
    by(PowerSGD, TypeError, "a number for `min_compression_rate`, got '2'", min_compression_rate="2"),
    by(PowerSGD, ValueError, "`min_compression_rate` above 0, got 0", min_compression_rate=0),
    by(PowerSGD, ValueError, "`orthogonalization_epsilon` of at least 0, got -1", orthogonalization_epsilon=-1),
    by(PowerSGD, TypeError, "True or False for `error_feedback`, got 1", error_feedback=1),
    by(PowerSGD, TypeError, "True or False for `warm_start`, got 'no'", warm_start="no"),
    by(BatchedPowerSGD, ValueError, "`batch_same_shape` has no meaning for BatchedPowerSGD", batch_same_shape=False),
    by(BlockQuantize, ValueError, "Expected dtype 'int8' or 'fp8', got 'int4'", dtype="int4"),
    by(BlockQuantize, ValueError, "block_size that is a multiple of 8 between 8 and .*, got 12", block_size=12),
    by(BlockQuantize, TypeError, "a whole number for `block_size`, got 256.0", block_size=256.0),
    by(BlockQuantize, TypeError, "True or False for `stochastic_rounding`, got None", stochastic_rounding=None),
    by(OneBit, ValueError, "start_iter of at least 0, got -1", start_iter=-1),
    by(OneBit, ValueError, "block_size .* got 0", block_size=0),
    by(OneBit, TypeError, "a whole number for `start_iter`, got '10'", start_iter="10"),
    by(TopK, ValueError, "ratio above 0 and up to 1, got 1.5", ratio=1.5),
    by(TopK, ValueError, "ratio above 0 and up to 1, got 0", ratio=0),
    by(TopK, TypeError, "a number for `ratio`, got '0.1'", ratio="0.1"),
    by(TopK, ValueError, "k of at least 1, got 0", k=0),
    by(TopK, TypeError, "a whole number for `k`, got 2.5", k=2.5),
    by(TopK, ValueError, "ratio or k, got both: ratio=0.1, k=3", ratio=0.1, k=3),
    by(QuantizePerChannel, ValueError, "bucket_size of at least 1, got 0", bucket_size=0),
    by(QuantizePerChannel, TypeError, "a whole number for `bucket_size`, got 1.5", bucket_size=1.5),
    by(Cast, ValueError, "`dtype` to be 'float16' or 'bfloat16', got 'float8'", dtype="float8"),
    by(Cast, TypeError, "`dtype` to be a name or a torch.dtype, got int", dtype=16),
    by(Cast, ValueError, "`accumulate` to be 'wire' or 'float32', got 'float64'", accumulate="float64"),
    by(Cast, ValueError, "PowerSGD has sums of its own", PowerSGD(), accumulate="float32"),
    by(Cast, ValueError, "Unknown communication hook 'gzip'; known names", "gzip"),
    by(PostLocalSGD, ValueError, "start_local_sgd_iter of at least 0, got -1", start_local_sgd_iter=-1),
    by(PostLocalSGD, TypeError, "a whole number for `start_local_sgd_iter`, got 1.5", start_local_sgd_iter=1.5),
    by(PostLocalSGD, ValueError, "subgroup_size of at least 1, got 0", subgroup_size=0),
    by(PostLocalSGD, ValueError, "subgroup_size or subgroups, got both", subgroup_size=2, subgroups=[[0, 1]]),
    by(PostLocalSGD, TypeError, "a list of lists of ranks for `subgroups`, got 3", subgroups=3),
    by(PostLocalSGD, TypeError, r"a list of lists of ranks for `subgroups`, got \[0, 1\]", subgroups=[0, 1]),
    by(PostLocalSGD, ValueError, "leave out subgroup_size", post_local_gradient_allreduce=False, subgroup_size=2),
    by(Rule, ValueError, r"a condition \(`pattern`, `min_numel` or `ndim`\)", "int8"),
    by(Rule, TypeError, "a whole number for `ndim`, got '2'", "int8", ndim="2"),
    by(Rule, TypeError, "a text for `pattern`, got 3", "int8", pattern=3),
    by(PerParameter, TypeError, "`rules` to consist of Rule objects, got str", ["int8"]),
    by(PerParameter, TypeError, "a list of Rule objects for `rules`, got Rule", Rule("int8", ndim=2)),
    by(Stage, ValueError, "`step` of at least 0, got -1", -1, "int8"),
    by(Stage, TypeError, "a whole number for `step`, got 'int8'", "int8", 0),
    by(Schedule, TypeError, "a list of Stage objects for `stages`, got Stage", Stage(0, None)),
    by(Schedule, TypeError, "`stages` to consist of Stage objects, got tuple", [(0, None)]),
    by(Schedule, ValueError, r"ascending steps, got steps \[5, 5\]", [Stage(5, None), Stage(5, "int8")]),
    by(Schedule, ValueError, r"one or more `stages` with ascending steps, got steps \[\]", []),
    by(TorchHook, TypeError, r"a callable hook\(state, bucket\), got str", hook="mean"),
    by(TorchHook, TypeError, "True or False for `one_at_a_time`, got 'no'", hook=print, one_at_a_time="no"),
    # Averagers.
    by(PeriodicModelAverager, ValueError, "`period` to be at least 1, got 0", period=0),
    by(PeriodicModelAverager, TypeError, "a whole number for `period`, got 1.5", period=1.5),
    by(PeriodicModelAverager, ValueError, "`warmup_steps` to be at least 0, got -1", period=2, warmup_steps=-1),
    by(PeriodicModelAverager, TypeError, "for `average_buffers`, got 'yes'", period=2, average_buffers="yes"),
    by(PeriodicModelAverager, ValueError, "'none' or 'averaged' for .*, got 'kept'", period=2, optimizer_state="kept"),
    by(HierarchicalModelAverager, TypeError, "a dict of period to group size", period_group_size_dict=[(2, 4)]),
    by(HierarchicalModelAverager, ValueError, "at least one period", period_group_size_dict={}),
    by(HierarchicalModelAverager, ValueError, "must increase, got 2 after 4", period_group_size_dict={4: 2, 2: 4}),
    by(HierarchicalModelAverager, ValueError, "must nest: 4 .* does not divide 6", period_group_size_dict={2: 4, 4: 6}),
    by(SlowMo, ValueError, "`slowmo_factor` to be at least 0 and below 1, got 1", period=2, slowmo_factor=1),
    by(SlowMo, ValueError, "`slowmo_lr` to be above 0, got 0", period=2, slowmo_lr=0),
    by(SlowMo, TypeError, "a number for `slowmo_lr`, got '1'", period=2, slowmo_lr="1"),
    by(SlowMo, ValueError, "a finite number for `slowmo_lr`, got inf", period=2, slowmo_lr=float("inf")),
    by(DiLoCo, ValueError, "a finite number for `outer_lr`, got inf", period=2, outer_lr=float("inf")),
    by(DiLoCo, ValueError, "3 fragments do not fit into a period of 2 steps", period=2, fragments=3),
    by(DiLoCo, ValueError, "delay=3 would let it arrive after the next one", period=2, delay=3),
    by(DiLoCo, ValueError, "`blending` to be at least 0 and below 1, got 1", period=2, blending=1),
    by(DiLoCo, ValueError, "`outer_lr` to be above 0, got 0", period=2, outer_lr=0),
    by(
        DiLoCo,
        ValueError,
        "Set `outer_optimizer` or `outer_lr`",
        period=2,
        outer_optimizer=torch.optim.SGD,
        outer_lr=1.0,
    ),
    by(
        DiLoCo(period=2, outer_optimizer=list).make_outer_optimizer,  # type: ignore[arg-type]
        TypeError,
        "`outer_optimizer` to return an optimizer, got list",
        PARAMS,
    ),
    by(DiLoCo, TypeError, "a callable that makes an optimizer", period=2, outer_optimizer="sgd"),
    # Optimizers.
    by(OptimizerInHook, TypeError, "True or False for `shard`, got 1", shard=1),
    by(OptimizerInHook, ValueError, "it needs `shard=True`", shard_buckets=True),
    by(OptimizerInHook, ValueError, "is the optimizer as it is", overlap=False),
    by(OptimizerInHook, ValueError, "no meaning with `overlap=False`", shard=True, overlap=False, interleaved=False),
    by(PostLocalSGDOptimizer, TypeError, "Expected a torch optimizer, got int", 3, AVERAGER),
    by(PostLocalSGDOptimizer, TypeError, "Expected a ModelAverager or .* got int", torch.optim.SGD(PARAMS, lr=0.1), 3),
    by(ShardedOptimizer, TypeError, "a class of optimizers for `optimizer_class`", PARAMS, "sgd"),
    # Callbacks.
    by(UnevenInputs, ValueError, "`policy` to be one of .*, got 'pad'", "pad"),
    by(UnevenInputs, ValueError, "`divisor` to be one of .*, got 'mean'", divisor="mean"),
    by(ModelAveraging, TypeError, "Expected a ModelAverager or its short name .* got int", 4),
    by(ModelAveraging, TypeError, "for `save_replicas`, got 1", AVERAGER, save_replicas=1),
    by(CommMonitor, TypeError, "a path for `dirpath`, got 3", 3),
    by(CommMonitor, ValueError, "`keep_steps` of at least 1, got 0", keep_steps=0),
    by(CommMonitor, TypeError, "a whole number for `log_every_n_steps`, got 0.5", log_every_n_steps=0.5),
    by(CommMonitor, TypeError, "True or False for `per_bucket`, got None", per_bucket=None),
]


@pytest.mark.parametrize(
    ("kind", "args", "settings", "error", "message"),
    VALUES,
    ids=[f"{kind.__name__} {args or ''}{settings or ''}" for kind, args, settings, *_ in VALUES],
)
def test_a_wrong_value_is_refused_by_name(
    kind: Callable[..., Any], args: tuple[Any, ...], settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        kind(*args, **settings)


def test_many_bad_configurations_are_tried_in_all() -> None:
    refused = [pair for pair in pairs(settings_by_axis(world_size=2)) if said(pair, "refused")]
    assert len(VALUES) + len(WRONG) + len(refused) >= 200
