"""The report: one HTML page without scripts or outside files. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from statistics import mean, median

from lightning_ddp_hooks.monitor import report_charts as charts
from lightning_ddp_hooks.monitor import report_text
from lightning_ddp_hooks.monitor.record import RunRecord, Summary
from lightning_ddp_hooks.monitor.report_charts import BUCKET_COLORS
from lightning_ddp_hooks.monitor.report_style import STYLE
from lightning_ddp_hooks.monitor.report_text import bytes_text, seconds_text, share_text
from lightning_ddp_hooks.monitor.timeline import BucketTiming, StepTiming, median_step, typical_steps, typical_waiting

_BUCKETS_LISTED, _PARAMETERS_LISTED = 40, 8


def build_report(record: RunRecord) -> str:
    """Return the page for the record of the rank that writes it; it may hold no steps."""
    facts = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(fact)}</dd></div>" for name, fact in record.facts.items())
    note = report_text.run_note(record)
    head = f"<header><h1>Communication report</h1><dl>{facts}</dl></header>"
    if note:
        head += f'<p class="note">{escape(note)}</p>'
    if not record.steps:
        return _page(f'{head}<p class="verdict">No step was recorded.</p>')
    steps = list(record.steps)
    summary = Summary.of(steps, record.world_size)
    step = median_step(steps)
    said = report_text.advice(
        steps, summary, record.world_size, has_hook=record.has_hook, bucket_cap_bytes=record.bucket_cap_bytes
    )
    parts = [
        head,
        f'<p class="verdict">{escape(report_text.headline(steps, summary, record.world_size))}</p>',
        f'<p class="advice">{_with_code(said)}</p>',
        _cards(summary),
        _typical_step(step, has_hook=record.has_hook),
        _section("Waiting, step by step", "How long each step waited for communication.",
                 charts.waiting_chart(steps, summary.exposed)),
        _buckets(steps, step),
        _parameters(record, step),
        _other_traffic(record, steps),
        _ranks(record),
        _legend(),
    ]  # fmt: skip
    return _page("".join(parts))


def _page(body: str) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Communication report</title><style>{STYLE}</style></head><body><main>{body}</main></body></html>\n"
    )


def _section(title: str, note: str, content: str) -> str:
    subtitle = f'<p class="sub">{escape(note)}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2>{subtitle}{content}</section>"


def _with_code(text: str) -> str:
    """Escape a text, and set what stands between backquotes as code."""
    pieces = escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if i % 2 else piece for i, piece in enumerate(pieces))


def _cards(summary: Summary) -> str:
    share = share_text(summary.exposed_share)
    cards = [
        ("step", seconds_text(summary.duration), f"median of {summary.steps:,} steps", ""),
        ("waited for communication", seconds_text(summary.exposed), f"{share} of the step", "hot"),
        ("communication in all", seconds_text(summary.communication), "any bucket in flight", ""),
        ("overlap", share_text(summary.overlap), "hidden behind computing", "good"),
        ("sent per rank and step", bytes_text(summary.sent_bytes), "mean over all steps", ""),
        ("effective compression", report_text.factor_text(summary.compression), "against a plain all-reduce", ""),
    ]
    if summary.error is not None:
        cards.append(("compression error", f"{summary.error:.2g}", "relative, to the exact mean", ""))
    inside = "".join(
        f'<div class="card {css}"><div class="name">{name}</div><div class="value">{value}</div>'
        f'<div class="what">{what}</div></div>'
        for name, value, what, css in cards
    )
    return f'<div class="cards">{inside}</div>'


def _typical_step(step: StepTiming, *, has_hook: bool) -> str:
    colors = [
        ("hook", "the hook computes, launches" if has_hook else "launching"),
        ("hidden", "in flight, hidden"),
        ("exposed", "in flight after the backward"),
    ]
    above, below = charts.timeline_chart(step, has_hook=has_hook), charts.budget_chart(step, has_hook=has_hook)
    note = f"Step {step.step}, which is nearest to the medians, on the rank that wrote this report."
    return _section("A typical step", note, above + charts.key(colors) + below)


def _bars(*bars: tuple[float, str]) -> str:
    """Draw bars one below the other: pairs of a share of the width and a class."""
    drawn = [f'<i class="bar {css}" style="width:{100 * min(max(share, 0.0), 1.0):.1f}%"></i>' for share, css in bars]
    return f'<div class="bars">{"".join(drawn)}</div>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Build a table of cells that are HTML already."""
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"


def _buckets(steps: Sequence[StepTiming], step: StepTiming) -> str:
    if not step.buckets:
        return ""
    typical, waiting = typical_steps(steps), typical_waiting(steps)
    largest = max(max(b.grad_bytes, b.sent_bytes) for b in step.buckets) or 1
    worst = max(*waiting.buckets, waiting.hook, waiting.after) or 1.0
    rows = []
    for position, bucket in enumerate(step.buckets[:_BUCKETS_LISTED]):
        mine = [other.buckets[position] for other in typical]
        sent = sum(b.sent_bytes for b in mine) / len(mine)
        exposed = waiting.buckets[position]
        errors = [b.error for b in mine if b.error is not None]
        rows.append([
            f'<span class="dot b{bucket.index % BUCKET_COLORS}"></span>{bucket.index}',
            f'<span title="{escape(", ".join(bucket.names))}">{escape(_contents(bucket))}</span>',
            _bars((bucket.grad_bytes / largest, "faint"), (sent / largest, "sent")),
            bytes_text(bucket.grad_bytes), bytes_text(sent),
            seconds_text(median(b.in_flight[1] - b.in_flight[0] for b in mine)),
            _bars((exposed / worst, "exposed")), seconds_text(exposed), f"{mean(errors):.2g}" if errors else "",
        ])  # fmt: skip
    for what, seconds in (("the hook computes", waiting.hook), ("no bucket in flight", waiting.after)):
        if seconds >= 0.5e-6:  # else it would be shown as 0 us
            rows.append(["", what, "", "", "", "", _bars((seconds / worst, "exposed")), seconds_text(seconds), ""])
    head = ["bucket", "parameters", "gradients, sent", "gradients", "sent", "in flight", "", "waited for", "error"]
    if all(not row[-1] for row in rows):
        head, rows = head[:-1], [row[:-1] for row in rows]
    rest = max(0, len(step.buckets) - _BUCKETS_LISTED)
    more = f'<p class="sub">And {rest} more.</p>' if rest else ""
    note = (
        "In the order in which they are sent. A bucket counts as waited for while all buckets before it are done. "
        f"Together {seconds_text(waiting.total)}, divided as in the steps around the median."
    )
    return _section("Buckets", note, _table(head, rows) + more)


def _contents(bucket: BucketTiming) -> str:
    first, last = bucket.names[0], bucket.names[-1]
    return first if len(bucket.names) == 1 else f"{first} \N{HORIZONTAL ELLIPSIS} {last} ({len(bucket.names)})"


def _parameters(record: RunRecord, step: StepTiming) -> str:
    bucket_of = {name: bucket for bucket in step.buckets for name in bucket.names}
    sizes = {name: n for name, n in record.parameter_bytes.items() if name in bucket_of}
    total = sum(sizes.values())
    if not total:
        return ""
    first = sorted(sizes, key=lambda name: (-sizes[name], name))[:_PARAMETERS_LISTED]
    rows = []
    for name in first:
        bucket = bucket_of[name]
        # What is sent for a bucket is divided by size: a hook sees the bucket, not the parameter.
        sent = sizes[name] * bucket.sent_bytes / (bucket.grad_bytes or 1)
        bars = _bars((sizes[name] / sizes[first[0]], f"b{bucket.index % BUCKET_COLORS}"))
        share = share_text(sizes[name] / total)
        code = f"<code>{escape(name)}</code>"
        rows.append([code, bars, bytes_text(sizes[name]), share, bytes_text(sent), str(bucket.index)])
    chart = charts.parameters_chart(sizes, {name: bucket.index for name, bucket in bucket_of.items()})
    table = _table(["largest parameters", "", "gradient", "of all", "sent", "bucket"], rows)
    note = f"{bytes_text(total)} of gradients in {len(sizes):,} parameters; a color is a bucket."
    return _section("Bytes by parameter", note, chart + table)


def _other_traffic(record: RunRecord, steps: Sequence[StepTiming]) -> str:
    purposes = Counter({"gradients": sum(b.sent_bytes for step in steps for b in step.buckets)})
    for step in steps:
        purposes.update(dict(step.other_bytes))
    between = sum(record.outside_bytes.values())
    if len(purposes) == 1 and not between:
        return ""
    total = purposes.total() or 1
    rows = [
        [escape(name), _bars((sent / total, "sent")), bytes_text(sent / len(steps)), share_text(sent / total)]
        for name, sent in purposes.most_common()
    ]
    table = _table(["purpose", "", "per step", "of all"], rows)
    more = f'<p class="sub">Between steps, over the whole run: {bytes_text(between)}.</p>' if between else ""
    return _section("What the bytes were for", "Sent by this rank, in the mean over all steps.", table + more)


def _ranks(record: RunRecord) -> str:
    ranks = [{name: float(figure or 0.0) for name, figure in row.items()} for row in record.ranks if row.get("steps")]
    if len(ranks) < 2:
        return ""
    worst = max(row["exposed"] for row in ranks)
    rows = [
        [
            f"{row['rank']:.0f}", seconds_text(row["duration"]), _bars((row["exposed"] / (worst or 1.0), "exposed")),
            seconds_text(row["exposed"]), seconds_text(row["communication"]), share_text(row["overlap"]),
            bytes_text(row["sent_bytes"]),
        ]
        for row in ranks
    ]  # fmt: skip
    note = (
        f"Waited for communication: mean {seconds_text(mean(row['exposed'] for row in ranks))}, at most "
        f"{seconds_text(worst)}. A rank that waits less than the others is the one that they wait for."
    )
    head = ["rank", "step", "", "waited", "communication", "overlap", "sent per step"]
    return _section("Ranks", note, _table(head, rows))


def _legend() -> str:
    terms = [
        ("in flight", "From the moment a bucket is handed over until it is reduced; early ranks wait for late ones."),
        ("waited for (exposed)", "Time in which the backward had nothing left to compute, but to wait for the last "
                                 "results; what a hook computes in it is listed by itself."),
        ("hook", "Time in which the backward stands still for a hook that computes what to send, and for starting to "
                 "send it; and what the hook computes after the backward."),
        ("overlap", "The part of the communication that the step did not wait for."),
        ("sent", "Payload that this rank sends to others, by the formula of each collective; headers come on top."),
        ("effective compression", "What a ring all-reduce of all gradients in their own dtype would send, divided by "
                                  "what was sent, for whatever purpose."),
    ]  # fmt: skip
    inside = "".join(f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in terms)
    return f'<section class="legend"><h2>Terms</h2><dl>{inside}</dl></section>'
