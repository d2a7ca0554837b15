"""Harm one rank of a training run in many ways, see how all end, then resume and compare with a run never harmed.

    python benchmarks/soak_faults.py                                  # the table of benchmarks/results/faults.md
    python benchmarks/soak_faults.py --minutes 30 --seed 1            # random faults in random settings

Each fault is done to one rank of a fit that writes a checkpoint every second step. All other ranks must end by
themselves and soon; every checkpoint file must be whole; and a run that goes on from the last one must come out like
one that was never harmed. The first fault for which that does not hold ends the program with an error, or with
``--keep-going`` is marked in the table.
"""

import argparse
import logging
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "tests" / part) for part in ("trainer", "")]

from _harness import format_table  # noqa: E402
from fault_runs import HARMS, PATIENCE, PLACES, SETTINGS, Fault, compare, fit, fit_each_setting, newest, resume_each  # noqa: E402
from faults import Ended, run_with_fault  # noqa: E402
from ranks import run_ranks  # noqa: E402
from trainer_runs import State  # noqa: E402

from lightning_ddp_hooks.health.failure_detector import EXIT_CODE  # noqa: E402

SOON = 20.0
HARMLESS = ("delay",)
PART_WAYS = ("hang", "collective of its own", "SIGTERM")  # all ranks live, but not where the others wait for them
GONE = ("kill", "segfault", "abort", "stop", "exit", "hang with the lock", "cut")

# What the table shows: each kind of fault once, spread over settings and numbers of ranks.
TABLE: list[tuple[str, int, Fault]] = [
    ("plain", 4, Fault("forward", "kill", 2)),
    ("plain", 4, Fault("forward", "kill", 0)),
    ("plain", 2, Fault("backward", "kill")),
    ("powersgd", 4, Fault("hook", "kill", 3)),
    ("averager", 4, Fault("average", "kill", 1)),
    ("diloco", 2, Fault("average", "kill", 0)),
    ("sharded", 4, Fault("hook", "kill", 1)),
    ("uneven", 4, Fault("loader", "kill", 2)),
    ("plain", 2, Fault("validation", "kill")),
    ("sharded", 2, Fault("save", "kill")),
    ("plain", 4, Fault("write", "kill")),
    ("averager", 2, Fault("write", "kill")),
    ("plain", 2, Fault("forward", "segfault")),
    ("uneven", 2, Fault("backward", "abort")),
    ("plain", 4, Fault("forward", "stop", 1)),
    ("plain", 2, Fault("backward", "stop", 0)),
    ("sharded", 2, Fault("hook", "stop")),
    ("averager", 2, Fault("average", "stop")),
    ("plain", 2, Fault("write", "stop")),
    ("plain", 4, Fault("forward", "raise", 1)),
    ("plain", 4, Fault("backward", "raise", 1)),
    ("powersgd", 2, Fault("hook", "raise")),
    ("sharded", 4, Fault("hook", "raise", 2)),
    ("averager", 4, Fault("average", "raise", 3)),
    ("diloco", 2, Fault("average", "raise")),
    ("uneven", 4, Fault("loader", "raise", 3)),
    ("plain", 2, Fault("validation", "raise")),
    ("uneven", 2, Fault("save", "raise")),
    ("plain", 2, Fault("step", "raise")),
    ("plain", 2, Fault("forward", "out of memory")),
    ("plain", 2, Fault("forward", "exit")),
    ("plain", 2, Fault("forward", "sys.exit")),
    ("plain", 2, Fault("batch end", "SIGTERM")),
    ("plain", 2, Fault("batch end", "SIGINT")),
    ("plain", 4, Fault("forward", "cut", 1)),
    ("powersgd", 2, Fault("hook", "cut")),
    ("averager", 2, Fault("forward", "cut", 0)),
    ("plain", 2, Fault("write", "disk full")),
    ("sharded", 4, Fault("write", "disk full")),
    ("diloco", 2, Fault("write", "disk full")),
    ("plain", 2, Fault("forward", "hang")),
    ("plain", 2, Fault("forward", "hang with the lock")),
    ("plain", 2, Fault("forward", "collective of its own")),
    ("plain", 4, Fault("forward", "delay", 1)),
    ("averager", 2, Fault("average", "delay")),
    ("powersgd", 2, Fault("hook", "delay")),
    ("sharded", 2, Fault("save", "delay")),
]


@dataclass
class Outcome:
    """What became of a run.

    Attributes:
        happens: what another rank said.
        seconds: from the fault to the end of the last process; of those that could end.
        lost: how many steps were lost.
        codes: how the processes ended.
    """

    happens: str
    seconds: float
    lost: int
    codes: str


class References:
    """Final states of runs that were not harmed, by setting and number of ranks."""

    def __init__(self) -> None:
        self._states: dict[tuple[str, int], list[State]] = {}

    def get(self, name: str, world_size: int) -> list[State]:
        if (name, world_size) not in self._states:
            results = run_ranks(fit_each_setting, [name], world_size=world_size)
            self._states[name, world_size] = [result[name] for result in results]
        return self._states[name, world_size]


def try_fault(name: str, world_size: int, fault: Fault, references: References, folder: Path) -> Outcome:
    """Do harm, then resume.

    Raises:
        AssertionError: a rank hung, said nothing of use, or left something behind that a run cannot go on from.
    """
    endings = run_with_fault(fit, name, str(folder), fault, world_size=world_size, timeout=60, patience=PATIENCE)
    expected = references.get(name, world_size)
    exact = SETTINGS[name].exact and world_size == 2
    if fault.harm in HARMLESS:
        for ended, state in zip(endings, expected, strict=True):
            assert ended.code == 0, ended
            compare(ended.value, state, exact=SETTINGS[name].exact)
        return Outcome("goes on, as if nothing had happened", 0, 0, "0")
    others = [ended for index, ended in enumerate(endings) if index != fault.rank]
    for ended in others:
        assert ended.code in (1, EXIT_CODE), ended
        assert ended.seconds < SOON, ended
        assert says_who(ended.error, fault), ended.error
    step, path = newest(folder)
    at_step, last_whole = PLACES[fault.place]
    done = at_step + (fault.place == "batch end")
    assert step == last_whole, f"the last checkpoint is of step {step}, not {last_whole}"
    for found, state in zip(run_ranks(resume_each, [(name, str(path))], world_size=world_size), expected, strict=True):
        compare(found[0], state, exact=exact)
    ended_alone = [ended for ended in endings if ended.code is not None]
    return Outcome(
        told_by(others, fault), max(ended.seconds for ended in ended_alone), done - step, codes_of(endings, fault)
    )


def says_who(error: str, fault: Fault) -> bool:
    if fault.harm in PART_WAYS:
        return "did ranks part ways?" in error or f"Rank {fault.rank} " in error
    if fault.harm in GONE:
        return f"Rank {fault.rank} died or was stopped" in error or (fault.rank == 0 and "Rank 0 (store host" in error)
    return f"Rank {fault.rank} failed at step" in error


def told_by(others: list[Ended], fault: Fault) -> str:
    """Return the line of the report that names the rank."""
    for ended in others:
        for line in ended.error.splitlines():
            text = line.removeprefix("RuntimeError: ")
            if text.startswith((f"Rank {fault.rank} ", "A collective failed")):
                return text.partition(";")[0].partition(": no sign")[0]
    return "?"


def codes_of(endings: list[Ended], fault: Fault) -> str:
    """Say how the processes ended, the harmed one first."""

    def text(code: int | None) -> str:
        if code is None:
            return "stays"
        return signal.Signals(-code).name if code < 0 else str(code)

    others = sorted({text(ended.code) for index, ended in enumerate(endings) if index != fault.rank})
    return f"{text(endings[fault.rank].code)}; others {', '.join(others)}"


def draw(rng: random.Random) -> tuple[str, int, Fault]:
    """Draw a fault that can happen."""
    while True:
        name, world_size = rng.choice(list(SETTINGS)), rng.choice([2, 2, 3, 4])
        fault = Fault(rng.choice(list(PLACES)), rng.choice(list(HARMS)), rng.randrange(world_size))
        possible = (
            (fault.place != "hook" or name in ("powersgd", "sharded"))
            and (fault.place != "average" or name in ("averager", "diloco"))
            and (fault.place != "step" or name != "sharded")
            and (fault.harm != "disk full" or fault.place == "write")
            and (fault.place != "write" or fault.harm not in ("delay", "collective of its own", "cut", "SIGTERM"))
            # Python runs signal handlers between two of its own instructions, wherever that is.
            and (fault.harm not in ("SIGTERM", "SIGINT") or fault.place == "batch end")
        )
        if possible:
            return name, world_size, fault


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, help="try random faults for so long; otherwise the table's")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only", default="", help="of the table, the rows that contain this text")
    parser.add_argument("--keep-going", action="store_true", help="mark what fails, and go on")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    rng, deadline = random.Random(args.seed), time.monotonic() + 60 * (args.minutes or 0)
    queue = list(TABLE)
    if args.minutes:
        print(f"seed {args.seed}", flush=True)
    references, rows, failed = References(), [], 0
    while time.monotonic() < deadline if args.minutes else queue:
        name, world_size, fault = draw(rng) if args.minutes else queue.pop(0)
        label = f"{fault.harm} in {fault.place}, rank {fault.rank}"
        if args.only not in f"{label} {name}":
            continue
        with tempfile.TemporaryDirectory(prefix="soak-faults-") as tmp:
            try:
                outcome = try_fault(name, world_size, fault, references, Path(tmp))
            except BaseException as error:
                print(f"FAILED: {label}, {name}, {world_size} ranks", flush=True)
                if not args.keep_going or not isinstance(error, Exception):
                    raise
                traceback.print_exc()
                failed += 1
                rows.append([label, name, str(world_size), "FAILED", "", "", ""])
                continue
        figures = [f"{outcome.seconds:.1f}", str(outcome.lost)]
        rows.append([label, name, str(world_size), outcome.happens, outcome.codes, *figures])
        print(*rows[-1], sep=" | ", flush=True)
    header = ["fault", "setting", "ranks", "the others say", "exit codes", "seconds", "steps lost"]
    print(f"\n{format_table(header, rows, 'markdown')}\n{len(rows)} faults, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
