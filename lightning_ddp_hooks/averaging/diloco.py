"""DiLoCo: an outer optimizer over what the replicas have moved, whole or streamed fragment by fragment."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from lightning_ddp_hooks.averaging.averager import AveragingContext, BoundAverager, ModelAverager
from lightning_ddp_hooks.averaging.exchange import Delta, DeltaExchange
from lightning_ddp_hooks.averaging.outer import OuterModel
from lightning_ddp_hooks.averaging.schedule import FragmentSchedule, require_number, split_fragments
from lightning_ddp_hooks.hooks.contract import BindContext, CommHook
from lightning_ddp_hooks.hooks.registry import HookLike, resolve_hook
from lightning_ddp_hooks.hooks.state import whole_number

log = logging.getLogger(__name__)

OuterOptimizer = Callable[[Iterable[Tensor]], Optimizer]


@dataclass(frozen=True, kw_only=True)
class DiLoCo(ModelAverager):
    """Lets each rank train by itself for ``period`` steps, then moves a global model by an outer optimizer.

    With x0 the global model and x the mean of the replicas, the outer gradient is x0 - x; all replicas go on from the
    new global model. The global model is what is evaluated and saved. It begins at step ``warmup_steps`` as the mean of
    the replicas, and the first outer step comes ``period`` steps later. With ``outer_lr=1, outer_momentum=0`` this is
    periodic averaging.

    Streaming: with ``fragments`` the model is cut into as many parts, of which one is sent every ``period / fragments``
    steps, so that the peak of the traffic is that much lower. With ``delay`` a part lands that many steps after it was
    sent, and training goes on meanwhile. With ``blending`` a replica keeps that share of its own parameters when a part
    lands.

    Args:
        period: steps between two outer steps of a parameter; the papers use 30 to 500.
        outer_lr: of the outer SGD; None takes the paper's 0.7.
        outer_momentum: of the outer SGD, Nesterov's unless 0; None takes the paper's 0.9.
        outer_optimizer: makes another outer optimizer from the outer parameters, such as
            ``functools.partial(torch.optim.Adam, lr=0.1)``; instead of the two arguments above.
        fragments: into how many parts the model is cut.
        delay: steps from sending to landing; at most the steps between two sendings.
        blending: share of its own parameters that a replica keeps, at least 0 and below 1; the paper uses 0.5 with a
            delay.
        comm_hook: compresses outer gradients on their way; whatever the strategy takes as ``comm_hook``.
        outer_device: where outer parameters and outer optimizer state live, such as ``"cpu"``; None for the
            parameters' own device.
        warmup_steps: see `ModelAverager`.
        average_buffers: see `ModelAverager`; buffers are averaged with each sending.
        optimizer_state: see `ModelAverager`; averaged with each sending.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: a value out of range, or arguments that contradict each other.

    Example:
        >>> DiLoCo(period=100, warmup_steps=1000)
        >>> DiLoCo(period=100, fragments=4, delay=5, blending=0.5, comm_hook="int8", outer_device="cpu")

    Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023,
    https://arxiv.org/abs/2311.08105; Douillard et al., "Streaming DiLoCo with overlapping communication", 2025,
    https://arxiv.org/abs/2501.18512.
    """

    period: int
    outer_lr: float | None = None
    outer_momentum: float | None = None
    outer_optimizer: OuterOptimizer | None = None
    fragments: int = 1
    delay: int = 0
    blending: float = 0.0
    comm_hook: HookLike | None = None
    outer_device: str | None = None

    def __post_init__(self) -> None:
        """Check each value, then their combination."""
        super().__post_init__()
        FragmentSchedule(self.period, self.warmup_steps, self.fragments, self.delay)
        require_number("blending", self.blending)
        if not 0 <= self.blending < 1:
            raise ValueError(
                f"Expected `blending` to be at least 0 and below 1, got {self.blending}; with 1 nothing would land."
            )
        for name in ("outer_lr", "outer_momentum"):
            value = getattr(self, name)
            if value is None:
                continue
            require_number(name, value)
            if self.outer_optimizer is not None:
                raise ValueError(f"Set `outer_optimizer` or `{name}`, not both.")
        if self.outer_lr is not None and not self.outer_lr > 0:
            raise ValueError(f"Expected `outer_lr` to be above 0, got {self.outer_lr}.")
        if self.outer_momentum is not None and not 0 <= self.outer_momentum < 1:
            raise ValueError(f"Expected `outer_momentum` to be at least 0 and below 1, got {self.outer_momentum}.")
        if self.outer_optimizer is not None and not callable(self.outer_optimizer):
            raise TypeError(
                "Expected `outer_optimizer` to be a callable that makes an optimizer from parameters, got "
                f"{type(self.outer_optimizer).__name__}."
            )
        if self.outer_device is not None:
            torch.device(self.outer_device)
        self.declared_hook()

    def declared_hook(self) -> CommHook | None:
        """Return the hook for outer gradients, or None for the plain mean."""
        return resolve_hook(self.comm_hook)

    def make_outer_optimizer(self, params: Iterable[Tensor]) -> Optimizer:
        """Return the outer optimizer over the outer parameters."""
        if self.outer_optimizer is not None:
            made = self.outer_optimizer(params)
            if not isinstance(made, Optimizer):
                raise TypeError(f"Expected `outer_optimizer` to return an optimizer, got {type(made).__name__}.")
            return made
        momentum = 0.9 if self.outer_momentum is None else self.outer_momentum
        lr = 0.7 if self.outer_lr is None else self.outer_lr
        return SGD(params, lr=lr, momentum=momentum, nesterov=momentum > 0)

    def bind(self, context: AveragingContext) -> BoundAverager:
        """Make the averager for these ranks."""
        return _BoundDiLoCo(self, context)


class _BoundDiLoCo(BoundAverager):
    def __init__(self, settings: DiLoCo, context: AveragingContext) -> None:
        super().__init__(settings, context)
        self._diloco = settings
        self._schedule = FragmentSchedule(settings.period, settings.warmup_steps, settings.fragments, settings.delay)
        device = None if settings.outer_device is None else torch.device(settings.outer_device)
        self._outer = OuterModel(context.names, context.params, device)
        self._optimizer: Optimizer | None = None
        trainable = set(self.trainable_indices())
        sizes = [param.numel() if index in trainable else 0 for index, param in enumerate(context.params)]
        self._fragments = split_fragments(sizes, settings.fragments)
        # A group of its own for deltas: they stay in flight while the mean of the model may be asked for.
        self._exchange_group = self.new_group(context.group)
        self._hook = None
        declared = settings.declared_hook()
        if declared is not None:
            self._hook = declared.bind(
                BindContext(
                    group=self._exchange_group,
                    control_group=context.control_group,
                    names=context.names,
                    params=context.params,
                    step=lambda: self.step,
                    new_group=self.new_group,
                    split_group=self.split_group,
                )
            )
        self._exchange = DeltaExchange(context.names, context.params, self._outer, self._exchange_group, self._hook)
        self._sent: Delta | None = None
        self._due = 0
        self._outer_steps = 0

    @property
    def in_flight(self) -> bool:
        """Whether deltas are under way."""
        return self._sent is not None

    # ------------------------------------------------------------------ each step

    def _average(self, step: int) -> bool:
        if self._schedule.begins(step):
            self._average_model(self.group)
            self._begin(self.trainable_indices())
            return True
        if self._sent is not None and step >= self._due:
            self._land()
        fragment = self._schedule.fragment(step)
        if fragment is None:
            return False
        indices = [index for index in self._fragments[fragment] if self._ever_trainable[index]]
        self._begin_late(indices)
        self._mean_of_the_rest()
        self._sent = self._exchange.send(indices)
        self._due = step + self._diloco.delay
        if self._diloco.delay:
            return False
        self._land()
        return self._diloco.fragments == 1 and self._diloco.blending == 0

    def _mean_of_the_rest(self) -> None:
        buffers = self.float_buffers()
        if buffers:
            self._mean(buffers, self.group)
        self._average_optimizers(self.group)

    def _begin_late(self, indices: list[int]) -> None:
        """Let parameters that have become trainable only now begin as the mean of the replicas."""
        late = [index for index in indices if index not in self._outer.values]
        if late:
            self._mean([self.context.params[index] for index in late], self.group)
            self._begin(late)

    def _begin(self, indices: list[int]) -> None:
        self._outer.begin(indices)
        self._renew_optimizer({} if self._optimizer is None else self._optimizer_state())

    def _land(self) -> None:
        """Take the outer step with the deltas that have arrived, and hand its result to the replica."""
        assert self._sent is not None
        assert self._optimizer is not None
        deltas = self._sent.means()
        self._sent = None
        for index, delta in deltas.items():
            value = self._outer.values[index]
            value.grad = delta.to(value.device)
        self._optimizer.step()
        for index in deltas:
            self._outer.values[index].grad = None
            self._outer.write(index, keep=self._diloco.blending)
        self._outer_steps += 1

    # ------------------------------------------------------------------ the averaged model

    @torch.no_grad()
    def average_into(self, targets: Any) -> None:
        """Write the global model into ``targets``; what has no outer parameter, such as buffers, is averaged."""
        params = self.trainable_indices()
        rest, rest_targets = [], []
        for position, (tensor, target) in enumerate(zip(self.model_tensors(), targets, strict=True)):
            index = params[position] if position < len(params) else None
            if index is not None and index in self._outer.values:
                target.copy_(self._outer.values[index])
            else:
                rest.append(tensor)
                rest_targets.append(target)
        if rest:
            self._mean(rest, self.group, rest_targets)

    def finish(self) -> None:
        """Land what is in flight and give all ranks the global model."""
        if self._sent is not None:
            self._land()
        if not self.replicas_equal and not self._outer_steps:
            log.warning(
                "Training ends at step %d, before the first outer step of DiLoCo (period=%d): the global model holds "
                "nothing of what the replicas have learnt since step %d.",
                self.step,
                self._diloco.period,
                self._diloco.warmup_steps,
            )
        super().finish()

    # ------------------------------------------------------------------ state

    def _extra_state(self) -> dict[str, Any]:
        names = self.context.names
        in_flight = None
        if self._sent is not None:
            means = {names[index]: delta.to("cpu", copy=True) for index, delta in self._sent.means().items()}
            in_flight = {"due": self._due, "deltas": means}
        return {
            "outer": self._outer.state_dict(),
            "outer_optimizer": self._optimizer_state(),
            "outer_steps": self._outer_steps,
            "in_flight": in_flight,
            "hook": self._hook.state_dict() if self._hook is not None else {},
        }

    def _load_extra_state(self, state: Mapping[str, Any]) -> None:
        self._outer.load_state_dict(state["outer"])
        self._renew_optimizer(state["outer_optimizer"])
        self._outer_steps = whole_number(state["outer_steps"])
        in_flight = state["in_flight"]
        self._sent = None
        if in_flight is not None:
            positions = {name: index for index, name in enumerate(self.context.names)}
            deltas = {positions[name]: delta.clone() for name, delta in in_flight["deltas"].items()}
            self._sent = Delta.arrived(deltas)
            self._due = whole_number(in_flight["due"])
        if self._hook is not None:
            self._hook.load_state_dict(state["hook"])

    def _optimizer_state(self) -> dict[str, Any]:
        """Return the outer optimizer's state by parameter name, on the CPU."""
        if self._optimizer is None:
            return {}
        names = {id(value): self.context.names[index] for index, value in self._outer.values.items()}
        return {
            names[id(value)]: {
                key: entry.detach().to("cpu", copy=True) if isinstance(entry, Tensor) else entry
                for key, entry in self._optimizer.state[value].items()
            }
            for group in self._optimizer.param_groups
            for value in group["params"]
            if id(value) in names and self._optimizer.state.get(value)
        }

    def _renew_optimizer(self, state: Mapping[str, Any]) -> None:
        """Make the outer optimizer over the present outer parameters, with the state that there was."""
        if not self._outer.values:
            self._optimizer = None
            return
        names, indices = self.context.names, sorted(self._outer.values)
        self._optimizer = self._diloco.make_outer_optimizer([self._outer.values[index] for index in indices])
        plain = self._optimizer.state_dict()
        plain["state"] = {
            # Copies: the optimizer writes into them.
            position: {key: v.clone() if isinstance(v, Tensor) else v for key, v in state[names[index]].items()}
            for position, index in enumerate(indices)
            if names[index] in state
        }
        # It brings tensors to the device of their parameter.
        self._optimizer.load_state_dict(plain)
