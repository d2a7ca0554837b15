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
from lightning_ddp_hooks.hooks import CommHook
from lightning_ddp_hooks.hooks.registry import SHORT_NAMES, HookLike
from lightning_ddp_hooks.lightning_cli import ArgumentParser as ListingParser

ROOT = Path(__file__).resolve().parent.parent.parent
STRATEGY = "--trainer.strategy=lightning_ddp_hooks.DDPHooksStrategy"

# What a class cannot do without.
NEEDED: dict[type, tuple[str, ...]] = {
    hooks.PerParameter: ("--it.rules=[{hook: bf16, ndim: 2}]",),
    hooks.Schedule: ("--it.stages=[{step: 0, hook: bf16}]",),
    hooks.TorchHook: (f"--it.hook={fp16_compress_hook.__module__}.fp16_compress_hook",),
    averaging.PeriodicModelAverager: ("--it.period=4",),
    averaging.HierarchicalModelAverager: ("--it.period_group_size_dict={2: 2}",),
    averaging.SlowMo: ("--it.period=4",),
    averaging.DiLoCo: ("--it.period=4",),
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


@pytest.fixture
def error_of(
    command_line: Callable[..., LightningCLI], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> Callable[..., str]:
    """What a command line that is wrong ends with, under our parser, in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def run(*flags: str) -> str:
        with pytest.raises(SystemExit) as left:
            command_line(*flags, parser_class=ListingParser)
        assert left.value.code == 2
        return str(capsys.readouterr().err)

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
    wanted: Any = HookLike | None if issubclass(cls, CommHook) else averaging.ModelAverager | None
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
    for name in inspect.signature(DDPHooksStrategy).parameters:
        assert f"--trainer.strategy.{name} " in text


FLAGS = {
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
        "--trainer.callbacks=lightning_ddp_hooks.callbacks.UnevenInputs",
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
        (["averager=lightning_ddp_hooks.averaging.SlowMo"], "arguments are required: period"),
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


takes_a_parser = pytest.mark.skipif(
    "parser_class" not in inspect.signature(LightningCLI.__init__).parameters, reason="needs Lightning 2.5.6"
)


def _options_of(cls: type) -> str:
    return ", ".join(sorted(inspect.signature(cls).parameters))


@takes_a_parser
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            [STRATEGY, "--trainer.strategy.bucket_cap=3"],
            f"Option 'bucket_cap' is not accepted; closest: bucket_cap_mb; accepted: {_options_of(DDPHooksStrategy)}\n",
        ),
        (
            [STRATEGY, "--trainer.strategy.comm_hook=PowerSGD", "--trainer.strategy.comm_hook.rnk=3"],
            f"Option 'rnk' is not accepted; closest: rank; accepted: {_options_of(hooks.PowerSGD)}\n",
        ),
        (
            [STRATEGY, "--trainer.strategy.optimizer_in_hook.shards=true"],
            "Option 'shards' is not accepted; closest: shard, shard_buckets; accepted: interleaved, overlap, shard",
        ),
        (
            ["--trainer.callbacks=lightning_ddp_hooks.callbacks.UnevenInputs", "--trainer.callbacks.polic=stop"],
            "Option 'polic' is not accepted; closest: policy; accepted: divisor, policy\n",
        ),
        (["--trainer.max_epoch_s=3"], "closest: trainer.max_epochs, .*; accepted: trainer.accelerator, .*"),
        (
            ["--modle.lr=3"],
            r"arguments: --modle.lr=3; (closest: .*; )?accepted: config, .*help, .*trainer\.\*\n",
        ),
        (["--config=wrong.yaml"], "'max_epoc'; closest: trainer.max_epochs, .*; accepted: "),
        (
            ["--config=deep.yaml"],
            f"Option 'perod' is not accepted; closest: period; accepted: {_options_of(averaging.SlowMo)}\n",
        ),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_our_parser_lists_the_right_flags(
    flags: list[str],
    said: str,
    error_of: Callable[..., str],
) -> None:
    Path("wrong.yaml").write_text("trainer: {max_epoc: 3}")
    averager = {"class_path": "lightning_ddp_hooks.averaging.SlowMo", "init_args": {"perod": 3}}
    strategy = {"class_path": "lightning_ddp_hooks.DDPHooksStrategy", "init_args": {"averager": averager}}
    Path("deep.yaml").write_text(json.dumps({"trainer": {"strategy": strategy}}))

    assert re.search(said, error_of(*flags))


@takes_a_parser
@pytest.mark.parametrize(
    "flags", [["--trainer.max_epoch_s=3"], ["--config=wrong.yaml"], []], ids=["flag", "file", "default"]
)
def test_our_parser_lists_the_flags_of_a_subcommand(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("wrong.yaml").write_text("trainer: {max_epoc: 3}")
    monkeypatch.setattr(sys, "argv", ["script", "fit", *flags])
    files = {} if flags else {"parser_kwargs": {"fit": {"default_config_files": ["wrong.yaml"]}}}
    with pytest.raises(SystemExit) as left:
        LightningCLI(Net, parser_class=ListingParser, save_config_callback=None, **files)  # type: ignore[arg-type]

    assert left.value.code == 2
    assert re.search("closest: trainer.max_epochs, .*; accepted: trainer.accelerator, ", capsys.readouterr().err)


@takes_a_parser
def test_each_of_several_wrong_flags_is_answered(command_line: Callable[..., LightningCLI], capsys: Any) -> None:
    with pytest.raises(SystemExit):
        command_line("garbage", "--foo=1", "--trainer.max-epoch-s=-2", "-trainer.devises=3", parser_class=ListingParser)

    *_, first, second, third = capsys.readouterr().err.splitlines()
    assert re.search(r"; foo: accepted: config, .*, help, .*, print_config, seed_everything, trainer\.\*$", first)
    assert second.startswith("  trainer.max_epoch_s: closest: trainer.max_epochs, ")
    assert third.startswith("  trainer.devises: closest: trainer.devices; accepted: trainer.accelerator, ")


@takes_a_parser
@pytest.mark.parametrize("flags", [["--trainer.max_epochs=3", "fit"], ["--config=early.yaml", "fit"]], ids=str)
def test_flags_before_the_subcommand_are_told_where_to_go(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("early.yaml").write_text("trainer: {max_epochs: 3}")
    monkeypatch.setattr(sys, "argv", ["script", *flags])
    with pytest.raises(SystemExit):
        LightningCLI(Net, parser_class=ListingParser, save_config_callback=None)

    said = capsys.readouterr().err.splitlines()[-1]
    assert "; accepted before the subcommand: config, " in said
    assert said.endswith("; all others go behind it, as in `fit --trainer.max_epochs ...`")


@takes_a_parser
@pytest.mark.parametrize(
    ("flags", "last"),
    [
        ([STRATEGY, "--trainer.strategy.averager=SlowMo", "--trainer.strategy.averager.perod=3"],
         "Option 'perod' is not accepted; closest: period; accepted: "),
        (["--trainer.strategy=ddp_hooks", "--trainer.strategy.comm_hook=int8"],
         "'ddp_hooks' is a name, which takes no arguments: to give some, name a class, such as DDPHooksStrategy."),
        (["--trainer.strategy.comm_hook=int8"], "'auto' is a name, which takes no arguments: "),
        ([STRATEGY, "--trainer.strategy.comm_hook=powersgd", "--trainer.strategy.comm_hook.rank=2"],
         "'powersgd' is a short name, which takes no arguments: to give it some, name the class, PowerSGD."),
        ([STRATEGY, "--trainer.strategy.comm_hook=PowerSDG", "--trainer.strategy.comm_hook.rank=2"],
         "'PowerSDG' is no class that was imported; closest: PowerSGD"),
        (["--trainer.callbacks=CommMonitr"], "'CommMonitr' is no class that was imported; closest: CommMonitor"),
        (["--trainer.callbacks=lightning_ddp_hooks.callbacks.CommMonitr"],
         "There is no 'CommMonitr' in lightning_ddp_hooks.callbacks; closest: CommMonitor"),
        (["--config=beside.yaml"], "Beside `class_path` there may only be `init_args`, which holds the arguments."),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)  # fmt: skip
def test_the_last_line_says_what_to_do(
    flags: list[str],
    last: str,
    error_of: Callable[..., str],
) -> None:
    hook = {"class_path": "lightning_ddp_hooks.hooks.PowerSGD", "rank": 3}
    strategy = {"class_path": "lightning_ddp_hooks.DDPHooksStrategy", "init_args": {"comm_hook": hook}}
    Path("beside.yaml").write_text(json.dumps({"trainer": {"strategy": strategy}}))

    assert error_of(*flags).splitlines()[-1].startswith(last)


@takes_a_parser
def test_other_errors_are_not_touched(command_line: Callable[..., LightningCLI], capsys: Any) -> None:
    said = []
    for kwargs in ({}, {"parser_class": ListingParser}):
        with pytest.raises(SystemExit):
            command_line(STRATEGY, "--trainer.strategy.timeout=60", **kwargs)
        said.append(capsys.readouterr().err)

    assert said[0] == said[1]


@pytest.mark.parametrize("name", ["powersdg", "lightning_ddp_hooks.hooks.PowerSDG"])
def test_a_wrong_hook_is_told_the_right_names(name: str, command_line: Callable[..., LightningCLI]) -> None:
    with pytest.raises(
        ValueError, match=f"Unknown communication hook '{name}'; known names: {', '.join(sorted(SHORT_NAMES))}"
    ):
        command_line(STRATEGY, f"--trainer.strategy.comm_hook={name}")
