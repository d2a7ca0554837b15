"""From predicted steps to advice: which hook to take, in words and as a table. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from lightning_ddp_hooks.advisor.cost_model import Prediction

Change = Literal["none", "rounding", "approximation", "local"]
"""What a way to communicate changes about the maths, from nothing to another training algorithm."""

CHANGES: tuple[Change, ...] = get_args(Change)

_WORTH: dict[Change, float] = {"none": 0.0, "rounding": 0.05, "approximation": 0.20, "local": 0.25}
"""By how much a step must become shorter for the change to be worth it; predictions are off by several percent."""

_WORTH_SECONDS = 1e-3
"""Likewise in seconds: what starting and scheduling a few more collectives costs is not in the model."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to communicate, with its prediction."""

    name: str  # on the command line
    change: Change
    effect: str  # of the change, in words
    yaml: str  # configuration that selects it
    bucket_cap_mb: float | None  # fastest size; None without buckets, or where the default size makes the same ones
    memory: int  # bytes that it keeps
    predicted: Prediction


@dataclass(frozen=True)
class Advice:
    """The recommended option and why; and the fastest one that changes more than was accepted, if it is worth it."""

    option: Option
    because: str
    beyond: Option | None


def advise(options: Sequence[Option], accept: Change = "rounding") -> Advice:
    """Choose the mildest option that is about as fast as any that is accepted.

    The mean in full precision is the starting point. An option that changes more takes its place only if its step is
    shorter by enough: 5% for rounding, 20% for approximation with error feedback, 25% for local training, and in any
    case a millisecond.
    """
    accepted = CHANGES[1 : CHANGES.index(accept) + 1]
    plain = chosen = milder = _fastest([option for option in options if option.change == "none"])
    beyond: Option | None = None
    for change in CHANGES[1:]:
        rivals = [option for option in options if option.change == change]
        if not rivals:
            continue
        rival = _fastest(rivals)
        saved = milder.predicted.step - rival.predicted.step
        if saved < max(_WORTH[change] * milder.predicted.step, _WORTH_SECONDS):
            continue
        milder = rival
        if change in accepted:
            chosen = rival
        else:
            beyond = rival
    others = [option for option in options if option.change in accepted]
    return Advice(chosen, _because(plain, chosen, others), beyond)


def _fastest(options: Sequence[Option]) -> Option:
    return min(options, key=lambda option: option.predicted.step)


def _because(plain: Option, chosen: Option, accepted: Sequence[Option]) -> str:
    waiting = plain.predicted.exposed / plain.predicted.step
    if chosen is plain:
        text = f"The plain mean waits {ms_text(plain.predicted.exposed)} of {ms_text(plain.predicted.step)} ms"
        if waiting < 0.05:
            return f"{text}: there is next to nothing to gain. Plain all-reduce is best."
        return f"{text}, but {_too_little(plain, accepted)}. Plain all-reduce is best."
    return (
        f"A step takes {ms_text(chosen.predicted.step)} instead of {ms_text(plain.predicted.step)} ms with the plain "
        f"mean, which waits {waiting:.0%} of the time for the network."
    )


def _too_little(plain: Option, accepted: Sequence[Option]) -> str:
    """Say by how much the accepted options fall short of what is asked of them."""
    if not accepted:
        return "no other option was asked about that changes no more than is accepted"
    best = _fastest(accepted)
    saved = plain.predicted.step - best.predicted.step
    if saved <= 0:
        return "none of the accepted options is faster"
    if saved < _WORTH_SECONDS:
        amount = f"less than {1e3 * _WORTH_SECONDS:g} ms, which is below what such predictions can tell"
    else:
        amount = f"{ms_text(saved)} ms, less than {_WORTH[best.change]:.0%} of the step"
    return f"none of the accepted options saves enough of it: {best.name}, the fastest one, saves {amount}"


def ms_text(seconds: float) -> str:
    """Return milliseconds with three significant digits."""
    return _digits(1e3 * seconds)


def mb_text(nbytes: float) -> str:
    """Return megabytes with three significant digits."""
    mb = nbytes / 1e6
    return _digits(mb) if mb >= 0.1 else f"{mb:.3f}"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def table(options: Sequence[Option]) -> str:
    """Lay the options out in aligned columns, fastest first; bucket sizes only where they make a difference."""
    header = ("hook", "step ms", "of mean", "waits ms", "hook ms", "sent MB", "memory MB", "buckets MB",
              "what it changes")  # fmt: skip
    plain = _fastest([option for option in options if option.change == "none"] or list(options))
    rows = [
        (
            option.name,
            ms_text(option.predicted.step),
            f"{option.predicted.step / plain.predicted.step:.2f}",
            ms_text(option.predicted.exposed),
            ms_text(option.predicted.hook),
            mb_text(option.predicted.sent),
            mb_text(option.memory),
            "" if option.bucket_cap_mb is None else f"{option.bucket_cap_mb:g}",
            option.effect,
        )
        for option in sorted(options, key=lambda option: option.predicted.step)
    ]
    laid_out: list[tuple[str, ...]] = [header, *rows]
    if not any(row[7] for row in rows):
        laid_out = [(*row[:7], row[8]) for row in laid_out]
    return align(laid_out, right=range(1, len(laid_out[0]) - 1))


def align(rows: Sequence[Sequence[str]], right: Sequence[int] | range = ()) -> str:
    """Lay rows of equal length out in columns, with a rule under the first row; those in ``right`` flush right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    def line(row: Sequence[str]) -> str:
        cells = zip(row, widths, strict=True)
        return "  ".join(cell.rjust(w) if n in right else cell.ljust(w) for n, (cell, w) in enumerate(cells)).rstrip()

    return "\n".join([line(rows[0]), "  ".join("-" * width for width in widths), *map(line, rows[1:])])
