"""A hundred fits in one process: plain, with each part of the package, ending with errors. What stays behind?

    python benchmarks/soak_teardown.py --fits 100

After each fit the garbage is collected, and then threads, open files, process groups, tensors, objects of this package
and hooks on parameters are counted. Ends with an error if any of them is more after the last fit than after the second
one of the same kind, on any rank; what resident memory did is shown.
"""

import argparse
import logging
import math
import sys
import time
import warnings
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "tests" / part) for part in ("trainer", "")]

from _harness import format_table, positive_int  # noqa: E402
from ranks import run_ranks  # noqa: E402
from teardown_runs import KINDS, fit_in_turn, grown  # noqa: E402

COUNTED = ("threads", "files", "groups", "tensors", "objects", "hooks")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fits", type=positive_int, default=100, help="at least so many, in each number of ranks")
    parser.add_argument("--world-sizes", type=positive_int, nargs="+", default=[1, 2], metavar="RANKS")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    rounds = max(3, math.ceil(args.fits / len(KINDS)))
    failed = False
    for world_size in args.world_sizes:
        start = time.monotonic()
        results = run_ranks(fit_in_turn, list(KINDS), rounds, world_size=world_size, timeout=3600)
        seconds = time.monotonic() - start
        rows = []
        for kind in KINDS:
            more = {name: pair for result in results for name, pair in grown(result[kind]).items()}
            failed |= bool(more)
            second, last = results[0][kind][1], results[0][kind][-1]
            cells = [f"{second[name]} to {last[name]}{' !' * (name in more)}" for name in COUNTED]
            rows.append([kind, *cells])
        rss = [found["rss_kb"] for found in results[0]["plain"]]
        print(f"\n{rounds * len(KINDS)} fits in one process, {world_size} rank(s), {seconds:.0f} s")
        print("After the second fit of each kind, and after the last one:\n")
        print(format_table(["kind", *COUNTED], rows, "markdown"))
        per_fit = (rss[-1] - rss[1]) / ((rounds - 2) * len(KINDS))
        print(
            f"\nresident memory: {rss[1] / 1024:.1f} to {rss[-1] / 1024:.1f} MiB, {per_fit:.1f} KiB a fit", flush=True
        )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
