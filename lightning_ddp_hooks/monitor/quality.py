r"""What a hook does to gradients, and how noisy they are, from squared norms in sampled steps. Pure.

    this rank's gradient g + what it has not sent before = what there is to send --hook--> what comes out
                                                                  |                   compared with the mean of all g
                                                                  \--> what it still has not sent, its error memory

[Note: gradient noise scale] The mean over n ranks has 1/n of the noise of one rank's gradient, so that the two squared
norms tell signal and noise apart (McCandlish et al., "An empirical model of large-batch training", 2018, appendix A.1,
https://arxiv.org/abs/1812.06162). With E|g|^2 = |G|^2 + S / b for one rank's batch of b samples and
E|mean|^2 = |G|^2 + S / (n b), both estimates are unbiased:

    |G|^2 = (n |mean|^2 - |g|^2) / (n - 1)        S / b = n (|g|^2 - |mean|^2) / (n - 1)

The noise scale S / |G|^2, in samples, is about the batch beyond which larger ones hardly help. Sums over steps are
divided, since a quotient of single steps is biased. It holds for batches of even size on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from math import isfinite, sqrt
from statistics import fmean
from typing import Literal

from lightning_ddp_hooks.monitor.timeline import StepTiming

Verdict = Literal["too little", "enough", "more than needed"]

_SAMPLES = 50  # of the last steps that were sampled, so many count
_AT_ONCE = 0.3  # unsent part of the norm, up to which more than 90% of the squared norm is sent at once
_LATE = 0.95  # and from which on less than 10% is: the rest is many steps late
_GROWS, _ENOUGH = 1.5, 3  # from one half of so many samples to the other an error memory should not grow by more
_NO_CHANGE = 1e-6  # relative error of what is only rounded by another order of sums
_AT_MOST = 0.1  # relative error that is no worry, however little noise there is


@dataclass(frozen=True, slots=True)
class Norms:
    """Squared norms of one parameter group in one step; of gradients as they count in the mean."""

    group: str
    local: float  # of the ranks' gradients, mean over ranks
    mean: float  # of their mean
    error: float  # of what came out minus that mean
    own: float = 0.0  # of this rank's gradient, where it has an error memory; as the next two
    due: float = 0.0  # of that and of what it had not sent before
    memory: float = 0.0  # of what it then still had not sent

    @property
    def relative_error(self) -> float:
        """Distance of what came out from the mean, relative to the mean."""
        return _ratio(self.error, self.mean)

    @property
    def has_memory(self) -> bool:
        """Whether what was not sent is kept."""
        return self.due > 0

    @property
    def unsent(self) -> float:
        """What was not sent, relative to what there was to send."""
        return _ratio(self.memory, self.due)

    @property
    def carried(self) -> float:
        """Size of the error memory relative to the gradient, both of this rank."""
        return _ratio(self.memory, self.own)

    def noise_batches(self, world_size: int) -> float | None:
        """Return the gradient noise scale in batches of a rank; None if there is nothing to tell it by."""
        if world_size < 2 or not self.mean:
            return None
        signal, noise = world_size * self.mean - self.local, world_size * (self.local - self.mean)
        return max(0.0, noise) / signal if signal > 0 else float("inf")

    def noise_share(self, world_size: int) -> float:
        """Return the norm of the noise in the mean gradient, relative to that; 0 if it is not known."""
        batches = self.noise_batches(world_size) or 0.0
        return 1.0 if batches == float("inf") else sqrt(batches / (world_size + batches))

    def verdict(self, world_size: int) -> Verdict | None:
        """Say whether the hook sends enough; None if it changes nothing (yet).

        What an error memory holds is sent later, so that what counts is how much later. What a hook without one leaves
        out is lost; that matters once it is not small beside the noise in the mean.
        """
        if self.has_memory and self.memory:
            return "too little" if self.unsent > _LATE else "more than needed" if self.unsent < _AT_ONCE else "enough"
        error, noise = self.relative_error, self.noise_share(world_size)
        if error < _NO_CHANGE:
            return None
        return "too little" if error > max(noise, _AT_MOST) else "more than needed" if error < 0.1 * noise else "enough"


def _ratio(squared: float, of: float) -> float:
    return 0.0 if not squared else sqrt(squared / of) if of else float("inf")


def add_up(group: str, norms: Iterable[Norms]) -> Norms:
    """Return the squared norms of several groups, or of several steps, taken together."""
    rows = list(norms)
    names = [entry.name for entry in fields(Norms)][1:]
    return Norms(group, **{name: sum(getattr(row, name) for row in rows) for name in names})


@dataclass(frozen=True)
class Quality:
    """What sampled steps tell together."""

    steps: int
    groups: tuple[Norms, ...]
    total: Norms
    grows: bool  # the error memory still does
    world_size: int
    batch: float | None  # samples of a rank's batch, if known

    @classmethod
    def of(cls, steps: Iterable[StepTiming], world_size: int) -> Quality | None:
        """Take the last steps that were sampled; None if there are none."""
        rows = [(step, [row for bucket in step.buckets for row in bucket.norms]) for step in steps]
        sampled = [(step, its) for step, its in rows if its][-_SAMPLES:]
        if not sampled:
            return None
        by_group: dict[str, list[Norms]] = {}
        for row in (row for _, its in sampled for row in its):
            by_group.setdefault(row.group, []).append(row)
        by_step = [add_up("", its) for _, its in sampled]
        half, batches = len(by_step) // 2, [step.samples for step, _ in sampled if step.samples]
        before, after = (add_up("", part).carried for part in (by_step[:half], by_step[half:]))
        return cls(
            steps=len(sampled),
            groups=tuple(add_up(name, its) for name, its in by_group.items()),
            total=add_up("all", by_step),
            grows=half >= _ENOUGH and after > max(1.0, _GROWS * before),
            world_size=world_size,
            batch=fmean(batches) if batches else None,
        )

    @property
    def noise_scale(self) -> float | None:
        """Gradient noise scale in samples; None where it, or the size of a batch, is not known."""
        batches = self.total.noise_batches(self.world_size)
        return None if batches is None or self.batch is None else self.batch * batches

    def verdict(self) -> Verdict | None:
        """Say whether the hook sends enough, over all parameters."""
        return "too little" if self.grows else self.total.verdict(self.world_size)

    def metrics(self) -> dict[str, float]:
        """Return figures for a logger, by name."""
        found = {"noise_scale": self.noise_scale, "noise_batches": self.total.noise_batches(self.world_size)}
        if self.total.has_memory:
            found |= {"unsent": self.total.unsent, "error_memory": self.total.carried}
        return {f"comm/{name}": value for name, value in found.items() if value is not None and isfinite(value)}


def group_names(
    names: Sequence[str], optimizer_groups: Sequence[Iterable[str]] = (), at_most: int = 12
) -> dict[str, str]:
    """Name the group of each parameter: that of its optimizer, if there are several, or else the part of the model.

    Parts are modules as deep within each other as leaves at most so many of them.
    """
    if len(optimizer_groups) > 1:
        found = {name: f"group {n}" for n, group in enumerate(optimizer_groups) for name in group}
        return {name: found.get(name, "no optimizer") for name in names}
    modules = {name: name.split(".")[:-1] for name in names}
    by_depth = [
        {name: ".".join(path[:depth]) or name for name, path in modules.items()}
        for depth in range(1 + max(map(len, modules.values()), default=0))
    ]
    few = [found for found in by_depth[1:] if len(set(found.values())) <= at_most]
    return few[-1] if few else dict.fromkeys(names, "all")
