"""From predicted steps to advice: which hook to take, in words and as a table. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from lightning_ddp_hooks.advisor.cost_model import Prediction

Change = Literal["none", "rounding", "approximation", "local"]
"""What a way to communicate changes about the maths, from nothing to another training algorithm."""

CHANGES: tuple[Change, ...] = get_args(Change)

CHECKED_RANKS, CHECKED_SECONDS = 4, 0.1
"""Predictions were compared with measured steps for up to so many ranks, and hold for steps from this length on."""

_RANGE = (0.95, 1.30)
"""Measured over predicted: 28 predictions of such steps are all within it, see ``benchmarks/results/advice.md``."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to communicate, with its prediction."""

    name: str  # on the command line
    change: Change
    effect: str  # of the change, in words
    yaml: str  # configuration that selects it
    bucket_cap_mb: float | None  # fastest size; None without buckets, or where the default size makes the same ones
    predicted: Prediction

    @property
    def span(self) -> tuple[float, float]:
        """Seconds between which the step is expected."""
        return self.predicted.step * _RANGE[0], self.predicted.step * _RANGE[1]


def why_unknown(seconds: float, world_size: int, device: str) -> str | None:
    """Say why a step that takes so long without communication cannot be predicted; None if it can."""
    if device != "cpu":
        return "Predictions were never compared with steps on a GPU"
    if world_size > CHECKED_RANKS:
        return (
            f"Predictions were never compared with steps of more than {CHECKED_RANKS} ranks, {world_size} are asked for"
        )
    if seconds < CHECKED_SECONDS:
        return (
            f"A step takes {ms_text(seconds)} ms without communication: below {1e3 * CHECKED_SECONDS:.0f} ms "
            "predictions were off by up to 77%, since what it costs to schedule collectives is not in the model"
        )
    return None


@dataclass(frozen=True)
class Advice:
    """The recommended option and why; and the fastest one that changes more than was accepted, if it is worth it."""

    option: Option
    because: str
    beyond: Option | None


def advise(options: Sequence[Option], accept: Change = "rounding") -> Advice:
    """Choose the mildest option that is about as fast as any that is accepted.

    The mean in full precision is the starting point. An option that changes more takes its place only if its step is
    shorter at the longest than the other's at the shortest.
    """
    accepted = CHANGES[1 : CHANGES.index(accept) + 1]
    plain = chosen = milder = _fastest([option for option in options if option.change == "none"])
    beyond: Option | None = None
    for change in CHANGES[1:]:
        rivals = [option for option in options if option.change == change]
        if not rivals or (rival := _fastest(rivals)).span[1] >= milder.span[0]:
            continue
        milder = rival
        if change in accepted:
            chosen = rival
        else:
            beyond = rival
    rivals = [option for option in options if option.change in accepted]
    return Advice(chosen, _because(plain, chosen, rivals), beyond)


def _fastest(options: Sequence[Option]) -> Option:
    return min(options, key=lambda option: option.predicted.step)


def _because(plain: Option, chosen: Option, rivals: Sequence[Option]) -> str:
    waits = plain.predicted.exposed / plain.predicted.step
    if chosen is not plain:
        return (
            f"A step takes {span_text(chosen)} ms instead of {span_text(plain)} ms with plain all-reduce, which waits "
            f"{waits:.0%} of the time for the network."
        )
    text = f"Plain all-reduce waits {ms_text(plain.predicted.exposed)} of {ms_text(plain.predicted.step)} ms"
    if waits < 0.05:
        return f"{text}: there is next to nothing to gain. Plain all-reduce is best."
    if not rivals:
        return f"{text}, and no other option was asked about that changes no more than is accepted."
    best = _fastest(rivals)
    saved = 1 - best.predicted.step / plain.predicted.step
    if saved <= 0:
        return f"{text}, but none of the accepted options is faster."
    text = f"{text}. {best.name} may be {saved:.0%} faster"
    return f"{text}, which is less than predictions can tell: measure it by `bench`."


def span_text(option: Option) -> str:
    """Return the range of a step in milliseconds."""
    return " to ".join(map(ms_text, option.span))


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
    header = ("hook", "step ms", "of mean", "waits ms", "hook ms", "sent MB", "buckets MB",
              "what it changes")  # fmt: skip
    plain = _fastest([option for option in options if option.change == "none"] or list(options))
    rows = [
        (
            option.name,
            span_text(option),
            f"{option.predicted.step / plain.predicted.step:.2f}",
            ms_text(option.predicted.exposed),
            ms_text(option.predicted.hook),
            mb_text(option.predicted.sent),
            "" if option.bucket_cap_mb is None else f"{option.bucket_cap_mb:g}",
            option.effect,
        )
        for option in sorted(options, key=lambda option: option.predicted.step)
    ]
    laid_out: list[tuple[str, ...]] = [header, *rows]
    if not any(row[6] for row in rows):
        laid_out = [(*row[:6], row[7]) for row in laid_out]
    return align(laid_out, right=range(1, len(laid_out[0]) - 1))


def align(rows: Sequence[Sequence[str]], right: Sequence[int] | range = ()) -> str:
    """Lay rows of equal length out in columns, with a rule under the first row; those in ``right`` flush right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    def line(row: Sequence[str]) -> str:
        cells = zip(row, widths, strict=True)
        return "  ".join(cell.rjust(w) if n in right else cell.ljust(w) for n, (cell, w) in enumerate(cells)).rstrip()

    return "\n".join([line(rows[0]), "  ".join("-" * width for width in widths), *map(line, rows[1:])])
