"""Put the report of what another rank did into the error that this one ends with."""

from __future__ import annotations


def attach_report(error: BaseException, report: str) -> None:
    """Have an error begin with a report, where it has a text; else add it as a note."""
    if error.args and isinstance(error.args[0], str):
        error.args = (f"{report}\nWhat failed here: {error.args[0]}", *error.args[1:])
    elif hasattr(error, "add_note"):  # from Python 3.11 on
        error.add_note(report)
