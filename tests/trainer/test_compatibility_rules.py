"""The rules of which settings go together, without any run; and the page that is made of them."""

import sys
from itertools import combinations
from pathlib import Path

import pytest
from settings import OTHER_RUNS, covering, pairs, run_of, said, settings_by_axis

from lightning_ddp_hooks import DDPHooksStrategy
from lightning_ddp_hooks.averaging import PeriodicModelAverager
from lightning_ddp_hooks.callbacks import UnevenInputs
from lightning_ddp_hooks.config import FitSettings
from lightning_ddp_hooks.conflicts import RULES, raise_on_conflict, warn_no_effect

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
AXES = settings_by_axis(world_size=2)


def test_every_setting_works_by_itself() -> None:
    for settings in AXES.values():
        for setting in settings:
            raise_on_conflict(run_of([setting]))


def test_every_rule_speaks_of_some_run() -> None:
    runs = [run_of(pair) for pair in pairs(AXES)] + list(OTHER_RUNS)
    for rule in RULES:
        assert any(rule.found(run) is not None for run in runs), rule.pair


def test_no_rule_speaks_of_the_defaults() -> None:
    for rule in RULES:
        assert rule.found(FitSettings()) is None
    raise_on_conflict(FitSettings())
    assert not list(warn_no_effect(FitSettings()))


def test_combinations_cover_every_pair_that_goes_together() -> None:
    covered = {pair for combination in covering(AXES) for pair in combinations(combination, 2)}
    for pair in pairs(AXES):
        assert (pair in covered) != bool(said(pair, "refused")), [str(setting) for setting in pair]


def test_averager_and_uneven_inputs_are_refused_by_the_strategy_however_they_come() -> None:
    strategy = DDPHooksStrategy(gradient_weighting="samples")
    with pytest.raises(ValueError, match="not exchanged once `averager` has taken over"):
        strategy.use_averager(PeriodicModelAverager(period=2))
    with pytest.raises(ValueError, match=r'contradicts `UnevenInputs\(divisor="active"\)`'):
        strategy.use_uneven_inputs(UnevenInputs(), trainer=None)  # type: ignore[arg-type]


def test_the_page_says_what_the_rules_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(DOCS), *sys.path])
    from make_compatibility import generated, page_with

    page = (DOCS / "compatibility.md").read_text()
    assert page_with(generated(), page) == page, "run `python docs/make_compatibility.py`"
