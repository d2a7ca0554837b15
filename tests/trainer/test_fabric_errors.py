"""What Fabric's strategy refuses or warns of, how it is launched, and what is said when a rank fails."""

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from fabric_runs import SCALED, Net, batches, make_fabric, make_model, sgd, train
from lightning.fabric import Fabric
from lightning.fabric.strategies import STRATEGY_REGISTRY
from ranks import run_ranks
from torch import nn
from torch.nn.functional import mse_loss
from trainer_runs import WIDTH, rank

from lightning_ddp_hooks import DDPHooksStrategy, FabricDDPHooksStrategy, averaging, hooks, optim

NAMES = ["ddp_hooks", "ddp_hooks_spawn", "ddp_hooks_fork", "ddp_hooks_notebook"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("unused", ["", "_find_unused_parameters_true", "_find_unused_parameters_false"])
def test_names_are_registered(name: str, unused: str) -> None:
    strategy = STRATEGY_REGISTRY.get(name + unused)

    assert type(strategy) is FabricDDPHooksStrategy
    assert type(Fabric(strategy=name + unused, accelerator="cpu", devices=2).strategy) is FabricDDPHooksStrategy


EARLY = optim.OptimizerInHook()
AVERAGER = averaging.PeriodicModelAverager(period=2)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"comm_hook": "powersdg"}, ValueError, "known names: allreduce, "),
        ({"comm_hook": 3}, TypeError, "Expected a short name, a CommHook"),
        ({"averager": 8}, TypeError, "Expected a ModelAverager or its short name for `averager`, got int"),
        ({"optimizer_in_hook": True}, TypeError, "Expected an OptimizerInHook for `optimizer_in_hook`, got bool"),
        ({"save_replicas": 1}, TypeError, "Expected True, False or 'auto' for `save_replicas`, got 1"),
        ({"detect_nonfinite": "yes"}, TypeError, "Expected True or False for `detect_nonfinite`"),
        ({"check_replicas_every_n_steps": -1}, ValueError, "Expected 0"),
        ({"failure_timeout": 0}, ValueError, "Expected a positive number of seconds"),
        ({"timeout": 30}, TypeError, "Expected a datetime.timedelta for `timeout`, got 30"),
        ({"process_group_backend": 1}, TypeError, "Expected a name such as 'gloo'"),
        ({"process_group_backend": "glo"}, ValueError, "got 'glo'; known are .*gloo, .*nccl"),
        ({"start_method": "thread"}, ValueError, "Expected `start_method` to be one of"),
        ({"reducer_backend": "rust"}, ValueError, "Expected `reducer_backend` to be one of"),
        ({"gradient_weighting": "samples"}, TypeError, "unexpected keyword argument 'gradient_weighting'"),
        ({"averager": AVERAGER, "optimizer_in_hook": EARLY}, ValueError, "set one of them"),
        ({"detect_nonfinite": True, "optimizer_in_hook": EARLY}, ValueError, "set one of them"),
        ({"find_unused_parameters": True, "static_graph": True}, ValueError, "set one of them"),
        (
            {"averager": averaging.PeriodicModelAverager(period=2, warmup_steps=1), "comm_hook": "noop"},
            ValueError,
            "the hook Noop never does",
        ),
    ],
)
def test_bad_arguments_raise(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        FabricDDPHooksStrategy(**arguments)


def test_it_takes_the_trainers_strategys_arguments_where_fabric_has_what_they_need() -> None:
    import inspect

    trainers = set(inspect.signature(DDPHooksStrategy).parameters)
    ours = set(inspect.signature(FabricDDPHooksStrategy).parameters)

    assert trainers - ours == {
        "precision_plugin",  # Fabric calls it `precision`
        "average_before_eval",  # evaluation is the user's: `averaged_model`
        "accumulation",  # its windows are the user's
        "gradient_weighting",  # neither batches nor losses pass through the strategy
        "skip_missing_loss",
        "check_logged_values",
        "resume",
        "ddp_comm_hook",
        "ddp_comm_state",
        "ddp_comm_wrapper",
        "model_averaging_period",
    }
    assert ours - trainers == {"precision"}


# ---------------------------------------------------------------------- errors on all ranks


def error_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def with_two_backwards(fabric: Fabric, model: Any, optimizer: Any) -> None:
    for x, y in batches(2):
        fabric.backward(mse_loss(model(x), y))


def with_a_nan(fabric: Fabric, model: Any, optimizer: Any) -> None:
    x, y = next(batches(1))
    fabric.backward(mse_loss(model(x), y) * (float("nan") if rank() == 1 else 1))
    optimizer.step()


def with_a_drift(fabric: Fabric, model: Any, optimizer: Any) -> None:
    train(fabric, model, optimizer, 1)
    with torch.no_grad():
        next(model.parameters()).add_(rank())
    train(fabric, model, optimizer, 1)


def collect_errors() -> dict[str, str]:
    found: dict[str, str] = {}

    def note(name: str, strategy: Mapping[str, Any], action: Callable[..., Any], make_optimizer: Any = sgd) -> None:
        fabric = make_fabric(strategy)
        model = make_model()
        model, optimizer = fabric.setup(model, make_optimizer(model.parameters()))
        found[name] = error_of(lambda: action(fabric, model, optimizer))

    early = {"optimizer_in_hook": EARLY}
    note("clip", early, lambda fabric, model, optimizer: fabric.clip_gradients(model, optimizer, max_norm=1.0))
    note("clip value", early, lambda fabric, model, optimizer: fabric.clip_gradients(model, optimizer, clip_val=1.0))
    note("two backwards", early, with_two_backwards)
    note("nan", {"detect_nonfinite": True}, with_a_nan)
    note("drift", {"check_replicas_every_n_steps": 1}, with_a_drift)

    fabric = make_fabric(early, plugins=SCALED)
    model = make_model()
    found["scaler"] = error_of(lambda: fabric.setup(model, sgd(model.parameters())))
    fabric = make_fabric(early)
    found["module alone"] = error_of(lambda: fabric.setup_module(make_model()))
    found["module alone by setup"] = error_of(lambda: fabric.setup(make_model()))
    found["optimizer alone"] = error_of(lambda: fabric.setup_optimizers(sgd(make_model().parameters())))
    model = make_model()
    optimizers = [sgd(part.parameters()) for part in (model.net[0], model.net[2])]
    found["two optimizers"] = error_of(lambda: fabric.setup(model, *optimizers))
    frozen = make_model().requires_grad_(False)
    fabric.setup_module(frozen)  # has no gradients, so that no optimizer is missed

    fabric = make_fabric()
    found["no model"] = error_of(lambda: fabric.strategy.step())
    first, second = fabric.setup_module(make_model()), fabric.setup_module(make_model())
    found["which model"] = error_of(lambda: fabric.strategy.stats())
    found["another model"] = error_of(lambda: fabric.strategy.stats(make_model()))
    found["late hook"] = error_of(lambda: fabric.strategy.register_comm_hook(None, hooks.noop_hook))
    fabric.strategy.register_comm_hook(None, hooks.allreduce_hook, first)
    found["second hook"] = error_of(lambda: fabric.strategy.register_comm_hook(None, hooks.noop_hook, first))
    found["no_backward_sync"] = error_of(lambda: fabric.strategy._backward_sync_control.no_backward_sync(Net(), True))
    import copy

    found["copy"] = error_of(lambda: copy.deepcopy(second))
    both = nn.ModuleList([second.module, nn.Linear(WIDTH, 1)])
    fabric.setup_module(both)
    x, _ = next(batches(1))
    found["shared parameters"] = error_of(lambda: second(x))

    fabric = make_fabric()
    found["different models"] = error_of(lambda: fabric.setup_module(nn.Linear(WIDTH, 1 + rank())))
    return found


EXPECTED = {
    "clip": "ValueError: `fabric.clip_gradients` needs all gradients before the step",
    "clip value": "ValueError: `fabric.clip_gradients` needs all gradients before the step",
    "two backwards": "RuntimeError: A second backward before `optimizer.step()`",
    "nan": "RuntimeError: Gradients that are infinite or not a number in step 0, before any exchange: rank 1: the "
    "gradient of 'net.4.",
    "drift": "RuntimeError: The ranks' parameters have drifted apart by the end of step 1: 'net.0.weight' differs",
    "scaler": "ValueError: A GradScaler (`precision='16-mixed'`) needs all gradients before it decides on the step",
    "module alone": "ValueError: `optimizer_in_hook` steps the optimizer while the model's gradients come",
    "module alone by setup": "ValueError: `optimizer_in_hook` steps the optimizer while the model's gradients come",
    "optimizer alone": "ValueError: `optimizer_in_hook` steps the optimizer while the model's gradients come",
    "two optimizers": "ValueError: `OptimizerInHook` steps one optimizer while gradients come, but there are 2",
    "no model": "RuntimeError: Expected one model, but no model has been set up",
    "which model": "RuntimeError: Expected one model, but 2 models have been set up: name one",
    "another model": "RuntimeError: Expected a model that `fabric.setup(...)` returned, got one that was not set up",
    "late hook": "RuntimeError: Models have been set up already: say which one the hook is for",
    "second hook": "RuntimeError: A communication hook is already registered",
    "no_backward_sync": "TypeError: Expected a model that `fabric.setup(...)` returned for `fabric.no_backward_sync`",
    "copy": "TypeError: A model that Fabric has set up cannot be copied or pickled",
    "shared parameters": "RuntimeError: This model's parameters belong to a model that was set up later",
    "different models": "RuntimeError: The ranks were given different models or settings; the first difference",
}


@pytest.mark.ranks
@pytest.mark.trainer
def test_what_cannot_work_raises_on_all_ranks_and_says_what_to_do() -> None:
    for found in run_ranks(collect_errors):
        assert found.keys() == EXPECTED.keys()
        for name, text in EXPECTED.items():
            assert found[name].startswith(text), name


# ---------------------------------------------------------------------- warnings


def collect_warnings(path: Path) -> dict[str, list[str]]:
    found = {}
    for name in ("an optimizer of one's own", "an optimizer of another model", "a checkpoint of ddp"):
        fabric = make_fabric({"comm_hook": hooks.PowerSGD(rank=1)})
        model = make_model()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if name == "an optimizer of one's own":
                train(fabric, fabric.setup_module(model), sgd(model.parameters()), 3)
            elif name == "an optimizer of another model":
                model, *_ = fabric.setup(model, sgd(model.parameters()), sgd(make_model().parameters()))
            else:
                model, optimizer = fabric.setup(model, sgd(model.parameters()))
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                if rank() == 0:
                    torch.save(state, path / "plain.ckpt")
                fabric.barrier()
                fabric.load(path / "plain.ckpt", {"model": model, "optimizer": optimizer})
        found[name] = [str(warning.message) for warning in caught if warning.category is UserWarning]
    return found


@pytest.mark.ranks
@pytest.mark.trainer
def test_what_may_go_unnoticed_is_said_once_by_the_first_rank(tmp_path: Path) -> None:
    first, second = run_ranks(collect_warnings, tmp_path)
    assert second == {name: [] for name in second}
    (text,) = first["an optimizer of one's own"]
    assert text.startswith("No optimizer of this model was set up, so that no training step is ever counted")
    assert "`comm_hook`" in text
    (text,) = first["an optimizer of another model"]
    assert "SGD was set up together with" in text
    assert "has none of its parameters" in text
    (text,) = first["a checkpoint of ddp"]
    assert "holds no state of lightning_ddp_hooks for 'model'" in text


# ---------------------------------------------------------------------- processes of its own


def run_script(text: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    script = cwd / "script.py"
    script.write_text(text)
    return subprocess.run(
        [sys.executable, script],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


PARTED = """
import torch
from lightning.fabric import Fabric
import lightning_ddp_hooks as ldh

fabric = Fabric(strategy=ldh.FabricDDPHooksStrategy(failure_timeout=1.5), accelerator="cpu", devices=2)
fabric.launch()
model = torch.nn.Linear(4, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(4):
    if step == 2 and fabric.global_rank:
        torch.distributed.barrier()
    fabric.backward(model(torch.ones(2, 4)).mean())
    optimizer.step()
"""


@pytest.mark.ranks
@pytest.mark.trainer
def test_ranks_that_part_ways_end_and_say_where_they_are(tmp_path: Path) -> None:
    done = run_script(PARTED, tmp_path)

    assert done.returncode
    assert "The ranks have parted ways" in done.stderr
    assert "waiting for `barrier` called by <module> (script.py:" in done.stderr
    assert {path.name for path in (tmp_path / "ddp_hooks_stacks").iterdir()} == {"rank-0.txt", "rank-1.txt"}


SPAWN = """
import torch
from lightning.fabric import Fabric
import lightning_ddp_hooks

def train(fabric):
    torch.manual_seed(fabric.global_rank)
    model = torch.nn.Linear(4, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    fabric.backward(model(torch.ones(2, 4)).mean())
    optimizer.step()
    other = fabric.broadcast(model.weight.detach(), src=1)
    assert torch.equal(other, model.weight)
    return fabric.strategy.step(), type(fabric.strategy).__name__

if __name__ == "__main__":
    fabric = Fabric(strategy="ddp_hooks_spawn", accelerator="cpu", devices=2)
    print(*fabric.launch(train))
"""


@pytest.mark.ranks
@pytest.mark.trainer
def test_spawned_processes_train(tmp_path: Path) -> None:
    done = run_script(SPAWN, tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "1 FabricDDPHooksStrategy"


FAILING = """
import time
import torch
from lightning.fabric import Fabric
import lightning_ddp_hooks as ldh

fabric = Fabric(strategy=ldh.FabricDDPHooksStrategy(failure_timeout=1.5), accelerator="cpu", devices=2)
fabric.launch()
model = torch.nn.Linear(4, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(4):
    if step == 3 and fabric.global_rank == 0:
        raise ValueError("a bad sample")
    fabric.backward(model(torch.ones(2, 4)).mean())
    optimizer.step()
"""


@pytest.mark.ranks
@pytest.mark.trainer
def test_a_rank_that_fails_is_named_by_the_others(tmp_path: Path) -> None:
    done = run_script(FAILING, tmp_path)

    assert done.returncode == 1
    assert "Rank 0 failed at step 3, outside a backward." in done.stderr, done.stderr
    assert "Rank 1, this one, was at step 3" in done.stderr
    assert done.stderr.count("ValueError: a bad sample") == 3  # its own, and twice in the report of the other


# ---------------------------------------------------------------------- the other package of Lightning


def use_standalone_package() -> list[str]:
    assert "lightning_fabric" not in sys.modules
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an old package's imports
        from lightning_fabric import Fabric as StandaloneFabric
    return [
        error_of(lambda strategy=strategy: StandaloneFabric(strategy=strategy, accelerator="cpu", devices=2))
        for strategy in ("ddp_hooks", "ddp_hooks_spawn")
    ]


@pytest.mark.ranks
def test_standalone_package_says_which_import_to_change() -> None:
    (messages,) = run_ranks(use_standalone_package, world_size=1)

    for message in messages:
        assert "`from lightning.fabric import Fabric`" in message
