"""Random programs over the Trainer on two and three ranks, against one process with a loop of plain PyTorch.

    python benchmarks/soak_programs.py --minutes 10            # other programs each time
    python benchmarks/soak_programs.py --seed 1234 --count 1   # one of them again

Programs mix accumulation, uneven inputs, a GradScaler, hooks, metrics, frozen layers, averagers, optimizers in the
hook, manual optimization and resuming; see `tests/trainer/programs.py`. Prints what is wrong, and fails then.
"""

import argparse
import logging
import sys
import time
import warnings
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "tests" / part) for part in ("trainer", "")]

from program_runs import judge, programs  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=0, help="how long to go on; one batch by default")
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 3], help="numbers of ranks")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first program")
    parser.add_argument("--count", type=int, default=25, help="programs in one world")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning_ddp_hooks").setLevel(logging.ERROR)
    begin, seed, failed = time.monotonic(), args.seed, 0
    while True:
        for world in args.worlds:
            start = time.monotonic()
            chosen = programs(seed, args.count, world)
            wrong = judge(chosen)
            failed += len(wrong)
            seconds = time.monotonic() - start
            print(
                f"{world} ranks: seeds {seed} to {chosen[-1].seed}, {seconds:.0f} s, {len(wrong)} wrong",
                *wrong,
                sep="\n",
            )
            sys.stdout.flush()
        seed = chosen[-1].seed + 1
        if time.monotonic() - begin >= 60 * args.minutes:
            break
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
