"""Is the advice right? `advise` and `bench` on the same hosts of a network lab, and what came of it.

For each case (a model, a rate, a number of hosts) the ranks first predict, measuring their own steps and the link
between them; then every hook is trained for some steps, and the two are compared: by how much the prediction of each
step is off, and how much longer the step of the recommended hook is than that of the best one that was accepted.

Finished cases are kept in a file, and a further call goes on behind them.

    python benchmarks/advice.py --results advice.json
    python benchmarks/advice.py --cases "lm, 100mbit, 4" --results advice.json
    python benchmarks/advice.py --minutes 0 --output markdown --results advice.json     # tables only
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _harness import format_table, positive_int
from netlab import Lab, LabError, why_impossible

HERE = Path(__file__).parent
# name -> what is trained, as on the command line.
MODELS = {
    "lm": ["--model", "lab_models.text_module", "--data", "lab_models.text"],
    "digits": ["--model", "lab_models.digits_module", "--data", "lab_models.digits"],
    "resnet": ["--model", "lab_models.resnet_module", "--batch", "lab_models.resnet_batch"],
    "mlp": ["--model", "lab_models.mlp_module", "--batch", "lab_models.mlp_batch"],
}
CASES = [
    ("lm", "100mbit", 4),
    ("lm", "1gbit", 4),
    ("lm", "100mbit", 2),
    ("lm", "1gbit", 2),
    ("resnet", "100mbit", 2),
    ("resnet", "1gbit", 2),
    ("digits", "100mbit", 4),
    ("digits", "1gbit", 2),
    ("mlp", "1gbit", 4),
    ("mlp", "100mbit", 2),
]
CHANGES = ("none", "rounding", "approximation", "local")


def key_of(model: str, rate: str, hosts: int) -> str:
    return f"{model}, {rate}, {hosts}"


def run_case(model: str, rate: str, hosts: int, args: argparse.Namespace) -> dict[str, Any]:
    env = {"PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]), "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as tmp, Lab(hosts, rate) as lab:
        predicted, measured = Path(tmp) / "predicted.json", Path(tmp) / "measured.json"
        hooks = ["--hooks", *args.hooks]
        lab.run("lightning_ddp_hooks", ["advise", *MODELS[model], "--measure-link", "--unchecked",
                "--steps", str(args.steps), *hooks, "--bucket-caps", str(args.cap), "--json", str(predicted)],
                module=True, env=env)  # fmt: skip
        lab.run("lightning_ddp_hooks", ["bench", *MODELS[model], "--steps", str(args.steps), *hooks,
                "--rounds", str(args.rounds), "--bucket-cap-mb", str(args.cap), "--json", str(measured)],
                module=True, env=env)  # fmt: skip
        return {
            "model": model, "rate": rate, "hosts": hosts,
            "predicted": json.loads(predicted.read_text()), "measured": json.loads(measured.read_text())["seconds"],
        }  # fmt: skip


# --- what came of it ------------------------------------------------------------------------------------------------


def measured_of(case: dict[str, Any]) -> dict[str, float]:
    return {name: min(times) for name, times in case["measured"].items()}


def advice_row(case: dict[str, Any]) -> list[str]:
    options = {option["name"]: option for option in case["predicted"]["options"]}
    measured = measured_of(case)
    recommended = case["predicted"]["recommended"]
    accepted = [name for name in measured if CHANGES.index(options[name]["change"]) <= CHANGES.index("rounding")]
    best = min(accepted, key=lambda name: measured[name])
    beyond = case["predicted"]["beyond"] or ""
    best_of_all = min(measured, key=lambda name: measured[name])
    return [
        f"{case['model']}, {case['rate']}, {case['hosts']} ranks", recommended, best,
        f"{1e3 * measured[recommended]:.0f}", f"{1e3 * measured[best]:.0f}",
        f"{measured[recommended] / measured[best] - 1:+.0%}",
        f"{measured['allreduce'] / measured[recommended]:.2f}",
        beyond, best_of_all, f"{measured[beyond] / measured[best_of_all] - 1:+.0%}" if beyond else "",
    ]  # fmt: skip


ADVICE_HEADER = ["case", "advised", "best measured", "ms advised", "ms best", "longer by", "mean / advised",
                 "beyond", "best of all", "longer by"]  # fmt: skip


def prediction_rows(case: dict[str, Any]) -> list[list[str]]:
    measured = measured_of(case)
    return [
        [
            f"{case['model']}, {case['rate']}, {case['hosts']} ranks", option["name"],
            f"{1e3 * option['predicted']['step']:.1f}", f"{1e3 * measured[option['name']]:.1f}",
            f"{option['predicted']['step'] / measured[option['name']] - 1:+.0%}",
        ]
        for option in case["predicted"]["options"]
    ]  # fmt: skip


def errors(cases: list[dict[str, Any]]) -> str:
    """The relative error of predictions, over all hooks of the cases, by number of ranks."""
    lines = []
    for hosts in sorted({case["hosts"] for case in cases}):
        off = [
            abs(option["predicted"]["step"] / measured_of(case)[option["name"]] - 1)
            for case in cases if case["hosts"] == hosts for option in case["predicted"]["options"]
        ]  # fmt: skip
        lines.append(f"{hosts} ranks: {len(off)} predictions, off by {statistics.median(off):.0%} (median), "
                     f"{statistics.mean(off):.0%} (mean), {max(off):.0%} (at most)")  # fmt: skip
    return "\n".join(lines)


# --- command line ---------------------------------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    names = [key_of(*case) for case in CASES]
    hooks = ["allreduce", "bf16", "int8", "powersgd-4", "onebit", "periodic-8", "diloco-16"]
    parser.add_argument("--cases", nargs="+", choices=names, default=names, metavar="CASE", help=f"of {names}")
    parser.add_argument("--hooks", nargs="+", default=hooks, metavar="NAME", help=f"(default: {' '.join(hooks)})")
    parser.add_argument("--steps", type=positive_int, default=8)
    parser.add_argument("--rounds", type=positive_int, default=1)
    parser.add_argument("--cap", type=float, default=4.0, help="bucket size in MiB (default: 4)")
    parser.add_argument("--minutes", type=float, default=30.0, help="begin no case after this time (default: 30)")
    parser.add_argument("--again", action="store_true", help="run cases also that are done, and replace them")
    parser.add_argument("--results", type=Path, default=Path("advice.json"), help="finished cases")
    parser.add_argument("--output", choices=["text", "markdown"], default="text", help="form of the tables")
    return parser


def main() -> int:
    parser = make_parser()
    args = parser.parse_args()
    known = json.loads(args.results.read_text()) if args.results.exists() else {}
    deadline = time.time() + 60 * args.minutes
    if args.minutes > 0 and (reason := why_impossible()) is not None:
        parser.exit(2, f"No network lab on this machine: {reason}.\n")
    failed = False
    for case in CASES:
        key = key_of(*case)
        if key not in args.cases or (key in known and not args.again) or time.time() > deadline:
            continue
        started = time.time()
        try:
            known[key] = run_case(*case, args)
        except LabError as error:
            failed = True
            print(f"{key}: {error}", file=sys.stderr)
            continue
        partial = args.results.with_suffix(".partial")
        partial.write_text(json.dumps(known, indent=1))
        partial.replace(args.results)
        print(f"{key}: {time.time() - started:.0f} s", flush=True)
    cases = [known[key] for case in CASES if (key := key_of(*case)) in known and key in args.cases]
    if cases:
        print("\n" + format_table(ADVICE_HEADER, [advice_row(case) for case in cases], args.output))
        rows = [row for case in cases for row in prediction_rows(case)]
        print("\n" + format_table(["case", "hook", "predicted ms", "measured ms", "off by"], rows, args.output))
        print("\n" + errors(cases))
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
