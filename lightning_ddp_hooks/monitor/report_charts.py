"""The charts of the report, as HTML boxes that CSS lays out. Pure; colors and sizes are in `report_style`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from lightning_ddp_hooks.monitor.report_text import bytes_text, seconds_text, share_text
from lightning_ddp_hooks.monitor.timeline import StepTiming, exposed_by_bucket, intersect, phases, union

BUCKET_COLORS = 6
_LANES_LABELLED = 12
_LABELLED_ROW = 0.07  # part of the height that a line of text takes


def nice_ticks(extent: float, at_most: int = 8) -> list[float]:
    """Return round numbers from 0 up to ``extent``: at most so many steps of 1, 2 or 5 times a power of ten."""
    if extent <= 0:
        return [0.0]
    rough = extent / at_most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    return [i * step for i in range(int(extent / step + 1e-9) + 1)]


def _box(css: str, style: str, title: str = "", text: str = "") -> str:
    hint = f' title="{escape(title)}"' if title else ""
    return f'<i class="{css}" style="{style}"{hint}>{escape(text)}</i>'


def key(entries: Iterable[tuple[str, str]]) -> str:
    """Explain colors: pairs of a class and a text."""
    inside = "".join(f'<span><i class="{css}"></i>{escape(text)}</span>' for css, text in entries)
    return f'<p class="key">{inside}</p>'


def timeline_chart(step: StepTiming, *, has_hook: bool = False) -> str:
    """Draw one step: compute above, one lane for each bucket below, and behind all of it when the step waits.

    What holds up the backward is named a hook if there is one, or else launching.
    """
    span = max(step.duration, 1e-9)

    def piece(begin: float, end: float, css: str, title: str = "", text: str = "") -> str:
        place = f"left:{100 * (begin - step.begin) / span:.3f}%;width:{100 * max(end - begin, 0.0) / span:.3f}%"
        return _box(css, place, title, text)

    ticks = nice_ticks(span)
    behind = [piece(step.begin + t, step.begin + t, "grid", text=seconds_text(t) if t else "0") for t in ticks]
    behind += [piece(begin, end, "waiting") for begin, end in step.wait_intervals]

    after = max([step.backward_end, *(end for _, end in step.wait_intervals)])
    backward = f"backward with {'hook' if has_hook else 'launching'}"
    segments = [
        ("forward", "forward", step.begin, step.backward_begin),
        (backward, "backward", step.backward_begin, step.backward_end),
        ("optimizer, rest", "rest", after, step.finished),
        *(("waits with hook" if step.hook_work else "waits", "wait", begin, end) for begin, end in step.wait_intervals),
    ]
    compute = [
        piece(begin, end, css, text, text)
        for name, css, begin, end in segments
        if end > begin and (text := f"{name} {seconds_text(end - begin)}")
    ]
    # The hook's part of the backward, and of the wait.
    for begin, end in union([*((b.ready, b.launched) for b in step.buckets), *step.hook_work]):
        name = "the hook computes" if has_hook else "launching"
        compute.append(piece(begin, end, "hook strip", f"{name} {seconds_text(end - begin)}"))

    lanes = len(step.buckets)
    height = 22.0 if lanes <= _LANES_LABELLED else max(3.0, 264.0 / lanes)
    rows = [_lane("compute", compute, 46)]
    for lane, (bucket, exposed) in enumerate(zip(step.buckets, exposed_by_bucket(step), strict=True)):
        launched, done = bucket.in_flight
        title = (
            f"bucket {bucket.index}: {len(bucket.names)} parameters, {bytes_text(bucket.grad_bytes)} of gradients, "
            f"{bytes_text(bucket.sent_bytes)} sent; in flight {seconds_text(done - launched)}, "
            f"waited for {seconds_text(exposed)}"
        )
        labelled = lane % math.ceil(lanes / _LANES_LABELLED) == 0
        label = f"bucket {bucket.index} \N{MIDDLE DOT} {bytes_text(bucket.grad_bytes)}" if labelled else ""
        pieces = [
            piece(bucket.ready, launched, "hook", f"{title} (hook)"),
            piece(launched, done, "hidden", title),
            *(piece(*both, "exposed", title) for both in intersect([(launched, done)], step.wait_intervals)),
        ]
        rows.append(_lane(label, pieces, height))
    return f'<div class="timeline"><div class="behind">{"".join(behind)}</div>{"".join(rows)}</div>'


def _lane(label: str, pieces: Sequence[str], height: float) -> str:
    inside = f"<span>{escape(label)}</span><div>{''.join(pieces)}</div>"
    return f'<div class="lane" style="height:{height:.1f}px">{inside}</div>'


def budget_chart(step: StepTiming, *, has_hook: bool = False) -> str:
    """Draw how a step's duration divides, as one bar; the hook's part is not part of the backward here."""
    parts = phases(step)
    pieces = [
        ("forward", "forward", parts.forward),
        ("backward alone", "backward", parts.backward),
        ("hook, launching" if has_hook else "launching", "hook", parts.hook),
        ("waiting alone" if step.hook_work else "waiting", "wait", parts.wait),
        ("optimizer, rest", "rest", parts.rest),
    ]
    total = sum(max(seconds, 0.0) for _, _, seconds in pieces) or 1.0
    drawn = [
        _box(css, f"flex:{100 * share:.3f}", f"{name}: {seconds_text(seconds)}", share_text(share))
        for name, css, seconds in pieces
        for share in [max(seconds, 0.0) / total]
    ]
    texts = key((css, f"{name} {seconds_text(seconds)}") for name, css, seconds in pieces)
    return f'<div class="budget">{"".join(drawn)}</div>{texts}'


def waiting_chart(steps: Sequence[StepTiming], middle: float, columns: int = 240) -> str:
    """Draw how long the steps waited, with the median of the typical ones.

    Each has one bar, or several neighbors share one: their mean, and lightly the largest.
    """
    waits = sorted(step.wait for step in steps)
    # One slow step must not press all others flat.
    top = 1.05 * (min(waits[-1], 1.6 * waits[int(0.95 * (len(waits) - 1))]) or 1e-6)

    def percent(seconds: float) -> str:
        return f"{100 * min(seconds / top, 1.0):.2f}%"

    lines = [_box("grid", f"bottom:{percent(t)}", text=seconds_text(t) if t else "0") for t in nice_ticks(top, 4)]
    lines.append(_box("median", f"bottom:{percent(middle)}"))
    group = max(1, math.ceil(len(steps) / columns))
    bars = []
    for members in (steps[i : i + group] for i in range(0, len(steps), group)):
        mean, most = sum(step.wait for step in members) / len(members), max(step.wait for step in members)
        first, last = members[0].step, members[-1].step
        title = f"{f'step {first}' if first == last else f'steps {first} to {last}'}: waited {seconds_text(mean)}"
        if group > 1:
            title += f", at most {seconds_text(most)}"
        inside = _box("most", f"height:{percent(most)}") + _box("exposed", f"height:{percent(mean)}")
        bars.append(f'<div title="{escape(title)}"{" class=beyond" if most > top else ""}>{inside}</div>')
    texts = [f"step {steps[0].step}", f"dashed: median {seconds_text(middle)}", f"step {steps[-1].step}"]
    ends = "".join(f"<span>{text}</span>" for text in texts)
    return f'<div class="columns">{"".join(lines)}{"".join(bars)}</div><p class="ends">{ends}</p>'


def parameters_chart(parameter_bytes: Mapping[str, int], bucket_of: Mapping[str, int], at_most: int = 120) -> str:
    """Draw gradients as areas: a row for each bucket, in it a box for each parameter; the smaller ones share a row."""
    ordered = sorted((name for name, n in parameter_bytes.items() if n), key=lambda name: -parameter_bytes[name])
    total = sum(parameter_bytes[name] for name in ordered)
    rows: dict[int, list[str]] = {}
    for name in ordered[:at_most]:
        rows.setdefault(bucket_of[name], []).append(name)
    drawn = []
    for index, names in sorted(rows.items()):
        height, boxes = sum(parameter_bytes[name] for name in names), ""
        for name in names:
            hint = f"{name}: {bytes_text(parameter_bytes[name])}, bucket {index}"
            text = name if height >= _LABELLED_ROW * total else ""
            boxes += _box(f"b{index % BUCKET_COLORS}", f"flex:{parameter_bytes[name]}", hint, text)
        drawn.append(f'<div style="flex:{height}">{boxes}</div>')
    if others := ordered[at_most:]:
        height, text = sum(parameter_bytes[name] for name in others), f"{len(others)} smaller ones"
        box = _box("rest", "flex:1", f"{text}: {bytes_text(height)}", text)
        drawn.append(f'<div style="flex:{height}">{box}</div>')
    return f'<div class="map">{"".join(drawn)}</div>' if drawn else ""
