"""The command line: each class and argument can be set and is explained, what is printed can be read, errors help."""

import inspect
import json
import re
import sys
from collections.abc import Callable
from dataclasses import KW_ONLY
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import pytest
from jsonargparse import ArgumentParser
from lightning.pytorch.cli import LightningCLI
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from trainer_runs import Net

from lightning_ddp_hooks import DDPHooksStrategy, averaging, callbacks, hooks, optim
from lightning_ddp_hooks.averaging.names import AVERAGERS as NAMED_AVERAGERS
from lightning_ddp_hooks.averaging.names import AveragerLike
from lightning_ddp_hooks.hooks import CommHook
from lightning_ddp_hooks.hooks.registry import SHORT_NAMES, HookLike

ROOT = Path(__file__).resolve().parent.parent.parent
STRATEGY = "--trainer.strategy=lightning_ddp_hooks.DDPHooksStrategy"

# What a class cannot do without.
NEEDED: dict[type, tuple[str, ...]] = {
    hooks.PerParameter: ("--it.rules=[{hook: bf16, ndim: 2}]",),
    hooks.Schedule: ("--it.stages=[{step: 0, hook: bf16}]",),
    hooks.TorchHook: (f"--it.hook={fp16_compress_hook.__module__}.fp16_compress_hook",),
    averaging.HierarchicalModelAverager: ("--it.period_group_size_dict={2: 2}",),
}
CLASSES = [value for value in vars(hooks).values() if inspect.isclass(value) and not get_origin(value)]
HOOKS = [cls for cls in CLASSES if issubclass(cls, CommHook) and cls != CommHook]
AVERAGERS = [
    cls
    for cls in (getattr(averaging, name) for name in averaging.__all__)
    if issubclass(cls, averaging.ModelAverager) and cls != averaging.ModelAverager
]
EXPLAINED = [
    *(DDPHooksStrategy, *HOOKS, hooks.Rule, hooks.Stage, *AVERAGERS, optim.OptimizerInHook),
    *(callbacks.UnevenInputs, callbacks.ModelAveraging, callbacks.CommMonitor),
]


def name_of(cls: type) -> str:
    return cls.__name__


@pytest.fixture(autouse=True)
def _no_warnings_of_names_that_lightning_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LightningCLI]:
    """A `LightningCLI` with the given flags, that does not run."""
    monkeypatch.setattr(sys, "argv", ["script"])
    quiet = {"accelerator": "cpu", "logger": False, "devices": 2}

    def run(*flags: str, **kwargs: Any) -> LightningCLI:
        args = ["--seed_everything=0", *flags]
        return LightningCLI(Net, args=args, run=False, save_config_callback=None, trainer_defaults=quiet, **kwargs)

    return run


@pytest.mark.parametrize("cls", EXPLAINED, ids=name_of)
def test_every_argument_is_explained(cls: type) -> None:
    parser = ArgumentParser()
    parser.add_class_arguments(cls, "it")
    helps = {action.dest: action.help for action in parser._actions}

    assert [name for name in inspect.signature(cls).parameters if not helps.get(f"it.{name}")] == []


@pytest.mark.parametrize("cls", [*HOOKS, *AVERAGERS, hooks.Rule, hooks.Stage], ids=name_of)
def test_types_are_such_that_each_python_can_resolve_them(cls: type) -> None:
    # Python 3.10 refuses objects that are not types; a parser then goes without any.
    assert KW_ONLY not in get_type_hints(cls).values()


@pytest.mark.parametrize("cls", [*HOOKS, *AVERAGERS], ids=name_of)
def test_every_hook_and_averager_is_taken_by_its_path(cls: type) -> None:
    parser = ArgumentParser(exit_on_error=False)
    wanted: Any = HookLike | None if issubclass(cls, CommHook) else AveragerLike | None
    parser.add_argument("--it", type=wanted)
    path = f"lightning_ddp_hooks.{'hooks' if issubclass(cls, CommHook) else 'averaging'}.{cls.__name__}"
    given = parser.parse_args([f"--it={path}", *NEEDED.get(cls, ())])

    assert type(parser.instantiate_classes(given).it) is cls


def test_short_names_are_in_the_help_of_the_strategy(command_line: Callable[..., LightningCLI], capsys: Any) -> None:
    with pytest.raises(SystemExit) as left:
        command_line("--trainer.strategy.help=lightning_ddp_hooks.DDPHooksStrategy")

    assert left.value.code == 0
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert f"Short names are {', '.join(sorted(SHORT_NAMES))}." in text
    assert f"a short name ({', '.join(sorted(NAMED_AVERAGERS))})" in text
    for name in inspect.signature(DDPHooksStrategy).parameters:
        assert f"--trainer.strategy.{name} " in text


@pytest.mark.parametrize("base", [CommHook, averaging.ModelAverager], ids=name_of)
def test_help_lists_what_is_public_and_nothing_else(base: type) -> None:
    where = "hooks" if base is CommHook else "averaging"
    classes = [cls for cls in HOOKS + AVERAGERS if issubclass(cls, base)]
    parser = ArgumentParser()
    parser.add_argument("--it", type=base)
    listed = re.sub(r"\s", "", parser.format_help()).partition("knownsubclasses:")[2]
    paths = set(re.findall(r"lightning_ddp_hooks\.(?:\w+\.)*\w+", listed))
    names = SHORT_NAMES if base is CommHook else NAMED_AVERAGERS
    short = {f"lightning_ddp_hooks.short_names.{name}" for name in names}
    assert paths == short | {f"lightning_ddp_hooks.{where}.{cls.__name__}" for cls in classes}


def test_callbacks_are_added_to_those_of_a_file(command_line: Callable[..., LightningCLI], tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("trainer: {callbacks: [{class_path: LearningRateMonitor}], logger: true}\n")
    added = "--trainer.callbacks+=lightning_ddp_hooks.callbacks.UnevenInputs"
    trainer = command_line(f"--config={tmp_path / 'config.yaml'}", STRATEGY, added).trainer
    names = [type(callback).__name__ for callback in trainer.callbacks]
    assert {"LearningRateMonitor", "UnevenInputs"} <= set(names)


@pytest.mark.parametrize("path", ["lightning_ddp_hooks.DDPHooksStrategy", "DDPHooksStrategy", "ddp_hooks"])
def test_the_strategy_needs_no_arguments(path: str, command_line: Callable[..., LightningCLI]) -> None:
    assert type(command_line(f"--trainer.strategy={path}").trainer.strategy) is DDPHooksStrategy


BY_NAME: dict[tuple[str, ...], Any] = {
    ("comm_hook=powersgd", "comm_hook.rank=2"): hooks.PowerSGD(rank=2),
    ("comm_hook=fp8", "comm_hook.block_size=128"): hooks.BlockQuantize(dtype="fp8", block_size=128),
    ("comm_hook=fp16",): hooks.Cast(dtype="float16"),
    ("comm_hook=allreduce",): None,
    ("averager=diloco",): averaging.DiLoCo(),
    ("averager=diloco", "averager.comm_hook=int8", "averager.comm_hook.block_size=64"): averaging.DiLoCo(
        comm_hook=hooks.BlockQuantize(block_size=64)
    ),
    ("averager=local_sgd", "averager.period=25"): averaging.PeriodicModelAverager(period=25),
    ("averager=hierarchical", "averager.period_group_size_dict={2: 2}"): averaging.HierarchicalModelAverager(
        period_group_size_dict={2: 2}
    ),
}


@pytest.mark.parametrize("flags", BY_NAME, ids=" ".join)
def test_settings_follow_a_short_name(flags: tuple[str, ...], command_line: Callable[..., LightningCLI]) -> None:
    named = [f"--trainer.strategy.{flag}" for flag in flags]
    settings = command_line("--trainer.strategy=ddp_hooks", *named).trainer.strategy.settings
    assert (settings.averager if "averager" in flags[0] else settings.hook) == BY_NAME[flags]


def test_files_and_flags_are_laid_over_each_other(command_line: Callable[..., LightningCLI], tmp_path: Path) -> None:
    named = {"class_path": "powersgd", "init_args": {"rank": 2, "seed": 5}}
    strategy = {"class_path": "ddp_hooks", "init_args": {"comm_hook": named, "averager": "slowmo"}}
    for name, content in (("one", {"strategy": strategy}), ("other", {"max_epochs": 3})):
        (tmp_path / name).write_text(json.dumps({"trainer": content}))
    files = (f"--config={tmp_path / 'one'}", f"--config={tmp_path / 'other'}")
    trainer = command_line(*files, "--trainer.strategy.comm_hook.rank=4").trainer
    assert trainer.max_epochs == 3
    assert type(trainer.strategy) is DDPHooksStrategy
    assert trainer.strategy.settings.hook == hooks.PowerSGD(rank=4, seed=5)
    assert trainer.strategy.settings.averager == averaging.SlowMo()


FLAGS = {
    "short names": (
        STRATEGY,
        "--trainer.strategy.comm_hook=fp8",
        "--trainer.strategy.averager=diloco",
        "--trainer.strategy.averager.period=25",
    ),
    "hook of a hook": (
        STRATEGY,
        "--trainer.strategy.comm_hook=lightning_ddp_hooks.hooks.Cast",
        "--trainer.strategy.comm_hook.inner=lightning_ddp_hooks.hooks.PowerSGD",
        "--trainer.strategy.comm_hook.inner.rank=2",
    ),
    "scalars": (
        STRATEGY,
        "--trainer.strategy.bucket_cap_mb=auto",
        "--trainer.strategy.timeout=0:05:00",
        "--trainer.strategy.failure_timeout=null",
        "--trainer.strategy.check_replicas_every_n_steps=100",
        "--trainer.strategy.detect_nonfinite=true",
        "--trainer.strategy.optimizer_in_hook.shard=true",
        "--trainer.strategy.optimizer_in_hook.overlap=false",
    ),
    "callbacks": (
        "--trainer.callbacks+=lightning_ddp_hooks.callbacks.UnevenInputs",
        "--trainer.callbacks.policy=stop",
        "--trainer.callbacks+=lightning_ddp_hooks.callbacks.CommMonitor",
        "--trainer.callbacks.keep_steps=10",
        "--trainer.callbacks+=lightning_ddp_hooks.callbacks.ModelAveraging",
        "--trainer.callbacks.averager=lightning_ddp_hooks.averaging.SlowMo",
        "--trainer.callbacks.averager.period=4",
    ),
    "a file": (f"--config={ROOT / 'examples' / 'powersgd.yaml'}",),
}


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_what_is_printed_is_read_and_printed_the_same(
    flags: tuple[str, ...], command_line: Callable[..., LightningCLI], tmp_path: Path, capsys: Any
) -> None:
    printed: list[str] = []
    for given in (flags, (f"--config={tmp_path / 'printed.yaml'}",)):
        with pytest.raises(SystemExit):
            command_line(*given, "--print_config")
        printed.append(capsys.readouterr().out)
        (tmp_path / "printed.yaml").write_text(printed[0])

    assert "lightning_ddp_hooks" in printed[0]
    assert printed[0] == printed[1]


def test_a_pair_of_state_and_function_is_taken_by_the_functions_path(command_line: Callable[..., LightningCLI]) -> None:
    path = f"{fp16_compress_hook.__module__}.fp16_compress_hook"
    strategy = command_line(STRATEGY, f"--trainer.strategy.comm_hook=[null, {path}]").trainer.strategy

    assert strategy.settings.hook == hooks.TorchHook(hook=fp16_compress_hook)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["bucket_cap=3"], "'lightning_ddp_hooks.DDPHooksStrategy':.*Option 'bucket_cap' is not accepted"),
        (["reducer_backend=fast"], r"\['auto', 'native', 'python'\]. Got value: fast"),
        (["comm_hook=lightning_ddp_hooks.hooks.PowerSGD", "comm_hook.rnk=3"], "Option 'rnk' is not accepted"),
        (["comm_hook=powersgd", "comm_hook.rnk=3"], "Option 'rnk' is not accepted"),
        (["averager=hierarchical"], "arguments are required: period_group_size_dict"),
        (["optimizer_in_hook.shards=true"], "Option 'shards' is not accepted"),
        (["timeout=60"], 'Expected a string with form "h:m:s"'),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_wrong_flag_ends_the_command_with_what_is_expected(
    flags: list[str], said: str, command_line: Callable[..., LightningCLI], capsys: Any
) -> None:
    with pytest.raises(SystemExit) as left:
        command_line(STRATEGY, *(f"--trainer.strategy.{flag}" for flag in flags))

    assert left.value.code == 2
    assert re.search(said, capsys.readouterr().err, flags=re.DOTALL)


@pytest.mark.parametrize("name", ["powersdg", "lightning_ddp_hooks.hooks.PowerSDG"])
def test_a_wrong_hook_is_told_the_right_names(name: str, command_line: Callable[..., LightningCLI]) -> None:
    with pytest.raises(
        ValueError, match=f"Unknown communication hook '{name}'; known names: {', '.join(sorted(SHORT_NAMES))}"
    ):
        command_line(STRATEGY, f"--trainer.strategy.comm_hook={name}")
    known = ", ".join(sorted(NAMED_AVERAGERS))
    with pytest.raises(ValueError, match=f"Unknown averager '{name}'; known names: {known}"):
        command_line(STRATEGY, f"--trainer.strategy.averager={name}")
