"""DiLoCo: an outer optimizer over what the replicas have moved, whole or streamed fragment by fragment."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.averaging.averager import AveragingContext, BoundAverager, ModelAverager
from lightning_ddp_hooks.averaging.exchange import PseudoGradientExchange
from lightning_ddp_hooks.averaging.outer import OuterModel
from lightning_ddp_hooks.averaging.replicas import copy_to_cpu
from lightning_ddp_hooks.averaging.schedule import FragmentSchedule, require_positive, require_share, split_fragments
from lightning_ddp_hooks.hooks.registry import HookLike, resolve_hook
from lightning_ddp_hooks.hooks.state import whole_number

log = logging.getLogger(__name__)

OuterOptimizer = Callable[[Iterable[Tensor]], Optimizer]


@dataclass(frozen=True, kw_only=True)
class DiLoCo(ModelAverager):
    """Lets each rank train by itself for ``period`` steps, then moves a global model by an outer optimizer.

    With x0 the global model and x the mean of the replicas, the pseudo-gradient is x0 - x; all replicas go on from the
    new global model. The global model is what is evaluated and saved. It begins at step ``warmup_steps`` as the mean of
    the replicas, and the first outer step comes ``period`` steps later. With ``outer_lr=1, outer_momentum=0`` this is
    periodic averaging.

    Args:
        period: Steps between two outer steps of a parameter; the papers use 30 to 500.
        outer_lr: Learning rate of the outer SGD; None takes the paper's 0.7.
        outer_momentum: Momentum of the outer SGD, Nesterov's unless 0; None takes the paper's 0.9.
        outer_optimizer: Callable that makes another outer optimizer from the outer parameters, such as
            ``functools.partial(torch.optim.Adam, lr=0.1)``; instead of the two arguments above.
        fragments: Number of parts that the model is cut into. One is sent every ``period / fragments`` steps, so that
            the peak of the traffic is that much lower.
        delay: Steps from sending to landing, during which training goes on; at most the steps between two sendings.
        blending: Share of its own parameters that a replica keeps when a part lands, at least 0 and below 1; the paper
            uses 0.5 with a delay.
        comm_hook: Hook that compresses pseudo-gradients; whatever the strategy takes as ``comm_hook``. Over gloo
            training does not go on while a function of your own is at work.
        outer_device: Where outer parameters and outer optimizer state live, such as ``"cpu"``; None for the
            parameters' own device.
        warmup_steps: See `ModelAverager`.
        average_buffers: See `ModelAverager`; buffers are averaged with each sending.
        optimizer_state: See `ModelAverager`; averaged with each sending.

    Raises:
        TypeError: Value of the wrong type.
        ValueError: Value out of range, or arguments that contradict each other.

    Example:
        >>> DiLoCo(period=100, warmup_steps=1000)
        >>> DiLoCo(period=100, fragments=4, delay=5, blending=0.5, comm_hook="int8", outer_device="cpu")

    Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023,
    https://arxiv.org/abs/2311.08105; Douillard et al., "Streaming DiLoCo with overlapping communication", 2025,
    https://arxiv.org/abs/2501.18512.
    """

    period: int = 100
    outer_lr: float | None = None
    outer_momentum: float | None = None
    outer_optimizer: OuterOptimizer | None = None
    fragments: int = 1
    delay: int = 0
    blending: float = 0.0
    comm_hook: HookLike | None = None
    outer_device: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        FragmentSchedule(self.period, self.warmup_steps, self.fragments, self.delay)
        require_share("blending", self.blending, "; with 1 nothing would land")
        if self.outer_lr is not None:
            require_positive("outer_lr", self.outer_lr)
        if self.outer_momentum is not None:
            require_share("outer_momentum", self.outer_momentum)
        for name in ("outer_lr", "outer_momentum"):
            if self.outer_optimizer is not None and getattr(self, name) is not None:
                raise ValueError(f"Set `outer_optimizer` or `{name}`, not both.")
        if self.outer_optimizer is not None and not callable(self.outer_optimizer):
            raise TypeError(
                "Expected `outer_optimizer` to be a callable that makes an optimizer from parameters, got "
                f"{type(self.outer_optimizer).__name__}."
            )
        if self.outer_device is not None:
            torch.device(self.outer_device)
        resolve_hook(self.comm_hook)

    @property
    def first_outer_step(self) -> int:
        """The step that sends the first pseudo-gradients."""
        return (
            self.warmup_steps + FragmentSchedule(self.period, self.warmup_steps, self.fragments, self.delay).offsets[0]
        )

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
        self._outer = OuterModel(context, settings.outer_device)
        self._optimizer: Optimizer | None = None
        trainable = set(self.trainable_indices())
        sizes = [param.numel() if index in trainable else 0 for index, param in enumerate(context.params)]
        self._fragments = split_fragments(sizes, settings.fragments)
        # A group of its own: pseudo-gradients stay in flight while the mean of the model may be asked for.
        group, hook = self.new_group(context.group), resolve_hook(settings.comm_hook)
        self._exchange = PseudoGradientExchange(context, self._outer, group, hook, step=lambda: self.step)
        self._due = 0
        self._outer_steps = 0

    @property
    def in_flight(self) -> bool:
        return self._exchange.in_flight

    def close(self, *, failed: bool = False) -> None:
        self._exchange.close(failed=failed)
        super().close(failed=failed)

    def _average(self, step: int) -> bool:
        if step == self._diloco.warmup_steps:
            self._average_model(self.group)
            self._begin(self.trainable_indices())
            return True
        if self._exchange.pending and step >= self._due:
            self._outer_step()
        fragment = self._schedule.fragment(step)
        if fragment is None:
            return False
        indices = [index for index in self._fragments[fragment] if self._ever_trainable[index]]
        late = [index for index in indices if index not in self._outer.values]
        if late:  # trainable only now
            self._mean([self.context.params[index] for index in late], self.group)
            self._begin(late)
        if buffers := self.float_buffers():
            self._mean(buffers, self.group)
        self._average_optimizers(self.group)
        self._exchange.send(indices)
        self._due = step + self._diloco.delay
        if self._diloco.delay:
            return False
        self._outer_step()
        return self._diloco.fragments == 1 and self._diloco.blending == 0

    def _begin(self, indices: list[int]) -> None:
        state = self._optimizer_state()
        self._outer.begin(indices)
        self._make_optimizer(state)

    def _outer_step(self) -> None:
        """Take the outer step with the pseudo-gradients that were sent, and hand its result to the replica."""
        means = self._exchange.take()
        for index, mean in means.items():
            value = self._outer.values[index]
            value.grad = mean.to(value.device)
        if self._optimizer is not None:  # there is none yet if the first fragment of a run that begins late is empty
            self._optimizer.step()
        for index in means:
            self._outer.values[index].grad = None
            self._outer.write(index, keep=self._diloco.blending)
        self._outer_steps += 1

    @torch.no_grad()
    def average_into(self, targets: Sequence[Tensor]) -> None:
        outer = {id(self.context.params[index]): value for index, value in self._outer.values.items()}
        rest = []  # what has no outer value, such as buffers, is averaged
        for tensor, target in zip(self.model_tensors(), targets, strict=True):
            if id(tensor) in outer:
                target.copy_(outer[id(tensor)])
            else:
                rest.append((tensor, target))
        if rest:
            self._mean([tensor for tensor, _ in rest], self.group, [target for _, target in rest])

    def finish(self) -> None:
        if self._exchange.pending:
            self._outer_step()
        if not self.replicas_equal and not self._outer_steps and comm.rank(self.group) == 0:
            log.warning(
                f"Training ends at step {self.step}, before the first outer step of DiLoCo "
                f"(period={self._diloco.period}): the global model holds nothing of what the replicas have learned "
                f"since step {self._diloco.warmup_steps}."
            )
        super().finish()

    def _extra_state(self) -> dict[str, Any]:
        in_flight, hook = None, self._exchange.hook
        if self._exchange.pending:
            means = {self.context.names[index]: mean for index, mean in self._exchange.means().items()}
            in_flight = {"due": self._due, "deltas": copy_to_cpu(means)}
        return {
            "outer": self._outer.state_dict(),
            "outer_optimizer": self._optimizer_state(),
            "outer_steps": self._outer_steps,
            "in_flight": in_flight,
            "hook": hook.state_dict() if hook is not None else {},
        }

    def _load_extra_state(self, state: Mapping[str, Any]) -> None:
        self._outer.load_state_dict(state["outer"])
        self._make_optimizer(state["outer_optimizer"])
        self._outer_steps = whole_number(state["outer_steps"])
        means, in_flight = None, state["in_flight"]
        if in_flight is not None:
            self._due = whole_number(in_flight["due"])
            positions = {name: index for index, name in enumerate(self.context.names)}
            means = {positions[name]: mean.clone() for name, mean in in_flight["deltas"].items()}
        self._exchange.restore(means)
        if self._exchange.hook is not None:
            self._exchange.hook.load_state_dict(state["hook"])

    def _optimizer_state(self) -> dict[str, Any]:
        """Return the outer optimizer's state by parameter name, on the CPU."""
        states = {} if self._optimizer is None else self._optimizer.state
        return {
            self.context.names[index]: copy_to_cpu(states[value])
            for index, value in sorted(self._outer.values.items())
            if states.get(value)
        }

    def _make_optimizer(self, state: Mapping[str, Any]) -> None:
        """Make the outer optimizer over the present outer parameters, with a state by parameter name."""
        self._optimizer = None
        if self._outer.values:
            indices = sorted(self._outer.values)
            self._optimizer = self._diloco.make_outer_optimizer([self._outer.values[index] for index in indices])
            names = [self.context.names[index] for index in indices]
            # Copies: the optimizer writes into them. It brings them to the device of their parameter.
            own = {n: copy_to_cpu(state[name]) for n, name in enumerate(names) if name in state}
            self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": own})
