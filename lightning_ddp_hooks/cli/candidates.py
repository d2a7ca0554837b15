"""The hooks and averagers that are compared: how to make each, what it changes, and how to write it in YAML."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_ddp_hooks.advisor.advice import Change
from lightning_ddp_hooks.averaging import DiLoCo, PeriodicModelAverager
from lightning_ddp_hooks.averaging.averager import ModelAverager
from lightning_ddp_hooks.hooks import BlockQuantize, Cast, OneBit, PowerSGD, TopK
from lightning_ddp_hooks.hooks.contract import CommHook

_HOOKS = "lightning_ddp_hooks.hooks"
_AVERAGING = "lightning_ddp_hooks.averaging"


@dataclass(frozen=True)
class Candidate:
    """One way to communicate."""

    change: Change  # of the maths
    effect: str  # of the change, in words
    hook: Callable[[], CommHook] | None = None  # makes the hook as it is after its warm-up
    averager: Callable[[], ModelAverager] | None = None  # likewise
    setting: str = ""  # argument of the strategy as YAML; how long a warm-up should be is the user's choice

    @property
    def period(self) -> int:
        """Number of steps after which the pattern of communication repeats."""
        return int(getattr(self.averager(), "period", 1)) if self.averager is not None else 1

    def yaml(self, bucket_cap_mb: float | None) -> str:
        """Return what goes into a Lightning CLI configuration."""
        lines = [self.setting] if self.setting else []
        if bucket_cap_mb is not None:
            lines.append(f"bucket_cap_mb: {bucket_cap_mb:g}")
        inside = "\n".join(lines).replace("\n", "\n      ")
        text = "trainer:\n  strategy:\n    class_path: lightning_ddp_hooks.DDPHooksStrategy"
        return f"{text}\n    init_args:\n      {inside}" if inside else text


def _declared(argument: str, class_path: str, **settings: object) -> str:
    lines = [f"{argument}:", f"  class_path: {class_path}"]
    if settings:
        lines += ["  init_args:", *(f"    {name}: {value}" for name, value in settings.items())]
    return "\n".join(lines)


# fmt: off
CANDIDATES: dict[str, Candidate] = {
    "allreduce": Candidate("none", "nothing: the mean in full precision"),
    "fp16": Candidate("rounding", "16 bits on the wire; may overflow above 65504",
                      lambda: Cast(dtype="float16"), setting="comm_hook: fp16"),
    "bf16": Candidate("rounding", "16 bits on the wire, 8 of them precision",
                      lambda: Cast(dtype="bfloat16"), setting="comm_hook: bf16"),
    "int8": Candidate("rounding", "8 bits on the wire, errors are sent later",
                      BlockQuantize, setting="comm_hook: int8"),
    "powersgd-4": Candidate("approximation", "rank 4 of each matrix, the rest is sent later; warm-up needed",
                            lambda: PowerSGD(rank=4, start_iter=0),
                            setting=_declared("comm_hook", f"{_HOOKS}.PowerSGD", rank=4, start_iter=500)),
    "powersgd-1": Candidate("approximation", "rank 1 of each matrix, the rest is sent later; warm-up needed",
                            lambda: PowerSGD(rank=1, start_iter=0),
                            setting=_declared("comm_hook", f"{_HOOKS}.PowerSGD", rank=1, start_iter=500)),
    "onebit": Candidate("approximation", "signs, the rest is sent later; long warm-up needed",
                        lambda: OneBit(start_iter=0),
                        setting=_declared("comm_hook", f"{_HOOKS}.OneBit", start_iter=500)),
    "topk": Candidate("approximation", "the largest 1%, the rest is sent later; warm-up needed",
                      lambda: TopK(ratio=0.01), setting="comm_hook: topk"),
    "periodic-8": Candidate("local", "ranks train alone, models are averaged every 8 steps",
                            averager=lambda: PeriodicModelAverager(period=8),
                            setting=_declared("averager", f"{_AVERAGING}.PeriodicModelAverager",
                                              period=8, warmup_steps=500)),
    "diloco-16": Candidate("local", "ranks train alone, an outer optimizer every 16 steps",
                           averager=lambda: DiLoCo(period=16),
                           setting=_declared("averager", f"{_AVERAGING}.DiLoCo", period=16, warmup_steps=500)),
}
# fmt: on
DEFAULT = ("allreduce", "bf16", "int8", "powersgd-4", "powersgd-1", "onebit", "periodic-8", "diloco-16")
