"""What contradicts a step in the hook is said at setup, on every rank, with the mode to use."""

import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.plugins import MixedPrecision
from ranks import run_ranks
from trainer_runs import QUIET, Manual, Net, make_module, make_trainer, rank

from lightning_ddp_hooks import DDPHooksStrategy
from lightning_ddp_hooks.averaging import PeriodicModelAverager
from lightning_ddp_hooks.callbacks import ModelAveraging
from lightning_ddp_hooks.hooks import PostLocalSGD, allreduce_hook
from lightning_ddp_hooks.hooks.contract import BindContext, BoundHook, CommHook
from lightning_ddp_hooks.optim import OptimizerInHook

pytestmark = [pytest.mark.trainer]

OVERLAPPED = OptimizerInHook(shard=True)
TWO_PHASES = OptimizerInHook(shard=True, overlap=False)


class ClipsItself(Net):
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        super().configure_gradient_clipping(*args, **kwargs)


class StepsItself(Net):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)


class LooksBefore(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass


class LooksAfterBackward(Net):
    def on_after_backward(self) -> None:
        pass


class Looks(Callback):
    def on_before_optimizer_step(self, *args: Any) -> None:
        pass


class SecondOrder(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def _scaled() -> dict[str, Any]:
    return {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]}


TOO_LATE: list[tuple[str, type[Net], dict[str, Any], str]] = [
    ("clip", Net, {"gradient_clip_val": 0.5}, r"`gradient_clip_val=0.5` needs all gradients"),
    ("scaler", Net, {"plugins": "scaler"}, "A GradScaler .* needs all gradients"),
    ("manual", Manual, {}, "In manual optimization the steps are yours"),
    ("clips itself", ClipsItself, {}, "ClipsItself overrides `configure_gradient_clipping`"),
    ("steps itself", StepsItself, {}, "StepsItself overrides `optimizer_step`"),
    ("looks", LooksBefore, {}, "LooksBefore overrides `on_before_optimizer_step`"),
    ("callback", Net, {"callbacks": [Looks()]}, "Looks overrides `on_before_optimizer_step`"),
]


def _fit_all() -> None:
    for name, module_class, options, message in TOO_LATE:
        options = _scaled() if name == "scaler" else options
        for settings in (OVERLAPPED, OptimizerInHook()):
            with pytest.raises(ValueError, match=message + r"(.|\n)*OptimizerInHook\(shard=True, overlap=False\)"):
                make_trainer({"optimizer_in_hook": settings}, **options).fit(make_module(module_class))
        make_trainer({"optimizer_in_hook": TWO_PHASES}, max_steps=1, **options).fit(make_module(module_class))
    for settings in (OVERLAPPED, OptimizerInHook(), TWO_PHASES):
        with pytest.raises(ValueError, match="LBFGS evaluates the loss again"):
            make_trainer({"optimizer_in_hook": settings}).fit(make_module(SecondOrder))
    for settings in (OVERLAPPED, TWO_PHASES):
        hook = PostLocalSGD(start_local_sgd_iter=1, subgroup_size=1)
        with pytest.raises(ValueError, match="PostLocalSGD leaves ranks with different gradients"):
            make_trainer({"optimizer_in_hook": settings, "comm_hook": hook}).fit(make_module())
    averager = PeriodicModelAverager(period=2, warmup_steps=1)
    with pytest.raises(ValueError, match="`averager` lets each rank train for itself"):
        make_trainer({"optimizer_in_hook": OVERLAPPED}, callbacks=[ModelAveraging(averager)]).fit(make_module())
    message = "LooksAfterBackward overrides `on_after_backward`"
    with nullcontext() if rank() else pytest.warns(UserWarning, match=message):
        make_trainer({"optimizer_in_hook": OVERLAPPED}, max_steps=1).fit(make_module(LooksAfterBackward))


@pytest.mark.ranks
def test_what_comes_too_late_raises_at_setup_and_works_in_two_phases() -> None:
    run_ranks(_fit_all, timeout=90)


class Registers(Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.strategy.register_comm_hook(None, allreduce_hook)


def _fit_registering() -> list[torch.Tensor]:
    found = []
    for settings in (None, OVERLAPPED, TWO_PHASES):
        module = make_module()
        make_trainer({"optimizer_in_hook": settings}, callbacks=[Registers()]).fit(module)
        found.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    return found


@pytest.mark.ranks
def test_a_hook_may_still_be_registered_when_training_starts() -> None:
    for plain, *others in run_ranks(_fit_registering):
        assert all(torch.equal(plain, other) for other in others)


def test_the_strategy_checks_its_argument() -> None:
    with pytest.raises(TypeError, match="Expected an OptimizerInHook for `optimizer_in_hook`, got bool"):
        DDPHooksStrategy(optimizer_in_hook=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='`skip_missing_loss="all"` decides after the backward'):
        DDPHooksStrategy(optimizer_in_hook=OVERLAPPED, skip_missing_loss="all")
    DDPHooksStrategy(optimizer_in_hook=TWO_PHASES, skip_missing_loss="all")
    averager = PeriodicModelAverager(period=2, warmup_steps=1)
    with pytest.raises(ValueError, match="`averager` lets each rank train for itself"):
        DDPHooksStrategy(optimizer_in_hook=TWO_PHASES, averager=averager)


class Local(CommHook):
    """A user's own hook that does not say whether ranks get the same."""

    def bind(self, context: BindContext) -> BoundHook:
        raise NotImplementedError


@pytest.mark.parametrize("settings", [OVERLAPPED, TWO_PHASES])
def test_a_users_own_hook_must_say_that_ranks_get_the_same(settings: OptimizerInHook) -> None:
    with pytest.raises(ValueError, match="Communication hook Local may leave ranks with different gradients"):
        DDPHooksStrategy(comm_hook=Local(), optimizer_in_hook=settings)
    DDPHooksStrategy(comm_hook=Local(), optimizer_in_hook=OptimizerInHook())


def test_yaml_makes_the_settings(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["script"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # of names that Lightning uses
    config = tmp_path / "config.yaml"
    config.write_text(
        """
trainer:
  accelerator: cpu
  devices: 1
  strategy:
    class_path: lightning_ddp_hooks.DDPHooksStrategy
    init_args:
      optimizer_in_hook:
        class_path: lightning_ddp_hooks.optim.OptimizerInHook
        init_args:
          shard: true
          interleaved: false
"""
    )
    quiet = {key: value for key, value in QUIET.items() if key != "accelerator"}
    args = ["--seed_everything=0", "--config", str(config)]
    cli = LightningCLI(Net, args=args, run=False, save_config_callback=None, trainer_defaults=quiet)
    assert cli.trainer.strategy.settings.optimizer_in_hook == OptimizerInHook(shard=True, interleaved=False)


class OtherOrder(Net):
    """One rank hands the optimizer its parameters in another order."""

    def configure_optimizers(self) -> Any:
        params = list(self.parameters())
        return torch.optim.Adam(params[::-1] if rank() == 1 else params)


class OtherRate(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01 * (1 + rank()))


class OtherClass(Net):
    def configure_optimizers(self) -> Any:
        return (torch.optim.SGD if rank() == 1 else torch.optim.Adam)(self.parameters(), lr=0.01)


def _errors_of_different_optimizers() -> list[str]:
    errors = []
    for module_class in (OtherOrder, OtherRate, OtherClass):
        for settings in (OVERLAPPED, TWO_PHASES):
            with pytest.raises(RuntimeError) as caught:
                make_trainer({"optimizer_in_hook": settings}).fit(make_module(module_class))
            errors.append(str(caught.value))
    return errors


@pytest.mark.ranks
def test_optimizers_that_differ_over_ranks_raise_on_every_rank() -> None:
    for errors in run_ranks(_errors_of_different_optimizers):
        for error in errors:
            assert "optimizer 0" in error
            assert "rank 0" in error
            assert "rank 1" in error
