"""Figures and findings in words."""

from __future__ import annotations

from lightning_ddp_hooks.monitor.record import RunRecord, Summary
from lightning_ddp_hooks.monitor.timeline import StepTiming, exposed_by_bucket, intersect, phases

# Below this share of a step, waiting is not worth anybody's time.
_NEGLIGIBLE = 0.01
# From this share of all waiting on, one bucket is to blame.
_MOST = 0.6


def seconds_text(seconds: float) -> str:
    """Return a duration with three significant digits: ``41.0 ms``, ``870 us``, ``2.30 s``."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if abs(seconds) * factor >= 0.9995:
            return f"{_three(seconds * factor)} {unit}"
    return f"{seconds * 1e6:.0f} us"


def bytes_text(nbytes: float) -> str:
    """Return a size with three significant digits, in powers of a thousand: ``25.0 MB``."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(nbytes) >= 0.9995 * factor:
            return f"{_three(nbytes / factor)} {unit}"
    return f"{nbytes:.0f} B"


def share_text(share: float) -> str:
    """Return a percentage: ``7.6%``, ``55%``."""
    return f"{100 * share:.1f}%" if abs(share) < 0.0995 else f"{100 * share:.0f}%"


def factor_text(factor: float | None) -> str:
    """Return a factor: ``3.98x``; a dash for None, where nothing was sent."""
    return "\N{EN DASH}" if factor is None else f"{_three(factor)}\N{MULTIPLICATION SIGN}"


def _three(value: float) -> str:
    magnitude = abs(value)
    digits = 2 if magnitude < 9.995 else 1 if magnitude < 99.95 else 0
    return f"{value:,.{digits}f}"


def _waited_at_the_end(step: StepTiming) -> int:
    """Return how many buckets were in flight while the step waited, if these are few and the last ones; else 0."""
    waited = [bool(intersect([bucket.in_flight], step.wait_intervals)) for bucket in step.buckets]
    count = sum(waited)
    few = count <= max(1, len(waited) // 3) and count < len(waited)
    return count if few and all(waited[len(waited) - count :]) else 0


def headline(step: StepTiming, summary: Summary, world_size: int) -> str:
    """Return one sentence about the run, by its typical step.

    Args:
        step: the typical one.
        summary: of all steps.
        world_size: number of ranks.
    """
    sent = bytes_text(summary.sent_bytes)
    if world_size == 1:
        return "There is one rank: nobody to communicate with."
    if not step.buckets:
        return f"Replicas trained on their own; bringing them together took {sent} per step, in the mean."
    of_step = f"{seconds_text(summary.exposed)} of {seconds_text(summary.duration)} per step"
    if summary.exposed_share < _NEGLIGIBLE:
        return f"Communication hides behind the backward: waiting takes {of_step}."
    exposed = exposed_by_bucket(step)
    worst = max(range(len(exposed)), key=lambda i: exposed[i])
    name = None
    if count := _waited_at_the_end(step):
        name = "the last bucket" if count == 1 else f"the last {count} buckets"
    elif len(step.buckets) > 1 and exposed[worst] >= _MOST * step.wait:
        name = f"bucket {step.buckets[worst].index}"
    if name is not None and summary.overlap >= 0.25:
        return f"Communication hides behind the backward except for {name}: waiting takes {of_step}."
    if summary.overlap >= 0.25:
        return f"{share_text(summary.overlap)} of the communication hides behind the backward: waiting takes {of_step}."
    if len(step.buckets) == 1:
        return f"Nothing hides the communication, since all gradients share one bucket: waiting takes {of_step}."
    return f"Little of the communication hides behind the backward: waiting takes {of_step}."


def advice(step: StepTiming, summary: Summary, world_size: int) -> str:
    """Return what there is to gain, and where to look for it."""
    if world_size == 1 or not step.buckets:
        return "Gradients are not exchanged, so no communication hook or bucket size would change the step."
    share = summary.exposed_share
    gain = f"Communication that costs nothing would make steps at most {share_text(share)} shorter"
    parts = phases(step)
    named = {"the forward": parts.forward, "the backward": parts.backward, "the hook": parts.hook,
             "waiting": parts.wait, "the optimizer and the rest": parts.rest}  # fmt: skip
    most = max(named, key=lambda name: named[name])
    text = f"{gain}. The largest part of the step is {most} ({share_text(named[most] / (step.duration or 1.0))})."
    if share < 0.03:
        return f"{text} There is little to gain from a hook or from other buckets here."
    if len(step.buckets) == 1:
        return f"{text} Buckets smaller than the model (`bucket_cap_mb`) let communication begin during the backward."
    if _waited_at_the_end(step):
        text += " What is waited for comes last, with no computation left to hide it: smaller buckets"
        return f"{text} (`bucket_cap_mb`) shorten that, and so does a hook that sends less."
    return f"{text} Communication takes longer than the backward can hide: send less, by a communication hook."


def run_note(record: RunRecord) -> str | None:
    """Return what limits the report, or None."""
    notes = [record.note] if record.note else []
    kept = len(record.steps)
    if record.count > kept:
        notes.append(f"Shown are the last {kept:,} of {record.count:,} steps.")
    if any(b.error is not None for step in record.steps for b in step.buckets):
        notes.append("Steps that measure the compression error take longer: they send the exact gradients too.")
    return " ".join(notes) or None
