"""The lines at the start of a fit."""

import math
import sys
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch

from lightning_ddp_hooks import averaging, hooks, optim
from lightning_ddp_hooks.describe import brief, declared, mib, sent_share, traffic_texts
from lightning_ddp_hooks.hooks.registry import SHORT_NAMES, parts_of, resolve_hook
from lightning_ddp_hooks.lightning.summary import as_table, summary_rows, without_effect

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
    title, rows = summary_rows(FACTS, {"hook": "PowerSGD(rank=1)", "averager": None, "optimizer": "sharded"})
    assert title == "lightning_ddp_hooks: 4 ranks over gloo"
    assert rows == {
        "gradients": "64 MiB of 150 parameters, in buckets of 1 MiB and then 25 MiB",
        "plain all-reduce": "would send 96 MiB per rank and step",
        "hook": "PowerSGD(rank=1)",
        "optimizer": "sharded",
        "reducer": "native",
    }


def test_one_rank_sends_nothing() -> None:
    facts = {**FACTS, "world_size": 1, "first_bucket_bytes": 25 << 20, "backend": "python"}
    title, rows = summary_rows(facts, {"hook": None})
    assert "1 rank over gloo" in title
    assert "in buckets of 25 MiB" in rows["gradients"]
    assert rows["plain all-reduce"].startswith("sends 0 MiB")
    assert "build-native" in rows["reducer"]


def test_it_is_a_table_with_rich_and_lines_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"hook": "Cast(dtype=[x])", "averager": "DiLoCo()"}
    assert "hook" in (table := as_table("title", rows))
    assert "Cast(dtype=[x])" in table  # which is no markup
    assert len(table.split("\n")) == 5
    monkeypatch.setitem(sys.modules, "rich", None)
    assert as_table("title", rows).split("\n") == ["title", "  hook      Cast(dtype=[x])", "  averager  DiLoCo()"]


def test_it_compares_with_plain_all_reduce() -> None:
    params = [torch.zeros(64, 128), torch.zeros(128)]
    total = 64 * 128 + 128
    for hook, share in (
        ("bf16", 1 / 2),
        ("int8", (1 + 4 / hooks.BlockQuantize().block_size) / 4),
        (hooks.PowerSGD(rank=2, start_iter=7), (2 * (64 + 128) + 128) / total),
        (hooks.Cast(hooks.PowerSGD(rank=2)), (2 * (64 + 128) + 128) / total / 2),
        (hooks.Cast("int8"), (1 + 4 / hooks.BlockQuantize().block_size) / 4),
        ("onebit", None),
    ):
        assert sent_share(resolve_hook(hook), params) == (share and pytest.approx(share)), hook
    diloco = averaging.DiLoCo(period=50, comm_hook="bf16")
    texts = traffic_texts(params, 2, hooks.PowerSGD(rank=2, start_iter=7), diloco, optim.OptimizerInHook(shard=True))
    assert texts["hook"] == ["from step 7 on about 0.062 of plain all-reduce, 2 KiB per rank and step"]
    assert texts["averager"] == ["every 50 steps", "about 0.01 of plain all-reduce, 0.33 KiB per rank and step"]
    assert texts["optimizer"] == ["each rank keeps the state of 16.2 KiB of the parameters"]
    groups = averaging.HierarchicalModelAverager(period_group_size_dict={4: 2, 16: 4})
    (text,) = traffic_texts(params, 4, None, groups, None)["averager"]
    assert text == "every 4 steps over 2 ranks, every 16 steps over 4 ranks"


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
    assert brief(averaging.PeriodicModelAverager(period=4)) == "PeriodicModelAverager(period=4)"
    groups = averaging.HierarchicalModelAverager(period_group_size_dict={4: 2, 16: 4})
    assert brief(groups) == "HierarchicalModelAverager(period_group_size_dict={4: 2, 16: 4})"


class Awkward:
    def __eq__(self, other: object) -> bool:
        raise TypeError("do not compare me")

    __hash__ = None  # type: ignore[assignment]


def _not_twice() -> int:
    raise RuntimeError("a default that cannot be made")


@dataclass(frozen=True, kw_only=True)
class UsersHook(hooks.CommHook):
    """Has fields that are named like those of our hooks, and values that are hard to describe."""

    stages: int = 3
    rules: tuple[str, ...] = ("a", "b")
    inner: str = "nosuch"
    default: object = None
    start_iter: str = "soon"
    start_local_sgd_iter: object = None
    awkward: Awkward = field(default_factory=Awkward)
    made: int = field(default_factory=_not_twice)
    unset: int = field(init=False)

    def bind(self, context: hooks.BindContext) -> hooks.BoundHook:
        raise NotImplementedError


def test_a_users_hook_may_have_any_fields() -> None:
    hook = UsersHook(made=1)
    assert list(without_effect(hook, None, 1)) == []
    assert list(parts_of(hook)) == [hook]
    text = declared(hook, None, None)["hook"]
    assert text == "UsersHook(awkward=Awkward, made=1)"


def test_an_averager_that_never_makes_an_outer_step_is_told() -> None:
    late = averaging.DiLoCo(period=6, warmup_steps=3, fragments=2)
    for averager, first in ((averaging.DiLoCo(period=6), 6), (late, 6)):
        assert [text[:22] for text in without_effect(None, averager, first)] == ["DiLoCo makes its first"]
        assert list(without_effect(None, averager, first + 1)) == []
        assert list(without_effect(None, averager, math.inf)) == []
    assert "DiLoCo begins after 3 steps" in next(without_effect(None, late, 3))


@dataclass(frozen=True, kw_only=True)
class Around(hooks.CommHook):
    """A user's hook around another one."""

    around: hooks.CommHook

    def bind(self, context: hooks.BindContext) -> hooks.BoundHook:
        raise NotImplementedError


def test_parts_are_found_in_whatever_is_composed() -> None:
    inner = hooks.PostLocalSGD(start_local_sgd_iter=5)
    rules = hooks.PerParameter([hooks.Rule(Around(around=inner), ndim=1)], default="int8")
    found = list(parts_of(hooks.Cast(hooks.Schedule([hooks.Stage(0, rules)]), "float16")))
    assert [type(part).__name__ for part in found] == [
        *("Cast", "Schedule", "PerParameter", "Around", "PostLocalSGD", "BlockQuantize"),
    ]
    assert found[4] is inner


def test_long_and_made_values_are_told_in_short() -> None:
    assert brief(list(range(2000))) == "[0, 1, 2, 3, 4, 5, 6, 7, ... (2000 in all)]"
    assert brief(partial(torch.optim.SGD, lr=0.7)) == "SGD(lr=0.7)"
    assert brief(partial(_not_twice, object(), torch.optim.SGD, lr=0.7)) == "SGD(lr=0.7)"  # as a command line makes it


def test_a_hook_that_has_a_short_name_is_told_by_it_too() -> None:
    for name in sorted(set(SHORT_NAMES) - {"allreduce"}):
        assert str(declared(resolve_hook(name), None, None)["hook"]).startswith(f"{name}: ")
    assert declared(hooks.BlockQuantize(), None, None)["hook"] == "int8: BlockQuantize()"
    assert declared(hooks.BlockQuantize(block_size=64), None, None)["hook"] == "BlockQuantize(block_size=64)"
    assert declared(None, None, None) == {"hook": None, "averager": None, "optimizer": None}


def test_one_subgroup_of_all_ranks_changes_nothing() -> None:
    hook = hooks.PostLocalSGD(start_local_sgd_iter=3)
    for averager in (None, averaging.PeriodicModelAverager(period=2, warmup_steps=3)):
        (text,) = without_effect(hook, averager, 8, one_subgroup=True)
        assert "one subgroup of all ranks" in text
    (text,) = without_effect(hook, None, 8)
    assert "drift apart" in text


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
