"""Long form of `tests/test_backward_programs.py`: many random programs of forwards and backwards against stock DDP.

    python benchmarks/soak_backwards.py --batches 50

Stops at the first batch with programs whose gradients differ, and prints them.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from backward_drawing import programs
from backward_programs import Program
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st
from test_backward_programs import check


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=50, help="worlds to start")
    parser.add_argument("--programs", type=int, default=40, help="programs in each")
    parser.add_argument("--length", type=int, default=10, help="operations in a program, at most")
    parser.add_argument("--ranks", type=int, default=2, choices=[1, 2, 4], help="powers of two: means are exact")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    print(f"seed {args.seed}")
    done = 0

    @seed(args.seed)
    @settings(
        max_examples=args.batches,
        deadline=None,
        database=None,
        derandomize=False,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
    )
    @given(batch=st.lists(programs(args.length), min_size=args.programs, max_size=args.programs))
    def soak(batch: list[Program]) -> None:
        nonlocal done
        check(batch, ["python", "native"], args.ranks)
        done += len(batch)
        print(f"{done} programs agree", flush=True)

    soak()
    print(f"{done} random programs gave the gradients of stock DDP, in both engines")


if __name__ == "__main__":
    main()
