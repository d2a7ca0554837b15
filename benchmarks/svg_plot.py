"""Plots of the benchmarks as SVG, so that no plotting library is needed: bars, and lines on logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#4c6ef5", "#e8590c", "#2f9e44", "#ae3ec9", "#0c8599", "#c92a2a", "#846358")
GREY = "#868e96"
_FONT = "font-family='system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif'"


@dataclass(frozen=True)
class Bar:
    """One row of a bar chart."""

    label: str
    value: float
    colour: str
    note: str = ""  # behind the value


@dataclass(frozen=True)
class Line:
    """One line of a chart, its points in ascending order of x."""

    label: str
    points: Sequence[tuple[float, float]]
    colour: str
    dashed: bool = False


def text(x: float, y: float, content: str, *, size: int = 12, anchor: str = "start", colour: str = "#212529",
         bold: bool = False) -> str:  # fmt: skip
    weight = " font-weight='600'" if bold else ""
    return (f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' text-anchor='{anchor}' fill='{colour}'{weight}>"
            f"{escape(content)}</text>")  # fmt: skip


def bars(
    title: str, rows: Sequence[Bar], unit: str, *, width: float = 470, label_width: float = 190
) -> tuple[str, float]:
    """A panel of horizontal bars, and its height."""
    top, pitch = 34.0, 22.0
    longest = max(row.value for row in rows)
    room = 62 + 6.3 * max(len(row.note) for row in rows)
    scale = (width - label_width - room) / longest
    parts = [text(0, 16, title, size=14, bold=True)]
    for number, row in enumerate(rows):
        y = top + number * pitch
        parts.append(text(label_width - 8, y + 12, row.label, anchor="end"))
        parts.append(f"<rect x='{label_width}' y='{y}' width='{max(1.0, row.value * scale):.1f}' height='16' rx='2' "
                     f"fill='{row.colour}'/>")  # fmt: skip
        value = f"{row.value:.0f}" if row.value >= 100 else f"{row.value:.1f}" if row.value >= 1 else f"{row.value:.2f}"
        shown = f"{value} {unit}" + (f", {row.note}" if row.note else "")
        parts.append(text(label_width + row.value * scale + 6, y + 12, shown, colour="#495057"))
    return "".join(parts), top + len(rows) * pitch + 6


def lines(
    title: str, curves: Sequence[Line], *, x_label: str, y_label: str, width: float = 470, height: float = 330,
    legend: bool = True,
) -> tuple[str, float]:  # fmt: skip
    """A panel of lines on two logarithmic axes, and its height."""
    left, right, top, bottom = 62.0, width - 10, 34.0, height - 44
    xs = [x for line in curves for x, _ in line.points]
    ys = [y for line in curves for _, y in line.points]
    x_low, x_high = math.log10(min(xs)), math.log10(max(xs))
    # A little room, so that no line lies on the frame.
    y_low, y_high = math.log10(min(ys) * 0.85), math.log10(max(ys) * 1.15)

    def x_of(x: float) -> float:
        return left + (math.log10(x) - x_low) / (x_high - x_low) * (right - left)

    def y_of(y: float) -> float:
        return bottom - (math.log10(y) - y_low) / (y_high - y_low) * (bottom - top)

    parts = [text(0, 16, title, size=14, bold=True)]
    for y in _ticks(10**y_low, 10**y_high):
        parts.append(f"<line x1='{left}' x2='{right}' y1='{y_of(y):.1f}' y2='{y_of(y):.1f}' stroke='#dee2e6'/>")
        parts.append(text(left - 8, y_of(y) + 4, f"{y:g}", anchor="end", size=11, colour="#495057"))
    for x in sorted(set(xs)):
        parts.append(f"<line x1='{x_of(x):.1f}' x2='{x_of(x):.1f}' y1='{bottom}' y2='{bottom + 4}' stroke='#868e96'/>")
        parts.append(text(x_of(x), bottom + 17, f"{x:g}", anchor="middle", size=11, colour="#495057"))
    parts.append(f"<line x1='{left}' x2='{right}' y1='{bottom}' y2='{bottom}' stroke='#868e96'/>")
    parts.append(text((left + right) / 2, height - 6, x_label, anchor="middle", colour="#495057"))
    parts.append(f"<g transform='translate(13,{(top + bottom) / 2:.0f}) rotate(-90)'>"
                 f"{text(0, 0, y_label, anchor='middle', colour='#495057')}</g>")  # fmt: skip
    for line in curves:
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in line.points)
        dash = " stroke-dasharray='5 4'" if line.dashed else ""
        parts.append(f"<polyline points='{path}' fill='none' stroke='{line.colour}' stroke-width='2'{dash}/>")
        parts += [f"<circle cx='{x_of(x):.1f}' cy='{y_of(y):.1f}' r='2.6' fill='{line.colour}'/>"
                  for x, y in line.points if not line.dashed]  # fmt: skip
    if legend:
        for number, line in enumerate(curves):
            y = top + 12 + number * 16
            dash = " stroke-dasharray='5 4'" if line.dashed else ""
            parts.append(f"<line x1='{left + 12}' x2='{left + 34}' y1='{y - 4}' y2='{y - 4}' stroke='{line.colour}' "
                         f"stroke-width='2'{dash}/>")  # fmt: skip
            parts.append(text(left + 40, y, line.label, size=11))
    return "".join(parts), height


def page(panels: Sequence[tuple[str, float]], *, columns: int, width: float = 470, note: str = "",
         key: Sequence[tuple[str, str]] = ()) -> str:  # fmt: skip
    """Panels side by side on white, a key of colours and a note below."""
    gap, margin = 34.0, 18.0
    rows = [panels[start : start + columns] for start in range(0, len(panels), columns)]
    parts, y = [], margin
    for row in rows:
        for column, (content, _) in enumerate(row):
            parts.append(f"<g transform='translate({margin + column * (width + gap):.0f},{y:.0f})'>{content}</g>")
        y += max(height for _, height in row) + 18
    x = margin
    for label, colour in key:
        parts.append(f"<rect x='{x:.0f}' y='{y:.0f}' width='12' height='12' rx='2' fill='{colour}'/>")
        parts.append(text(x + 18, y + 10, label))
        x += 34 + 7.0 * len(label)
    y += 24 if key else 0
    for line in note.split("\n") if note else []:
        parts.append(text(margin, y + 8, line, colour="#495057"))
        y += 17
    full = 2 * margin + min(columns, len(panels)) * width + (min(columns, len(panels)) - 1) * gap
    return (f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {full:.0f} {y + margin:.0f}' {_FONT}>"
            f"<rect width='100%' height='100%' fill='white'/>{''.join(parts)}</svg>\n")  # fmt: skip


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers between two bounds: powers of ten, and 2 and 5 times them where those are few."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1,) if math.log10(high / low) > 3.5 else (1, 2, 5)
    ticks = [f * 10.0**p for p in powers for f in factors if low <= f * 10.0**p <= high]
    if len(ticks) < 3:  # a narrow range: equal steps
        step = 10.0 ** math.floor(math.log10((high - low) / 2))
        ticks = [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return ticks
