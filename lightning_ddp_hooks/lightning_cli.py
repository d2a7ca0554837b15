"""A parser for Lightning's command line that lists the right flags when one is wrong."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import NoReturn

from lightning.pytorch.cli import LightningArgumentParser

# How jsonargparse says that a name is wrong: of a class, of a group, in a file for a subcommand, on the command line.
_WRONG_NAME = [
    re.compile(r"(?:Problem in default config file '.*': )?" + text)
    for text in (
        r"Option '([^']+)' is not accepted",
        r"Group '([^']+)' does not accept option '([^']+)'",
        r"Subcommand '[^']+' does not accept option '([^']+)'",
        r"unrecognized arguments: --([^\s=]+)",
    )
]


class ArgumentParser(LightningArgumentParser):
    """`LightningArgumentParser`, whose errors about a wrong flag name the flags that there are.

    The parser that `LightningCLI` takes by default says that a flag is not accepted, and no more. This one adds the
    closest names, and all flags of the class or group that the wrong one was meant for. Nothing else differs.

    Example:
        >>> from lightning.pytorch.cli import LightningCLI
        >>> from lightning_ddp_hooks.lightning_cli import ArgumentParser
        >>> LightningCLI(MyModule, MyData, parser_class=ArgumentParser)  # doctest: +SKIP
    """

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Report an error of the command line, and end the command.

        Args:
            message: what is wrong.
            ex: the error that it comes from.

        Raises:
            ArgumentError: in a parser of a class, which reports to the parser around it.
        """
        wrong = next((".".join(found.groups()) for pattern in _WRONG_NAME if (found := pattern.match(message))), None)
        if wrong is not None:
            parser = getattr(ex, "subcommand_parser", self)
            message = f"{message}; {_right_names(wrong, _names(parser))}"
        super().error(message, ex)


def _names(parser: LightningArgumentParser) -> list[str]:
    """Return the names that a parser takes."""
    files = parser.default_config_files
    parser.default_config_files = []  # which the wrong name may be in
    try:
        return sorted(parser.get_defaults().keys())
    finally:
        parser.default_config_files = files


def _right_names(wrong: str, names: Sequence[str]) -> str:
    """Name those of the right names that are closest to a wrong one, and those beside it."""
    group = wrong.rpartition(".")[0]
    prefix = f"{group}." if group else ""
    beside = [name for name in names if name.startswith(prefix)]
    if beside:  # what they have in common makes none close
        ends = [name.removeprefix(prefix) for name in beside]
        close = [prefix + end for end in difflib.get_close_matches(wrong.removeprefix(prefix), ends, n=3)]
    else:
        close = difflib.get_close_matches(wrong, names, n=3)
    if not (prefix and beside):  # many, maybe: name the groups
        beside = sorted({f"{name.partition('.')[0]}.*" if "." in name else name for name in names})
    closest = f"closest: {', '.join(close)}; " if close else ""
    return f"{closest}accepted: {', '.join(beside)}"
