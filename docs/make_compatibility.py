"""Writes the generated part of compatibility.md from the rules that the strategy checks.

python docs/make_compatibility.py            # after a change of the rules; a test compares the page with them
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "tests" / part) for part in ("trainer", "")]

from generated_part import page_with  # noqa: E402
from settings import OTHER_RUNS, pairs, run_of, settings_by_axis  # noqa: E402

from lightning_ddp_hooks.conflicts import RULES  # noqa: E402

PAGE = Path(__file__).resolve().parent / "compatibility.md"
HEADINGS = {"refused": "## Refused", "no effect": "## One has no effect beside the other"}


def generated() -> str:
    """Return the part of the page that follows from the rules."""
    axes = settings_by_axis(world_size=2)
    runs = [run_of(pair) for pair in pairs(axes)] + list(OTHER_RUNS)
    lines = []
    for verdict, heading in HEADINGS.items():
        lines += [heading, ""]
        for rule in RULES:
            if rule.verdict == verdict:
                text = next(found for run in runs if (found := rule.found(run)) is not None)
                by = "" if rule.by == "ours" else " (Lightning refuses it)"
                lines.append(f"- **{rule.pair[0]}** and **{rule.pair[1]}**{by}: {text}")
        lines.append("")
    lines += ["## All others work together", "", f"Any other two settings of {', '.join(axes)}."]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page_with(generated(), PAGE.read_text()))
