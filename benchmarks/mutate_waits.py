"""Removes each wait between streams, one at a time, and shows that the tests on the simulated device notice it.

    python benchmarks/mutate_waits.py [--only NAME ...]

A mutant is a copy of the package with one line changed. The tests in tests/device run against it until one fails. A
mutant that survives is either equivalent (the table says why) or shows a hole in the tests; then the exit status is 1.
It takes a minute or two for each mutant, and one more for those in C++, which are compiled.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STREAM, IN_FLIGHT, BUCKET = "reducer/stream.py", "reducer/in_flight.py", "reducer/in_flight_bucket.py"
SUM = "reducer/native/sum.cpp"
TESTS = ["tests/device/test_reducer_on_sim.py", "tests/device/test_one_point.py", "tests/device/test_hooks_on_sim.py"]


@dataclass(frozen=True)
class Mutant:
    """One wait, and the text that takes its place.

    Attributes:
        name: Name in the table.
        file: File within the package.
        old: Text of the wait; occurs once.
        new: Text without it.
        equivalent: Why removing it changes nothing; empty if it does.
    """

    name: str
    file: str
    old: str
    new: str
    equivalent: str = ""


MUTANTS = (
    Mutant("record ready", STREAM, "self._ready.record(torch.accelerator.current_stream(self._device))", "pass"),
    Mutant("communication waits for ready", STREAM, "self._stream.wait_event(self._ready)", "pass"),
    Mutant("record done", STREAM, "self._done.record(self._stream)", "pass"),
    Mutant(
        "compute waits for done",
        STREAM,
        "torch.accelerator.current_stream(self._device).wait_event(self._done)",
        "pass",
    ),
    Mutant("host waits for the read", STREAM, "self._arrived.synchronize()", "pass"),
    Mutant("join at the end", IN_FLIGHT, "                stream.join()\n", "                pass\n"),
    Mutant(
        "join behind the read of the status",
        IN_FLIGHT,
        "            self.streams[-1].join()  # the next backward writes the slot behind the read\n",
        "",
    ),
    Mutant("wait for a collective", BUCKET, "                handle.wait()\n", "                pass\n"),
    Mutant("native: record ready", SUM, "  ready_->record(current_stream(*stream_));\n", ""),
    Mutant("native: communication waits for ready", SUM, "  ready_->block(*stream_);\n", ""),
    Mutant("native: wait for the sum", SUM, "  std::exchange(work_, nullptr)->wait();\n", "  work_ = nullptr;\n"),
    Mutant("native: record done", SUM, "    done_->record(*stream_);\n", ""),
    Mutant("native: compute waits for done", SUM, "    done_->block(current_stream(*stream_));\n", ""),
)


def run_against(mutant: Mutant, folder: Path) -> tuple[bool, str]:
    """Run the tests against a mutant; return whether they failed, and the last line that says so."""
    shutil.copytree(ROOT / "lightning_ddp_hooks", folder / "lightning_ddp_hooks")
    shutil.copytree(ROOT / "tests", folder / "tests")
    shutil.copy(ROOT / "pyproject.toml", folder)
    path = folder / "lightning_ddp_hooks" / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.name}: the text of the wait occurs {text.count(mutant.old)} times in {mutant.file}.")
    path.write_text(text.replace(mutant.old, mutant.new))
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *TESTS]
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    failed = [line for line in ran.stdout.splitlines() if line.startswith("FAILED")]
    return ran.returncode == 1, failed[0].partition("::")[2].partition(" ")[0] if failed else ran.stdout[-300:]


def main() -> int:
    """Try the mutants, and print what became of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[mutant.name for mutant in MUTANTS])
    chosen = parser.parse_args().only
    survivors = 0
    for mutant in MUTANTS:
        if chosen and mutant.name not in chosen:
            continue
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            noticed, by = run_against(mutant, Path(folder))
        if not noticed and not mutant.equivalent:
            survivors += 1
        verdict = f"noticed by {by}" if noticed else f"SURVIVES {mutant.equivalent or by}"
        print(f"{mutant.name:40} {time.perf_counter() - started:5.0f} s  {verdict}", flush=True)
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
