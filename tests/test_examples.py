"""The examples as a user runs them: a command line, real processes, and the last line of the output."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.examples, pytest.mark.timeout(300)]

EXAMPLES = Path(__file__).parent.parent / "examples"

TINY_LANGUAGE_MODEL = (
    "--model.width=32",
    "--model.depth=1",
    "--data.length=32",
    "--trainer.limit_train_batches=4",
    "--trainer.limit_val_batches=2",
)


def last_line(script: str, *flags: str, cwd: Path) -> str:
    """Run ``script fit`` in ``cwd``, where its logs and checkpoints go; return the last line of its output."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / script, "fit", *flags],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def value(line: str, name: str) -> float:
    match = re.fullmatch(rf"{name}=(\d+\.\d{{4}})", line)
    assert match, f"expected {name}=..., got {line!r}"
    return float(match[1])


def test_digits_ends_with_its_accuracy(tmp_path: Path) -> None:
    line = last_line("digits.py", "--trainer.max_epochs=3", cwd=tmp_path)

    assert 0.85 < value(line, "test_acc") <= 1


def test_digits_takes_strategy_flags(tmp_path: Path) -> None:
    line = last_line(
        "digits.py",
        "--trainer.max_epochs=1",
        "--trainer.strategy=lightning_ddp_hooks.DDPHooksStrategy",
        "--trainer.strategy.bucket_cap_mb=0.01",
        cwd=tmp_path,
    )

    assert 0 < value(line, "test_acc") <= 1


def test_language_model_ends_with_its_loss(tmp_path: Path) -> None:
    line = last_line("language_model.py", *TINY_LANGUAGE_MODEL, cwd=tmp_path)

    assert 3 < value(line, "val_loss") < 6  # from a guess, 5.5, on its way down


def test_uneven_shards_ends_with_all_images_of_both_shards(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "uneven_shards.py", "--epochs=2"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    images, accuracy = done.stdout.splitlines()[-1].split()
    assert images == "images_per_epoch=1497"
    assert 0.5 < value(accuracy, "test_acc") <= 1
