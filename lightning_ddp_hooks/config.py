"""What a user sets: each setting once, with its default, who takes it, and what is checked of its value.

The signatures of `DDPHooksStrategy`, `FabricDDPHooksStrategy` and `DataParallel` are written out, since command lines
and type checkers read them; a test compares them with the fields here. Which settings go together is in conflicts.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import partial
from typing import Any, Literal, cast, get_args

import torch

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.averaging.averager import ModelAverager
from lightning_ddp_hooks.averaging.names import resolve_averager
from lightning_ddp_hooks.hooks.contract import CommHook, declaration_text
from lightning_ddp_hooks.hooks.registry import HookLike, resolve_hook
from lightning_ddp_hooks.optim.in_hook import OptimizerInHook
from lightning_ddp_hooks.optim.sharding import diverging_part
from lightning_ddp_hooks.reducer.config import ReducerConfig

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]
Taker = Literal["DDPHooksStrategy", "FabricDDPHooksStrategy", "DistributedDataParallel"]

_CHOICES = {
    "gradient_weighting": ("ranks", "samples"),
    "accumulation": ("lightning", "exact"),
    "skip_missing_loss": ("zeros", "all"),
    "start_method": get_args(StartMethod),
    "resume": (None, "auto"),
}
_TRAINER_ONLY = (
    "average_before_eval",
    "gradient_weighting",
    "skip_missing_loss",
    "check_logged_values",
    "resume",
    "accumulation",
)
_WATCH = ("failure_timeout", "stall_timeout")


def replicas_differ_from(hook: CommHook | None) -> int | None:
    """Return the first step from which ranks may hold different models under a hook; None for never."""
    return None if hook is None else hook.replicas_differ_from()


@dataclass(frozen=True, kw_only=True)
class Settings(ReducerConfig):
    """All settings of a training run; what each means is documented where users set it, in `DDPHooksStrategy`.

    Values are checked by `check`, so that the rules of conflicts.py can be asked about any combination.
    """

    comm_hook: HookLike | None = None
    averager: ModelAverager | None = None
    save_replicas: bool | Literal["auto"] = "auto"
    optimizer_in_hook: OptimizerInHook | None = None
    process_group_backend: str | None = None
    timeout: timedelta | None = comm.DEFAULT_TIMEOUT
    failure_timeout: float | None = 30.0
    stall_timeout: float | None = None
    check_replicas_every_n_steps: int | None = None
    detect_nonfinite: bool = False
    start_method: StartMethod = "popen"
    average_before_eval: bool = True
    gradient_weighting: Literal["ranks", "samples"] = "ranks"
    accumulation: Literal["lightning", "exact"] = "lightning"
    skip_missing_loss: Literal["zeros", "all"] = "zeros"
    check_logged_values: bool = False
    resume: Literal["auto"] | None = None

    def __post_init__(self) -> None:
        """Find the hook that a short name or a pair stands for, and the averager."""
        object.__setattr__(self, "comm_hook", resolve_hook(self.comm_hook))
        object.__setattr__(self, "averager", resolve_averager(self.averager))

    @classmethod
    def from_arguments(cls, taker: Taker, arguments: Mapping[str, Any], **fixed: Any) -> Settings:
        """Return the settings among a constructor's arguments, and ``fixed`` ones that it does not take, checked."""
        settings = cls(**{name: arguments[name] for name in settings_of(taker)}, **fixed)
        settings.check()
        return settings

    @property
    def hook(self) -> CommHook | None:
        """The communication hook; None for the mean."""
        return cast("CommHook | None", self.comm_hook)

    def reducer_config(self) -> ReducerConfig:
        """Return the reducer's part, checked."""
        return ReducerConfig(**{entry.name: getattr(self, entry.name) for entry in fields(ReducerConfig)})

    def check(self) -> None:
        """Raise if a value is wrong by itself."""
        self.reducer_config()
        optimizer: object = self.optimizer_in_hook
        if optimizer is not None and not isinstance(optimizer, OptimizerInHook):
            raise TypeError(f"Expected an OptimizerInHook for `optimizer_in_hook`, got {type(optimizer).__name__}.")
        for name in ("average_before_eval", "detect_nonfinite", "check_logged_values"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"Expected True or False for `{name}`, got {value!r}.")
        if not isinstance(self.save_replicas, bool) and self.save_replicas != "auto":
            raise TypeError(f"Expected True, False or 'auto' for `save_replicas`, got {self.save_replicas!r}.")
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"Expected `{name}` to be one of {choices}, got {value!r}.")
        for name, check in _CHECKS.items():
            if (value := getattr(self, name)) is not None:
                check(value)
        if self.stall_timeout is not None and self.failure_timeout is None:
            raise ValueError("`stall_timeout` has no effect with `failure_timeout=None`: set both, or neither.")

    def to_agree_on(self) -> dict[str, object]:
        """Return what must be the same on all ranks beside the reducer's part, by name."""
        of_averager = ("save_replicas", "average_before_eval") if self.averager is not None else ()
        names = (
            *of_averager,
            "gradient_weighting",
            "skip_missing_loss",
            "failure_timeout",
            "detect_nonfinite",
            "resume",
            "stall_timeout",
            "accumulation",
        )
        return {
            "comm_hook": declaration_text(self.hook),
            "averager": declaration_text(self.averager),
            "optimizer_in_hook": repr(self.optimizer_in_hook),
            **{name: getattr(self, name) for name in (*names, "check_replicas_every_n_steps", "check_logged_values")},
        }

    def in_fit(self, **facts: Any) -> FitSettings:
        """Return these settings with what is known of a fit; see `FitSettings`."""
        return FitSettings(**{entry.name: getattr(self, entry.name) for entry in fields(Settings)}, **facts)


@dataclass(frozen=True, kw_only=True)
class FitSettings(Settings):
    """Settings with what Trainer, module and callbacks say; what is not known yet contradicts nothing."""

    policy: str | None = None  # of `UnevenInputs`, as the divisor; None without it
    divisor: str | None = None
    manual: bool = False  # optimization
    gradient_clip_val: float | None = None  # the Trainer's, as the next one
    accumulate_grad_batches: int = 1
    scaler: bool = False  # whether a GradScaler scales the loss
    weight_averaging: str | None = None  # Lightning's callback that averages weights over steps
    late: str | None = None  # what looks at gradients before the step, as in "MyModule overrides `optimizer_step`"

    @property
    def steps_early(self) -> bool:
        """Whether the optimizer is stepped while gradients still come."""
        return self.optimizer_in_hook is not None and self.optimizer_in_hook.overlap

    @property
    def exact_windows(self) -> bool:
        """Whether the gradient of an accumulation window is the mean over what it holds."""
        return self.accumulation == "exact" or "samples" in (self.gradient_weighting, self.divisor)

    @property
    def differing(self) -> str | None:
        """The name of a hook, or of a part of it, that leaves ranks with different gradients."""
        return diverging_part(self.hook)


def settings_of(taker: Taker) -> list[str]:
    """Return the names of the settings that a constructor takes."""
    if taker == "DistributedDataParallel":
        return ["comm_hook", *(entry.name for entry in fields(ReducerConfig)), *_WATCH]
    names = [entry.name for entry in fields(Settings)]
    return names if taker == "DDPHooksStrategy" else [name for name in names if name not in _TRAINER_ONLY]


def _check_timeout(value: object) -> None:
    if not isinstance(value, timedelta):
        raise TypeError(f"Expected a datetime.timedelta for `timeout`, got {value!r}.")
    if value < timedelta(0):
        raise ValueError(f"Expected a `timeout` that is not negative, got {value!r}.")


def _check_backend_name(value: object) -> None:
    """Take the name of a backend, or one for each kind of device (``"cpu:gloo,cuda:nccl"``)."""
    if not isinstance(value, str):
        raise TypeError(f"Expected a name such as 'gloo' for `process_group_backend`, got {value!r}.")
    known, parts = comm.backend_names(), [part.rpartition(":") for part in value.split(",")]
    if any(name.lower() not in known for *_, name in parts):
        raise ValueError(
            f"Expected a backend of torch.distributed for `process_group_backend`, got {value!r}; known are "
            f"{', '.join(known)}. One of your own has to be registered first."
        )
    devices = [device for device, colon, _ in parts if colon]
    if len(devices) < len(parts) > 1 or len(set(devices)) < len(devices) or not all(map(_is_device, devices)):
        raise ValueError(
            "Expected `process_group_backend` to name a backend, or one for each kind of device, as in "
            f"'cpu:gloo,cuda:nccl', got {value!r}."
        )


def _is_device(name: str) -> bool:
    try:
        return torch.device(name).index is None
    except RuntimeError:
        return False


def _check_seconds(name: str, none: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"Expected a number of seconds or None for `{name}`, got {value!r}.")
    if not 0 < value <= threading.TIMEOUT_MAX:  # longer than which threads cannot wait
        raise ValueError(f"Expected a positive number of seconds for `{name}`, or None for {none}, got {value!r}.")


def check_interval(value: object) -> None:
    """Raise unless a value can be a `check_replicas_every_n_steps`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"Expected a number of steps or None for `check_replicas_every_n_steps`, got {value!r}.")
    if value < 0:
        raise ValueError(
            f"Expected 0 (never), a number of steps, or None for `check_replicas_every_n_steps`, got {value}."
        )


_CHECKS: dict[str, Callable[[object], None]] = {
    "timeout": _check_timeout,
    "failure_timeout": partial(_check_seconds, "failure_timeout", "no reports"),
    "stall_timeout": partial(_check_seconds, "stall_timeout", "the default"),
    "check_replicas_every_n_steps": check_interval,
    "process_group_backend": _check_backend_name,
}
