"""The lines at the start of a fit."""

import math

import pytest
import torch

from lightning_ddp_hooks import averaging, hooks, optim
from lightning_ddp_hooks.hooks.registry import SHORT_NAMES, resolve_hook
from lightning_ddp_hooks.strategy.summary import brief, declared, mib, summary_text, without_effect

FACTS = {
    "world_size": 4,
    "comm_backend": "gloo",
    "backend": "native",
    "total_parameter_size_bytes": 64 << 20,
    "num_parameter_tensors": 150,
    "first_bucket_bytes": 1 << 20,
    "bucket_cap_bytes": 25 << 20,
}


def test_it_says_who_sends_what() -> None:
    assert summary_text(FACTS, {"hook": "PowerSGD(rank=1)", "averager": None, "optimizer": "sharded"}).split("\n") == [
        "lightning_ddp_hooks: 4 ranks over gloo, native reducer",
        "  gradients   64 MiB of 150 parameters, in buckets of 1 MiB and then 25 MiB",
        "  all-reduce  of them, without hook, would send 96 MiB from each rank",
        "  hook        PowerSGD(rank=1)",
        "  optimizer   sharded",
    ]


def test_one_rank_sends_nothing() -> None:
    text = summary_text({**FACTS, "world_size": 1, "first_bucket_bytes": 25 << 20}, {"hook": None})
    assert "1 rank over gloo" in text
    assert "in buckets of 25 MiB" in text
    assert "sends 0 MiB from each rank" in text


def test_sizes_have_as_many_digits_as_they_need() -> None:
    assert [mib(n) for n in (0, 24, 1 << 10, 4.58 * (1 << 10), 1 << 20, 1.5 * (1 << 20), 58.72 * (1 << 20))] == [
        "0 MiB",
        "0.02 KiB",
        "1 KiB",
        "4.58 KiB",
        "1 MiB",
        "1.50 MiB",
        "58.7 MiB",
    ]


def test_a_declaration_is_told_by_what_differs_from_the_defaults() -> None:
    assert brief(hooks.PowerSGD()) == "PowerSGD()"
    cast = hooks.Cast(hooks.PowerSGD(rank=2), torch.bfloat16)
    assert brief(cast) == "Cast(inner=PowerSGD(rank=2), dtype=torch.bfloat16)"
    assert brief(hooks.TorchHook(hook=mib, state=torch.ones(2))).startswith("TorchHook(hook=")
    assert brief(optim.OptimizerInHook(shard=True)) == "OptimizerInHook(shard=True)"
    assert brief(averaging.PeriodicModelAverager(period=8)) == "PeriodicModelAverager(period=8)"
    groups = averaging.HierarchicalModelAverager(period_group_size_dict={4: 2, 16: 4})
    assert brief(groups) == "HierarchicalModelAverager(period_group_size_dict={4: 2, 16: 4})"


def test_a_hook_that_has_a_short_name_is_told_by_it_too() -> None:
    for name in sorted(set(SHORT_NAMES) - {"allreduce"}):
        assert str(declared(resolve_hook(name), None, None)["hook"]).startswith(f"{name}: ")
    assert declared(hooks.BlockQuantize(), None, None)["hook"] == "int8: BlockQuantize()"
    assert declared(hooks.BlockQuantize(block_size=64), None, None)["hook"] == "BlockQuantize(block_size=64)"
    assert declared(None, None, None) == {"hook": None, "averager": None, "optimizer": None}


@pytest.mark.parametrize(
    ("hook", "averager", "steps", "wanted"),
    [
        (hooks.PowerSGD(start_iter=10), None, 11, ()),
        (hooks.PowerSGD(start_iter=10), None, math.inf, ()),
        (hooks.PowerSGD(start_iter=10), None, 10, ("PowerSGD", "10 steps", "`start_iter`")),
        (hooks.Cast(hooks.OneBit(start_iter=10), "float16"), None, 5, ("OneBit", "5 steps")),
        (None, averaging.PeriodicModelAverager(period=2, warmup_steps=7), 7, ("PeriodicModelAverager", "7 steps")),
        (None, averaging.PeriodicModelAverager(period=2, warmup_steps=7), 8, ()),
        (hooks.Noop(), None, 8, ("Noop", "of its own")),
        (hooks.Noop(), averaging.PeriodicModelAverager(period=2), 8, ()),
        (hooks.PostLocalSGD(start_local_sgd_iter=3), None, 8, ("PostLocalSGD", "drift apart")),
        (hooks.PostLocalSGD(start_local_sgd_iter=3), averaging.PeriodicModelAverager(period=2, warmup_steps=3), 8, ()),
    ],
)
def test_settings_without_effect_are_named(hook, averager, steps, wanted) -> None:  # type: ignore[no-untyped-def]
    texts = list(without_effect(hook, averager, steps))
    assert len(texts) == bool(wanted)
    for part in wanted:
        assert part in texts[0]
