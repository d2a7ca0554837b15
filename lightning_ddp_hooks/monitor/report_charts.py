"""The charts of the report, as HTML boxes that CSS lays out. Pure; colors and sizes are in `report_style`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from lightning_ddp_hooks.monitor.report_text import bytes_text, seconds_text
from lightning_ddp_hooks.monitor.timeline import StepTiming, exposed_by_bucket, intersect, union

_LANES_LABELLED = 12
_SHOWN_SHARE = 0.001  # parts of a step below it are not explained


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
        ("optimizer, rest", "optimizer", after, step.finished),
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


PARTS = {
    "data": "loading, between steps", "validation": "validation", "save": "saving", "forward": "forward",
    "backward": "backward alone", "hook": "hook, launching", "optimizer": "optimizer, rest",
    "skew": "waits for others", "transfer": "waits for the transfer", "wait": "waits",
}  # fmt: skip
"""What a step divides into, by class, in words."""


def budget_chart(rows: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """Draw how steps divide: a row for each label, with seconds by the keys of `PARTS`."""
    longest = max((sum(parts.values()) for _, parts in rows), default=0.0) or 1.0
    drawn, seen = [], dict.fromkeys(PARTS, 0.0)
    for label, parts in rows:
        pieces, left = [], 0.0
        for css, seconds in parts.items():
            width = 100 * max(seconds, 0.0) / longest
            title = f"{label}: {PARTS[css]} {seconds_text(seconds)}"
            pieces.append(_box(css, f"left:{left:.3f}%;width:{width:.3f}%", title, seconds_text(seconds)))
            left += width
            seen[css] = max(seen[css], seconds / longest)
        drawn.append(_lane(label, pieces, 30))
    shown = [(css, f"{PARTS[css]} {seconds_text(rows[0][1][css])}" if len(rows) == 1 else PARTS[css])
             for css, share in seen.items() if share >= _SHOWN_SHARE]  # fmt: skip
    return f'<div class="timeline budget">{"".join(drawn)}</div>{key(shown)}'
