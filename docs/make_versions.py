"""Writes the table of versions.md from versions.json, the list of what was tested where.

python docs/make_versions.py                 # after an entry was added; a test compares the page with the list
"""

import json
from pathlib import Path

from generated_part import page_with

PAGE = Path(__file__).resolve().parent / "versions.md"
COLUMNS = ("python", "torch", "lightning", "torchmetrics")


def table_in(page: str) -> str:
    """Return the page with the table made anew, newest torch first."""
    runs = json.loads(PAGE.with_suffix(".json").read_text())
    runs.sort(key=lambda run: [int(part) for part in run["torch"].split(".")], reverse=True)
    lines = [
        "| Python | torch | lightning | torchmetrics | tests that pass | by | on | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        versions = " | ".join(run[column] for column in COLUMNS)
        lines.append(
            f"| {versions} | {run['passed']} of {run['of']} | `{run['how']}` | {run['date']} | {run['note']} |"
        )
    return page_with("\n".join(lines), page)


if __name__ == "__main__":
    PAGE.write_text(table_in(PAGE.read_text()))
