"""What the ranks tell each other about a backward that did not go as expected, and what follows from it.

Pure: the reports are exchanged elsewhere. Every rank resolves the same reports, and so all come to the same resolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum
from typing import Literal

MAX_NAMES = 8
_FIND_UNUSED = '`find_unused_parameters=True` (in a Trainer: `strategy="ddp_hooks_find_unused_parameters_true"`)'


class UnusedPolicy(Enum):
    """What it means that a trainable parameter got no gradient."""

    FORBIDDEN = "forbidden"
    """An error (the default for automatic optimization)."""
    ALIKE = "alike"
    """Right if it is so on all ranks, else an error (manual optimization)."""
    ALLOWED = "allowed"
    """Always right (``find_unused_parameters=True``)."""


@dataclass(frozen=True)
class RankReport:
    """One rank's account of one synced backward.

    Attributes:
        missing: Parameters of the reducer that got no gradient since the last synced backward.
        trainable: Names of all parameters of the module that require a gradient.
        sparse: Parameters whose gradient is sparse.
        had_loss: Whether this rank had something to call backward on.
        shadowing: Whether it has run out of data, so that no gradient is missed from it; its loss is what it had
            accumulated before.
        order: Parameters in the order in which their gradients became ready; empty unless it is being recorded.
        fired: How often each parameter's gradient came; empty unless the order is being recorded.
        structure: Digest of names, dtypes and shapes; empty unless the order is being recorded.
        problem: What this rank found wrong by itself.
        aborted: The exception that ended this rank's backward, in words; None if none did.
        buffers_replaced: Whether a buffer is not what the ranks have agreed on.
    """

    missing: tuple[int, ...] = ()
    trainable: tuple[str, ...] = ()
    sparse: tuple[int, ...] = ()
    had_loss: bool = True
    shadowing: bool = False
    order: tuple[int, ...] = ()
    fired: tuple[int, ...] = ()
    structure: str = ""
    problem: str | None = None
    aborted: str | None = None
    buffers_replaced: bool = False

    @property
    def absent(self) -> bool:
        """Whether it rightly had nothing, since it has run out of data."""
        return self.shadowing and not self.had_loss


@dataclass(frozen=True)
class Resolution:
    """What all ranks do now.

    Attributes:
        unused: Parameters that no rank used; their gradients stay untouched.
        relayout: Whether the set of trainable parameters has changed, alike on all ranks.
        skip_step: Whether all ranks skip the step, since one had no loss.
        discard: Whether the gradients of this backward are dropped, since an exception ended it on all ranks.
    """

    unused: frozenset[int] = frozenset()
    relayout: bool = False
    skip_step: bool = False
    discard: bool = False


def resolve(
    reports: Sequence[RankReport],
    names: Sequence[str],
    policy: UnusedPolicy,
    *,
    skip_missing_loss: Literal["zeros", "all"] = "zeros",
    stateful_hook: str | None = None,
) -> Resolution:
    """Decide what follows from all ranks' reports.

    Args:
        reports: One for each rank, in rank order.
        names: Names of the reducer's parameters.
        policy: What a missing gradient means.
        skip_missing_loss: Whether a rank without a loss takes part with zeros, or makes all ranks skip the step.
        stateful_hook: Name of the communication hook, if it keeps a memory of gradients.
    """
    for rank, report in enumerate(reports):
        if report.problem is not None:
            raise RuntimeError(f"Rank {rank}: {report.problem}")
    if any(report.aborted is not None for report in reports):
        _check_aborted_alike(reports, stateful_hook)
        return Resolution(unused=frozenset(range(len(names))), discard=True)
    raise_if_sets_differ([report.trainable for report in reports])
    by_structure = {report.structure for report in reports if report.structure}
    if len(by_structure) > 1:
        raise RuntimeError(
            "The parameters' dtypes, devices or shapes differ between ranks since the start of training. Change them "
            "alike on all ranks."
        )

    working = [rank for rank, report in enumerate(reports) if report.had_loss]
    if not working:
        return Resolution(unused=frozenset(range(len(names))), skip_step=True)
    trainable = set(reports[0].trainable)
    missing = [set(reports[rank].missing) for rank in working]
    missing_on = {
        index: [rank for rank, lacks in zip(working, missing, strict=True) if index in lacks]
        for index in sorted(set().union(*missing))
    }
    unused = frozenset(index for index, ranks in missing_on.items() if len(ranks) == len(working))
    with_data = {rank for rank in working if not reports[rank].shadowing}
    missed_on = {index: [rank for rank in ranks if rank in with_data] for index, ranks in missing_on.items()}
    wrong = {
        index: ranks
        for index, ranks in missed_on.items()
        if ranks and names[index] in trainable and _is_error(len(ranks) == len(with_data), policy)
    }
    if wrong:
        raise RuntimeError(_missing_text(wrong, names, with_data, policy))
    known = set(names)
    return Resolution(
        unused=unused,
        # Where parameters may be left out, a frozen one is only that; a GAN freezes and unfreezes in every step.
        relayout=bool(trainable - known)
        or (policy is UnusedPolicy.FORBIDDEN and any(name not in trainable for name in names)),
        skip_step=skip_missing_loss == "all" and any(not (report.had_loss or report.absent) for report in reports),
    )


def _check_aborted_alike(reports: Sequence[RankReport], stateful_hook: str | None) -> None:
    aborted = [rank for rank, report in enumerate(reports) if report.aborted is not None]
    others = [rank for rank, report in enumerate(reports) if report.aborted is None and not report.absent]
    text = reports[aborted[0]].aborted
    if others:
        raise RuntimeError(
            f"The backward of {ranks_text(aborted)} was ended by an exception ({text}), that of {ranks_text(others)} "
            "was not: their gradients cannot be averaged. Let an exception in a backward end all ranks, or catch it on "
            "all of them."
        )
    if stateful_hook is not None:
        raise RuntimeError(
            f"A backward was ended by an exception ({text}) when gradients were on their way already, and what the "
            f"communication hook {stateful_hook} remembers of them cannot be taken back: resume from a checkpoint."
        )


def _is_error(unused_everywhere: bool, policy: UnusedPolicy) -> bool:
    if policy is UnusedPolicy.ALIKE:
        return not unused_everywhere
    return policy is UnusedPolicy.FORBIDDEN


def raise_if_sets_differ(of_ranks: Sequence[Sequence[str]]) -> None:
    """Compare the names of trainable parameters."""
    sets = [set(names) for names in of_ranks]
    common, union = set.intersection(*sets), set.union(*sets)
    if common == union:
        return
    name = next(name for names in of_ranks for name in names if name not in common)
    yes = [rank for rank, trainable in enumerate(sets) if name in trainable]
    no = [rank for rank, trainable in enumerate(sets) if name not in trainable]
    raise RuntimeError(
        f"Parameter {name!r} requires a gradient on {ranks_text(yes)} but not on {ranks_text(no)}. "
        "Freeze and unfreeze the same parameters on all ranks."
    )


def _missing_text(
    wrong: dict[int, list[int]], names: Sequence[str], ranks_with_data: AbstractSet[int], policy: UnusedPolicy
) -> str:
    lines = [f"  {names[index]!r} on {ranks_text(ranks)}" for index, ranks in list(wrong.items())[:MAX_NAMES]]
    if len(wrong) > MAX_NAMES:
        lines.append(f"  and {len(wrong) - MAX_NAMES} more")
    everywhere = all(len(ranks) == len(ranks_with_data) for ranks in wrong.values())
    text = "Parameters got no gradient in this backward:\n" + "\n".join(lines) + "\n"
    if policy is UnusedPolicy.ALIKE:
        return text + (
            "Other ranks did compute a gradient for them. In manual optimization each backward must use the same "
            f"parameters on all ranks; pass {_FIND_UNUSED} if they may differ."
        )
    if everywhere:
        return text + (
            f"They took no part in the loss. Freeze them with `requires_grad_(False)`, or pass {_FIND_UNUSED}. If it "
            "is always the same ones, `static_graph=True` is enough."
        )
    return text + f"Pass {_FIND_UNUSED} if ranks may use different parameters."


def steps_differ_text(ended: Sequence[bool]) -> str:
    """Say what is wrong when some ranks have ended their step and others are in a backward of it."""
    done = [rank for rank, flag in enumerate(ended) if flag]
    busy = [rank for rank, flag in enumerate(ended) if not flag]
    return (
        f"The ranks ran different numbers of backwards in one training step: {ranks_text(done)} ended the step while "
        f"{ranks_text(busy)} ran a further backward. In manual optimization every rank must run the same backwards; a "
        "rank that has nothing to learn from can run one on a loss multiplied by zero."
    )


def unfrozen_once_text(names: Sequence[str]) -> str:
    """Say what has happened when parameters were unfrozen and frozen again before all ranks knew, on a device."""
    shown = ", ".join(map(repr, names[:MAX_NAMES])) + (", ..." if len(names) > MAX_NAMES else "")
    return (
        f"Parameters required a gradient in one backward only, which did not train them: {shown}. On this device what "
        f"is unfrozen is trained from the next backward on; to swap parameters in each step, pass {_FIND_UNUSED}."
    )


def late_gradient_text(late: Sequence[tuple[str, int]]) -> str | None:
    """Say what is wrong when gradients changed after they had been copied; None if none did."""
    if not late:
        return None
    names = ", ".join(repr(name) for name, _ in late[:MAX_NAMES])
    if any(not expected for _, expected in late):
        return (
            f"Parameters got a gradient that the first backward did not use: {names}. `static_graph=True` promises "
            "that the graph never changes; use `find_unused_parameters=True` instead."
        )
    return (
        f"Parameters got a further gradient after their bucket had been sent: {names}. This happens with "
        "re-entrant activation checkpointing when a block is used a varying number of times: pass "
        "`use_reentrant=False` to torch.utils.checkpoint.checkpoint. It also happens on a device when a backward is "
        "run again after an exception has ended it: call `zero_grad()`, which sets gradients to None, before that."
    )


def ranks_text(ranks: Sequence[int]) -> str:
    """Name some ranks in a message."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
