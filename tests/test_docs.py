"""What README and docs show works: Python, diffs and YAML run or load, commands parse, links and names are there.

Each page's Python blocks run one after the other, as a reader would paste them: those that communicate on two ranks.
"""

import argparse
import contextlib
import importlib
import inspect
import io
import os
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from lightning.pytorch.strategies import DDPStrategy
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import lightning_ddp_hooks
from lightning_ddp_hooks import DataParallel, DDPHooksStrategy, averaging, callbacks, hooks, optim
from lightning_ddp_hooks.__main__ import _parser
from lightning_ddp_hooks.hooks.registry import SHORT_NAMES

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.md"))


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    """Return the page's blocks of a language, also those indented in a list."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [re.sub(rf"^{indent}", "", block, flags=re.MULTILINE) for indent, block in found]


def pages_with(language: str) -> list[Path]:
    return [page for page in PAGES if blocks(page, language)]


# ---------------------------------------------------------------------- Python


def given() -> dict[str, Any]:
    """Return what the pages take for granted."""
    module = nn.Linear(2, 2)
    rank = dist.get_rank() if dist.is_initialized() else 0
    return {
        "Trainer": Trainer,
        "DDPHooksStrategy": DDPHooksStrategy,
        "DataParallel": DataParallel,
        "averaging": averaging,
        "callbacks": callbacks,
        "hooks": hooks,
        "optim": optim,
        "MyModel": BoringModel,
        "MyData": BoringDataModule,
        "my_state": None,
        "my_function": lambda state, bucket: bucket.buffer(),
        "module": module,
        "model": module,
        "optimizer": torch.optim.SGD(module.parameters(), lr=0.1),
        "loss": lambda output: output.square().mean(),
        "loader": [torch.ones(3, 2)] * (2 + rank),
        "rank": rank,
        "torch": torch,
    }


def run_page(page: Path) -> dict[str, Any]:
    """Run the page's blocks one after the other; return the names that they leave."""
    names = given()
    for block in blocks(page, "python"):
        exec(compile(block, name_of(page), "exec"), names)
    return names


def on_ranks(page: Path) -> None:
    run_page(page)


def communicates(page: Path) -> bool:
    calls = r"DataParallel\(|Join\(\[|fabric\.launch\(|device_mesh\("
    return any(re.search(calls, block) for block in blocks(page, "python"))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("page", [page for page in pages_with("python") if not communicates(page)], ids=name_of)
def test_the_python_of_a_page_runs(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "fit", "--trainer.fast_dev_run=true", "--trainer.accelerator=cpu"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    run_page(page)


@pytest.mark.ranks
@pytest.mark.parametrize("page", [page for page in pages_with("python") if communicates(page)], ids=name_of)
def test_the_python_of_a_page_that_communicates_runs_on_two_ranks(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # pages may write files
    run_ranks(on_ranks, page)


def test_no_python_is_left_out() -> None:
    for page in PAGES:
        assert not re.findall(r"^ *```(?:py|pycon|python .*)$", page.read_text(), flags=re.MULTILINE), page
    assert sum(len(blocks(page, "python")) for page in PAGES) >= 25


# What a diff leads to, where neither a GPU nor four processes are at hand.
HERE = {'accelerator="gpu"': 'accelerator="cpu"'}


@pytest.fixture
def _world_of_one(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def run_diffs(page: Path, **names: Any) -> None:
    """Run what each diff of the page leads to, by itself."""
    for block in blocks(page, "diff"):
        after = "\n".join(line[1:] for line in block.splitlines() if not line.startswith("-"))
        for there, here in HERE.items():
            after = after.replace(there, here)
        exec(compile(after, name_of(page), "exec"), given() | names)


def launches(page: Path) -> bool:
    return any("Fabric(" in block for block in blocks(page, "diff"))


@pytest.mark.usefixtures("_world_of_one")
@pytest.mark.parametrize("page", [page for page in pages_with("diff") if not launches(page)], ids=name_of)
def test_what_a_diff_leads_to_runs(page: Path) -> None:
    run_diffs(page)


def diffs_on_ranks(page: Path) -> None:
    data = TensorDataset(torch.ones(6, 2), torch.zeros(6, 2))
    run_diffs(page, loader=DataLoader(data, batch_size=2), loss=nn.functional.mse_loss)


@pytest.mark.ranks
@pytest.mark.parametrize("page", [page for page in pages_with("diff") if launches(page)], ids=name_of)
def test_what_a_diff_with_a_loop_of_its_own_leads_to_runs_on_two_ranks(page: Path) -> None:
    run_ranks(diffs_on_ranks, page)


# ---------------------------------------------------------------------- what the pages teach


def in_turns() -> list[list[float]]:
    """Return what the page's hook makes of a constant gradient, step by step."""
    hook = run_page(ROOT / "docs" / "extending.md")["InTurns"]
    module = nn.Linear(4, 1, bias=False)
    model = DataParallel(module, comm_hook=hook(parts=4))
    seen = []
    for step in range(4):
        model.set_step(step)
        model.zero_grad()
        model(torch.full((1, 4), 1.0 + dist.get_rank())).sum().backward()  # a gradient of ones, and one of twos
        seen.append(module.weight.grad.view(-1).tolist())
    return seen


@pytest.mark.ranks
def test_the_hook_of_the_page_sends_each_slice_in_its_turn_and_the_rest_later() -> None:
    turns = [[1.5 * (step + 1) if part == step else 0.0 for part in range(4)] for step in range(4)]
    assert run_ranks(in_turns) == [turns, turns]


def pulled() -> float:
    """Return where the page's averager pulls a parameter that is 0 on rank 0 and 1 on rank 1."""
    averager = run_page(ROOT / "docs" / "extending.md")["Elastic"](period=1, pull=0.5)
    parameter = nn.Parameter(torch.tensor([float(dist.get_rank())]))
    averager.average_parameters([parameter])
    return parameter.item()


@pytest.mark.ranks
def test_the_averager_of_the_page_pulls_replicas_halfway_to_their_mean() -> None:
    assert run_ranks(pulled) == [0.25, 0.75]


def counted() -> int:
    return run_page(ROOT / "docs" / "extending.md")["counter"].total


@pytest.mark.ranks
def test_the_joinable_of_the_page_counts_the_samples_of_all_ranks() -> None:
    assert run_ranks(counted) == [3 * (2 + 3), 3 * (2 + 3)]


# ---------------------------------------------------------------------- YAML


def parse(config: Path, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    monkeypatch.setattr(sys, "argv", ["script"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # of names that Lightning uses
    quiet = {"accelerator": "cpu", "logger": False, "devices": 2}
    args = ["--seed_everything=0", f"--config={config}"]
    return LightningCLI(BoringModel, args=args, run=False, save_config_callback=None, trainer_defaults=quiet).trainer


YAML = [(page, block) for page in pages_with("yaml") for block in blocks(page, "yaml")]
YAML += [(file, file.read_text()) for file in sorted((ROOT / "examples").glob("*.yaml"))]


@pytest.mark.parametrize(("page", "text"), YAML, ids=[f"{name_of(page)}-{n}" for n, (page, _) in enumerate(YAML)])
def test_yaml_is_taken_by_a_command_line(
    page: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(text)
    strategy = parse(config, monkeypatch).strategy

    assert type(strategy) is DDPHooksStrategy
    assert strategy.settings != DDPHooksStrategy().settings  # what the block sets has arrived


# ---------------------------------------------------------------------- commands


def commands(page: Path) -> list[list[str]]:
    """Return the words of each command in the page's bash blocks, without comments, settings and redirections."""
    found = []
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").replace(" && ", "\n").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]
            if words:
                found.append(words[: words.index(">")] if ">" in words else words)
    return found


COMMANDS = [(page, words) for page in [*PAGES, *RESULTS] for words in commands(page)]


def test_commands_of_the_package_parse() -> None:
    checked = 0
    for page, words in COMMANDS:
        if "lightning_ddp_hooks" not in words:
            continue
        flags = words[words.index("lightning_ddp_hooks") + 1 :]
        try:
            _parser().parse_args(flags)
        except SystemExit as left:
            pytest.fail(f"{name_of(page)}: {shlex.join(words)} ends with {left.code}")
        checked += 1
    assert checked >= 8


def refused(lines: list[list[str]]) -> list[str]:
    """Return those command lines of `LightningCLI` examples that the parser does not take."""
    os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"
    bad = []
    for script, *flags in lines:
        if flags == ["fit"] or not any(".help" in flag for flag in flags):
            flags = [*flags, "--print_config"]
        sys.argv = [script, *flags]
        said = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            try:
                runpy.run_path(script, run_name="__main__")
                code: object = "no end"
            except SystemExit as left:
                code = left.code
        if code != 0:
            bad.append(f"{shlex.join([script, *flags])}: {said.getvalue()[-500:]}")
    return bad


@pytest.mark.ranks
def test_command_lines_of_examples_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = []
    for page, words in COMMANDS:
        scripts = [word for word in words if word.startswith("examples/")]
        for script in scripts:
            assert (ROOT / script).exists(), f"{name_of(page)}: {script}"
        if words[0] == "python" and "fit" in words:
            lines.append(words[1:])
    assert len(lines) >= 10
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "config.yaml").write_text("trainer: {max_epochs: 2}\n")
    monkeypatch.chdir(tmp_path)

    assert run_ranks(refused, lines, world_size=1) == [[]]


def test_scripts_that_are_named_exist_and_know_their_flags() -> None:
    benchmarks = "".join(path.read_text() for path in (ROOT / "benchmarks").glob("*.py"))
    checked = 0
    for page, words in COMMANDS:
        if words[0] != "python" or words[1] == "-m" or "fit" in words:
            continue
        script = ROOT / words[1]
        assert script.exists(), f"{name_of(page)}: {words[1]}"
        known = script.read_text() + (benchmarks if "benchmarks" in words[1] else "")
        for flag in [word.split("=")[0] for word in words[2:] if word.startswith("--")]:
            names = {f'"{flag}"', f'"{flag.replace("--no-", "--", 1)}"'}  # of a flag with its opposite
            assert any(name in known for name in names), f"{name_of(page)}: {words[1]} {flag}"
            checked += 1
    assert checked >= 10


def test_files_that_are_named_exist() -> None:
    for page in [*PAGES, *RESULTS]:
        for path in re.findall(r"(?<![\w/])(?:examples|benchmarks|docs)/[\w./-]+\.\w+", page.read_text()):
            assert (ROOT / path).exists(), f"{name_of(page)}: {path}"


# ---------------------------------------------------------------------- links, navigation, names


@pytest.mark.parametrize(
    ("script", "made", "page"),
    [("make_versions", "table_in", "versions.md"), ("make_headline", "headline", "headline.svg")],
)
def test_what_a_script_makes_is_as_it_makes_it(
    script: str, made: str, page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "docs"), *sys.path])
    text = (ROOT / "docs" / page).read_text()
    assert getattr(importlib.import_module(script), made)(text) == text, f"run `python docs/{script}.py`"


def test_results_that_are_named_are_there() -> None:
    text = (ROOT / "docs" / "results.md").read_text()
    named = set(re.findall(r"`(?:benchmarks/results/)?(\w+\.md)`", text))
    assert named <= {page.name for page in RESULTS}
    assert named >= {page.name for page in RESULTS} - {"redesign.md"}


@pytest.mark.parametrize("page", [*PAGES, *RESULTS], ids=name_of)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), target


def test_every_page_is_in_the_navigation() -> None:
    def files(entries: list[Any]) -> Iterator[str]:
        for entry in entries:
            value = next(iter(entry.values()))
            yield from files(value) if isinstance(value, list) else [value]

    listed = list(files(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(listed) == sorted(str(page.relative_to(ROOT / "docs")) for page in PAGES[1:])


def test_the_api_pages_have_every_public_name() -> None:
    text = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    names = set(lightning_ddp_hooks.__all__) - {"__version__"}
    names -= set(parts := ("averaging", "callbacks", "fsdp", "hooks", "join", "optim"))
    for part in (getattr(lightning_ddp_hooks, name) for name in parts):
        names |= set(part.__all__)
    missing = [name for name in sorted(names) if not re.search(rf"\b{name}\b", text)]
    assert not missing


def torchs_names() -> set[str]:
    """Return the public names, and the arguments, of what torch and Lightning have in this field."""
    from torch.distributed.algorithms import ddp_comm_hooks, join
    from torch.distributed.algorithms.ddp_comm_hooks import (
        ddp_zero_hook,
        debugging_hooks,
        default_hooks,
        post_localSGD_hook,
        powerSGD_hook,
        quantization_hooks,
    )
    from torch.distributed.algorithms.model_averaging import averagers, hierarchical_model_averager, utils
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

    modules = [ddp_comm_hooks, ddp_zero_hook, debugging_hooks, default_hooks, post_localSGD_hook, powerSGD_hook]
    modules += [quantization_hooks, averagers, hierarchical_model_averager, utils, join]
    names = {
        name
        for module in modules
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    }
    classes = [DistributedDataParallel, DDPStrategy, ZeroRedundancyOptimizer, PostLocalSGDOptimizer, join.Join]
    classes += [powerSGD_hook.PowerSGDState, post_localSGD_hook.PostLocalSGDState, averagers.PeriodicModelAverager]
    classes += [hierarchical_model_averager.HierarchicalModelAverager]
    for cls in classes:
        names |= set(inspect.signature(cls).parameters)
    for cls in (ZeroRedundancyOptimizer, join.Join, join.Joinable, join.JoinHook):
        names |= {name for name in vars(cls) if not name.startswith("_")}
    return names


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of importing torch.distributed.optim
def test_the_tables_of_names_have_all_of_torchs_and_lightnings_and_ours_exist() -> None:
    text = (ROOT / "docs" / "migrate.md").read_text()
    missing = [name for name in sorted(torchs_names()) if not re.search(rf"\b{name}\b", text)]
    assert not missing
    for part, name in re.findall(r"`(hooks|optim|averaging|join|callbacks)\.(\w+)", text):
        assert hasattr(getattr(lightning_ddp_hooks, part), name), f"{part}.{name}"


def test_the_page_of_hooks_lists_all_short_names() -> None:
    text = (ROOT / "docs" / "hooks.md").read_text()
    assert [name for name in SHORT_NAMES if f"`{name}`" not in text] == []


def test_commands_are_all_described() -> None:
    (choices,) = (action.choices for action in _parser()._actions if isinstance(action, argparse._SubParsersAction))
    text = "".join(page.read_text() for page in PAGES)
    assert [name for name in choices if f"lightning_ddp_hooks {name}" not in text] == []
