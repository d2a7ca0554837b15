"""A parser for Lightning's command line that lists the right flags when one is wrong."""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import NoReturn

from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.strategies import StrategyRegistry

from lightning_ddp_hooks import averaging, callbacks, hooks, optim
from lightning_ddp_hooks.hooks.registry import SHORT_NAMES
from lightning_ddp_hooks.lightning.strategy import DDPHooksStrategy

# How jsonargparse says that a name is wrong: of a class, of a group, in a file for a subcommand.
_WRONG_NAME = [
    re.compile(r"(?:Problem in default config file '.*': )?" + text)
    for text in (
        r"Option '([^']+)' is not accepted",
        r"Group '([^']+)' does not accept option '([^']+)'",
        r"Subcommand '[^']+' does not accept option '([^']+)'",
    )
]
_UNRECOGNIZED = "unrecognized arguments: "  # on the command line; those behind it are of argparse


class ArgumentParser(LightningArgumentParser):
    """`LightningArgumentParser`, whose errors about a wrong flag name the flags that there are.

    The parser that `LightningCLI` takes by default says that a flag is not accepted, and no more. This one adds the
    closest names, and all flags of the class or group that the wrong one was meant for. What helps stands on the last
    lines, below all that jsonargparse has tried. Nothing else differs.

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
        if wrong := _wrong_names(message):
            names = _names(getattr(ex, "subcommand_parser", self))
            texts = [_right_names(name, names) for name in wrong]
            if len(wrong) > 1:
                texts = [f"{name}: {text}" for name, text in zip(wrong, texts, strict=True)]
            message += "; " + "\n  ".join(texts)
        elif self.exit_on_error:  # the outermost parser, whose message has those of the others in it
            message = "\n".join([message, *dict.fromkeys(_remedies(message))])
        super().error(message, ex)


def _wrong_names(message: str) -> list[str]:
    """Return the names that a message says are wrong, if that is all that it says."""
    if message.startswith(_UNRECOGNIZED):
        flags = re.findall(r"(?<!\S)--?([A-Za-z][^\s=]*)", message.removeprefix(_UNRECOGNIZED))
        return [flag.replace("-", "_") for flag in flags]
    return [".".join(found.groups()) for pattern in _WRONG_NAME if (found := pattern.match(message))]


def _names(parser: LightningArgumentParser) -> list[str]:
    """Return the names that a parser takes."""
    files = parser.default_config_files
    parser.default_config_files = []  # which the wrong name may be in
    try:
        # The last two are flags, but nothing that has a value.
        return sorted([*parser.get_defaults().keys(), *(["help", "print_config"] if parser.exit_on_error else [])])
    finally:
        parser.default_config_files = files


def _right_names(wrong: str, names: Sequence[str]) -> str:
    """Name those of the right names that are closest to a wrong one, and those beside it."""
    if not names:
        return "it takes none"
    if "subcommand" in names:
        before = ", ".join(name for name in names if name != "subcommand")
        return f"accepted before the subcommand: {before}; all others go behind it, as in `fit --{wrong} ...`"
    group = wrong.rpartition(".")[0]
    prefix = f"{group}." if group else ""
    beside = [name for name in names if name.startswith(prefix)]
    if beside:  # what they have in common makes none close
        close = [prefix + end for end in _closest(wrong.removeprefix(prefix), [n.removeprefix(prefix) for n in beside])]
    else:
        close = _closest(wrong, names)
    if not (prefix and beside):  # many, maybe: name the groups
        beside = sorted({f"{name.partition('.')[0]}.*" if "." in name else name for name in names})
    closest = f"closest: {', '.join(close)}; " if close else ""
    return f"{closest}accepted: {', '.join(beside)}"


def _closest(wrong: str, names: Sequence[str]) -> list[str]:
    return difflib.get_close_matches(wrong, names, n=3)


# ---------------------------------------------------------------------- what to do, of all that was tried


def _remedies(message: str) -> Iterator[str]:
    """Say what to do about the mistakes that are told of within a message."""
    yield from re.findall(r"^ +((?:Option|Group) '.*; accepted: .*)$", message, flags=re.MULTILINE)
    for name in re.findall(r"Expected a dot import path string: (\S+)", message):
        if name in SHORT_NAMES:
            made = SHORT_NAMES[name]()
            instead = "" if made is None else f": to give it some, name the class, {type(made).__name__}"
            yield f"'{name}' is a short name, which takes no arguments{instead}."
        elif name == "auto" or name in StrategyRegistry.available_strategies():
            yield f"'{name}' is a name, which takes no arguments: to give some, name a class, such as DDPHooksStrategy."
        elif close := _closest(name, _public_classes(averaging, callbacks, hooks, optim)):
            yield f"'{name}' is no class that was imported; closest: {', '.join(close)}"
    for module, name in re.findall(r"module '([\w.]+)' has no attribute '(\w+)'", message):
        if module in sys.modules and (close := _closest(name, _public_classes(sys.modules[module]))):
            yield f"There is no '{name}' in {module}; closest: {', '.join(close)}"
    if re.search(r"Expected an instantiatable class, but \S+ is abstract", message) and "'class_path'" in message:
        yield "Beside `class_path` there may only be `init_args`, which holds the arguments."


def _public_classes(*modules: ModuleType) -> list[str]:
    found = {name for module in modules for name, value in vars(module).items() if inspect.isclass(value)}
    return sorted({DDPHooksStrategy.__name__, *(name for name in found if not name.startswith("_"))})
