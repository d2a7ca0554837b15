"""What the strategy takes, by which names, and what it says to what it does not take."""

import inspect
import os
import pickle
import re
import subprocess
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from ranks import run_ranks
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_wrapper
from trainer_runs import EXACT, Net, State, assert_same, fit

from lightning_ddp_hooks import DDPHooksStrategy
from lightning_ddp_hooks.averaging import DiLoCo, HierarchicalModelAverager, PeriodicModelAverager
from lightning_ddp_hooks.callbacks import CommMonitor, UnevenInputs
from lightning_ddp_hooks.hooks import (
    BlockQuantize,
    Cast,
    CommHook,
    PerParameter,
    PowerSGD,
    Rule,
    Schedule,
    Stage,
    TopK,
    TorchHook,
)
from lightning_ddp_hooks.optim import OptimizerInHook

LAUNCHERS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}


@pytest.mark.parametrize("suffix", LAUNCHERS)
@pytest.mark.parametrize("unused", ["", "_find_unused_parameters_true", "_find_unused_parameters_false"])
def test_every_name_makes_the_strategy_with_its_launcher(suffix: str, unused: str) -> None:
    trainer = Trainer(strategy=f"ddp_hooks{suffix}{unused}", accelerator="cpu", devices=2, logger=False)

    strategy = trainer.strategy
    assert type(strategy) is DDPHooksStrategy
    assert isinstance(strategy, DDPStrategy)
    assert strategy._start_method == LAUNCHERS[suffix]
    assert strategy.settings.find_unused_parameters is unused.endswith("true")
    assert trainer.world_size == 2


def test_names_are_listed_by_the_registry() -> None:
    names = {name for name in StrategyRegistry.available_strategies() if name.startswith("ddp_hooks")}

    assert {f"ddp_hooks{suffix}" for suffix in LAUNCHERS} <= names
    assert "ddp_hooks_find_unused_parameters_true" in names


# ---------------------------------------------------------------------- bad input


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"comm_hook": "nonsense"}, ValueError, r"Unknown communication hook 'nonsense'; known names: .*allreduce"),
    ({"comm_hook": allreduce_hook}, TypeError, r"wrap a function as \(None, function\)"),
    ({"comm_hook": PowerSGD}, TypeError, r"got the class PowerSGD; make one, as in PowerSGD\(\)"),
    ({"comm_hook": (allreduce_hook, None)}, TypeError, "the callable comes second"),
    ({"comm_hook": (None, 3)}, TypeError, r"callable hook\(state, bucket\), got int"),
    ({"comm_hook": 3}, TypeError, "a short name, a CommHook, a pair"),
    ({"bucket_cap_mb": "25"}, TypeError, "number of MiB for `bucket_cap_mb`, got '25'"),
    ({"bucket_cap_mb": True}, TypeError, "`bucket_cap_mb`"),
    ({"bucket_cap_mb": 0}, ValueError, "`bucket_cap_mb` to be a finite number of MiB above 0, got 0"),
    ({"bucket_cap_mb": float("nan")}, ValueError, "`bucket_cap_mb`"),
    ({"bucket_cap_mb": float("inf")}, ValueError, "`bucket_cap_mb`"),
    ({"first_bucket_mb": -1}, ValueError, "`first_bucket_mb`"),
    ({"first_bucket_mb": "1"}, TypeError, "`first_bucket_mb`"),
    ({"gradient_as_bucket_view": 1}, TypeError, "True or False for `gradient_as_bucket_view`, got 1"),
    ({"find_unused_parameters": "yes"}, TypeError, "`find_unused_parameters`"),
    ({"static_graph": None}, TypeError, "`static_graph`"),
    ({"broadcast_buffers": "no"}, TypeError, "`broadcast_buffers`"),
    ({"find_unused_parameters": True, "static_graph": True}, ValueError, "set one of them"),
    ({"gradient_weighting": "tokens"}, ValueError, r"`gradient_weighting` .*'ranks', 'samples'.*got 'tokens'"),
    ({"gradient_weighting": None}, ValueError, "`gradient_weighting`"),
    ({"accumulation": "mean"}, ValueError, r"`accumulation` .*'lightning', 'exact'.*got 'mean'"),
    ({"skip_missing_loss": "none"}, ValueError, "`skip_missing_loss` .*'zeros', 'all'"),
    ({"skip_missing_loss": True}, ValueError, "`skip_missing_loss`"),
    ({"failure_timeout": "30"}, TypeError, "seconds or None for `failure_timeout`, got '30'"),
    ({"failure_timeout": 0}, ValueError, "positive number of seconds for `failure_timeout`, .* got 0"),
    ({"failure_timeout": 1e30}, ValueError, r"`failure_timeout`, or None for no reports, got 1e\+30"),
    ({"stall_timeout": -1}, ValueError, "positive number of seconds for `stall_timeout`, .* got -1"),
    ({"stall_timeout": 60, "failure_timeout": None}, ValueError, "has no effect with `failure_timeout=None`"),
    ({"failure_timeout": float("inf")}, ValueError, "`failure_timeout`, or .* got inf"),
    ({"check_replicas_every_n_steps": 1.5}, TypeError, "`check_replicas_every_n_steps`, got 1.5"),
    ({"check_replicas_every_n_steps": -1}, ValueError, "or None for `check_replicas_every_n_steps`, got -1"),
    ({"detect_nonfinite": 1}, TypeError, "True or False for `detect_nonfinite`, got 1"),
    ({"detect_nonfinite": True, "optimizer_in_hook": OptimizerInHook()}, ValueError, "`detect_nonfinite` looks at"),
    ({"reducer_backend": "rust"}, ValueError, "`reducer_backend` .*'native', 'python'.*got 'rust'"),
    ({"start_method": "thread"}, ValueError, "`start_method` .*'popen'"),
    ({"resume": "last"}, ValueError, "`resume` .*'auto'"),
    ({"timeout": timedelta(seconds=-1)}, ValueError, "a `timeout` that is not negative"),
    ({"timeout": 30}, TypeError, "datetime.timedelta for `timeout`, got 30"),
    ({"process_group_backend": 3}, TypeError, "`process_group_backend`, got 3"),
    ({"process_group_backend": "glo"}, ValueError, "got 'glo'; known are .*gloo, .*nccl"),
    ({"process_group_backend": "cpu:gloo,cuda:ncl"}, ValueError, "got 'cpu:gloo,cuda:ncl'; known are"),
    ({"process_group_backend": " gloo"}, ValueError, "got ' gloo'; known are"),
    ({"process_group_backend": "gloo,nccl"}, ValueError, "one for each kind of device, .* got 'gloo,nccl'"),
    ({"process_group_backend": "cpu:gloo, cuda:gloo"}, ValueError, "one for each kind of device"),
    ({"process_group_backend": "cup:gloo"}, ValueError, "one for each kind of device"),
    ({"process_group_backend": "cpu:gloo,cpu:nccl"}, ValueError, "one for each kind of device"),
    ({"bucket_cap": 25}, TypeError, "bucket_cap"),
    ({"ddp_comm_state": object()}, ValueError, "need `ddp_comm_hook`"),
    ({"ddp_comm_wrapper": fp16_compress_wrapper}, ValueError, "need `ddp_comm_hook`"),
    ({"ddp_comm_hook": allreduce_hook, "comm_hook": "allreduce"}, ValueError, "not both"),
    ({"ddp_comm_hook": allreduce_hook, "ddp_comm_wrapper": 3}, TypeError, "callable for `ddp_comm_wrapper`, got 3"),
    ({"model_averaging_period": 4}, ValueError, "`model_averaging_period` needs a PostLocalSGDState"),
    ({"averager": 4}, TypeError, "ModelAverager or its short name for `averager`, got int"),
    ({"averager": PeriodicModelAverager(period=2), "model_averaging_period": 4}, ValueError, "not both"),
    ({"averager": PeriodicModelAverager(period=2), "gradient_weighting": "samples"}, ValueError, "weighs gradients"),
    ({"average_before_eval": 1}, TypeError, "True or False for `average_before_eval`, got 1"),
    ({"save_replicas": None}, TypeError, "True, False or 'auto' for `save_replicas`, got None"),
    ({"check_logged_values": 1}, TypeError, "True or False for `check_logged_values`, got 1"),
]


def text_of(settings: object) -> str:
    return re.sub(r" at 0x\w+", "", str(settings))  # the same in every process


@pytest.mark.parametrize(("settings", "error", "message"), WRONG, ids=[text_of(settings) for settings, *_ in WRONG])
def test_a_wrong_argument_is_refused_by_name(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        DDPHooksStrategy(**settings)


@pytest.mark.parametrize("name", ["gloo", "GLOO", "cpu:gloo,cuda:nccl", None])
def test_backends_are_named_as_in_torch(name: str | None) -> None:
    assert DDPHooksStrategy(process_group_backend=name).process_group_backend == name


def test_every_argument_of_ours_has_a_wrong_value_above() -> None:
    lightnings = {"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"}
    tried = {name for settings, *_ in WRONG for name in settings}

    assert set(inspect.signature(DDPHooksStrategy).parameters) - lightnings <= tried


def fit_with_different_settings() -> list[str]:
    """Fit with settings of which one after another is not the same on all ranks; return the errors."""
    first = int(os.environ["RANK"]) == 0
    averager, uneven = PeriodicModelAverager(period=2), UnevenInputs()
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"gradient_weighting": "ranks" if first else "samples"}, {}),
        ({"skip_missing_loss": "zeros" if first else "all"}, {}),
        ({"averager": averager, "save_replicas": first}, {}),
        ({"averager": averager, "average_before_eval": first}, {}),
        ({"failure_timeout": 20 if first else 30}, {}),
        ({}, {"callbacks": [uneven if first else UnevenInputs("stop")]}),
        ({}, {"callbacks": [] if first else [CommMonitor()]}),
        ({}, {"accumulate_grad_batches": 1 if first else 2}),
        ({}, {"gradient_clip_val": None if first else 1.0}),
        ({}, {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "norm" if first else "value"}),
        ({}, {"precision": "32-true" if first else "bf16-mixed"}),
        ({}, {"max_steps": 3 if first else 4}),
        ({}, {"max_epochs": 1 if first else 2}),
    ]
    errors = []
    for settings, options in cases:
        with pytest.raises(RuntimeError) as raised:
            fit(Net, settings, options)
        errors.append(str(raised.value))
    return errors


def test_a_setting_that_differs_is_named_on_every_rank_before_anything_runs() -> None:
    names = ["gradient_weighting", "skip_missing_loss", "save_replicas", "average_before_eval", "failure_timeout"]
    names += ["UnevenInputs", "callbacks of lightning_ddp_hooks", "accumulate_grad_batches", "gradient_clip_val"]
    names += ["gradient_clip_algorithm", "precision", "max_steps", "max_epochs"]
    for errors in run_ranks(fit_with_different_settings):
        for name, error in zip(names, errors, strict=True):
            assert re.search(f"is rank 0: argument {name}=.*; rank 1: argument {name}=", error), error


def test_lightnings_name_for_the_hook_warns_and_works() -> None:
    with pytest.warns(
        UserWarning, match=r"`ddp_comm_hook` is Lightning's name: use `comm_hook=\(state, hook\)`"
    ) as caught:
        strategy = DDPHooksStrategy(ddp_comm_state="state", ddp_comm_hook=allreduce_hook)
    with pytest.warns(UserWarning, match="`ddp_comm_hook` is Lightning's name"):
        wrapped = DDPHooksStrategy(ddp_comm_hook=allreduce_hook, ddp_comm_wrapper=fp16_compress_wrapper)

    assert strategy.settings.hook == TorchHook(hook=allreduce_hook, state="state")
    assert wrapped.settings.hook.hook.__name__ == "fp16_compress_wrapper_hook"
    assert caught[0].filename == __file__  # the line to change


@pytest.mark.parametrize(
    "settings",
    [{}, {"comm_hook": (None, allreduce_hook)}, {"bucket_cap_mb": 2.5, "timeout": timedelta(minutes=1)}],
    ids=text_of,
)
def test_strategies_can_be_pickled(settings: dict[str, Any]) -> None:
    copy = pickle.loads(pickle.dumps(DDPHooksStrategy(**settings)))

    assert copy.settings == DDPHooksStrategy(**settings).settings


def test_the_reducer_is_there_only_while_fitting() -> None:
    with pytest.raises(RuntimeError, match="only while the Trainer is fitting"):
        DDPHooksStrategy().stats()


# ---------------------------------------------------------------------- the command line and YAML


def parse(*args: str, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    monkeypatch.setattr(sys, "argv", ["script"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # of names that Lightning uses
    quiet = {"accelerator": "cpu", "logger": False, "devices": 2}
    args = ("--seed_everything=0", *args)
    return LightningCLI(Net, args=list(args), run=False, save_config_callback=None, trainer_defaults=quiet).trainer


FLAGS = (
    "--trainer.strategy=lightning_ddp_hooks.DDPHooksStrategy",
    "--trainer.strategy.bucket_cap_mb=2",
    "--trainer.strategy.find_unused_parameters=true",
    "--trainer.strategy.gradient_weighting=samples",
    "--trainer.strategy.timeout=0:01:00",
)


def assert_as_flags_say(strategy: DDPHooksStrategy) -> None:
    assert type(strategy) is DDPHooksStrategy
    assert strategy.settings.bucket_cap_mb == 2
    assert strategy.settings.find_unused_parameters is True
    assert strategy.settings.gradient_weighting == "samples"
    assert strategy._timeout == timedelta(minutes=1)


def test_command_line_sets_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_as_flags_say(parse(*FLAGS, monkeypatch=monkeypatch).strategy)
    assert type(parse("--trainer.strategy=ddp_hooks", monkeypatch=monkeypatch).strategy) is DDPHooksStrategy


def test_yaml_sets_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        """
        trainer:
          strategy:
            class_path: lightning_ddp_hooks.DDPHooksStrategy
            init_args:
              comm_hook: allreduce
              bucket_cap_mb: 2
              find_unused_parameters: true
              gradient_weighting: samples
              timeout: 0:01:00
        """
    )

    assert_as_flags_say(parse("--config", str(tmp_path / "config.yaml"), monkeypatch=monkeypatch).strategy)


def test_printed_configuration_can_be_read_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        parse(*FLAGS, "--print_config", monkeypatch=monkeypatch)
    assert left.value.code == 0
    printed = capsys.readouterr().out
    assert "class_path: lightning_ddp_hooks.DDPHooksStrategy" in printed
    (tmp_path / "config.yaml").write_text(printed)

    assert_as_flags_say(parse("--config", str(tmp_path / "config.yaml"), monkeypatch=monkeypatch).strategy)


HOOK_FLAGS: list[tuple[list[str], CommHook]] = [
    (["comm_hook=powersgd"], PowerSGD()),
    (["comm_hook=lightning_ddp_hooks.hooks.PowerSGD", "comm_hook.rank=4"], PowerSGD(rank=4)),
    (["comm_hook=TopK", "comm_hook.ratio=0.1"], TopK(ratio=0.1)),
    (["comm_hook=Cast", "comm_hook.inner=powersgd", "comm_hook.dtype=float16"], Cast(PowerSGD(), "float16")),
]


@pytest.mark.parametrize(("flags", "hook"), HOOK_FLAGS, ids=[" ".join(flags) for flags, _ in HOOK_FLAGS])
def test_command_line_sets_the_hook(flags: list[str], hook: CommHook, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = parse(FLAGS[0], *(f"--trainer.strategy.{flag}" for flag in flags), monkeypatch=monkeypatch).strategy

    assert strategy.settings.hook == hook


def test_command_line_sets_the_averager(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("averager=PeriodicModelAverager", "averager.period=4", "averager.warmup_steps=100")
    strategy = parse(FLAGS[0], *(f"--trainer.strategy.{flag}" for flag in flags), monkeypatch=monkeypatch).strategy

    assert strategy.settings.averager == PeriodicModelAverager(period=4, warmup_steps=100)


HOOK_NAMES = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
IN_YAML: list[tuple[str, dict[str, Any]]] = [
    (
        "comm_hook: {class_path: Cast, init_args: {inner: int8, dtype: float16}}",
        {"comm_hook": Cast(BlockQuantize(), "float16")},
    ),
    (
        """
        comm_hook:
          class_path: lightning_ddp_hooks.hooks.Cast
          init_args:
            inner: {class_path: lightning_ddp_hooks.hooks.PowerSGD, init_args: {rank: 2}}
        """,
        {"comm_hook": Cast(PowerSGD(rank=2))},
    ),
    (
        """
        comm_hook:
          class_path: lightning_ddp_hooks.hooks.PerParameter
          init_args:
            rules:
            - hook: {class_path: lightning_ddp_hooks.hooks.PowerSGD, init_args: {rank: 4}}
              ndim: 2
            - hook: int8
              pattern: "*.embed.*"
            default: bf16
        """,
        {
            "comm_hook": PerParameter(
                [Rule(PowerSGD(rank=4), ndim=2), Rule(BlockQuantize(), pattern="*.embed.*")],
                default=Cast(dtype="bfloat16"),
            )
        },
    ),
    (
        """
        comm_hook:
          class_path: lightning_ddp_hooks.hooks.Schedule
          init_args:
            stages:
            - {step: 0, hook: bf16}
            - step: 1000
              hook: {class_path: lightning_ddp_hooks.hooks.TopK, init_args: {ratio: 0.1}}
        """,
        {"comm_hook": Schedule([Stage(0, Cast(dtype="bfloat16")), Stage(1000, TopK(ratio=0.1))])},
    ),
    (
        f"comm_hook: {{class_path: TorchHook, init_args: {{hook: {HOOK_NAMES}.allreduce_hook}}}}",
        {"comm_hook": TorchHook(hook=allreduce_hook)},
    ),
    (
        """
        averager:
          class_path: lightning_ddp_hooks.averaging.HierarchicalModelAverager
          init_args: {period_group_size_dict: {2: 2, 8: 4}, warmup_steps: 5}
        """,
        {"averager": HierarchicalModelAverager(period_group_size_dict={2: 2, 8: 4}, warmup_steps=5)},
    ),
    (
        """
        averager:
          class_path: lightning_ddp_hooks.averaging.DiLoCo
          init_args:
            period: 8
            comm_hook: {class_path: lightning_ddp_hooks.hooks.PowerSGD, init_args: {rank: 4}}
        """,
        {"averager": DiLoCo(period=8, comm_hook=PowerSGD(rank=4))},
    ),
]


@pytest.mark.parametrize(("text", "expected"), IN_YAML, ids=[str(expected)[:40] for _, expected in IN_YAML])
def test_yaml_sets_composed_hooks_and_averagers_and_prints_them_back(
    text: str,
    expected: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    head = "trainer:\n  strategy:\n    class_path: lightning_ddp_hooks.DDPHooksStrategy\n    init_args:\n"
    config = tmp_path / "config.yaml"
    config.write_text(head + indent(dedent(text), " " * 6))
    with pytest.raises(SystemExit):
        parse("--config", str(config), "--print_config", monkeypatch=monkeypatch)
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)

    for path in (config, printed):
        strategy = parse("--config", str(path), monkeypatch=monkeypatch).strategy
        assert strategy.settings.hook == expected.get("comm_hook")
        assert strategy.settings.averager == expected.get("averager")


def test_command_line_names_the_hooks_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="hook 'nonsense'; known names: allreduce, batched"):
        parse(FLAGS[0], "--trainer.strategy.comm_hook=nonsense", monkeypatch=monkeypatch)


@pytest.mark.parametrize("flag", ["bucket_cap_mb=wide", "gradient_weighting=tokens", "bucket_cap=2"])
def test_command_line_refuses_wrong_arguments(
    flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        parse(FLAGS[0], f"--trainer.strategy.{flag}", monkeypatch=monkeypatch)

    assert left.value.code == 2
    assert re.split("[=]", flag)[0] in capsys.readouterr().err


# ---------------------------------------------------------------------- processes


LAUNCHED = """
import sys
import torch
import lightning_ddp_hooks
from trainer_runs import EXACT, Net, make_module, state_of
from lightning.pytorch import Trainer

if __name__ == "__main__":
    strategy, path = sys.argv[1:]
    trainer = Trainer(**EXACT, devices=2, strategy=strategy)
    assert trainer.strategy.launcher is not None
    module = make_module(Net)
    trainer.fit(module)
    trainer.save_checkpoint(path + ".ckpt")  # by the ranks, or the one process that has started them
    if trainer.is_global_zero:
        torch.save(state_of(module), path)
"""


def run_script(text: str, *args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a script that can import the package and the tests' models; without the caller's warning filters."""
    script = cwd / "script.py"
    script.write_text(text)
    here = Path(__file__).parent
    path = ":".join(str(folder) for folder in (here, here.parent, here.parent.parent))
    env = {"PATH": "", "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HOME": str(cwd)}
    return subprocess.run(
        [sys.executable, script, *args], cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=100
    )


@pytest.mark.trainer
@pytest.mark.parametrize("name", ["ddp_hooks", "ddp_hooks_spawn", "ddp_hooks_fork"])
def test_launchers_start_the_processes_themselves(name: str, tmp_path: Path) -> None:
    done = run_script(LAUNCHED, name, str(tmp_path / "state.pt"), cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    state: State = torch.load(tmp_path / "state.pt", weights_only=True)
    saved = torch.load(tmp_path / "state.pt.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(saved[key].float(), tensor.float()) for key, tensor in state.items())
    for key, tensor in fit(Net, "auto", EXACT).items():
        # Trained in float64, but spawned processes give the weights back to a module of float32.
        torch.testing.assert_close(state[key].float(), tensor.float())


def slurm(rank: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "localhost",
    }


def fit_under_slurm() -> tuple[list[int], State, State]:
    expected = fit(Net, "ddp", EXACT)
    rank = int(os.environ["RANK"])
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID"):
        del os.environ[name]
    os.environ.update(slurm(rank))
    torch.manual_seed(rank)
    module = Net()
    trainer = Trainer(**EXACT, strategy="ddp_hooks", devices=2)
    assert isinstance(trainer.strategy.cluster_environment, SLURMEnvironment)
    trainer.fit(module)
    strategy = trainer.strategy
    ranks = [strategy.global_rank, strategy.local_rank, strategy.world_size]
    return ranks, {name: tensor.clone() for name, tensor in module.state_dict().items()}, expected


@pytest.mark.ranks
@pytest.mark.trainer
def test_slurms_variables_are_understood() -> None:
    for rank, (ranks, ours, ddp) in enumerate(run_ranks(fit_under_slurm)):
        assert ranks == [rank, rank, 2]
        assert_same(ours, ddp)


# ---------------------------------------------------------------------- the other package of Lightning


OLDER_NAMES = """
import pytorch_lightning as pl
import torch
from lightning_ddp_hooks import DDPHooksStrategy, callbacks, optim
from lightning_fabric import Fabric

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(5, 4), 1)

if __name__ == "__main__":
    for strategy in ("ddp_hooks", DDPHooksStrategy(optimizer_in_hook=optim.OptimizerInHook(shard=True))):
        used = [callbacks.UnevenInputs(), callbacks.CommMonitor()]
        trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False, max_epochs=1,
            callbacks=used, enable_progress_bar=False, enable_model_summary=False)
        trainer.fit(Net())
        print(trainer.global_rank, type(trainer.strategy).__mro__[1].__module__, trainer.global_step, flush=True)
    assert "lightning.pytorch" not in __import__("sys").modules
    fabric = Fabric(strategy="ddp_hooks", accelerator="cpu", devices=2)
    print(type(fabric.strategy).__mro__[1].__module__, flush=True)
    import lightning.pytorch
    try:
        lightning.pytorch.Trainer(strategy="ddp_hooks", accelerator="cpu", devices=2, logger=False)
    except ValueError as error:
        print(error, flush=True)
"""


@pytest.mark.trainer
def test_the_older_names_of_lightning_work_where_they_are_imported_first(tmp_path: Path) -> None:
    done = run_script(OLDER_NAMES, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    for expected in ("0 pytorch_lightning.strategies.ddp 3", "1 pytorch_lightning.strategies.ddp 3"):
        assert done.stdout.count(expected) == 2, done.stdout
    assert "lightning_fabric.strategies.ddp" in done.stdout
    assert "use `import pytorch_lightning as pl` instead of `import lightning.pytorch as pl`" in done.stdout


OLDER_NAMES_LAST = """
import lightning_ddp_hooks as ldh
import pytorch_lightning as pl
for strategy in ("ddp_hooks", ldh.DDPHooksStrategy()):
    used = [ldh.callbacks.UnevenInputs()]
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False, callbacks=used)
    print(type(trainer.strategy).__mro__[1].__module__)
assert "lightning" not in __import__("sys").modules
"""


def test_the_older_names_of_lightning_work_where_they_are_imported_after_this_package(tmp_path: Path) -> None:
    done = run_script(OLDER_NAMES_LAST, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("pytorch_lightning.strategies.ddp") == 2


def import_standalone_package() -> list[str]:
    assert "pytorch_lightning" not in sys.modules
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an old package's imports
        import pytorch_lightning as pl
    messages = []
    for strategy in ("ddp_hooks", "ddp_hooks_spawn"):
        with pytest.raises(ValueError, match="`import") as caught:
            pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False)
        messages.append(str(caught.value))
    return messages


@pytest.mark.ranks
def test_standalone_package_imported_after_ours_says_which_import_to_change() -> None:
    (messages,) = run_ranks(import_standalone_package, world_size=1)

    for message in messages:
        assert "`import lightning.pytorch as pl`" in message
        assert "`import pytorch_lightning as pl`" in message
