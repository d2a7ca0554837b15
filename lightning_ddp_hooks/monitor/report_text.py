"""Figures and findings in words."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_ddp_hooks.monitor.record import RunRecord, Summary
from lightning_ddp_hooks.monitor.timeline import StepTiming, Waiting, typical_phases, typical_steps, typical_waiting

_NEGLIGIBLE = 0.01  # below this share of a step, waiting is not worth anybody's time
_LITTLE = 0.03  # below this share, neither waiting nor a hook is worth a change
_MOST = 0.6  # from this share of all waiting on, one bucket is to blame
_HARDLY = 0.05  # up to this share of all waiting, a bucket is as good as not waited for


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


def _waited_at_the_end(waiting: Waiting) -> int:
    """Return how many buckets there are from the first one that is waited for, if these are few; else 0."""
    waited = [seconds > _HARDLY * waiting.total for seconds in waiting.buckets]
    count = len(waited) - waited.index(True) if any(waited) else 0
    return count if count <= max(1, len(waited) // 3) and count < len(waited) else 0


def _worst(waiting: Waiting, buckets: Sequence[int]) -> str | None:
    """Name what most of the waiting is for, by the indices of the buckets, or None."""
    if waiting.hook >= _MOST * waiting.total:
        return "what the hook computes after it"
    if waiting.after >= _MOST * waiting.total:
        return "what follows the last bucket (results written back, ranks that agree)"
    if count := _waited_at_the_end(waiting):
        return "the last bucket" if count == 1 else f"the last {count} buckets"
    worst = max(range(len(buckets)), key=lambda i: waiting.buckets[i])
    if len(buckets) > 1 and waiting.buckets[worst] >= _MOST * waiting.total:
        return f"bucket {buckets[worst]}"
    return None


def headline(steps: Sequence[StepTiming], summary: Summary, world_size: int) -> str:
    """Return one sentence about the run, by its typical steps; there is at least one step."""
    sent = bytes_text(summary.sent_bytes)
    buckets = [bucket.index for bucket in typical_steps(steps)[0].buckets]
    if world_size == 1:
        return "There is one rank: nobody to communicate with."
    if not buckets:
        return f"Replicas trained on their own; bringing them together took {sent} per step, in the mean."
    of_step = f"{seconds_text(summary.exposed)} of {seconds_text(summary.duration)} per step"
    if summary.exposed_share < _NEGLIGIBLE:
        return f"Communication hides behind the backward: waiting takes {of_step}."
    if summary.overlap >= 0.25:
        if (name := _worst(typical_waiting(steps), buckets)) is not None:
            return f"Communication hides behind the backward except for {name}: waiting takes {of_step}."
        return f"{share_text(summary.overlap)} of the communication hides behind the backward: waiting takes {of_step}."
    if len(buckets) == 1:
        return f"Nothing hides the communication, since all gradients share one bucket: waiting takes {of_step}."
    return f"Little of the communication hides behind the backward: waiting takes {of_step}."


def advice(
    steps: Sequence[StepTiming], summary: Summary, world_size: int, *, has_hook: bool = False, bucket_cap_bytes: int = 0
) -> str:
    """Return what there is to gain, and where to look for it; there is at least one step."""
    sizes = [bucket.grad_bytes for bucket in typical_steps(steps)[0].buckets]
    buckets = len(sizes)
    if world_size == 1 or not buckets:
        return "Gradients are not exchanged, so no communication hook or bucket size would change the step."
    parts = typical_phases(steps)
    hook, wait, duration = parts.hook, parts.wait, summary.duration or 1.0
    launching = "the hook" if has_hook else "starting communication"
    named = {"the forward": parts.forward, "the backward": parts.backward, launching: parts.hook,
             "waiting": parts.wait, "the optimizer and the rest": parts.rest}  # fmt: skip
    most = max(named, key=lambda name: named[name])
    gain = f"Communication that costs nothing would make steps at most {share_text((hook + wait) / duration)} shorter"
    text = f"{gain}. The largest part of the step is {most} ({share_text(named[most] / duration)})."
    if max(hook, wait) < _LITTLE * duration:
        return f"{text} There is little to gain from a hook or from other buckets here."
    if hook > wait:
        costs = f"takes {seconds_text(hook)} of a step, more than the {seconds_text(wait)} of pure waiting"
        # Where none has reached the limit, what keeps them apart is something else: rules, devices, dtypes.
        larger = "larger buckets (`bucket_cap_mb`)" if buckets > 1 and max(sizes) >= bucket_cap_bytes else ""
        if has_hook:
            others = ", ".join(filter(None, (larger, "a cheaper hook")))
            return f"{text} The hook itself {costs}: try {others} or none."
        if larger:
            return f"{text} Starting to communicate {costs}: {larger} start less often."
        return f"{text} Starting to communicate {costs}: a hook would not shorten that."
    if buckets == 1:
        return f"{text} Buckets smaller than the model (`bucket_cap_mb`) let communication begin during the backward."
    waiting = typical_waiting(steps)
    less = "a hook that sends less"
    if has_hook:
        less += f" than this one, if it computes no longer ({seconds_text(hook)} of a step)"
    if waiting.after >= _MOST * waiting.total:
        return f"{text} Most of the waiting comes when all buckets are reduced: other buckets or hooks would not help."
    if _waited_at_the_end(waiting):
        text += " What is waited for comes last, with no computation left to hide it: smaller buckets"
        return f"{text} (`bucket_cap_mb`) shorten that, and so does {less}."
    return f"{text} Communication takes longer than the backward can hide: {less} would shorten that."


def run_note(record: RunRecord) -> str | None:
    """Return what limits the report, or None."""
    notes = [record.note] if record.note else []
    kept = len(record.steps)
    if record.count > kept:
        notes.append(f"Shown are the last {kept:,} of {record.count:,} steps.")
    if any(b.error is not None for step in record.steps for b in step.buckets):
        notes.append("Steps that measure the compression error take longer: they send the exact gradients too.")
    return " ".join(notes) or None
