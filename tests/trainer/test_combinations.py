"""Every two settings work together, or are refused at set-up with the reason; as the strategy's table of rules says."""

import logging
from typing import Any

import pytest
from backends import why_no_native
from combination_runs import fit_combinations, judge_all, name_of
from lightning.pytorch.callbacks import Callback
from ranks import run_ranks
from settings import Setting, covering, pairs, said, settings_by_axis
from trainer_runs import EXACT, Manual, Net, State, assert_same, fit, make_module, make_trainer, rank, state_of

from lightning_ddp_hooks.averaging import PeriodicModelAverager
from lightning_ddp_hooks.hooks import CommHook, PostLocalSGD

WORLD = 2

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.trainer,
    pytest.mark.timeout(900),  # the first test may wait for the compiler
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning"),
]


def _axes() -> dict[str, list[Setting]]:
    axes = settings_by_axis(WORLD)
    if why_no_native() is not None:
        axes["reducer_backend"].pop()
    return axes


def test_settings_that_go_together_train_as_they_should() -> None:
    axes = _axes()
    wrong = judge_all(covering(axes), axes, WORLD)
    assert not wrong, "\n".join(wrong)


def test_settings_that_do_not_go_together_are_refused_on_all_ranks() -> None:
    axes = _axes()
    refused = [pair for pair in pairs(axes) if said(pair, "refused")]
    for errors in run_ranks(fit_combinations, refused, WORLD):
        for pair, error in zip(refused, errors, strict=True):
            assert isinstance(error, str), f"{name_of(pair, axes)}: not refused"
            assert said(pair, "refused")[0] in error, f"{name_of(pair, axes)}: {error}"


FAILED_ONCE = [
    {"averager": "PeriodicModelAverager", "UnevenInputs": '"join", "active"', "find_unused_parameters": "True"},
    {"comm_hook": "OneBit", "optimization": "manual"},
    {"comm_hook": "TopK", "optimization": "manual"},
]


def test_combinations_that_failed_once() -> None:
    axes = _axes()
    chosen = [
        tuple(
            next(s for s in settings if s.name == names.get(axis, settings[0].name)) for axis, settings in axes.items()
        )
        for names in FAILED_ONCE
    ]
    wrong = judge_all(chosen, axes, WORLD)
    assert not wrong, "\n".join(wrong)


# ---------------------------------------------------------------------- what goes together only if it is seen to


class Diverging(Net):
    """One rank's gradients are not finite in step 3, when each rank trains for itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 3 and rank() == 1:
            self.net[2].weight.register_hook(lambda gradient: gradient / 0)
        return loss


class ManualDiverging(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step([part / 0 for part in batch] if batch_idx == 3 and rank() == 1 else batch, batch_idx)


def _errors_of_diverging() -> list[str]:
    errors = []
    for module_class in (Diverging, ManualDiverging):
        strategy = {"averager": PeriodicModelAverager(period=8, warmup_steps=1), "detect_nonfinite": True}
        with pytest.raises(RuntimeError) as caught:
            make_trainer(strategy).fit(make_module(module_class))
        errors.append(str(caught.value))
    return errors


def test_gradients_that_are_not_finite_are_found_also_where_ranks_train_for_themselves() -> None:
    for errors in run_ranks(_errors_of_diverging):
        assert "in step 3, before any exchange: rank 1: the gradient of 'net.2.weight'" in errors[0]
        assert "in step 3, before any exchange: rank 1: the gradient of" in errors[1]


class Registers(Callback):
    def __init__(self, hook: CommHook) -> None:
        self.hook = hook

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.strategy.register_comm_hook(None, DeclaredLater(self.hook))


class DeclaredLater:
    """Stands for a declaration where only a function can be given."""

    def __init__(self, hook: CommHook) -> None:
        self.as_comm_hook = lambda state: hook

    def __call__(self, state: Any, bucket: Any) -> None:
        raise AssertionError("only its declaration is used")


def _fit_registering(start: int) -> tuple[State, State] | str:
    averager = PeriodicModelAverager(period=3, warmup_steps=2)
    hook = PostLocalSGD(start_local_sgd_iter=start, subgroup_size=2)
    late = make_module()
    try:
        make_trainer({"averager": averager}, callbacks=[Registers(hook)], **EXACT).fit(late)
    except ValueError as error:
        return str(error)
    return state_of(late), fit(Net, {"averager": averager, "comm_hook": hook}, EXACT)


def test_a_hook_that_comes_late_goes_with_the_averager_or_is_refused() -> None:
    for late, declared in run_ranks(_fit_registering, 2):
        assert_same(late, declared)
    for error in run_ranks(_fit_registering, 4):
        assert "leaves the global mean of gradients at step 4: set both alike" in error


def _logs_of(*each: dict[str, Any]) -> list[list[str]]:
    return [_log_of(settings) for settings in each]


def _log_of(settings: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_ddp_hooks").addHandler(handler)
    make_trainer({**settings, "check_replicas_every_n_steps": 1}, max_steps=1).fit(make_module())
    logging.getLogger("lightning_ddp_hooks").removeHandler(handler)
    return lines


def test_what_has_no_effect_is_said_by_rank_zero() -> None:
    replaced = {"averager": PeriodicModelAverager(period=2), "comm_hook": "int8"}
    one_host = {"comm_hook": PostLocalSGD(start_local_sgd_iter=0)}
    first, second = run_ranks(_logs_of, replaced, one_host)
    assert any("The hook BlockQuantize has no effect" in line for line in first[0])
    assert any("`check_replicas_every_n_steps` has no effect from step 0 on" in line for line in first[0])
    assert any("PostLocalSGD has one subgroup of all ranks" in line for line in first[1])
    assert not any("no effect" in line or "one subgroup" in line for line in [*second[0], *second[1]])
