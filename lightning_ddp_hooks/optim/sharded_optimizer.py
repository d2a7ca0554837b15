"""An optimizer whose state is shared among the ranks: ZeRO stage 1 for plain PyTorch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.join.context import Join, Joinable, JoinHook
from lightning_ddp_hooks.optim.partial_step import evaluate
from lightning_ddp_hooks.optim.sharded_step import ShardedStep, StateDict
from lightning_ddp_hooks.optim.sharding import ShardAssignment
from lightning_ddp_hooks.reducer.module_sync import check_same_on_all_ranks


class JoinableOptimizer(Optimizer, Joinable):
    """Base of optimizers whose steps are collective, so that ranks that have run out of data go on with them."""

    process_group: comm.ProcessGroup

    @abstractmethod
    def step_without_data(self) -> None:
        """Do this rank's part of a step of the others."""

    def end_join(self, is_last_joiner: bool) -> None:
        """End a context in which ranks ran out of data at different times; on all ranks."""

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return what this rank does once it has run out of data; for `Join`."""
        return _StepOn(self)

    @property
    def join_device(self) -> torch.device:
        """Device of the first parameter."""
        first: Tensor = self.param_groups[0]["params"][0]
        return first.device

    @property
    def join_process_group(self) -> comm.ProcessGroup:
        """Ranks whose steps are collective."""
        return self.process_group


class _StepOn(JoinHook):
    def __init__(self, optimizer: JoinableOptimizer) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        self._optimizer.step_without_data()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._optimizer.end_join(is_last_joiner)


class ShardedOptimizer(JoinableOptimizer):
    """Wraps any optimizer so that each rank holds about 1/N of its state.

    `step` has each rank step its own parameters, and then all ranks exchange them. The gradients must be the same on
    all ranks when it is called, as `DataParallel` or torch's DDP make them; then the parameters are, to the last bit,
    what the unsharded optimizer makes of them. Construction is collective.

    Each parameter is stepped by one rank. They are shared out by what their updates cost: for Muon, that is not the
    number of elements.

    With ``overlap_with_ddp=True`` the steps are made within the backward by a hook, which cuts parameters where it can;
    see `hook_with_zero_step`. There `step` does what is left to do, which is mostly nothing, and may be called or not.

    Args:
        params: Parameters or parameter groups, the same on all ranks.
        optimizer_class: Class of the optimizer, such as ``torch.optim.AdamW``. Its update of a parameter may depend
            only on that parameter, its state and its group's values.
        process_group: Ranks that share the state; None for all.
        overlap_with_ddp: Whether a hook is to make the steps.
        **defaults: Settings of the optimizer.

    Attributes:
        optim: The optimizer inside; it shares groups and state with this object.

    Raises:
        RuntimeError: No process group is initialised, or the ranks' parameters differ.
        TypeError: ``optimizer_class`` is not a class of optimizers.
        ValueError: The optimizer cannot be sharded; names it.

    Example:
        >>> model = DataParallel(model)
        >>> optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
        >>> model(batch).mean().backward()
        >>> optimizer.step()

    Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020,
    https://arxiv.org/abs/1910.02054.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        process_group: comm.ProcessGroup | None = None,
        overlap_with_ddp: bool = False,
        **defaults: Any,
    ) -> None:
        given: Any = optimizer_class
        if not (isinstance(given, type) and issubclass(given, Optimizer)):
            raise TypeError(f"Expected a class of optimizers for `optimizer_class`, got {optimizer_class!r}.")
        if not isinstance(overlap_with_ddp, bool):
            raise TypeError(f"Expected True or False for `overlap_with_ddp`, got {overlap_with_ddp!r}.")
        self.process_group = comm.resolve_group(process_group)
        self.optim = optimizer_class(params, **defaults)
        self._made = False
        Optimizer.__init__(self, self.optim.param_groups, self.optim.defaults)
        self._made = True
        self._share()

        self.overlap_with_ddp = overlap_with_ddp
        self.has_hook = False
        self.driven = False  # by the hook, which has been called
        self._control_group = comm.new_group(self.process_group, cpu=True)
        named = [
            (f"group {g}, parameter {n}", param)
            for g, group in enumerate(self.param_groups)
            for n, param in enumerate(group["params"])
        ]
        settings = {"optimizer_class": optimizer_class.__qualname__, "overlap_with_ddp": overlap_with_ddp}
        check_same_on_all_ranks(named, settings, self._control_group)
        self._group = comm.new_group(self.process_group)
        shards = ShardAssignment(comm.world_size(self._group), comm.rank(self._group))
        self.sharded_step = ShardedStep(self.optim, shards, self._group)
        if not overlap_with_ddp:
            self.sharded_step.assign_all()
        self._consolidated: StateDict | None = None
        self._consolidated_at = -1

    def _share(self) -> None:
        """Have the groups and the state of the optimizer inside; it makes new ones when it loads a state."""
        self.param_groups = self.optim.param_groups
        self.state = self.optim.state

    def __repr__(self) -> str:
        return f"ShardedOptimizer({self.optim!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied: process groups cannot be."""
        raise TypeError("ShardedOptimizer cannot be copied or pickled: save what `state_dict` returns.")

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step this rank's parameters, and exchange all; collective.

        Args:
            closure: Function that evaluates the model and returns the loss; called once, before the step.
            **kwargs: Arguments of the ``step`` of the optimizer inside.

        Returns:
            What the closure returned.
        """
        loss = evaluate(closure)
        Join.notify(self)
        self._finish(kwargs)
        return loss

    def step_without_data(self) -> None:
        """Step the parameters that this rank owns; in a `Join` context put the wrapped model before the optimizer."""
        self._finish()

    def _finish(self, arguments: Mapping[str, Any] | None = None) -> None:
        if self.sharded_step.begun or not self.driven:
            self.sharded_step.rest(arguments)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, on all ranks alike; they get their owners in the next step."""
        if not self._made:
            super().add_param_group(param_group)
            return
        self.optim.add_param_group(param_group)
        self._share()

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the whole state on one rank's host, one owner after the other; collective.

        Args:
            to: Rank within the process group.

        Raises:
            ValueError: There is no such rank.
        """
        if not 0 <= to < comm.world_size(self.process_group):
            raise ValueError(f"Expected `to` to be a rank below {comm.world_size(self.process_group)}, got {to!r}.")
        state = self.sharded_step.state_dict(self._control_group, to)
        self._consolidated = state if comm.rank(self.process_group) == to else None
        self._consolidated_at = self.sharded_step.version

    def state_dict(self) -> StateDict:
        """Return the whole state as `consolidate_state_dict` gathered it, in the optimizer's own unsharded form.

        Raises:
            RuntimeError: It was not gathered on this rank since the last step.
        """
        if self._consolidated is None or self._consolidated_at != self.sharded_step.version:
            raise RuntimeError(
                "The optimizer state is shared among the ranks: call `consolidate_state_dict(to=rank)` on all ranks "
                "after the step, and then `state_dict()` on that rank."
            )
        return self._consolidated

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Take up a whole state, also of the unsharded optimizer, and keep this rank's part; on all ranks."""
        self.sharded_step.load_state_dict(state_dict)
        self.sharded_step.version += 1
        self._share()

    @property
    def in_join(self) -> bool:
        """Whether it is in a `Join` context."""
        return self._join is not None

    def close(self) -> None:
        """Free the process groups; the optimizer cannot be used after that."""
        self.sharded_step.close()
        for group in (self._group, self._control_group):
            comm.destroy_group(group)
