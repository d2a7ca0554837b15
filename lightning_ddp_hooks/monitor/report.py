"""The report: one HTML page without scripts or outside files. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from statistics import mean, median

from lightning_ddp_hooks.monitor import report_charts as charts
from lightning_ddp_hooks.monitor import report_text
from lightning_ddp_hooks.monitor.record import RunRecord, Summary
from lightning_ddp_hooks.monitor.report_style import STYLE
from lightning_ddp_hooks.monitor.report_text import bytes_text, seconds_text, share_text
from lightning_ddp_hooks.monitor.skew import PHASES
from lightning_ddp_hooks.monitor.timeline import (
    BucketTiming,
    StepTiming,
    exposed_by_bucket,
    median_step,
    phases,
    typical_steps,
)

_BUCKETS_LISTED = 40


def build_report(record: RunRecord) -> str:
    """Return the page for the record of the rank that writes it; it may hold no steps."""
    facts = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(fact)}</dd></div>" for name, fact in record.facts.items())
    note = report_text.run_note(record)
    head = f"<header><h1>Communication report</h1><dl>{facts}</dl></header>"
    if note:
        head += f'<p class="note">{escape(note)}</p>'
    if not record.steps:
        return _page(f'{head}<p class="answer">No step was recorded.</p>')
    steps = list(record.steps)
    summary = Summary.of(steps, record.world_size)
    step = median_step(steps)
    parts = [
        head,
        *(
            f'<h2 class="question">{question}</h2><p class="answer">{_with_code(answer)}</p>'
            for question, answer in report_text.answers(record, summary)
        ),
        _division(record, step),
        _cards(summary),
        _quality(record),
        _typical_step(step, has_hook=record.has_hook),
        _buckets(steps, step),
        _other_traffic(record, steps),
    ]
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


def _division(record: RunRecord, step: StepTiming) -> str:
    """Show how steps divide: of each rank in the mean, or where they were not compared in the typical step."""
    found = record.split()
    if found is None:
        parts = phases(step)
        own = {**dict(zip(PHASES, step.between, strict=False)), "forward": parts.forward, "backward": parts.backward,
               "hook": parts.hook, "wait": parts.wait, "optimizer": parts.rest}  # fmt: skip
        return _section(
            "What a step takes", f"Step {step.step} of rank {record.rank}.", charts.budget_chart([("", own)])
        )
    rows = []
    for rank, (spent, skew, transfer) in enumerate(zip(found.own, found.skew, found.transfer, strict=True)):
        *before, after = zip(PHASES, spent, strict=True)
        rows.append((f"rank {rank}", {**dict(before), "skew": skew, "transfer": transfer, **dict([after])}))
    note = (
        f"Means over {found.steps:,} steps. A rank waits for others until the last one sends its part of a bucket, and "
        "for the transfer from then on."
    )
    return _section("What the ranks' steps take", note, charts.budget_chart(rows))


def _typical_step(step: StepTiming, *, has_hook: bool) -> str:
    colors = [
        ("hook", "the hook computes, launches" if has_hook else "launching"),
        ("hidden", "in flight, hidden"),
        ("exposed", "in flight after the backward"),
    ]
    note = f"Step {step.step}, which is nearest to the medians, on the rank that wrote this report."
    return _section("A typical step", note, charts.timeline_chart(step, has_hook=has_hook) + charts.key(colors))


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
    typical = typical_steps(steps)
    waits = [mean(column) for column in zip(*map(exposed_by_bucket, typical), strict=True)]
    largest = max(max(b.grad_bytes, b.sent_bytes) for b in step.buckets) or 1
    worst = max(waits) or 1.0
    rows = []
    for position, bucket in enumerate(step.buckets[:_BUCKETS_LISTED]):
        mine = [other.buckets[position] for other in typical]
        sent = sum(b.sent_bytes for b in mine) / len(mine)
        exposed = waits[position]
        errors = [b.error for b in mine if b.error is not None]
        rows.append([
            str(bucket.index),
            f'<span title="{escape(", ".join(bucket.names))}">{escape(_contents(bucket))}</span>',
            _bars((bucket.grad_bytes / largest, "faint"), (sent / largest, "sent")),
            bytes_text(bucket.grad_bytes), bytes_text(sent),
            seconds_text(median(b.in_flight[1] - b.in_flight[0] for b in mine)),
            _bars((exposed / worst, "exposed")), seconds_text(exposed), f"{mean(errors):.2g}" if errors else "",
        ])  # fmt: skip
    head = ["bucket", "parameters", "gradients, sent", "gradients", "sent", "in flight", "", "waited for", "error"]
    if all(not row[-1] for row in rows):
        head, rows = head[:-1], [row[:-1] for row in rows]
    rest = max(0, len(step.buckets) - _BUCKETS_LISTED)
    more = f'<p class="sub">And {rest} more.</p>' if rest else ""
    note = (
        "In the order in which they are sent. A bucket counts as waited for, for others or the transfer, while all "
        "before it are done; means over the steps."
    )
    return _section("Buckets", note, _table(head, rows) + more)


def _quality(record: RunRecord) -> str:
    quality = record.quality
    if quality is None:
        return ""
    rows = []
    for norms in (*quality.groups, *([quality.total] if len(quality.groups) > 1 else [])):
        memory = [f"{norms.unsent:.2g}", report_text.factor_text(norms.carried)] if norms.has_memory else ["", ""]
        noise = share_text(norms.noise_share(record.world_size) ** 2)
        sends = (norms.verdict(record.world_size) or "") if record.has_hook and record.is_approximate else ""
        rows.append([escape(norms.group), f"{norms.relative_error:.2g}", *memory, noise, sends])
    note = (
        f"By parameter group, over the last {quality.steps} steps that were measured. Error: of what comes out, "
        "relative to the mean over the ranks. Not sent: of this rank's gradient with its error memory, by which a hook "
        "that has one is judged. Memory: relative to this rank's gradient. Noise: part of the mean's squared norm."
    )
    head = ["group", "error", "not sent", "memory", "noise", "sends"]
    return _section("What the hook does to gradients", note, _table(head, rows))


def _contents(bucket: BucketTiming) -> str:
    first, last = bucket.names[0], bucket.names[-1]
    return first if len(bucket.names) == 1 else f"{first} \N{HORIZONTAL ELLIPSIS} {last} ({len(bucket.names)})"


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


page, section, table = _page, _section, _table  # for other pages of the same looks
