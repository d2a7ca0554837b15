"""``compare``: a page that shows the reports of two runs side by side."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lightning_ddp_hooks.cli import common
from lightning_ddp_hooks.monitor.compare import build_comparison, read_summary

DESCRIPTION = """\
Compare two runs that CommMonitor has written reports of: what a step takes, what was sent, which settings differ.

  python -m lightning_ddp_hooks compare lightning_logs/version_0/comm_monitor lightning_logs/version_1/comm_monitor
"""


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = common.add_command(commands, "compare", run, "compare the reports of two runs", DESCRIPTION)
    parser.add_argument("runs", nargs=2, type=Path, metavar="RUN", help="directory of a report, or its summary.json")
    parser.add_argument("--names", nargs=2, metavar="NAME", help="what the page calls them (default: their paths)")
    parser.add_argument("--output", type=Path, default=Path("comparison.html"), metavar="FILE",
                        help="the page (default: comparison.html)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    names = tuple(args.names or map(str, args.runs))
    page = build_comparison((names[0], names[1]), (read_summary(args.runs[0]), read_summary(args.runs[1])))
    args.output.write_text(page, encoding="utf-8")
    print(f"Written: {args.output}")
    return 0
