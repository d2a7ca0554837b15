"""When gradients become ready: what was measured of a module's steps, and what that means for buckets. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from lightning_ddp_hooks.advisor.cost_model import ComputeStep


@dataclass(frozen=True, kw_only=True)
class BackwardProfile:
    """A typical training step of a module on one rank, without communication; times in seconds."""

    names: tuple[str, ...]  # of the trainable parameters
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]  # as "float32"
    nbytes: tuple[int, ...]
    ready: tuple[float, ...]  # each gradient is complete; from the start of the backward that reduces gradients
    before: float  # from the start of the step to that backward
    backward: float
    after: float  # from its end to that of the step
    steps: int  # number of measured steps

    @property
    def seconds(self) -> float:
        """Duration of the whole step."""
        return self.before + self.backward + self.after

    @property
    def gradient_bytes(self) -> int:
        """Size of all gradients."""
        return sum(self.nbytes)

    @property
    def order(self) -> list[int]:
        """Positions of the parameters, first ready first."""
        return sorted(range(len(self.names)), key=lambda index: (self.ready[index], -index))

    def compute_step(self, buckets: Sequence[Sequence[int]]) -> ComputeStep:
        """Return when buckets, given by the positions of their parameters, are ready; each after those before it."""
        ready = [0.0]
        for bucket in buckets:
            complete = min(max(self.ready[index] for index in bucket), self.backward)
            ready.append(max(complete, ready[-1]))
        return ComputeStep(self.before, tuple(ready[1:]), self.backward, self.after)


@dataclass(frozen=True)
class StepSample:
    """One measured step; times as in `BackwardProfile`, with None for a gradient that did not come."""

    ready: tuple[float | None, ...]
    before: float
    backward: float
    after: float


def profile_of(
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[str],
    nbytes: Sequence[int],
    samples: Sequence[StepSample],
) -> BackwardProfile:
    """Take the median of each time over the steps; a gradient that never came counts as coming last."""
    backward = median(sample.backward for sample in samples)
    ready = []
    for times in zip(*(sample.ready for sample in samples), strict=True):
        known = [time for time in times if time is not None]
        ready.append(min(median(known), backward) if known else backward)
    return BackwardProfile(
        names=tuple(names), shapes=tuple(shapes), dtypes=tuple(dtypes), nbytes=tuple(nbytes), ready=tuple(ready),
        before=median(sample.before for sample in samples), backward=backward,
        after=median(sample.after for sample in samples), steps=len(samples),
    )  # fmt: skip


def slowest(profiles: Sequence[BackwardProfile]) -> BackwardProfile:
    """Join the profiles of several ranks: a collective starts when the last rank is ready.

    Raises:
        ValueError: The ranks do not train the same parameters.
    """
    first = profiles[0]
    if any(profile.names != first.names for profile in profiles):
        raise ValueError("Expected the same trainable parameters on all ranks.")
    return replace(
        first,
        ready=tuple(max(times) for times in zip(*(profile.ready for profile in profiles), strict=True)),
        before=max(profile.before for profile in profiles),
        backward=max(profile.backward for profile in profiles),
        after=max(profile.after for profile in profiles),
        steps=min(profile.steps for profile in profiles),
    )
