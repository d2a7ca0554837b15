"""A model averager at work, with its groups, its step and its state.

[Note: which parameters] Ranks must flatten the same tensors. Which gradients exist may differ from rank to rank, which
parameters are trainable does not; and a parameter that was trainable once may have drifted. So the tensors are all
parameters that have ever been trainable, in the order of the module.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.averaging.averager import AveragingContext, ModelAverager
from lightning_ddp_hooks.averaging.flat import FlatMean
from lightning_ddp_hooks.averaging.optimizer_state import average_optimizer_state
from lightning_ddp_hooks.hooks.state import whole_number


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
