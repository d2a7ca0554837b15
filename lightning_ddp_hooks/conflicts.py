"""Which settings go together: one table, which the strategies check and from which the documentation is made.

    constructor     settings                             raise_on_conflict()   before anything runs
    set-up of a fit settings, Trainer, module            raise_on_conflict()   on all ranks, before any collective
    start of a fit  the same                             warn_no_effect()      said by rank zero

Two settings that no rule speaks of work together. Values that are wrong by themselves are refused in config.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from lightning_ddp_hooks.averaging.gradients import contradiction, hook_follows_schedule
from lightning_ddp_hooks.config import FitSettings
from lightning_ddp_hooks.optim.sharding import sharding_problem
from lightning_ddp_hooks.reducer.config import USED_CHANGES_AND_DOES_NOT

TWO_PHASES = (
    "use `OptimizerInHook(shard=True, overlap=False)`, which steps when all gradients are there, or leave "
    "`optimizer_in_hook` out."
)


@dataclass(frozen=True)
class ConflictRule:
    """Two settings that do not go together: as the documentation calls them, how to tell, and what is said then."""

    pair: tuple[str, str]
    applies: Callable[[FitSettings], Any]
    text: str | Callable[[FitSettings], str]  # with ``{s.name}`` for values of the settings
    verdict: Literal["refused", "no effect"] = "refused"
    by: Literal["ours", "Lightning's"] = "ours"

    def found(self, settings: FitSettings) -> str | None:
        """Return what is to be said of settings, or None."""
        if not self.applies(settings):
            return None
        return self.text.format(s=settings) if isinstance(self.text, str) else self.text(settings)


def raise_on_conflict(settings: FitSettings) -> None:
    """Raise a ValueError if two settings do not go together; it says why, and what to do."""
    for rule in RULES:
        if rule.verdict == "refused" and rule.by == "ours" and (text := rule.found(settings)) is not None:
            raise ValueError(text)


def warn_no_effect(settings: FitSettings) -> Iterator[str]:
    """Say which settings have no effect beside others."""
    for rule in RULES:
        if rule.verdict == "no effect" and (text := rule.found(settings)) is not None:
            yield text


def _weights_by_samples(s: FitSettings) -> str | None:
    if s.gradient_weighting == "samples":
        return '`gradient_weighting="samples"`'
    return '`UnevenInputs(divisor="samples")`' if s.divisor == "samples" else None


def _averager_replaces_hook(s: FitSettings) -> bool:
    if s.averager is None or s.hook is None or s.averager.warmup_steps or s.policy == "join":
        return False
    return not hook_follows_schedule(s.averager, s.hook)


def _averager_flags(s: FitSettings) -> list[str]:
    return [f"`{name}=False`" for name in ("average_before_eval", "save_replicas") if not getattr(s, name)]


RULES: tuple[ConflictRule, ...] = (
    ConflictRule(
        ("find_unused_parameters", "static_graph"),
        lambda s: s.find_unused_parameters and s.static_graph,
        USED_CHANGES_AND_DOES_NOT,
    ),
    ConflictRule(
        ("averager", 'gradient_weighting="samples"'),
        lambda s: s.averager and s.gradient_weighting == "samples",
        '`gradient_weighting="samples"` weighs gradients, which are not exchanged once `averager` has taken over.',
    ),
    ConflictRule(
        ("averager", "Lightning's averaging of weights over steps"),
        lambda s: s.averager and s.weight_averaging,
        "The callback {s.weight_averaging} averages over the steps of one rank, and so keeps another model on each one "
        "while `averager` lets each train for itself: leave one of them out.",
    ),
    ConflictRule(
        ("averager", "optimizer_in_hook"),
        lambda s: s.averager and s.optimizer_in_hook,
        "`averager` lets each rank train for itself with an optimizer of its own, which `optimizer_in_hook` steps for "
        "all ranks: set one of them.",
    ),
    ConflictRule(
        ("averager", "a hook of another schedule"),
        lambda s: s.averager and contradiction(s.averager, s.hook),
        lambda s: str(s.averager and contradiction(s.averager, s.hook)),
    ),
    ConflictRule(
        ("averager", 'skip_missing_loss="all"'),
        lambda s: s.averager and s.skip_missing_loss == "all",
        '`skip_missing_loss="all"` has the ranks agree on each step, which they do not once `averager` has taken over: '
        'leave it at "zeros", with which a rank without loss has no gradient in that step.',
    ),
    ConflictRule(
        ("averager", 'UnevenInputs(divisor="samples")'),
        lambda s: s.averager and s.divisor == "samples",
        '`UnevenInputs(divisor="samples")` weighs gradients, which are not exchanged once `averager` has taken over.',
    ),
    ConflictRule(
        ('gradient_weighting="samples"', "another divisor of UnevenInputs"),
        lambda s: s.gradient_weighting == "samples" and s.divisor not in (None, "samples"),
        '`gradient_weighting="samples"` contradicts `UnevenInputs(divisor="{s.divisor}")`: set `divisor="samples"`.',
    ),
    ConflictRule(
        ("a hook that leaves ranks different", "weights by samples"),
        lambda s: s.differing and _weights_by_samples(s),
        lambda s: (
            f"{_weights_by_samples(s)} weighs each rank's gradient by its share of the samples of all ranks, but "
            f"communication hook {s.differing} does not add up those of all ranks: leave one of them out."
        ),
    ),
    ConflictRule(
        ("a hook that leaves ranks different", 'UnevenInputs(policy="join")'),
        lambda s: s.differing and s.policy == "join",
        'With `UnevenInputs(policy="join")` a rank that has run out of data takes the mean gradient of the others, '
        'which communication hook {s.differing} does not give it: use another hook, or `policy="stop"`.',
    ),
    ConflictRule(
        ("a sharded optimizer", "a hook that leaves ranks different"),
        lambda s: s.optimizer_in_hook and s.optimizer_in_hook.shard and sharding_problem(s.hook),
        lambda s: str(sharding_problem(s.hook)),
    ),
    ConflictRule(
        ("steps while gradients come", 'skip_missing_loss="all"'),
        lambda s: s.steps_early and s.skip_missing_loss == "all",
        '`skip_missing_loss="all"` decides after the backward whether there is a step, but `optimizer_in_hook` makes '
        f"it while gradients come: {TWO_PHASES}",
    ),
    ConflictRule(
        ("steps while gradients come", "detect_nonfinite"),
        lambda s: s.steps_early and s.detect_nonfinite,
        "`detect_nonfinite` looks at the gradients of a whole backward, but `optimizer_in_hook` steps while they come: "
        "use `OptimizerInHook(shard=True, overlap=False)`, or set one of them.",
    ),
    ConflictRule(
        ("steps while gradients come", "manual optimization"),
        lambda s: s.steps_early and s.manual,
        "In manual optimization the steps are yours to make, but `optimizer_in_hook` makes them while gradients come: "
        f"{TWO_PHASES}",
    ),
    ConflictRule(
        ("steps while gradients come", "gradient_clip_val"),
        lambda s: s.steps_early and s.gradient_clip_val,
        "`gradient_clip_val={s.gradient_clip_val}` needs all gradients before the step, but `optimizer_in_hook` steps "
        f"while they come: {TWO_PHASES}",
    ),
    ConflictRule(
        ("steps while gradients come", "a GradScaler"),
        lambda s: s.steps_early and s.scaler,
        "A GradScaler (`precision='16-mixed'`) needs all gradients before it decides on the step, but "
        f"`optimizer_in_hook` steps while they come: {TWO_PHASES}",
    ),
    ConflictRule(
        ("steps while gradients come", "code between backward and step"),
        lambda s: s.steps_early and s.late,
        "{s.late}, which is called after the backward, but `optimizer_in_hook` steps while gradients come: "
        f"{TWO_PHASES}",
    ),
    ConflictRule(
        ("manual optimization", 'skip_missing_loss="all"'),
        lambda s: s.manual and s.skip_missing_loss == "all",
        '`skip_missing_loss="all"` skips the step of automatic optimization; in manual optimization the steps are '
        "yours: agree on skipping one by `self.all_gather` or `trainer.strategy.reduce_boolean_decision`.",
    ),
    ConflictRule(
        ("manual optimization", "gradient_clip_val"),
        lambda s: s.manual and s.gradient_clip_val,
        "Automatic gradient clipping is not supported for manual optimization.",
        by="Lightning's",
    ),
    ConflictRule(
        ("manual optimization", "accumulate_grad_batches"),
        lambda s: s.manual and s.accumulate_grad_batches != 1,
        "Automatic gradient accumulation is not supported for manual optimization.",
        by="Lightning's",
    ),
    ConflictRule(
        ("manual optimization", 'accumulation="exact"'),
        lambda s: s.manual and s.accumulation == "exact",
        '`accumulation="exact"` has no effect: in manual optimization the windows are yours.',
        verdict="no effect",
    ),
    ConflictRule(
        ("averager from step 0 on", "comm_hook"),
        _averager_replaces_hook,
        "The hook {s.hook.__class__.__name__} has no effect: {s.averager.__class__.__name__} begins at step 0 "
        "(`warmup_steps=0`), and from then on gradients are not exchanged.",
        verdict="no effect",
    ),
    ConflictRule(
        ("averager", "check_replicas_every_n_steps"),
        lambda s: s.averager and s.check_replicas_every_n_steps,
        "`check_replicas_every_n_steps` has no effect from step {s.averager.warmup_steps} on: with "
        "{s.averager.__class__.__name__} ranks are meant to differ.",
        verdict="no effect",
    ),
    ConflictRule(
        ("a hook that leaves ranks different", "check_replicas_every_n_steps"),
        # Whoever asks for the check under a function of their own knows what it gives the ranks.
        lambda s: s.check_replicas_every_n_steps and s.differing in ("Noop", "PostLocalSGD"),
        "`check_replicas_every_n_steps` has no effect once the hook {s.differing} leaves ranks with different "
        "gradients.",
        verdict="no effect",
    ),
    ConflictRule(
        ("a GradScaler", "detect_nonfinite"),
        lambda s: s.detect_nonfinite and s.scaler,
        "`detect_nonfinite` has no effect: the GradScaler itself deals with gradients that are not finite.",
        verdict="no effect",
    ),
    ConflictRule(
        ("no averager", "average_before_eval, save_replicas"),
        lambda s: s.averager is None and _averager_flags(s),
        lambda s: f"{' and '.join(_averager_flags(s))} of the strategy has no effect without `averager`.",
        verdict="no effect",
    ),
)
"""What does not go together, in the order in which it is looked at."""
