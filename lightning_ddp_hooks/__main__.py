"""The command line: ``python -m lightning_ddp_hooks COMMAND``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

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
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    command = commands.add_parser(
        "build-native",
        help="compile the native reducer",
        description="Compile the native reducer for the torch that is installed, unless it is compiled already. "
        'From then on reducer_backend="auto" uses it.',
    )
    command.add_argument("--where", action="store_true", help="only print where it lies, or would lie")
    command.set_defaults(run=_build_native)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    args = _parser().parse_args(argv)
    status: int = args.run(args)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
