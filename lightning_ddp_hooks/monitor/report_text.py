"""Figures and findings in words."""

from __future__ import annotations

from statistics import fmean

from lightning_ddp_hooks.monitor.quality import Quality
from lightning_ddp_hooks.monitor.record import RunRecord, Summary
from lightning_ddp_hooks.monitor.skew import PHASES, SlowRank, Split, slow_rank
from lightning_ddp_hooks.monitor.timeline import exposed_by_bucket, typical_steps

_NEGLIGIBLE = 0.01  # below this share of a step, waiting is not worth anybody's time
_LITTLE = 0.03  # below this share, neither waiting nor a hook is worth a change
_MOST = 0.6  # from this share of all waiting on, something is to blame for it
_HARDLY = 0.05  # up to this share of all waiting, buckets are as good as not waited for


def seconds_text(seconds: float) -> str:
    """Return a duration with three significant digits: ``41.0 ms``, ``870 µs``, ``2.30 s``."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if abs(seconds) * factor >= 0.9995:
            return f"{_three(seconds * factor)} {unit}"
    return f"{seconds * 1e6:.0f} µs"


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


_WHERE = {
    "data": "while it loads batches", "validation": "in validation", "save": "while it saves a checkpoint",
    "forward": "in the forward", "backward": "in the backward", "hook": "in what the hook computes",
    "optimizer": "in the optimizer or what comes after it",
}  # fmt: skip

_UNEVEN = (
    'if it has larger batches than the others, even them out (`gradient_weighting="samples"` keeps the mean right '
    "where they differ)"
)
_OTHER = "look at the machine (other work on it, throttling, a failing device) or take another one"
_MACHINE = (
    f"{_UNEVEN}; if not, {_OTHER}. "
    "Model averaging lets ranks meet less often, which helps where the lateness comes and goes"
)
_REMEDIES = {
    "data": f"Give it more workers (`num_workers`) or faster storage; {_UNEVEN}.",
    "validation": "Divide the validation data evenly, or validate less often.",
    "save": "Save less often or in the background; what only one rank saves, the others wait for.",
}


def slow_rank_text(slow: SlowRank, found: Split, record: RunRecord) -> str:
    """Name the rank that holds the others up, and where it loses the time."""
    host = f" ({record.hosts[slow.rank]})" if len(set(record.hosts)) > 1 else ""
    of_step = f"{seconds_text(slow.held_up)} of {seconds_text(found.duration)} per step"
    text = f"Rank {slow.rank}{host} holds the others up: they wait {of_step} for it"
    if slow.phase is None:
        return f"{text}; in no one phase."
    text = f"{text}, and it loses the time {_WHERE[slow.phase]}"
    buckets = typical_steps(list(record.steps))[0].buckets if slow.bucket is not None and record.steps else ()
    if slow.bucket is None or slow.bucket >= len(buckets):
        return f"{text}."
    bucket = buckets[slow.bucket]
    first, last = bucket.names[0], bucket.names[-1]
    shown = f"`{first}`" if first == last else f"`{first}` to `{last}`"
    return f"{text}, on the way to the gradients of bucket {bucket.index} ({shown})."


def slow_rank_advice(slow: SlowRank | None) -> str:
    """Say what helps where ranks wait for each other."""
    nothing = "No communication hook and no bucket size changes that."
    if slow is None:
        return (
            f"Now one rank is late, now another: model averaging, with which they meet less often, evens that out; "
            f"so do batches of even size. {nothing}"
        )
    if slow.phase == "hook":
        longer = f"On rank {slow.rank} the hook computes longer than on the others"
        return f"{longer}: a hook that computes less may help; or {_OTHER}."
    remedy = _REMEDIES.get(slow.phase or "", f"On rank {slow.rank}: {_MACHINE}.")
    return f"{remedy} {nothing}"


def _skew(found: Split | None) -> float:
    """Return the part of a step that a rank waits for others, if that is what it mostly waits for; else 0."""
    if found is None or not found.duration or max(found.skew) < fmean(found.transfer):
        return 0.0
    share = max(found.skew) / found.duration
    return share if share >= _LITTLE else 0.0


def headline(record: RunRecord, summary: Summary) -> str:
    """Return one sentence about the run, by its typical steps; there is at least one step."""
    sent = bytes_text(summary.sent_bytes)
    buckets = typical_steps(list(record.steps))[0].buckets
    found = record.split()
    if record.world_size == 1:
        return "There is one rank: nobody to communicate with."
    if not buckets:
        return f"Replicas trained on their own; bringing them together took {sent} per step, in the mean."
    if found is not None and _skew(found):
        of_step = f"{seconds_text(max(found.skew))} of {seconds_text(found.duration)} per step"
        return f"Ranks wait for each other, {of_step}, more than for the network."
    of_step = f"{seconds_text(summary.exposed)} of {seconds_text(summary.duration)} per step"
    if summary.exposed_share < _NEGLIGIBLE:
        return f"Communication hides behind the backward: waiting takes {of_step}."
    if summary.overlap >= 0.25:
        return f"{share_text(summary.overlap)} of the communication hides behind the backward: waiting takes {of_step}."
    if len(buckets) == 1:
        return f"Nothing hides the communication, since all gradients share one bucket: waiting takes {of_step}."
    return f"Little of the communication hides behind the backward: waiting takes {of_step}."


def who_is_slow(record: RunRecord) -> str:
    """Return the rank that the others wait for, and where it loses the time, or that there is none."""
    found = record.split()
    if record.world_size == 1:
        return "There are no others."
    if found is None:
        return "Not known: the ranks were not compared."
    slow, share = slow_rank(found), max(found.skew) / (found.duration or 1.0)
    if share < _LITTLE:
        return f"None: no rank waits for others longer than {share_text(share)} of a step."
    if slow is None:
        return "None by itself: now one rank is late, now another."
    return slow_rank_text(slow, found, record)


def answers(record: RunRecord, summary: Summary) -> list[tuple[str, str]]:
    """Return what a reader wants to know first: questions and their answers; there is at least one step."""
    found = [
        ("What am I waiting for?", headline(record, summary)),
        ("Who is slow?", who_is_slow(record)),
        ("What should I change?", advice(record, summary)),
    ]
    quality = quality_text(record)
    return found if quality is None else [*found, ("What does the hook do to gradients?", quality)]


def advice(record: RunRecord, summary: Summary) -> str:
    """Return what there is to gain, and where to look for it; there is at least one step."""
    typical, found, has_hook = typical_steps(list(record.steps)), record.split(), record.has_hook
    sizes = [bucket.grad_bytes for bucket in typical[0].buckets]
    if record.world_size == 1 or not sizes:
        return "Gradients are not exchanged, so no communication hook or bucket size would change the step."
    if found is None:
        text = "Whether the network or other ranks were waited for is not known, since the ranks were not compared"
        return f"{text}: no advice."
    duration, transfer = found.duration or 1.0, fmean(found.transfer)
    if _skew(found):
        rest = f" The transfer itself takes {seconds_text(transfer)}: look at that once the ranks are even."
        return slow_rank_advice(slow_rank(found)) + (rest if transfer >= _LITTLE * duration else "")
    hook = fmean(spent[PHASES.index("hook")] for spent in found.own)
    gain = share_text((hook + transfer) / duration)
    text = f"Communication that costs nothing would make steps at most {gain} shorter."
    if max(hook, transfer) < _LITTLE * duration:
        return f"{text} There is little to gain from a hook or from other buckets here."
    if hook > transfer:
        costs = f"takes {seconds_text(hook)} of a step, more than the {seconds_text(transfer)} of transfer"
        # Where none has reached the limit, what keeps them apart is something else: rules, devices, dtypes.
        can_grow = len(sizes) > 1 and max(sizes) >= record.bucket_cap_bytes
        larger = "larger buckets (`bucket_cap_mb`)" if can_grow else ""
        if has_hook:
            others = ", ".join(filter(None, (larger, "a cheaper hook")))
            return f"{text} The hook itself {costs}: try {others} or none."
        if larger:
            return f"{text} Starting to communicate {costs}: {larger} start less often."
        return f"{text} Starting to communicate {costs}: a hook would not shorten that."
    if len(sizes) == 1:
        return f"{text} Buckets smaller than the model (`bucket_cap_mb`) let communication begin during the backward."
    waits = [fmean(column) for column in zip(*map(exposed_by_bucket, typical), strict=True)]
    less = "a hook that sends less"
    if has_hook:
        less += f" than this one, if it computes no longer ({seconds_text(hook)} of a step)"
    if sum(waits) < (1 - _MOST) * fmean(step.wait for step in typical) - hook:
        return f"{text} Most of the waiting comes when all buckets are reduced: other buckets or hooks would not help."
    if sum(waits[-max(1, len(waits) // 3) :]) > (1 - _HARDLY) * sum(waits):
        text += " What is waited for comes last, with no computation left to hide it: smaller buckets"
        return f"{text} (`bucket_cap_mb`) shorten that, and so does {less}."
    return f"{text} The transfer takes longer than the backward can hide: {less} would shorten that."


def quality_text(record: RunRecord) -> str | None:
    """Say in a line what the hook does to gradients, and whether it sends enough; None if that was not measured."""
    quality = record.quality
    if quality is None:
        return None
    total, share = quality.total, quality.total.noise_share(quality.world_size)
    noise = f"{share_text(share**2)} of the mean gradient is noise" + _noise_scale_text(quality)
    if not record.has_hook:
        return f"Measured: {noise}."
    if not record.is_approximate:
        return f"Ranks are to differ under this hook, so that its result is not judged. Measured: {noise}."
    verdict = quality.verdict()
    if total.has_memory and total.memory:
        found = (
            f"the hook sends {share_text(max(0.0, 1 - total.unsent**2))} of the gradient and its error memory at once, "
            f"and the memory is {factor_text(total.carried)} the gradient{', and grows' if quality.grows else ''}"
        )
    else:
        found = f"what comes out is {share_text(total.relative_error)} off the mean of the ranks' gradients"
    size = f"`{record.sized_by}`" if record.sized_by else None
    says = {
        "too little": f"{size} is too low" if size else "The hook sends too little",
        "enough": f"{size} fits" if size else "The hook fits",
        "more than needed": f"A lower {size} would do" if size else "The hook could send less",
        None: "The hook has changed nothing yet",
    }[verdict]
    return f"{says}: {found}; {noise}."


def _noise_scale_text(quality: Quality) -> str:
    batches = quality.total.noise_batches(quality.world_size)
    if batches is None or batches == float("inf"):
        return ""
    scale, now, unit = batches, float(quality.world_size), "times a rank's batch"
    if quality.noise_scale is not None and quality.batch is not None:
        scale, now, unit = quality.noise_scale, now * quality.batch, "samples"
    return f" (gradient noise scale about {_three(scale)} {unit}, the batch of all ranks is {now:,.0f})"


def run_note(record: RunRecord) -> str | None:
    """Return what limits the report, or None."""
    notes = [record.note] if record.note else []
    if record.count > len(record.steps):
        notes.append(f"Shown are the last {len(record.steps):,} of {record.count:,} steps.")
    if not record.sees_ends:
        notes.append("Of a collective only the end of the wait for it is known here, so that the division into "
                     "waiting for others and transfer is uncertain.")  # fmt: skip
    if record.has_hook and record.quality is not None:
        notes.append("Steps that measure what the hook does take longer: they send the exact gradients too.")
    return " ".join(notes) or None
