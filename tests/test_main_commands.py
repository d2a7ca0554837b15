"""The commands advise, bench and doctor, as they are typed."""

import argparse
import contextlib
import io
import json
import logging
import os
import shlex
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import run_ranks

import ddp_hooks_command
import lightning_ddp_hooks
from lightning_ddp_hooks import comm
from lightning_ddp_hooks.__main__ import _parser, main
from lightning_ddp_hooks.cli import doctor
from lightning_ddp_hooks.cli.target import _merged

MODULES = """
import logging

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn


class Module(LightningModule):
    def __init__(self, width: int = 64):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 1))

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def on_train_start(self):
        logging.getLogger("lightning.pytorch.module").warning("a warning of the module")

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        steps = int(self.trainer.estimated_stepping_batches)
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)]


class Manual(Module):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizers = self.optimizers()
        self.manual_backward(self.net(batch).square().mean())
        optimizers.step()
        optimizers.zero_grad()


class Data(LightningDataModule):
    def __init__(self, samples: int = 256, batch_size: int = 4):
        super().__init__()
        self.samples, self.batch_size = samples, batch_size

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(self.samples, 8), self.batch_size)


def batch():
    return torch.randn(4, 8)


def wide():
    return Module(width=512)


def not_a_module():
    return 3


class NeedsArguments(Module):
    def __init__(self, depth: int):
        super().__init__()
"""
NETWORK = ["--world-size", "4", "--bandwidth", "1gbit"]
PREDICTED = ["advise", *NETWORK, "--unchecked", "--steps", "2", "--hooks", "allreduce", "--device", "cpu"]


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with modules to ask about, which is the working directory."""
    (tmp_path / "asked_about.py").write_text(MODULES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


@pytest.fixture(autouse=True)
def _forget_modules() -> None:
    sys.modules.pop("asked_about", None)


def _typed(*words: str, timeout: float = 100.0) -> str:
    """Run a command line in a process of its own; return what it printed."""
    of_torchrun = ("WORLD_SIZE", "RANK", "LOCAL_RANK")
    environment = {name: value for name, value in os.environ.items() if name not in of_torchrun}
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run([sys.executable, "-m", "lightning_ddp_hooks", *words], capture_output=True, text=True,
                          env=environment, timeout=timeout)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# ---------------------------------------------------------------------- advise


@pytest.mark.trainer
def test_advise_prints_a_table_a_recommendation_and_yaml(capsys: pytest.CaptureFixture[str], modules: Path) -> None:
    words = ["--model", "asked_about.wide", "--data", "asked_about.Data", "--json", "figures.json"]
    hooks = ["--hooks", "allreduce", "int8", "powersgd-1", "periodic-8"]
    assert main([*PREDICTED, *words, *hooks, "--bandwidth", "1mbit"]) == 0
    text = capsys.readouterr().out
    figures = json.loads((modules / "figures.json").read_text())
    numel = 8 * 512 + 512 + 512 + 1
    assert sum(figures["profile"]["nbytes"]) == 4 * numel
    steps = {option["name"]: option["predicted"]["step"] for option in figures["options"]}
    # At 1 Mbit/s the wire is all there is: 1.5 x 20 kB in 0.25 s, and a quarter of it.
    assert steps["allreduce"] == pytest.approx(1.5 * 4 * numel / 125e3, rel=0.2)
    assert 0.2 < steps["int8"] / steps["allreduce"] < 0.4
    assert figures["recommended"] == "int8"
    assert "Recommendation: int8." in text
    assert "comm_hook: int8" in text
    assert f"If you can accept more than --accept rounding: {figures['beyond']}" in text
    assert "4 ranks, 1 Mbit/s, 0.1 ms" in text
    # 20 kB make one bucket whatever its limit.
    assert "bucket_cap_mb" not in text
    assert {option["bucket_cap_mb"] for option in figures["options"]} == {None}


def _bench_commands(text: str) -> list[list[str]]:
    """Find the commands that advise proposes, one that starts processes and one for torchrun."""
    lines = [line.strip() for line in text.splitlines() if "-m lightning_ddp_hooks bench" in line]
    return [shlex.split(line.partition("-m lightning_ddp_hooks ")[2]) for line in lines]


@pytest.mark.trainer
@pytest.mark.parametrize(
    "words",
    [
        ["--model", "asked_about.wide", "--data", "asked_about.Data"],
        ["--config", "my config.yaml", "--batch", "asked_about.batch", "--latency", "1ms", "--bucket-caps", "0.01"],
    ],
    ids=["model", "config"],
)
def test_advise_proposes_a_bench_that_is_accepted(
    words: list[str], capsys: pytest.CaptureFixture[str], modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("jsonargparse")
    (modules / "my config.yaml").write_text("model:\n  class_path: asked_about.Module\n  init_args:\n    width: 1024\n")
    assert main([*PREDICTED, *words]) == 0
    here, on_hosts = _bench_commands(capsys.readouterr().out)
    expected = _parser().parse_args(["bench", *words[:4], "--steps", "2", "--hooks", "allreduce", "--device", "cpu"])
    expected.bucket_cap_mb = 0.01 if "--config" in words else 25.0
    assert _parser().parse_args(on_hosts) == expected
    expected.processes = min(4, max(2, os.cpu_count() or 1))
    assert _parser().parse_args(here) == expected
    monkeypatch.setenv("WORLD_SIZE", "1")  # as under torchrun, which starts the processes
    assert main([*PREDICTED, *words]) == 0
    assert _bench_commands(capsys.readouterr().out) == [on_hosts]


@pytest.mark.trainer
def test_advise_says_so_where_plain_allreduce_is_best(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "asked_about.Module", "--batch", "asked_about.batch"]
    assert main([*PREDICTED, *words, "--bandwidth", "100gbit", "--latency", "0us", "--hooks", "allreduce", "bf16"]) == 0
    assert "Plain all-reduce is best." in capsys.readouterr().out


@pytest.mark.trainer
def test_advise_takes_model_data_and_trainer_from_a_configuration(modules: Path) -> None:
    pytest.importorskip("jsonargparse")
    (modules / "config.yaml").write_text(
        "model:\n  class_path: asked_about.Module\n  init_args:\n    width: 32\n"
        "data:\n  class_path: asked_about.Data\n  init_args:\n    batch_size: 2\n"
        "trainer:\n  accumulate_grad_batches: 4\n  devices: 8\n"
    )
    assert main([*PREDICTED, "--config", "config.yaml", "--json", "figures.json"]) == 0
    figures = json.loads((modules / "figures.json").read_text())
    assert figures["profile"]["shapes"][0] == [32, 8]
    # Three micro-batches come before the backward that reduces.
    assert figures["profile"]["before"] > 2 * figures["profile"]["backward"]
    (modules / "wide.yaml").write_text("model:\n  width: 64\n")
    (modules / "arguments.yaml").write_text("model:\n  width: 16\n")
    words = [
        "--config",
        "wide.yaml",
        "--config",
        "arguments.yaml",
        "--model",
        "asked_about.Module",
        "--batch",
        "asked_about.batch",
    ]
    assert main([*PREDICTED, *words, "--json", "figures.json"]) == 0
    assert json.loads((modules / "figures.json").read_text())["profile"]["shapes"][0] == [16, 8]


def test_later_configurations_are_laid_over_earlier_ones() -> None:
    first = {"model": {"class_path": "a.A", "init_args": {"width": 1, "depth": 2}}, "trainer": {"precision": 16}}
    later = {"model": {"class_path": "a.A", "init_args": {"width": 3}}, "data": {"class_path": "b.B"}}
    both = _merged(first, later)
    assert both["model"] == {"class_path": "a.A", "init_args": {"width": 3, "depth": 2}}
    assert (both["trainer"], both["data"]) == (first["trainer"], later["data"])
    assert _merged(both, {"model": {"class_path": "c.C"}})["model"] == {"class_path": "c.C"}


@pytest.mark.trainer
def test_advise_measures_manual_optimization(modules: Path) -> None:
    words = ["--model", "asked_about.Manual", "--data", "asked_about.Data", "--json", "figures.json"]
    assert main([*PREDICTED, *words]) == 0
    profile = json.loads((modules / "figures.json").read_text())["profile"]
    assert profile["steps"] == 2
    assert 0 < max(profile["ready"]) <= profile["backward"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Name the LightningModule"),
        (["--model", "Module"], "Expected --model as pkg.module.Name, got 'Module'"),
        (["--model", "nowhere.Module"], "cannot import 'nowhere'"),
        (["--model", "asked_about.Absent"], "'asked_about' has no 'Absent'"),
        (["--model", "asked_about.not_a_module", "--batch", "asked_about.batch"], "from --model, got a int"),
        (["--model", "asked_about.Module"], "Module has no train_dataloader"),
        (["--model", "asked_about.NeedsArguments", "--batch", "asked_about.batch"], "cannot be made without arguments"),
        (["--model", "asked_about.Module", "--data", "asked_about.Data", "--batch", "asked_about.batch"], "not both"),
        (["--model", "asked_about.Module", "--measure-link"], "needs the other ranks"),
        (["--model", "asked_about.Module", "--world-size", "1"], "One rank has nothing to communicate"),
        (["--config", "absent.yaml"], "absent.yaml"),
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_told_what_is_wrong(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*PREDICTED, *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["advise", "--bandwidth", "fast"], "Expected a bandwidth such as 1gbit"),
        (["advise", "--latency", "soon"], "Expected a latency such as 50us"),
        (["advise", "--world-size", "0"], "expected a number from 1 up"),
        (["advise", "--hooks", "magic"], "invalid choice: 'magic'"),
        (["bench", "--bucket-cap-mb", "0"], "expected a number above 0"),
        (["unknown"], "invalid choice: 'unknown'"),
    ],
)
def test_argparse_refuses_what_makes_no_sense(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert message in capsys.readouterr().err


@pytest.mark.trainer
@pytest.mark.parametrize(
    ("words", "reason"),
    [(["--world-size", "4"], "A step takes "), (["--world-size", "8"], "of more than 4 ranks, 8 are asked for")],
)
def test_advise_refuses_what_it_cannot_know_and_says_bench(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--model", "asked_about.wide", "--batch", "asked_about.batch", "--steps", "2", "--bandwidth", "1gbit"]
    assert main(["advise", "--device", "cpu", *asked, *words]) == 2
    said = capsys.readouterr().err
    assert reason in said
    assert "Measure it instead." in said
    assert all(command[:3] == ["bench", "--model", "asked_about.wide"] for command in _bench_commands(said))
    assert _bench_commands(said)


def test_advise_without_a_network_asks_for_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--model", "asked_about.Module", "--world-size", "4"]) == 2
    assert "--bandwidth" in capsys.readouterr().err


# ---------------------------------------------------------------------- bench, doctor


def _on_rank(*words: str) -> tuple[str, list[str]]:
    """Run a command as one of the ranks that torchrun has started; return what it printed and what was logged."""
    sys.path.insert(0, os.getcwd())
    output = io.StringIO()
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    lightning = logging.getLogger("lightning.pytorch")
    lightning.addHandler(handler)
    with contextlib.redirect_stdout(output):
        assert main(list(words)) == 0
    lightning.info("again as before")
    return output.getvalue(), logged


@pytest.mark.ranks
@pytest.mark.trainer
def test_bench_measures_on_the_ranks_of_torchrun() -> None:
    words = ["--model", "asked_about.Module", "--batch", "asked_about.batch", "--steps", "2", "--device", "cpu"]
    hooks = ["allreduce", "int8", "periodic-8"]
    arguments = ["bench", *words, "--rounds", "1", "--hooks", *hooks, "--json", "figures.json", "--yaml", "best.yaml"]
    (first, logged), (second, _) = run_ranks(_on_rank, *arguments)
    assert "2 ranks" in first
    assert "Fastest for this module on this network: " in first
    assert "Your step, your model, this network: asked_about.Module, 2 ranks over gloo, " in first
    best = Path("best.yaml").read_text()
    assert best in first
    assert best.startswith("trainer:\n  strategy:\n    class_path: lightning_ddp_hooks.DDPHooksStrategy")
    assert not second
    # Of each fit nothing but warnings, so that the table is not buried.
    assert logged == [*["a warning of the module"] * len(hooks), "again as before"]
    figures = json.loads(Path("figures.json").read_text())
    assert figures["world_size"] == 2
    assert set(figures["seconds"]) == set(hooks)
    assert all(0 < seconds < 10 for times in figures["seconds"].values() for seconds in times)


@pytest.mark.ranks
def test_doctor_examines_this_machine_and_its_ranks() -> None:
    text = _typed("doctor", "--device", "cpu", "--processes", "2")  # a word that is not handed on to them
    subjects = {" ".join(line.split()[1:]) for line in text.splitlines()}
    assert "FAIL" not in text
    for expected in ("versions python", "messages each rank reaches each other one (gloo)", "ranks 2 on 1 host(s)"):
        assert any(subject.startswith(expected) for subject in subjects), text
    (host,) = (line for line in text.splitlines() if line.split()[1:2] == ["host"])
    for expected in ("native reducer", "shm backend", "GB of shared memory free", "GB of disk for checkpoints",
                     "clock +0.0 ms from rank 0's", "ports reached"):  # fmt: skip
        assert expected in host
    assert "bit/s, " in text


def test_doctor_names_hosts_that_cannot_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads stand for ranks; one's host has a name that leads nowhere."""
    store, hosts, found = dist.HashStore(), ["localhost", "nowhere.invalid"], [[], []]  # type: ignore[var-annotated]
    monkeypatch.setattr(comm, "meet", lambda timeout: (store, int(threading.current_thread().name), 2))
    monkeypatch.setattr(doctor.socket, "gethostname", lambda: hosts[int(threading.current_thread().name)])
    monkeypatch.setattr(doctor, "_CONNECTS", timedelta(seconds=1))
    threads = [
        threading.Thread(target=lambda n=n: found[n].extend(doctor._unreachable()), name=str(n)) for n in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found[0] == found[1]
    ((verdict, subject, text),) = found[0]
    assert (verdict, subject) == ("FAIL", "ports")
    assert text.startswith("localhost cannot connect to nowhere.invalid: let all ports through")


def test_the_console_command_helps_without_torch() -> None:
    (choices,) = (action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction))
    assert {choice.dest: choice.help for choice in choices._choices_actions} == ddp_hooks_command.COMMANDS
    code = "import sys, ddp_hooks_command as c\ntry: c.main(sys.argv[1:])\nfinally: print('torch' in sys.modules)"
    for flags, said in (("--help", "measure which hook"), ("--version", lightning_ddp_hooks.__version__)):
        done = subprocess.run(
            [sys.executable, "-c", code, flags], capture_output=True, text=True, timeout=60, check=True
        )
        assert said in done.stdout
        assert done.stdout.endswith("False\n")


def test_the_console_command_hands_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert ddp_hooks_command.main(["build-native", "--where"]) == 0
    assert "ddp" in capsys.readouterr().out
    for flags in ([], ["benhc"]):
        with pytest.raises(SystemExit) as left:
            ddp_hooks_command.main(flags)
        assert left.value.code == 2


def test_bench_and_doctor_do_not_start_processes_under_torchrun(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["doctor", "--processes", "2"]) == 2
    assert "torchrun has started them already" in capsys.readouterr().err
    assert main(["bench", "--processes", "2", "--model", "asked_about.Module"]) == 2
    assert "torchrun has started them already" in capsys.readouterr().err


def test_one_process_is_no_bench(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["bench", "--processes", "1", "--model", "asked_about.Module"]) == 2
    assert "one rank has nothing to communicate" in capsys.readouterr().err
