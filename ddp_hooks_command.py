"""The console command ``ddp-hooks``: help and version at once, without loading torch; all else in the package."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence

COMMANDS = {
    "advise": "predict which hook is fastest on your network",
    "bench": "measure which hook is fastest on your network",
    "compare": "compare the reports of two runs",
    "doctor": "check versions, backends, ranks, link, clocks and the native build",
    "build-native": "compile the native reducer",
}
"""What each command does."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    if not given or given[0] not in COMMANDS:
        parser = argparse.ArgumentParser(prog="ddp-hooks", allow_abbrev=False)
        parser.add_argument("--version", action="version", version=importlib.metadata.version("lightning-ddp-hooks"))
        commands = parser.add_subparsers(metavar="COMMAND", required=True)
        for name, text in COMMANDS.items():
            commands.add_parser(name, help=text)
        parser.parse_args(given)
    from lightning_ddp_hooks.__main__ import main as run

    return run(given)
