"""A model averager as a user declares it, and what it learns at setup, where it is bound to ranks and a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.averaging.schedule import require_int

if TYPE_CHECKING:
    from lightning_ddp_hooks.averaging.bound import BoundAverager


@dataclass(frozen=True, kw_only=True)
class AveragingContext:
    """What an averager learns at setup.

    Attributes:
        group: Ranks to average over; the averager makes groups of its own from it.
        control_group: CPU (gloo) group over the same ranks, for setup, checkpoints and small exchanges.
        names: Names of the parameters, in an order that is the same on all ranks.
        params: The parameters themselves, also frozen ones.
        buffers: Returns the module's buffers as they are now (a module may replace one by a new tensor).
        optimizers: Returns the optimizers that train the parameters.
    """

    group: comm.ProcessGroup
    control_group: comm.ProcessGroup
    names: Sequence[str]
    params: Sequence[nn.Parameter]
    buffers: Callable[[], Sequence[Tensor]] = tuple
    optimizers: Callable[[], Sequence[Optimizer]] = tuple

    @property
    def world_size(self) -> int:
        """Number of ranks that average."""
        return comm.world_size(self.group)


@dataclass(frozen=True, kw_only=True)
class ModelAverager(ABC):
    """An averager as the user declares it.

    Under a Trainer hand it to ``DDPHooksStrategy(averager=...)`` or to ``ModelAveraging(averager)``. In plain PyTorch
    hand it to `PostLocalSGDOptimizer`, or call `average_parameters` after each optimizer step.

    Args:
        warmup_steps: Steps before the first averaging; meanwhile gradients are averaged over all ranks.
        average_buffers: Average floating-point buffers (such as BatchNorm's statistics) along with the parameters.
        optimizer_state: ``"none"`` leaves each rank its own inner optimizer state; ``"averaged"`` averages its
            floating-point tensors along with the parameters.

    Raises:
        TypeError: Value of the wrong type.
        ValueError: Value out of range.

    Example:
        >>> averager = PeriodicModelAverager(period=4, warmup_steps=100)
        >>> for step in range(200):
        ...     ...
        ...     optimizer.step()
        ...     averager.average_parameters(model.parameters())
    """

    warmup_steps: int = 0
    average_buffers: bool = True
    optimizer_state: Literal["none", "averaged"] = "none"

    def __post_init__(self) -> None:
        require_int("warmup_steps", self.warmup_steps, 0)
        if not isinstance(self.average_buffers, bool):
            raise TypeError(f"Expected True or False for `average_buffers`, got {self.average_buffers!r}.")
        if self.optimizer_state not in ("none", "averaged"):
            raise ValueError(f"Expected 'none' or 'averaged' for `optimizer_state`, got {self.optimizer_state!r}.")

    @abstractmethod
    def bind(self, context: AveragingContext) -> BoundAverager:
        """Make the averager that works, for these ranks and this model; collective.

        Raises:
            ValueError: Settings that do not fit the number of ranks, or a model with nothing to train.
        """

    # Plain PyTorch: the averager that the first call binds, and a state that waits for it.
    _bound: ClassVar[BoundAverager | None] = None
    _loaded: ClassVar[Mapping[str, Any]] = {}

    def average_parameters(self, params: Iterable[nn.Parameter] | Iterable[dict[str, Any]]) -> None:
        """Do what the schedule says for this step; call it on all ranks after each optimizer step.

        The first call binds the averager to the default process group and to these parameters. Buffers and optimizers
        are not known here; for them see `PostLocalSGDOptimizer`.

        Args:
            params: Parameters of the model, or parameter groups of an optimizer; the same in each call.

        Raises:
            ValueError: Other parameters than in the first call, or none to train.
        """
        given = list(_flat(params))
        bound = self._bound
        if bound is None:
            bound = self.bind(plain_context([str(index) for index in range(len(given))], given))
            if self._loaded:
                bound.load_state_dict(self._loaded)
            object.__setattr__(self, "_bound", bound)
        elif [id(param) for param in given] != [id(param) for param in bound.context.params]:
            raise ValueError(
                f"Expected the {len(bound.context.params)} parameters of the first call, in their order, got "
                f"{len(given)} of which some differ."
            )
        bound.average_parameters()

    @property
    def step(self) -> int:
        """Number of steps that `average_parameters` has seen."""
        return int(self._loaded.get("step", 0)) if self._bound is None else self._bound.step

    def state_dict(self) -> dict[str, Any]:
        """Return the state that `average_parameters` has built up; collective for some averagers."""
        return dict(self._loaded) if self._bound is None else self._bound.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, also before the first call of `average_parameters`."""
        if self._bound is None:
            object.__setattr__(self, "_loaded", dict(state))
        else:
            self._bound.load_state_dict(state)

    def __getstate__(self) -> dict[str, Any]:
        # A copy or a pickle is the declaration alone: it goes to other processes, where other groups exist.
        return {name: value for name, value in self.__dict__.items() if name not in ("_bound", "_loaded")}


def plain_context(
    names: Sequence[str],
    params: Sequence[nn.Parameter],
    buffers: Callable[[], Sequence[Tensor]] = tuple,
    optimizers: Callable[[], Sequence[Optimizer]] = tuple,
    process_group: comm.ProcessGroup | None = None,
) -> AveragingContext:
    """Return a context over a process group (None: the default one), outside a Trainer; collective."""
    group = comm.resolve_group(process_group)
    control_group = comm.new_group(group, cpu=True)
    return AveragingContext(
        group=group, control_group=control_group, names=names, params=params, buffers=buffers, optimizers=optimizers
    )


def _flat(params: Iterable[Any]) -> Iterable[nn.Parameter]:
    for item in params:
        if isinstance(item, nn.Parameter):
            yield item
        elif isinstance(item, Mapping) and "params" in item:
            yield from item["params"]
        else:
            raise TypeError(f"Expected parameters or parameter groups, got {type(item).__name__}.")
