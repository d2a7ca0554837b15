"""What a communication hook is, and what it is bound to.

Three forms of one thing:
  * a function ``hook(state, bucket) -> Future[Tensor] | Tensor``: torch's contract (`TorchHook` runs it);
  * a `CommHook`: what a user declares; picklable, and it holds no process group;
  * a `BoundHook`: a `CommHook` at setup, with its state; a generator of requests (reducer/requests.py), which a queue
    carries out in an order that is the same on all ranks (reducer/queue.py).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.reducer.bucket import GradBucket
from lightning_ddp_hooks.reducer.in_flight_bucket import check_result as check_result
from lightning_ddp_hooks.reducer.in_flight_bucket import phases_of as phases_of
from lightning_ddp_hooks.reducer.requests import Phases as Phases
from lightning_ddp_hooks.reducer.requests import Subgroup as Subgroup

HookFunction = Callable[[Any, Any], Any]


@dataclass(frozen=True, kw_only=True)
class BindContext:
    """What a hook learns at setup.

    Attributes:
        control_group: CPU (gloo) group over the ranks, for setup and checkpoints only.
        names: Names of the parameters, in the reducer's order.
        params: The parameters themselves.
        step: Returns the current training step (the clock of the strategy).
        subgroup: Makes groups of parts of the ranks and returns this rank's part, to limit requests to; collective.
        comm_dtype: Dtype in which a hook that can choose is to send floating point, set by `Cast`; None for that of the
            gradients. See `BoundHook.casts_itself`.
    """

    control_group: comm.ProcessGroup
    names: Sequence[str]
    params: Sequence[Tensor]
    step: Callable[[], int]
    subgroup: Callable[[Sequence[Sequence[int]]], Subgroup]
    comm_dtype: torch.dtype | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return comm.world_size(self.control_group)

    @property
    def rank(self) -> int:
        """Position of this process among the ranks."""
        return comm.rank(self.control_group)


class BoundHook(ABC):
    """A hook at work, with its state.

    Example:
        The mean of positive and of negative parts, in two collectives. Each `yield` hands over a request and returns
        its result; meanwhile the backward and other buckets go on.

        >>> class BoundHalves(BoundHook):
        ...     name = "Halves"
        ...
        ...     def reduce(self, bucket):
        ...         buffer = bucket.buffer()
        ...         positive = yield requests.AllReduce(buffer.clamp(min=0))
        ...         negative = yield requests.AllReduce(buffer.clamp(max=0))
        ...         return (positive + negative) / bucket.divisor

    Attributes:
        name: Name in messages and checkpoints.
        one_at_a_time: Whether a bucket may start only when the one before it is done.
        casts_itself: Whether it sends in ``BindContext.comm_dtype``, so that `Cast` need not cast the bucket for it.
        takes_divided: Whether gradients may come divided already (the bucket's divisor is 1 then), which costs
            nothing in the copy into the bucket.
        keeps_state: Whether results depend on earlier gradients (error feedback, factors of the last step). After a
            backward that was broken off by an error, a run goes on only with a hook that does not.
    """

    name: str = "hook"
    one_at_a_time: bool = False
    casts_itself: bool = False
    takes_divided: bool = False
    keeps_state: bool = False

    @abstractmethod
    def reduce(self, bucket: GradBucket) -> Phases:
        """Reduce one bucket; may overwrite its buffer.

        The gradients in the bucket are sums to be divided by ``bucket.divisor``. Called in bucket order. A generator:
        yields the same kinds of requests on all ranks, and returns the reduced tensor, or None if it is in the bucket.
        """

    def group_of(self, name: str, param: Tensor) -> Hashable:
        """Return a key for a parameter; parameters with different keys do not share a bucket."""
        return None

    def hook_of(self, name: str, param: Tensor) -> "BoundHook":
        """Return the hook that has a parameter now: this one, unless it is made of others."""
        return self

    def error_memory(self) -> Mapping[str, Tensor]:
        """Return what was not sent yet, flat, by the names of parameters, in the units of the bucket; not copied."""
        return {}

    def stats(self) -> dict[str, Any]:
        """Return facts for reports, such as a compression rate; may wait for the device."""
        return {}

    def rescale(self, factor: float) -> None:  # noqa: B027  (most hooks keep nothing)
        """Multiply what is kept of earlier gradients by a loss's new scale over the old one (of a GradScaler)."""

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to go on: tensors, str, int, float, bool, None, list and dict only. Collective."""
        return {}

    def own_state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state, in the form of `state_dict` but without a collective.

        Raises:
            TypeError: The hook has none.
        """
        if type(self).state_dict is BoundHook.state_dict:
            return {}
        raise TypeError(
            f"The state of {self.name} lies on all ranks, and cannot be pickled on one: use `state_dict()`."
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, maybe with another number of ranks."""
        if state:
            raise ValueError(
                f"Communication hook {self.name} has no state, but the checkpoint holds that of {state.get('hook')!r}: "
                "continue with the hook that the checkpoint was written with, or delete its state from the checkpoint."
            )


class CommHook(ABC):
    """A hook as the user declares it: picklable, keyword-only, without process group.

    Example:
        >>> @dataclass(frozen=True, kw_only=True)
        ... class Halves(CommHook):
        ...     def bind(self, context):
        ...         return BoundHalves()
        ...
        ...     def replicas_differ_from(self):
        ...         return None  # a sum over all ranks is the same on all of them
        >>> Trainer(strategy=DDPHooksStrategy(comm_hook=Halves()))

    Attributes:
        is_plain_mean: Whether it is the mean that the reducer itself computes, faster than through a hook.
        delayed_by: Name of its setting for the step up to which it is plain all-reduce, or None.
        sized_by: Name of its setting for how much it sends, or None.
    """

    is_plain_mean = False
    delayed_by: ClassVar[str | None] = None
    sized_by: ClassVar[str | None] = None

    @abstractmethod
    def bind(self, context: BindContext) -> BoundHook:
        """Make the hook that works, for these ranks and parameters; collective.

        Raises:
            ValueError: What the hook cannot take: a world size, a dtype, a group specification.
        """

    def replicas_differ_from(self) -> int | None:
        """Return the first step from which ranks may get different gradients, or hold different models; None for never.

        The default is 0, since nothing is known of a hook that does not say: a sharded optimizer refuses it, and
        replicas are not compared. A hook that gives all ranks the same result overrides this to return None.
        """
        return 0

    def inner_hooks(self) -> Sequence[Any]:
        """Return the hooks that it is composed of, as they were declared: short names too.

        By default those of a dataclass's fields that are hooks, or lists of hooks. A hook that takes others by their
        short names, or is no dataclass, returns them here.
        """
        declared: Any = self
        values = [getattr(self, entry.name, None) for entry in (fields(declared) if is_dataclass(declared) else ())]
        flat = [item for value in values for item in (value if isinstance(value, (list, tuple)) else [value])]
        return [value for value in flat if isinstance(value, CommHook)]


class ReplicatingHook(CommHook):
    """Base of hooks that give all ranks the same result."""

    def replicas_differ_from(self) -> int | None:
        """Return None: never."""
        return None


def declaration_text(hook: object) -> str:
    """Describe a declaration in a text that is the same on ranks that declared the same."""
    if isinstance(hook, (str, int, float, bool, type(None), torch.dtype)):
        return repr(hook)
    if isinstance(hook, (list, tuple)):
        return "[" + ", ".join(map(declaration_text, hook)) + "]"
    if isinstance(hook, Mapping):
        return "{" + ", ".join(f"{declaration_text(key)}: {declaration_text(its)}" for key, its in hook.items()) + "}"
    if is_dataclass(hook) and not isinstance(hook, type):
        names = (entry.name for entry in fields(hook) if hasattr(hook, entry.name))
        inside = ", ".join(f"{name}={declaration_text(getattr(hook, name))}" for name in names)
        return f"{type(hook).__qualname__}({inside})"
    return hook_name(hook)


def hook_name(hook: object) -> str:
    """Name a hook in a message, whether it is a function, a partial or an object."""
    inner = getattr(hook, "func", hook)  # functools.partial
    return str(getattr(inner, "__qualname__", None) or type(inner).__qualname__)


def require_types(
    declaration: object, *, whole: Sequence[str] = (), numbers: Sequence[str] = (), flags: Sequence[str] = ()
) -> None:
    """Check the types of a dataclass's settings by their names; None will do where it is the default."""
    for names, kinds, expected in (
        (whole, (int,), "a whole number"),
        (numbers, (int, float), "a number"),
        (flags, (bool,), "True or False"),
    ):
        for name in names:
            value = getattr(declaration, name)
            default = value is None and getattr(type(declaration), name, 0) is None
            if not default and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
                raise TypeError(f"Expected {expected} for `{name}`, got {value!r}.")
