"""A model averager as a user declares it, and as it works once it is bound to ranks and a model at setup.

[Note: which parameters] Ranks must flatten the same tensors. Which gradients exist may differ from rank to rank, which
parameters are trainable does not; and a parameter that was trainable once may have drifted. So the tensors are all
parameters that have ever been trainable, in the order of the module.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.averaging.flat import FlatMean
from lightning_ddp_hooks.averaging.replicas import average_optimizer_state
from lightning_ddp_hooks.averaging.schedule import require_int
from lightning_ddp_hooks.hooks.state import whole_number


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

    # Plain PyTorch: the averager that the first call binds, and a state that waits for it. Without an annotation, since
    # command lines resolve those of a class.
    _bound = cast("BoundAverager | None", None)
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
            bound = self.start(plain_context([str(index) for index in range(len(given))], given))
        elif [id(param) for param in given] != [id(param) for param in bound.context.params]:
            raise ValueError(
                f"Expected the {len(bound.context.params)} parameters of the first call, in their order, got "
                f"{len(given)} of which some differ."
            )
        bound.average_parameters()

    def start(self, context: AveragingContext) -> BoundAverager:
        """Bind the averager in plain PyTorch, where `step` and `state_dict` then speak of it; collective."""
        bound = self.bind(context)
        if self._loaded:
            bound.load_state_dict(self._loaded)
        object.__setattr__(self, "_bound", bound)
        return bound

    @property
    def step(self) -> int:
        """Number of steps that it has seen, in `average_parameters` or of a `PostLocalSGDOptimizer`."""
        return int(self._loaded.get("step", 0)) if self._bound is None else self._bound.step

    def state_dict(self) -> dict[str, Any]:
        """Return the state that it has built up in plain PyTorch; collective for some averagers."""
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


class BoundAverager(ABC):
    """An averager at work.

    Attributes:
        settings: What the user declared.
        context: What is known at setup.
        group: Group of the averager's own over all ranks; nothing else uses it.
        step: Number of the next step, from 0.
        replicas_equal: Whether all ranks are known to hold the same parameters.

    Raises:
        ValueError: No parameter of the model is trainable.
    """

    def __init__(self, settings: ModelAverager, context: AveragingContext) -> None:
        self._ever_trainable = [param.requires_grad for param in context.params]
        if not any(self._ever_trainable):
            raise ValueError(
                f"{type(settings).__name__} has nothing to average: none of the model's {len(context.params)} "
                "parameters is trainable. Leave out the averager, or unfreeze before the start what is to be trained."
            )
        self.settings = settings
        self.context = context
        self._own_groups: list[comm.ProcessGroup] = []
        self.group = self.new_group(context.group)
        self.step = 0
        self.replicas_equal = True
        self._means: FlatMean | None = None

    @abstractmethod
    def _average(self, step: int) -> bool:
        """Average if ``step`` is due; may overwrite parameters, buffers and optimizer state. Collective.

        Returns:
            Whether all ranks hold the same parameters now; False also if nothing was averaged.
        """

    def average_parameters(self) -> None:
        """Do what the schedule says for this step, and count it; on all ranks, after the step's optimizers."""
        pairs = zip(self._ever_trainable, self.context.params, strict=True)
        self._ever_trainable = [before or param.requires_grad for before, param in pairs]
        equal_before = self.replicas_equal and self.syncs_gradients(self.step)
        self.replicas_equal = self._average(self.step) or equal_before
        self.step += 1

    def syncs_gradients(self, step: int) -> bool:
        """Tell whether the gradients of ``step`` are to be averaged over all ranks."""
        return step < self.settings.warmup_steps

    def trainable_indices(self) -> list[int]:
        """Return the positions of the parameters to average; see [Note: which parameters]."""
        return [index for index, trainable in enumerate(self._ever_trainable) if trainable]

    def float_buffers(self) -> list[Tensor]:
        """Return the buffers to average, which are in floating point; none unless `average_buffers` is set."""
        buffers = self.context.buffers() if self.settings.average_buffers else ()
        return [buffer for buffer in buffers if buffer.is_floating_point() or buffer.is_complex()]

    def model_tensors(self) -> list[Tensor]:
        """Return the tensors that make up the averaged model: parameters, then buffers if they are averaged."""
        return [*(self.context.params[index] for index in self.trainable_indices()), *self.float_buffers()]

    def average_into(self, targets: Sequence[Tensor]) -> None:
        """Write the averaged model into ``targets``, shaped like `model_tensors`; collective, changes no state.

        Without outer parameters this is the mean over all ranks.
        """
        self._mean(self.model_tensors(), self.group, targets)

    def finish(self) -> None:
        """Give all ranks the averaged model for good; collective."""
        if not self.replicas_equal:
            self.average_into(self.model_tensors())
            self.replicas_equal = True

    def _mean(self, tensors: Sequence[Tensor], group: comm.ProcessGroup, into: Sequence[Tensor] | None = None) -> None:
        """Average over ``group``, in place or into other tensors; keep the flat buffers for the next time."""
        if self._means is None or not self._means.is_of(tensors):
            self._means = None  # frees the old buffers first
            self._means = FlatMean(tensors)
        self._means.run(group, into)

    def _average_model(self, group: comm.ProcessGroup) -> None:
        self._mean(self.model_tensors(), group)
        self._average_optimizers(group)

    def _average_optimizers(self, group: comm.ProcessGroup) -> None:
        if self.settings.optimizer_state == "averaged":
            for optimizer in self.context.optimizers():
                average_optimizer_state(optimizer, group, self.context.control_group)

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to go on, the same on all ranks; collective for some averagers.

        It consists of tensors, str, int, float, bool, None, list and dict, and does not depend on the number of ranks.
        """
        return {"kind": type(self.settings).__name__, "step": self.step, **self._extra_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` returned; the parameters themselves are restored elsewhere.

        Raises:
            ValueError: State of another kind of averager.
        """
        kind = type(self.settings).__name__
        if state["kind"] != kind:
            raise ValueError(
                f"Expected the state of a {kind}, found that of a {state['kind']}: continue with the averager that the "
                "checkpoint was written with, or start from the model's weights alone."
            )
        self.step = whole_number(state["step"])
        self._load_extra_state(state)

    def _extra_state(self) -> dict[str, Any]:
        return {}

    def _load_extra_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027  (most averagers have none)
        pass

    def new_group(self, parent: comm.ProcessGroup) -> comm.ProcessGroup:
        """Make a further group over the ranks of ``parent``, which is freed with the averager; collective."""
        self._own_groups.append(comm.new_group(parent))
        return self._own_groups[-1]

    def split_group(self, parent: comm.ProcessGroup, parts: Sequence[Sequence[int]]) -> comm.ProcessGroup:
        """Split a group and return this rank's part, which is freed with the averager; collective."""
        self._own_groups.append(comm.split_group(parent, parts))
        return self._own_groups[-1]

    @property
    def in_flight(self) -> bool:
        """Whether a collective is under way between steps."""
        return False

    def close(self, *, failed: bool = False) -> None:
        """Free the groups; after an error those that can be."""
        if failed:
            comm.free_after_error(self._own_groups, self.in_flight)
        else:
            for group in self._own_groups:
                comm.destroy_group(group)
        self._own_groups.clear()


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
