"""What a user sets for a sharded model, and what of it cannot work."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_ddp_hooks.averaging.averager import ModelAverager
from lightning_ddp_hooks.config import check_interval
from lightning_ddp_hooks.hooks.allreduce import AllReduce
from lightning_ddp_hooks.hooks.cast import Cast
from lightning_ddp_hooks.hooks.compose import PerParameter, Schedule
from lightning_ddp_hooks.hooks.contract import CommHook, declaration_text, hook_name
from lightning_ddp_hooks.hooks.function_hook import TorchHook
from lightning_ddp_hooks.hooks.powersgd import PowerSGD
from lightning_ddp_hooks.hooks.registry import HookLike, parts_of, resolve_hook

# What these make of a parameter does not depend on the others in its bucket.
_BY_PARAMETER = (AllReduce, Cast, PowerSGD, PerParameter, Schedule)


@dataclass(frozen=True, kw_only=True)
class FSDPSettings:
    """Settings of `apply` and `FSDPHooksStrategy`; what each means is documented there.

    Raises:
        TypeError: A value of the wrong type.
        ValueError: A value out of range, or settings that do not go together.
    """

    comm_hook: HookLike | None = None
    averager: ModelAverager | None = None
    check_replicas_every_n_steps: int | None = None

    def __post_init__(self) -> None:
        hook, averager = self.hook, self.averager
        if averager is not None and not isinstance(averager, ModelAverager):
            raise TypeError(f"Expected a ModelAverager for `averager`, got {type(averager).__name__}.")
        if self.check_replicas_every_n_steps is not None:
            check_interval(self.check_replicas_every_n_steps)
        functions = [part for part in parts_of(hook) if isinstance(part, TorchHook)]
        if functions:
            raise ValueError(
                f"The function {hook_name(functions[0].hook)} issues collectives itself, over ranks that it chooses; "
                "on a sharded model a hook works between replicas only. Use a declaration, such as PowerSGD(...), or "
                "write a `CommHook`."
            )
        if hook is not None and hook.replicas_differ_from() is not None:
            raise ValueError(
                f"{hook_name(hook)} leaves replicas with different gradients, or does not say that it does not "
                "(`replicas_differ_from`), while each replica steps by its own: let replicas train for themselves by "
                "`averager=PeriodicModelAverager(...)` or another averager."
            )
        if hook is not None and averager is not None and not averager.warmup_steps:
            raise ValueError(
                f"The hook {hook_name(hook)} has no effect: {type(averager).__name__} begins at step 0 "
                "(`warmup_steps=0`), and from there on gradients are not exchanged between replicas. DiLoCo takes a "
                "`comm_hook` of its own for what it sends."
            )
        if averager is not None and self.check_replicas_every_n_steps:
            raise ValueError(
                "`check_replicas_every_n_steps` compares replicas that are meant to be the same, which they are not "
                f"under {type(averager).__name__}: leave one of them out."
            )

    @property
    def hook(self) -> CommHook | None:
        """The communication hook; None for the mean."""
        return resolve_hook(self.comm_hook)

    def check_model(self, *, has_replicas: bool, offloads: bool) -> None:
        """Raise if a setting does not fit a model, for the reason that `apply` gives."""
        averager = self.averager
        if averager is not None and not has_replicas:
            raise ValueError(
                f"{type(averager).__name__} averages over replicas, and the model has only one: shard it on a mesh of "
                "two dimensions (replicas x shards), or pass `replicas`."
            )
        if self.check_replicas_every_n_steps and not has_replicas:
            raise ValueError("`check_replicas_every_n_steps` has no effect: the model has only one replica.")
        if averager is not None and offloads:
            raise ValueError(
                f"{type(averager).__name__} averages shards on the device of the gradients; with CPUOffloadPolicy they "
                "lie on the CPU: leave one of them out."
            )

    def check_tensor_parallel(self, *, in_group: str | None, in_model: str | None) -> None:
        """Raise if a hook would give a parameter that tensor-parallel ranks share a different gradient on each.

        Args:
            in_group: Such a parameter in a group that has sharded ones too; None if there is none.
            in_model: The same of the whole model, which an averager's hook sees at once.
        """
        outer = resolve_hook(getattr(self.averager, "comm_hook", None))
        for hook, name in ((self.hook, in_group), (outer, in_model)):
            bad = [part for part in parts_of(hook) if type(part) not in _BY_PARAMETER]
            if bad and name is not None:
                raise ValueError(
                    f"{hook_name(bad[0])} cannot work on {name!r}, which tensor-parallel ranks share: what it makes "
                    "of it depends on others in the bucket, of which each rank has another shard, so that the ranks "
                    "would drift apart. Use Cast, PowerSGD, or PerParameter and Schedule of these."
                )

    def to_agree_on(self) -> dict[str, object]:
        """Return what must be the same on all ranks, by name."""
        return {
            "comm_hook": declaration_text(self.hook),
            "averager": declaration_text(self.averager),
            "check_replicas_every_n_steps": self.check_replicas_every_n_steps,
        }
