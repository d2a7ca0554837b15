"""The command line: ``python -m lightning_ddp_hooks COMMAND``, or ``ddp-hooks COMMAND``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from lightning_ddp_hooks import __version__
from lightning_ddp_hooks.cli import advise, bench, compare, doctor
from lightning_ddp_hooks.reducer.native import build


def _build_native(args: argparse.Namespace) -> int:
    if args.where:
        print(build.library_path())
        return 0
    if build.is_built():
        print(f"The native reducer is built: {build.library_path()}")
        return 0
    print("Building the native reducer; this takes about a minute.", flush=True)
    try:
        path = build.build()
        build.load()
    except (RuntimeError, ImportError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"Built: {path}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lightning_ddp_hooks", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (advise, bench, compare, doctor):
        command.add_parser(commands)
    native = commands.add_parser(
        "build-native",
        help="compile the native reducer",
        description="Compile the native reducer for the torch that is installed, unless it is compiled already. "
        'From then on reducer_backend="auto" uses it.',
    )
    native.add_argument("--where", action="store_true", help="only print where it lies, or would lie")
    native.set_defaults(run=_build_native)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 2 for a wrong command line, as argparse has it."""
    args = _parser().parse_args(argv)
    # What is named on a command line is looked for where it is given, also when a script starts this module.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return int(args.run(args))
    except ValueError as error:
        print(f"python -m lightning_ddp_hooks: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
