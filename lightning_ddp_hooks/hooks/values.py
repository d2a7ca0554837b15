"""Checks of the types that declarations of hooks are given; a wrong one would fail late, or pass for something else."""

from __future__ import annotations

from collections.abc import Sequence


def require_types(
    declaration: object, *, whole: Sequence[str] = (), numbers: Sequence[str] = (), flags: Sequence[str] = ()
) -> None:
    """Make sure that a declaration's settings have the right types; None will do where it is the default.

    Args:
        declaration: a dataclass.
        whole: names of settings that are whole numbers.
        numbers: of those that are any numbers.
        flags: of those that are True or False.

    Raises:
        TypeError: one has not; names it.
    """
    for names, kinds, expected in (
        (whole, (int,), "a whole number"),
        (numbers, (int, float), "a number"),
        (flags, (bool,), "True or False"),
    ):
        for name in names:
            value = getattr(declaration, name)
            if value is None and getattr(type(declaration), name, 0) is None:
                continue
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                raise TypeError(f"Expected {expected} for `{name}`, got {value!r}.")
