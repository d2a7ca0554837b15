"""The examples as a user runs them: their command lines, on several ranks, and the last line of the output.

What starts processes itself runs as such once; the others run as scripts on ranks that are there already, which takes a
fraction of the time.
"""

import contextlib
import io
import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import run_ranks

pytestmark = [pytest.mark.examples, pytest.mark.timeout(300)]

EXAMPLES = Path(__file__).parent.parent / "examples"


def run_script(script: str, *args: str) -> str:
    """Be one rank of ``python script args``; return the last line of what it prints."""
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [script, *args]
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    return (output.getvalue().splitlines() or [""])[-1]


def configuration(*flags: str) -> str:
    """Return what ``digits.py fit flags --print_config`` prints."""
    output = io.StringIO()
    sys.argv = ["digits.py", "fit", *flags, "--print_config"]
    with contextlib.redirect_stdout(output), pytest.raises(SystemExit) as left:
        runpy.run_path(str(EXAMPLES / "digits.py"), run_name="__main__")
    assert left.value.code == 0
    return output.getvalue()


def on_two_ranks(script: str, *args: str) -> str:
    """Run an example in the working directory, where its logs go; return rank 0's last line."""
    return run_ranks(run_script, script, *args, timeout=120)[0]


def run_command(*command: str | Path) -> str:
    """Run a command line; return the last line of its output."""
    done = subprocess.run(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def value(line: str, name: str) -> float:
    match = re.search(rf"(?:^| ){name}=(\d+\.\d+)(?: |$)", line)
    assert match, f"expected {name}=..., got {line!r}"
    return float(match[1])


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # of names that Lightning uses


def test_digits_ends_with_its_accuracy() -> None:
    line = on_two_ranks("digits.py", "fit", "--trainer.max_epochs=3")

    assert re.fullmatch(r"test_acc=\d\.\d{4}", line)
    assert 0.85 < value(line, "test_acc") <= 1


def test_powersgd_is_set_by_yaml_and_flags_on_a_real_command_line(tmp_path: Path) -> None:
    line = run_command(
        *(sys.executable, EXAMPLES / "digits.py", "fit", "--config", EXAMPLES / "powersgd.yaml"),
        "--trainer.max_epochs=2",
        "--trainer.strategy.comm_hook.default=fp16",
    )

    assert 0.7 < value(line, "test_acc") <= 1
    report = next(tmp_path.glob("lightning_logs/version_*/comm_monitor/report.html")).read_text()
    assert "PowerSGD(rank=4, start_iter=30" in report
    assert "default=Cast(dtype=&#x27;float16&#x27;" in report


def test_language_model_ends_with_its_loss() -> None:
    tiny = ("--model.width=32", "--model.depth=1", "--data.length=32")
    short = ("--trainer.limit_train_batches=4", "--trainer.limit_val_batches=2")
    line = on_two_ranks("language_model.py", "fit", *tiny, *short)

    assert 3 < value(line, "val_loss") < 6  # from a guess, 5.5, on its way down


def test_uneven_shards_ends_with_all_images_of_both_shards() -> None:
    line = on_two_ranks("uneven_shards.py", "--epochs=2")

    assert line.startswith("images_per_epoch=1497 ")
    assert 0.5 < value(line, "test_acc") <= 1


@pytest.mark.parametrize("averager", ["periodic", "diloco"])
def test_local_sgd_learns_and_sends_less(averager: str) -> None:
    line = on_two_ranks("local_sgd.py", "--averager", averager, "--epochs=4", "--warmup=10")

    assert 0.8 < value(line, "test_acc") <= 1
    gradients_kb = 116.3  # a ring all-reduce over two ranks sends every float32 gradient once
    steps = 4 * 19
    averagings = -(-(steps - 10) // 8)  # the first after the warm-up, and then one in 8 steps
    assert value(line, "kb_per_step") == pytest.approx(gradients_kb * (10 + averagings) / steps, rel=0.05)


def test_gan_trains_both_networks_without_a_flag() -> None:
    line = on_two_ranks("gan.py", "--epochs=2")

    assert 0.3 < value(line, "real") < 1
    assert 0 < value(line, "made") < 0.7


def test_sharded_optimizer_shares_its_state_and_changes_nothing() -> None:
    sharded = on_two_ranks("sharded_optimizer.py", "--epochs=1")
    whole = on_two_ranks("sharded_optimizer.py", "--epochs=1", "--no-shard")

    parameters, its_kb = sharded.split(" state_kb=")
    same_parameters, all_kb = whole.split(" state_kb=")
    assert parameters == same_parameters
    first, second = map(float, all_kb.split("+"))
    assert first == second
    assert sum(map(float, its_kb.split("+"))) == pytest.approx(first, abs=0.2)  # printed to a tenth
    assert max(map(float, its_kb.split("+"))) < 0.51 * first


def test_muon_is_shared_and_changes_nothing() -> None:
    assert on_two_ranks("muon.py", "--epochs=1") == on_two_ranks("muon.py", "--epochs=1", "--no-shard")


def test_a_fabric_loop_goes_on_from_its_checkpoint() -> None:
    first = on_two_ranks("fabric_digits.py", "--hook=int8", "--epochs=3", "--save=digits.ckpt")
    second = on_two_ranks("fabric_digits.py", "--hook=int8", "--epochs=1", "--resume=digits.ckpt")

    assert first.startswith("steps=69 ")  # half of 1,437 images in batches of 32, three times
    assert second.startswith("steps=92 ")
    assert 0.75 < value(first, "test_acc") <= 1


def test_own_hook_learns() -> None:
    assert 0.6 < value(on_two_ranks("own_hook.py", "--epochs=3"), "test_acc") <= 1


def test_two_nodes_train_together() -> None:
    line = run_command(EXAMPLES / "two_nodes.sh", "--trainer.max_epochs=1")

    assert 0.3 < value(line, "test_acc") <= 1


@pytest.mark.timeout(60)
def test_if_one_of_two_nodes_fails_the_other_one_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with pytest.raises(AssertionError, match="in use"):
            run_command(EXAMPLES / "two_nodes.sh", "--trainer.max_epochs=1")


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.sh")), ids=lambda path: path.name)
def test_shell_scripts_are_valid(script: Path) -> None:
    # SLURM is not here to run its script; what the script starts is digits.py with flags that the parser knows.
    subprocess.run(["bash", "-n", script], check=True)
    assert os.access(script, os.X_OK)


def test_the_flags_of_the_slurm_script_are_known() -> None:
    words = (EXAMPLES / "slurm.sh").read_text().replace("\\\n", " ").split("digits.py fit")[1].split()
    (printed,) = run_ranks(configuration, *words, world_size=1)

    assert "num_nodes: 2" in printed
    assert "bucket_cap_mb: auto" in printed


NOTEBOOK = """
import json, sys
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        exec("".join(cell["source"]).replace("max_epochs=5", "max_epochs=1"))
"""


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    last = run_command(sys.executable, "-c", NOTEBOOK, EXAMPLES / "hooks.ipynb")

    name, sent = re.fullmatch(r"(\w+) +accuracy 0\.\d+  sent +([\d.]+) kB a step", last).groups()
    assert name == "PowerSGD"
    assert 0 < float(sent) < 340.0  # what all-reduce sends of 85,002 parameters


def test_language_model_is_trained_in_shards() -> None:
    line = run_ranks(run_script, "language_model_fsdp.py", "--batches=2", world_size=4, timeout=120)[0]

    assert 0 < value(line, "val_loss") < 7
