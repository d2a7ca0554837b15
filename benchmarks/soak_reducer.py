"""Long form of `tests/test_random_models.py`: many random models against the single-process reference.

    python benchmarks/soak_reducer.py --batches 50 --backend python

Stops at the first model whose result differs, and prints it.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from random_models import Spec, specs
from test_random_models import check_batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=50, help="worlds to start")
    parser.add_argument("--models", type=int, default=20, help="models in each")
    parser.add_argument("--backend", choices=["python", "native"], default="python")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    print(f"seed {args.seed}")
    done = 0

    @seed(args.seed)
    @settings(max_examples=args.batches, deadline=None, database=None, phases=[Phase.generate])
    @given(batch=st.lists(specs, min_size=args.models, max_size=args.models), world_size=st.integers(1, 4))
    def soak(batch: list[Spec], world_size: int) -> None:
        nonlocal done
        check_batch(batch, world_size, args.backend)
        done += len(batch)
        print(f"{done} models agree", flush=True)

    soak()
    print(f"{done} random models trained as the reference says ({args.backend} backend)")


if __name__ == "__main__":
    main()
