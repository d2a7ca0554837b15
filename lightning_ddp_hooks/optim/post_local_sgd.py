"""An optimizer that averages the model after its steps: model averaging for plain PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ddp_hooks import _compat, comm
from lightning_ddp_hooks.averaging.averager import BoundAverager, plain_context
from lightning_ddp_hooks.averaging.loss_scale import SharedScale, follow_scale, scaler_text
from lightning_ddp_hooks.averaging.names import AveragerLike, resolve_averager
from lightning_ddp_hooks.averaging.replicas import optimizer_params
from lightning_ddp_hooks.join.context import Join
from lightning_ddp_hooks.optim.sharded_optimizer import JoinableOptimizer
from lightning_ddp_hooks.reducer.module_sync import check_same_on_all_ranks


class PostLocalSGDOptimizer(JoinableOptimizer):
    """Steps a local optimizer, then lets a model averager do what its schedule says.

    Use it with gradients that are averaged over all ranks for the averager's ``warmup_steps`` steps and over a
    subgroup, or not at all, afterward; see `PostLocalSGD` and ``DataParallel.no_sync``. Construction is collective.

    Under a GradScaler a step that is skipped on this rank still counts and still averages, so that ranks that train for
    themselves never wait for each other in vain. Given as ``scaler``, it has one scale on all ranks: an overflow on one
    of them lowers it for all, at the end of the next step.

    In a `Join` context a rank that has run out of data takes part in the averages with its model as it is: like any
    replica between two averages it counts as one of them.

    Args:
        optim: Local optimizer.
        averager: What averages, and when: a `ModelAverager`, or its short name. Under a Trainer use
            ``DDPHooksStrategy(averager=...)`` instead.
        module: Model, if its buffers are to be averaged too; without it only the optimizer's parameters are.
        process_group: Ranks that average; None for all.
        scaler: GradScaler that calls `step`, if there is one.

    Raises:
        RuntimeError: No process group is initialized, or ranks have different scalers; in `step`: a GradScaler calls it
            that was not given.
        TypeError: An argument of the wrong type.

    Example:
        >>> model = DataParallel(model, comm_hook=PostLocalSGD(start_local_sgd_iter=100, subgroup_size=8))
        >>> optimizer = PostLocalSGDOptimizer(
        ...     torch.optim.SGD(model.parameters(), lr=0.1), PeriodicModelAverager(period=4, warmup_steps=100)
        ... )

    Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", 2018, https://arxiv.org/abs/1808.07217.
    """

    # Tells GradScaler to call `step` also when it found Inf, and to leave unscaling to it.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        optim: Optimizer,
        averager: AveragerLike,
        *,
        module: nn.Module | None = None,
        process_group: comm.ProcessGroup | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        if not isinstance(optim, Optimizer):
            raise TypeError(f"Expected a torch optimizer, got {type(optim).__name__}.")
        if (declared := resolve_averager(averager)) is None:
            raise TypeError("Expected a ModelAverager or its short name for `averager`, got None.")
        # `Optimizer.__init__` would make parameter groups of its own; this object has those of the local optimizer.
        self.optim = optim
        self._declared = declared
        self._names = {} if module is None else {id(param): name for name, param in module.named_parameters()}
        self._context = plain_context(
            *self._named_params(),
            buffers=tuple if module is None else lambda: list(module.buffers()),
            optimizers=lambda: [self.optim],
            process_group=process_group,
        )
        self.process_group = self._context.group
        self._scaler = scaler
        self._scale = None if scaler is None else SharedScale(scaler, self._context.group)
        check_same_on_all_ranks([], {"scaler": scaler_text(scaler)}, self._context.control_group)
        self.averager: BoundAverager = declared.start(self._context)

    def _named_params(self) -> tuple[list[str], list[nn.Parameter]]:
        params = list(optimizer_params(self.optim))
        return [self._names.get(id(param), str(index)) for index, param in enumerate(params)], params

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The local optimizer's state."""
        return self.optim.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The local optimizer's parameter groups."""
        return self.optim.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The local optimizer's defaults."""
        return self.optim.defaults

    def __repr__(self) -> str:
        return f"PostLocalSGDOptimizer({self._declared!r}, {self.optim!r})"

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step the local optimizer, then average if it is due."""
        loss: float | None = None
        if self._may_step():
            loss = self.optim.step() if closure is None else self.optim.step(closure)
        Join.notify(self)
        if self._scaler is not None and self._scale is not None:
            self._scale.exchange(_compat.found_inf_flags(self._scaler, self))
        self.averager.average_parameters()
        return loss

    def step_without_data(self) -> None:
        """Do what the averager's schedule says for this step of the others."""
        if self._scale is not None:
            self._scale.exchange([])
        self.averager.average_parameters()

    def end_join(self, is_last_joiner: bool) -> None:
        """Take over the scale of a rank that ran out of data last."""
        if self._scaler is not None:
            follow_scale(self._scaler, is_last_joiner, self._context.control_group)

    @torch.no_grad()
    def _may_step(self) -> bool:
        """Do what a GradScaler leaves to us: unscale, and tell whether the gradients are finite."""
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if found_inf is None:
            return True
        if self._scaler is None:
            raise RuntimeError(
                "A GradScaler calls `step` of a PostLocalSGDOptimizer that does not know it, so that scales of ranks "
                "would part: give it, as in `PostLocalSGDOptimizer(optimizer, averager, scaler=scaler)`."
            )
        for param in optimizer_params(self):
            if scale is not None and param.grad is not None:
                param.grad.mul_(scale.reciprocal().to(param.grad.device))
        return not bool(found_inf)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, which are averaged from now on; collective."""
        self.optim.add_param_group(param_group)
        state = self.averager.state_dict()
        self.averager.close()
        names, params = self._named_params()
        self._context = replace(self._context, names=names, params=params)
        self.averager = self._declared.start(self._context)
        self.averager.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """Return the local optimizer's state, the averager's, and its ``"step"`` as torch's class of this name has it.

        Collective for some averagers.
        """
        return {**self.optim.state_dict(), "step": self.averager.step, "averager": self.averager.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take up what `state_dict` returned, here or in torch's class of this name.

        A state of the local optimizer alone lets the averager begin at step 0, with a warning.
        """
        own = {key: value for key, value in state_dict.items() if key not in ("step", "averager")}
        self.optim.load_state_dict(own)
        if "averager" in state_dict:
            self.averager.load_state_dict(state_dict["averager"])
            return
        if "step" not in state_dict:
            warnings.warn("The state holds no step of a model averager; it begins at step 0.", stacklevel=2)
        self.averager.step = int(state_dict.get("step", 0))
