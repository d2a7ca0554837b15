"""A parser for Lightning's command line that lists the right flags when one is wrong."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import NoReturn

from lightning.pytorch.cli import LightningArgumentParser

# How jsonargparse says that a name is wrong: of a class, of a group, in a file for a subcommand, on the command line.
_WRONG_NAME = [
    re.compile(r"Option '([^']+)' is not accepted"),
    re.compile(r"Group '([^']+)' does not accept option '([^']+)'"),
    re.compile(r"Subcommand '[^']+' does not accept option '([^']+)'"),
    re.compile(r"unrecognized arguments: --([^\s=]+)"),
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
            message = f"{message}; {_right_names(wrong, sorted(parser.get_defaults().keys()))}"
        super().error(message, ex)


def _right_names(wrong: str, names: Sequence[str]) -> str:
    """Name those of the right names that are closest to a wrong one, and those beside it."""
    close = difflib.get_close_matches(wrong, names, n=3)
    group = wrong.rpartition(".")[0]
    beside = [name for name in names if name.startswith(f"{group}.")]
    if not beside:  # nothing is of that group: name the groups
        beside = sorted({f"{name.partition('.')[0]}.*" if "." in name else name for name in names})
    return f"closest: {', '.join(close)}; accepted: {', '.join(beside)}" if close else f"accepted: {', '.join(beside)}"
