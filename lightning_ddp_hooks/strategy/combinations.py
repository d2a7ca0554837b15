"""Which settings go together: one table, which the strategy checks and from which the documentation is made.

    DDPHooksStrategy(...)      -- the settings -->                     Run --> refuse()     before anything runs
    set-up of a fit            -- and what the Trainer and the module  Run --> refuse()     on all ranks, before the
                                  say: clipping, manual, precision                          first collective
    start of a fit             -- the same -->                         Run --> idle()       said by rank zero

Two settings that no rule speaks of work together. Values that are wrong by themselves are refused where they are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from lightning_ddp_hooks.averaging.averager import ModelAverager
from lightning_ddp_hooks.averaging.gradients import contradiction, hook_follows_schedule
from lightning_ddp_hooks.hooks.contract import CommHook
from lightning_ddp_hooks.optim.in_hook import OptimizerInHook
from lightning_ddp_hooks.optim.sharding import diverging_part, sharding_problem
from lightning_ddp_hooks.reducer.config import USED_CHANGES_AND_DOES_NOT

_TWO_PHASES = "use `OptimizerInHook(shard=True, overlap=False)`, which steps when all gradients are there, or leave "
_TWO_PHASES += "`optimizer_in_hook` out."


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is set, as far as it is known; what is not known yet has the value that contradicts nothing.

    Attributes:
        hook: the communication hook; None for the mean.
        averager: as in `DDPHooksStrategy`.
        average_before_eval: likewise.
        save_replicas: likewise.
        optimizer_in_hook: likewise.
        gradient_weighting: likewise.
        skip_missing_loss: likewise.
        find_unused_parameters: likewise.
        static_graph: likewise.
        detect_nonfinite: likewise.
        check_replicas_every_n_steps: likewise.
        policy: of `UnevenInputs`; None without.
        divisor: of `UnevenInputs`; None without.
        manual: whether the module optimises manually.
        gradient_clip_val: of the Trainer.
        accumulate_grad_batches: of the Trainer.
        scaler: whether a GradScaler scales the loss.
        late: what wants to see or change gradients between the backward and the step, as in "MyModule overrides
            `optimizer_step`"; None if nothing does.
    """

    hook: CommHook | None = None
    averager: ModelAverager | None = None
    average_before_eval: bool = True
    save_replicas: bool = True
    optimizer_in_hook: OptimizerInHook | None = None
    gradient_weighting: str = "ranks"
    skip_missing_loss: str = "zeros"
    find_unused_parameters: bool = False
    static_graph: bool = False
    detect_nonfinite: bool = False
    check_replicas_every_n_steps: int | None = None
    policy: str | None = None
    divisor: str | None = None
    manual: bool = False
    gradient_clip_val: float | None = None
    accumulate_grad_batches: int = 1
    scaler: bool = False
    late: str | None = None

    @property
    def steps_early(self) -> bool:
        """Whether the optimizer is stepped while gradients still come."""
        return self.optimizer_in_hook is not None and self.optimizer_in_hook.overlap

    @property
    def diverging(self) -> str | None:
        """The name of a hook, or of a part of it, that leaves ranks with different gradients."""
        return diverging_part(self.hook)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Two settings that do not go together.

    Attributes:
        first: one setting, as the documentation calls it.
        second: the other.
        verdict: ``"refused"`` raises; ``"no effect"`` is said at the start of a fit.
        found: returns what is to be said of a run in which both are set, or None for any other run.
        by: who refuses it.
    """

    first: str
    second: str
    found: Callable[[Run], str | None]
    verdict: Literal["refused", "no effect"] = "refused"
    by: Literal["ours", "Lightning's"] = "ours"


def refuse(run: Run) -> None:
    """Make sure that settings go together.

    Raises:
        ValueError: two of them do not; says why, and what to do.
    """
    for rule in RULES:
        if rule.verdict == "refused" and rule.by == "ours" and (text := rule.found(run)) is not None:
            raise ValueError(text)


def idle(run: Run) -> Iterator[str]:
    """Say which settings have no effect beside others."""
    for rule in RULES:
        if rule.verdict == "no effect" and (text := rule.found(run)) is not None:
            yield text


# ---------------------------------------------------------------------- what contradicts what


def _unused_and_static(run: Run) -> str | None:
    return USED_CHANGES_AND_DOES_NOT if run.find_unused_parameters and run.static_graph else None


def _averager_and_hook(run: Run) -> str | None:
    return None if run.averager is None else contradiction(run.averager, run.hook)


def _averager_and_optimizer(run: Run) -> str | None:
    if run.averager is None or run.optimizer_in_hook is None:
        return None
    return (
        "`averager` lets each rank train for itself with an optimizer of its own, which `optimizer_in_hook` steps for "
        "all ranks: set one of them."
    )


def _averager_and_weighting(run: Run) -> str | None:
    if run.averager is None or run.gradient_weighting != "samples":
        return None
    return '`gradient_weighting="samples"` weighs gradients, which are not exchanged once `averager` has taken over.'


def _averager_and_divisor(run: Run) -> str | None:
    if run.averager is None or run.divisor != "samples":
        return None
    return '`UnevenInputs(divisor="samples")` weighs gradients, which are not exchanged once `averager` has taken over.'


def _averager_and_skipping(run: Run) -> str | None:
    if run.averager is None or run.skip_missing_loss != "all":
        return None
    return (
        '`skip_missing_loss="all"` has the ranks agree on each step, which they do not once `averager` has taken over: '
        'leave it at "zeros", with which a rank without loss has no gradient in that step.'
    )


def _weighting_and_divisor(run: Run) -> str | None:
    if run.gradient_weighting != "samples" or run.divisor in (None, "samples"):
        return None
    return (
        f'`gradient_weighting="samples"` contradicts `UnevenInputs(divisor="{run.divisor}")`: set `divisor="samples"`.'
    )


def _diverging_and_weights(run: Run) -> str | None:
    setting = '`gradient_weighting="samples"`' if run.gradient_weighting == "samples" else None
    setting = setting or ('`UnevenInputs(divisor="samples")`' if run.divisor == "samples" else None)
    if setting is None or run.diverging is None:
        return None
    return (
        f"{setting} weighs each rank's gradient by its share of the samples of all ranks, but communication hook "
        f"{run.diverging} does not add up those of all ranks: leave one of them out."
    )


def _diverging_and_join(run: Run) -> str | None:
    if run.policy != "join" or run.diverging is None:
        return None
    return (
        'With `UnevenInputs(policy="join")` a rank that has run out of data takes the mean gradient of the others, '
        f'which communication hook {run.diverging} does not give it: use another hook, or `policy="stop"`.'
    )


def _sharded_and_diverging(run: Run) -> str | None:
    sharded = run.optimizer_in_hook is not None and run.optimizer_in_hook.shard
    return sharding_problem(run.hook) if sharded else None


def _early_and_skipping(run: Run) -> str | None:
    if not run.steps_early or run.skip_missing_loss != "all":
        return None
    return (
        '`skip_missing_loss="all"` decides after the backward whether there is a step, but `optimizer_in_hook` makes '
        f"it while gradients come: {_TWO_PHASES}"
    )


def _early_and_nonfinite(run: Run) -> str | None:
    if not run.steps_early or not run.detect_nonfinite:
        return None
    return (
        "`detect_nonfinite` looks at the gradients of a whole backward, but `optimizer_in_hook` steps while they come: "
        "use `OptimizerInHook(shard=True, overlap=False)`, or set one of them."
    )


def _early_and_manual(run: Run) -> str | None:
    if not run.steps_early or not run.manual:
        return None
    return (
        "In manual optimisation the steps are yours to make, but `optimizer_in_hook` makes them while gradients come: "
        f"{_TWO_PHASES}"
    )


def _early_and_clipping(run: Run) -> str | None:
    if not run.steps_early or not run.gradient_clip_val:
        return None
    return (
        f"`gradient_clip_val={run.gradient_clip_val}` needs all gradients before the step, but `optimizer_in_hook` "
        f"steps while they come: {_TWO_PHASES}"
    )


def _early_and_scaler(run: Run) -> str | None:
    if not run.steps_early or not run.scaler:
        return None
    return (
        "A GradScaler (`precision='16-mixed'`) needs all gradients before it decides on the step, but "
        f"`optimizer_in_hook` steps while they come: {_TWO_PHASES}"
    )


def _early_and_late(run: Run) -> str | None:
    if not run.steps_early or run.late is None:
        return None
    return (
        f"{run.late}, which is called after the backward, but `optimizer_in_hook` steps while gradients come: "
        f"{_TWO_PHASES}"
    )


def _manual_and_skipping(run: Run) -> str | None:
    if not run.manual or run.skip_missing_loss != "all":
        return None
    return (
        '`skip_missing_loss="all"` skips the step of automatic optimisation; in manual optimisation the steps are '
        "yours: agree on skipping one by `self.all_gather` or `trainer.strategy.reduce_boolean_decision`."
    )


def _manual_and_clipping(run: Run) -> str | None:
    if not run.manual or not run.gradient_clip_val:
        return None
    return "Automatic gradient clipping is not supported for manual optimization."


def _manual_and_accumulation(run: Run) -> str | None:
    if not run.manual or run.accumulate_grad_batches == 1:
        return None
    return "Automatic gradient accumulation is not supported for manual optimization."


# ---------------------------------------------------------------------- what has no effect beside what


def _idle_hook(run: Run) -> str | None:
    if run.averager is None or run.hook is None or run.averager.warmup_steps or run.policy == "join":
        return None
    if hook_follows_schedule(run.averager, run.hook):
        return None
    return (
        f"The hook {type(run.hook).__name__} has no effect: {type(run.averager).__name__} begins at step 0 "
        "(`warmup_steps=0`), and from then on gradients are not exchanged."
    )


def _idle_check_beside_averager(run: Run) -> str | None:
    if run.averager is None or not run.check_replicas_every_n_steps:
        return None
    return (
        f"`check_replicas_every_n_steps` has no effect from step {run.averager.warmup_steps} on: with "
        f"{type(run.averager).__name__} ranks are meant to differ."
    )


def _idle_check_beside_hook(run: Run) -> str | None:
    # A function's user who asks for the check is taken at his word.
    if not run.check_replicas_every_n_steps or run.diverging not in ("Noop", "PostLocalSGD"):
        return None
    return (
        f"`check_replicas_every_n_steps` has no effect once the hook {run.diverging} leaves ranks with different "
        "gradients."
    )


def _idle_nonfinite(run: Run) -> str | None:
    if not run.detect_nonfinite or not run.scaler:
        return None
    return "`detect_nonfinite` has no effect: the GradScaler itself deals with gradients that are not finite."


def _idle_averager_settings(run: Run) -> str | None:
    settings = {"average_before_eval": run.average_before_eval, "save_replicas": run.save_replicas}
    named = [f"`{name}=False`" for name, value in settings.items() if not value]
    if run.averager is not None or not named:
        return None
    return f"{' and '.join(named)} of the strategy has no effect without `averager`."


RULES: tuple[Rule, ...] = (
    Rule(first="find_unused_parameters", second="static_graph", found=_unused_and_static),
    Rule(first="averager", second='gradient_weighting="samples"', found=_averager_and_weighting),
    Rule(first="averager", second="optimizer_in_hook", found=_averager_and_optimizer),
    Rule(first="averager", second="a hook of another schedule", found=_averager_and_hook),
    Rule(first="averager", second='skip_missing_loss="all"', found=_averager_and_skipping),
    Rule(first="averager", second='UnevenInputs(divisor="samples")', found=_averager_and_divisor),
    Rule(first='gradient_weighting="samples"', second="another divisor of UnevenInputs", found=_weighting_and_divisor),
    Rule(first="a hook that leaves ranks different", second="weights by samples", found=_diverging_and_weights),
    Rule(first="a hook that leaves ranks different", second='UnevenInputs(policy="join")', found=_diverging_and_join),
    Rule(first="a sharded optimizer", second="a hook that leaves ranks different", found=_sharded_and_diverging),
    Rule(first="steps while gradients come", second='skip_missing_loss="all"', found=_early_and_skipping),
    Rule(first="steps while gradients come", second="detect_nonfinite", found=_early_and_nonfinite),
    Rule(first="steps while gradients come", second="manual optimisation", found=_early_and_manual),
    Rule(first="steps while gradients come", second="gradient_clip_val", found=_early_and_clipping),
    Rule(first="steps while gradients come", second="a GradScaler", found=_early_and_scaler),
    Rule(first="steps while gradients come", second="code between backward and step", found=_early_and_late),
    Rule(first="manual optimisation", second='skip_missing_loss="all"', found=_manual_and_skipping),
    Rule(first="manual optimisation", second="gradient_clip_val", found=_manual_and_clipping, by="Lightning's"),
    Rule(
        first="manual optimisation", second="accumulate_grad_batches", found=_manual_and_accumulation, by="Lightning's"
    ),
    Rule(first="averager from step 0 on", second="comm_hook", found=_idle_hook, verdict="no effect"),
    Rule(
        first="averager",
        second="check_replicas_every_n_steps",
        found=_idle_check_beside_averager,
        verdict="no effect",
    ),
    Rule(
        first="a hook that leaves ranks different",
        second="check_replicas_every_n_steps",
        found=_idle_check_beside_hook,
        verdict="no effect",
    ),
    Rule(first="a GradScaler", second="detect_nonfinite", found=_idle_nonfinite, verdict="no effect"),
    Rule(
        first="no averager",
        second="average_before_eval, save_replicas",
        found=_idle_averager_settings,
        verdict="no effect",
    ),
)
"""What does not go together, in the order in which it is looked at."""
