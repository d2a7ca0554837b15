"""All pairs of settings, one by one, on one to three ranks, each against what `tests/trainer/combination_runs.py` says.

    python benchmarks/soak_combinations.py --worlds 2 3            # about a quarter of an hour on two cores
    python benchmarks/soak_combinations.py --random 200 --seed 1   # any number of settings at once
    python benchmarks/soak_combinations.py --worlds 2 --period 2   # averagers that leave ranks apart between averages

The test of the same name packs the pairs into few runs, where one setting might hide what another does. Prints what is
wrong, and ends with an error then.
"""

import argparse
import logging
import random
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "tests" / part) for part in ("trainer", "")]

from combination_runs import fit_combinations, judge_all, name_of  # noqa: E402
from ranks import run_ranks  # noqa: E402
from settings import Combination, Setting, pairs, said, settings_by_axis  # noqa: E402


def combinations_of(axes: dict[str, list[Setting]]) -> list[Combination]:
    """Return for each pair that works the pair with the defaults."""
    chosen = []
    for pair in pairs(axes):
        if said(pair, "refused"):
            continue
        given = {setting.axis: setting for setting in pair}
        chosen.append(tuple(given.get(axis, settings[0]) for axis, settings in axes.items()))
    return list(dict.fromkeys(chosen))


def draw(axes: dict[str, list[Setting]], rng: random.Random) -> Combination:
    """Return settings of all axes that go together."""
    chosen: list[Setting] = []
    for axis in rng.sample(list(axes), len(axes)):
        fits = [setting for setting in axes[axis] if not said([*chosen, setting], "refused")]
        chosen.append(rng.choice(fits))
    return tuple(sorted(chosen, key=lambda setting: list(axes).index(setting.axis)))


def check_refused(axes: dict[str, list[Setting]], world_size: int) -> list[str]:
    """Return which pairs are not refused as they should be."""
    refused = [pair for pair in pairs(axes) if said(pair, "refused")]
    wrong = []
    for errors in run_ranks(fit_combinations, refused, world_size, world_size=world_size, timeout=300):
        for pair, error in zip(refused, errors, strict=True):
            if not isinstance(error, str) or said(pair, "refused")[0] not in error:
                wrong.append(f"{name_of(pair, axes)}: {error}")
    print(f"{world_size} ranks: {len(refused)} pairs are refused")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 3], help="numbers of ranks")
    parser.add_argument("--period", type=int, default=1, help="of averagers; above 1 their results are only near")
    parser.add_argument("--random", type=int, default=0, help="so many random combinations instead of the pairs")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--batch", type=int, default=60, help="combinations in one world")
    parser.add_argument("--backend", choices=["python", "native"], default="python", help="engine where it is free")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning_ddp_hooks").setLevel(logging.ERROR)
    failed: list[Any] = []
    what = f"random combinations (seed {args.seed})" if args.random else "pairs"
    for world_size in args.worlds:
        axes = settings_by_axis(world_size, args.period)
        if args.backend == "native":
            axes["reducer_backend"].reverse()
        wrong = check_refused(axes, world_size)
        rng = random.Random(args.seed)
        chosen = [draw(axes, rng) for _ in range(args.random)] if args.random else combinations_of(axes)
        for first in range(0, len(chosen), args.batch):
            start = time.perf_counter()
            part = chosen[first : first + args.batch]
            wrong += judge_all(part, axes, world_size)
            seconds = time.perf_counter() - start
            print(f"{world_size} ranks: {first + len(part)} of {len(chosen)} {what}, {seconds:.0f} s", flush=True)
        print(*wrong, sep="\n")
        failed += wrong
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
