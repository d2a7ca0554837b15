"""The charts of the report, as SVG. Pure; colours and fonts are the page's classes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from lightning_ddp_hooks.monitor.report_text import bytes_text, seconds_text, share_text
from lightning_ddp_hooks.monitor.timeline import StepTiming, exposed_by_bucket, intersect, phases, union

WIDTH = 1040.0
_LEFT = 150.0  # of the lanes' labels
_CHARACTER, _BOLD_CHARACTER = 6.7, 7.4  # width of a character of a label, about

_BUCKET_COLOURS = 6


def nice_ticks(extent: float, at_most: int = 8) -> list[float]:
    """Return round numbers from 0 up to ``extent``: steps of 1, 2 or 5 times a power of ten.

    Args:
        extent: the largest value shown; above 0.
        at_most: how many steps there may be.
    """
    if extent <= 0:
        return [0.0]
    rough = extent / at_most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    return [i * step for i in range(int(extent / step + 1e-9) + 1)]


def _text(x: float, y: float, content: str, css: str = "label", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{css}" text-anchor="{anchor}">{escape(content)}</text>'


def _rect(x: float, y: float, width: float, height: float, css: str, title: str = "", radius: float = 2) -> str:
    inside = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.6):.2f}" height="{height:.2f}" rx="{radius:g}" '
        f'class="{css}">{inside}</rect>'
    )


def _svg(height: float, parts: Sequence[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH:g} {height:.0f}" role="img" aria-label="{escape(label)}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


# ---------------------------------------------------------------------- one step


def timeline_svg(step: StepTiming, *, has_hook: bool = False) -> str:
    """Draw one step: compute above, one lane for each bucket below, and over all of it when the step waits.

    Args:
        step: which.
        has_hook: whether what holds up the backward is a hook, or just launching.
    """
    span = max(step.duration, 1e-9)
    scale = (WIDTH - _LEFT - 12) / span
    lanes = len(step.buckets)
    pitch = 22.0 if lanes <= 12 else max(3.0, 264.0 / lanes)
    bar = pitch * 0.72
    compute_top, compute_height = 24.0, 34.0
    lanes_top = compute_top + compute_height + 14
    bottom = lanes_top + lanes * pitch + 4

    def x(instant: float) -> float:
        return _LEFT + (instant - step.begin) * scale

    parts = []
    for tick in nice_ticks(span):
        parts.append(f'<line x1="{x(step.begin + tick):.1f}" y1="16" x2="{x(step.begin + tick):.1f}" '
                     f'y2="{bottom:.0f}" class="grid"/>')  # fmt: skip
        parts.append(_text(x(step.begin + tick), 11, seconds_text(tick) if tick else "0", "tick", "middle"))
    for begin, end in step.wait_intervals:
        parts.append(_rect(x(begin), 16, (end - begin) * scale, bottom - 16, "waiting", radius=0))

    parts.append(_text(_LEFT - 10, compute_top + 21, "compute", "lane", "end"))
    ends = [step.begin, step.backward_begin, step.backward_end]
    after = max([step.backward_end, *(end for _, end in step.wait_intervals)])
    segments = [
        ("forward", "forward", ends[0], ends[1]),
        (f"backward with {'hook' if has_hook else 'launching'}", "backward", ends[1], ends[2]),
        ("optimizer, rest", "rest", after, step.finished),
        *(("waits with hook" if step.hook_work else "waits", "wait", begin, end) for begin, end in step.wait_intervals),
    ]
    for name, css, begin, end in segments:
        if end <= begin:
            continue
        width = (end - begin) * scale
        text = f"{name} {seconds_text(end - begin)}"
        parts.append(_rect(x(begin), compute_top, width, compute_height, css, text, 3))
        shown = next((t for t in (text, name, name.partition(" ")[0]) if len(t) * _CHARACTER + 10 < width), "")
        parts.append(_text(x(begin) + width / 2, compute_top + 21, shown, f"on-{css}", "middle"))

    # What of the backward, and of the wait, is the hook's.
    for begin, end in union([*((b.ready, b.launched) for b in step.buckets), *step.hook_work]):
        name = "the hook computes" if has_hook else "launching"
        parts.append(_rect(x(begin), compute_top + compute_height - 7, (end - begin) * scale, 7, "hook",
                           f"{name} {seconds_text(end - begin)}", 0))  # fmt: skip

    for lane, (bucket, exposed) in enumerate(zip(step.buckets, exposed_by_bucket(step), strict=True)):
        top = lanes_top + lane * pitch
        launched, done = bucket.in_flight
        title = (
            f"bucket {bucket.index}: {len(bucket.names)} parameters, {bytes_text(bucket.grad_bytes)} of gradients, "
            f"{bytes_text(bucket.sent_bytes)} sent; in flight {seconds_text(done - launched)}, "
            f"waited for {seconds_text(exposed)}"
        )
        if lanes <= 12 or lane % math.ceil(lanes / 12) == 0:
            text = f"bucket {bucket.index} \N{MIDDLE DOT} {bytes_text(bucket.grad_bytes)}"
            parts.append(_text(_LEFT - 10, top + bar / 2 + 4, text, "lane", "end"))
        parts.append(_rect(x(bucket.ready), top, (launched - bucket.ready) * scale, bar, "hook", f"{title} (hook)"))
        parts.append(_rect(x(launched), top, (done - launched) * scale, bar, "hidden", title))
        for begin, end in intersect([(launched, done)], step.wait_intervals):
            parts.append(_rect(x(begin), top, (end - begin) * scale, bar, "exposed", title))
    return _svg(bottom + 6, parts, "Timeline of a typical step")


def budget_svg(step: StepTiming, *, has_hook: bool = False) -> str:
    """Draw how a step's duration divides, as one bar; the hook's part is no part of the backward here."""
    parts = phases(step)
    pieces = [
        ("forward", "forward", parts.forward),
        ("backward alone", "backward", parts.backward),
        ("hook, launching" if has_hook else "launching", "hook", parts.hook),
        ("waiting alone" if step.hook_work else "waiting", "wait", parts.wait),
        ("optimizer, rest", "rest", parts.rest),
    ]
    total = sum(max(seconds, 0.0) for _, _, seconds in pieces) or 1.0
    drawn, left = [], 0.0
    for index, (name, css, seconds) in enumerate(pieces):
        width = max(seconds, 0.0) / total * WIDTH
        if width >= 0.5:
            drawn.append(_rect(left, 0, width - 1, 26, css, f"{name}: {seconds_text(seconds)}", 3))
        share = share_text(max(seconds, 0.0) / total)
        if len(share) * _CHARACTER + 6 < width:
            drawn.append(_text(left + width / 2, 17.5, share, f"on-{css}", "middle"))
        key = index * WIDTH / len(pieces)
        drawn.append(_rect(key, 39, 10, 10, css))
        drawn.append(_text(key + 16, 48, f"{name} {seconds_text(seconds)}"))
        left += width
    return _svg(54, drawn, "How the step divides")


# ---------------------------------------------------------------------- many steps


def exposed_svg(steps: Sequence[StepTiming], middle: float, columns: int = 240) -> str:
    """Draw how long the steps waited: one bar each, or the mean (and lightly the largest) of several neighbours.

    Args:
        steps: in order.
        middle: the median wait of the typical ones, in seconds.
        columns: how many bars there may be.
    """
    height, top, bottom, left = 176.0, 18.0, 152.0, 62.0
    waits = [step.wait for step in steps]
    largest = max(waits, default=0.0)
    # One slow step must not press all others flat.
    ceiling = min(largest, 1.6 * sorted(waits)[int(0.95 * (len(waits) - 1))]) if waits else 0.0
    ceiling = ceiling or 1e-6
    ticks = nice_ticks(ceiling * 1.05, 4)

    def y(seconds: float) -> float:
        return bottom - min(seconds / (ceiling * 1.05), 1.0) * (bottom - top)

    parts = []
    for tick in ticks:
        parts.append(f'<line x1="{left}" y1="{y(tick):.1f}" x2="{WIDTH:g}" y2="{y(tick):.1f}" class="grid"/>')
        parts.append(_text(left - 8, y(tick) + 4, seconds_text(tick) if tick else "0", "tick", "end"))
    group = max(1, math.ceil(len(steps) / columns))
    bins = [steps[i : i + group] for i in range(0, len(steps), group)]
    pitch = (WIDTH - left) / max(1, len(bins))
    width = min(pitch * 0.8, 26.0)
    for number, members in enumerate(bins):
        x = left + number * pitch + (pitch - width) / 2
        inside = [step.wait for step in members]
        mean, most = sum(inside) / len(inside), max(inside)
        first, last = members[0].step, members[-1].step
        name = f"step {first}" if first == last else f"steps {first} to {last}"
        title = f"{name}: waited {seconds_text(mean)}" + (f", at most {seconds_text(most)}" if group > 1 else "")
        if group > 1:
            parts.append(_rect(x, y(most), width, bottom - y(most), "most", title, 1))
        parts.append(_rect(x, y(mean), width, bottom - y(mean), "exposed", title, 1))
        if most > ceiling * 1.05:
            parts.append(_text(x + width / 2, top + 1, "\N{UPWARDS ARROW}", "tick", "middle"))
    if waits:
        parts.append(f'<line x1="{left}" y1="{y(middle):.1f}" x2="{WIDTH:g}" y2="{y(middle):.1f}" class="median"/>')
        parts.append(_text(WIDTH, top - 4, f"median {seconds_text(middle)}", "strong", "end"))
        parts.append(_text(left, height - 6, f"step {steps[0].step}", "tick"))
        parts.append(_text(WIDTH, height - 6, f"step {steps[-1].step}", "tick", "end"))
    return _svg(height, parts, "Exposed time over steps")


# ---------------------------------------------------------------------- parameters

Box = tuple[float, float, float, float]
"""x, y, width, height."""


def squarify(sizes: Sequence[float], width: float, height: float) -> list[Box]:
    """Divide a rectangle into boxes of the given proportions, as square as that goes.

    Bruls, Huizing, van Wijk, "Squarified treemaps", 2000.

    Args:
        sizes: above 0, in descending order.
        width: of the rectangle.
        height: of the rectangle.
    """
    total = sum(sizes)
    areas = [size / total * width * height for size in sizes]
    boxes: list[Box] = []
    x, y = 0.0, 0.0
    while len(boxes) < len(areas):
        side = min(width, height)
        row: list[float] = []
        for area in areas[len(boxes) :]:
            if row and _worst(row, side) < _worst([*row, area], side):
                break
            row.append(area)
        depth = sum(row) / side if side else 0.0
        along = 0.0
        for area in row:
            size = area / depth if depth else 0.0
            boxes.append((x, y + along, depth, size) if width >= height else (x + along, y, size, depth))
            along += size
        if width >= height:
            x, width = x + depth, max(width - depth, 0.0)
        else:
            y, height = y + depth, max(height - depth, 0.0)
    return boxes


def _worst(row: Sequence[float], side: float) -> float:
    """Return the largest ratio of sides if these areas lie along a side."""
    total = sum(row)
    if not (side and total):
        return math.inf
    return max(side * side * max(row) / (total * total), total * total / (side * side * min(row)))


def parameters_svg(parameter_bytes: Mapping[str, int], bucket_of: Mapping[str, int], at_most: int = 120) -> str:
    """Draw the parameters as areas, coloured by bucket.

    Args:
        parameter_bytes: size of each gradient, by name.
        bucket_of: in which bucket it travels, by name.
        at_most: how many are drawn by themselves; the others share one area.
    """
    height = 300.0
    ordered = sorted(((n, name) for name, n in parameter_bytes.items() if n), key=lambda entry: (-entry[0], entry[1]))
    shown, others = ordered[:at_most], ordered[at_most:]
    entries = [(nbytes, name, f"b{bucket_of.get(name, 0) % _BUCKET_COLOURS}") for nbytes, name in shown]
    if others:
        entries.append((sum(n for n, _ in others), f"{len(others)} smaller ones", "rest"))
        entries.sort(key=lambda entry: -entry[0])
    if not entries:
        return ""
    parts = []
    for (nbytes, name, css), (x, y, w, h) in zip(
        entries, squarify([n for n, _, _ in entries], WIDTH, height), strict=True
    ):
        where = f", bucket {bucket_of[name]}" if name in bucket_of else ""
        parts.append(_rect(x + 1, y + 1, max(w - 2, 0.6), max(h - 2, 0.6), css, f"{name}: {bytes_text(nbytes)}{where}"))
        room, rows = int((w - 14) / _BOLD_CHARACTER), int((h - 9) / 14)
        for text in (name, name.rpartition(".")[2]):
            lines = wrapped(text, room)
            if lines and len(lines) <= rows:
                labelled = [(line, "on-box") for line in lines] + [(bytes_text(nbytes), "on-box faint")]
                parts += [_text(x + 8, y + 17 + 14 * n, line, kind) for n, (line, kind) in enumerate(labelled[:rows])]
                break
    return _svg(height, parts, "Gradient bytes by parameter")


def wrapped(name: str, room: int) -> list[str]:
    """Break a name behind its dots into lines of at most ``room`` characters; empty if it cannot be done."""
    lines: list[str] = []
    for part in name.replace(".", ".\0").split("\0"):
        if len(part) > room:
            return []
        if lines and len(lines[-1]) + len(part) <= room:
            lines[-1] += part
        else:
            lines.append(part)
    return lines
