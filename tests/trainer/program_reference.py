"""What a program has to end with: a loop of plain PyTorch in one process, over replicas that it holds side by side."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from programs import OPTIMIZERS, Program, ProgramNet, frozen_layers, make_batch
from torch import Tensor, nn

Gradients = list[Tensor | None]


@dataclass
class Expected:
    """What all ranks are to end with.

    Attributes:
        state: of the model.
        scale: of the GradScaler.
        losses: of all micro-batches of an epoch, with their sizes, for each epoch.
        val_losses: the means of all samples, for each validation.
    """

    state: dict[str, Tensor] = field(default_factory=dict)
    scale: float = 1.0
    losses: list[list[tuple[float, int]]] = field(default_factory=list)
    val_losses: list[float] = field(default_factory=list)

    def mean_loss(self, epoch: int) -> float:
        return sum(loss * size for loss, size in self.losses[epoch]) / sum(size for _, size in self.losses[epoch])


class Replica:
    """One rank's model and optimizers."""

    def __init__(self, program: Program, net: nn.Module) -> None:
        self.net: Any = deepcopy(net)
        make, options = OPTIMIZERS[program.optimizer]
        self.parts = self.net.split(program.manual or 1)
        self.optimizers = [make(params, **options) for params in self.parts]
        self.rate = options["lr"]

    def take(self) -> Gradients:
        """Return the gradients, and clear them."""
        found = [param.grad for param in self.net.parameters()]
        self.net.zero_grad()
        return found


class Scale:
    """The scale of a GradScaler: as torch's, or a step behind while ranks step by gradients of their own."""

    def __init__(self) -> None:
        self.value, self.counted = 64.0, 0
        self.sent: tuple[bool, float] | None = None

    def update(self, overflow: bool, apart: bool) -> None:
        found = overflow
        if apart:
            found = self.sent is not None and self.sent[0] and self.sent[1] <= self.value
            self.sent = (overflow, self.value)
        if found:
            self.value, self.counted = self.value / 2, 0
        else:
            self.counted += 1
            if self.counted == 3:
                self.value, self.counted = self.value * 2, 0


class Simulation:
    """A training run: one process that plays all ranks."""

    def __init__(self, program: Program) -> None:
        torch.manual_seed(0)
        net = ProgramNet(program)
        self.program = program
        self.replicas = [Replica(program, net) for _ in range(program.world)]
        self.average = AVERAGERS[program.averager[0]] if program.averager else Replicas
        self.scale = Scale()
        self.found = Expected(losses=[[] for _ in range(program.epochs)])

    def run(self) -> Expected:
        program, found = self.program, self.found
        average = self.average(program, self.replicas)
        for step in range(program.epochs * program.steps):
            frozen = frozen_layers(program, step)
            for replica in self.replicas:
                for number, layer in enumerate(replica.net.layers):
                    layer.requires_grad_(number not in frozen)
            if not self.apart(step):
                self._share_buffers(0)
            *between, last = program.window(step)
            self._validate(between, average)
            for number in range(program.manual or 1):
                self._step(step, number)
            if self.tail(step):
                self._share_buffers(next(r for r in range(program.world) if last < program.counts[r]))
            if program.schedule:
                for replica in self.replicas:
                    replica.optimizers[0].param_groups[0]["lr"] = replica.rate * 0.9 ** (step + 1)
            average.after(step)
            self._validate([last], average)
        found.state, found.scale = average.model().state_dict(), self.scale.value
        return found

    def _validate(self, batches: list[int], average: Replicas) -> None:
        """Validate after those of the batches of an epoch that are due."""
        program = self.program
        for index in batches if program.validate else ():
            if (index + 1) % (program.validate_every or program.batches) == 0:
                self.found.val_losses.append(_validate(program, average.model()))

    def apart(self, step: int) -> bool:
        """Whether an averager has taken over."""
        return self.program.averager is not None and step >= self.program.averager[2]

    def tail(self, step: int) -> bool:
        """Whether a rank has run out by the end of a step."""
        program = self.program
        return program.policy == "join" and min(program.counts) <= program.window(step)[-1]

    @torch.no_grad()
    def _share_buffers(self, source: int) -> None:
        buffers = [dict(replica.net.named_buffers()) for replica in self.replicas]
        for each in buffers:
            for name, buffer in each.items():
                buffer.copy_(buffers[source][name])

    def _step(self, step: int, number: int) -> None:
        """Make one optimizer's step on all replicas."""
        program, synced = self.program, self.tail(step) or not self.apart(step)
        gradients = [self._gradient(step, number, rank) for rank in range(program.world)]
        without = {rank for rank in range(program.world) if self._has_batch(step, rank) and gradients[rank] is None}
        holding = {rank for rank in range(program.world) if self._has_batch(step, rank)}
        if synced:
            gradients = [_sum(gradients)] * program.world
            if without == holding or (program.skip == "all" and without):
                return  # nobody steps, nor looks at the scale
        overflows = []
        for replica, gradient in zip(self.replicas, gradients, strict=True):
            for param, value in zip(replica.net.parameters(), gradient or (), strict=False):
                param.grad = None if value is None else value.clone()
            found = [p.grad for p in replica.parts[number] if p.grad is not None]
            overflows.append(not all(bool(value.isfinite().all()) for value in found))
            if not overflows[-1]:
                _clip(program, replica.parts[number])
                replica.optimizers[number].step()
            replica.net.zero_grad()
        self.scale.update(any(overflows), self.apart(step))

    def _has_batch(self, step: int, rank: int) -> bool:
        return self.program.window(step)[0] < self.program.counts[rank]

    def _gradient(self, step: int, number: int, rank: int) -> Gradients | None:
        """Return a rank's share in a step's gradient; None if there is no loss."""
        program, net = self.program, self.replicas[rank].net
        alone, window = self.apart(step) and not self.tail(step), program.window(step)
        any_loss = False
        for index in window:
            if index >= program.counts[rank]:
                continue
            batch = make_batch(program, rank, index)
            for part in range(program.parts if program.manual else 1):
                loss = net.loss(
                    batch,
                    branch=(step, rank) not in program.unused,
                    overflow=(step, rank) in program.overflows and index == window[0],
                    part=part + number,
                )
                if part == number == 0:
                    self.found.losses[step // program.steps].append((loss.item(), len(batch[0])))
                if (step, rank) not in program.missing:
                    any_loss = True
                    (loss * _share(program, step, rank, index) * (program.world if alone else 1)).backward()
        return self.replicas[rank].take() if any_loss else None


def _clip(program: Program, params: list[nn.Parameter]) -> None:
    if program.clip is not None:
        kind, value = program.clip
        (nn.utils.clip_grad_norm_ if kind == "norm" else nn.utils.clip_grad_value_)(params, value)


def _sum(gradients: list[Gradients | None]) -> Gradients:
    """Add up over ranks; what no rank has, nobody gets."""
    found: Gradients = []
    for each in zip(*(gradient for gradient in gradients if gradient is not None), strict=True):
        there = [gradient for gradient in each if gradient is not None]
        found.append(torch.stack(there).sum(0) if there else None)
    return found


def _share(program: Program, step: int, rank: int, index: int) -> float:
    """Return what a rank's micro-batch weighs in the gradient of the whole step."""
    window, world = program.window(step), program.world

    def active(at: int) -> list[int]:
        return [other for other in range(world) if at < program.counts[other]]

    if program.by_samples:
        total = sum(program.size(other, at) for at in window for other in active(at))
        return program.size(rank, index) / total
    if program.divisor == "world" or program.policy is None:
        return 1 / (world * (len(window) if program.exact_windows else program.accumulate))
    if program.exact_windows:
        return 1 / sum(len(active(at)) for at in window)
    return 1 / (len(active(index)) * program.accumulate)


@torch.no_grad()
def _validate(program: Program, net: Any) -> float:
    net = deepcopy(net).eval()
    losses = samples = 0.0
    for rank, count in enumerate(program.validate):
        for index in range(count):
            batch = make_batch(program, rank, index, validation=True)
            losses += float(net.loss(batch)) * len(batch[0])
            samples += len(batch[0])
    return losses / samples


# ---------------------------------------------------------------------- averagers


class Replicas:
    """All replicas are the same, and remain so."""

    def __init__(self, program: Program, replicas: list[Replica]) -> None:
        self.program, self.replicas = program, replicas

    def after(self, step: int) -> None:
        """Do what is due after a step."""

    def model(self) -> Any:
        """Return what is validated, and what is left at the end."""
        return self.replicas[0].net


class Averaged(Replicas):
    """The mean of all replicas in some steps."""

    begun = False

    def due(self, step: int) -> bool:
        assert self.program.averager is not None
        kind, period, warmup = self.program.averager
        return step >= warmup and (step - (0 if kind == "hierarchical" else warmup)) % period == 0

    def after(self, step: int) -> None:
        assert self.program.averager is not None
        self.begun = step >= self.program.averager[2]
        if self.due(step):
            self._put(self._mean())

    @torch.no_grad()
    def _mean(self) -> dict[str, Tensor]:
        states = [replica.net.state_dict() for replica in self.replicas]
        return {
            name: torch.stack([state[name] for state in states]).mean(0) if value.is_floating_point() else value
            for name, value in states[0].items()
        }

    def _put(self, state: dict[str, Tensor]) -> None:
        for replica in self.replicas:
            replica.net.load_state_dict({**replica.net.state_dict(), **state})

    def model(self) -> Any:
        if not self.begun:
            return super().model()
        net = deepcopy(self.replicas[0].net)
        net.load_state_dict(self._mean())
        return net


class SlowMo(Averaged):
    """u <- 0.5 u + (x0 - x) / lr;  x0 <- x0 - lr u, with the mean rate of a period."""

    def __init__(self, program: Program, replicas: list[Replica]) -> None:
        super().__init__(program, replicas)
        self.rates: list[float] = []
        self.start: dict[str, Tensor] | None = None

    def after(self, step: int) -> None:
        super().after(step)
        if self.begun:
            self.rates.append(self.replicas[0].rate * (0.9**step if self.program.schedule else 1.0))
        if not self.due(step):
            return
        params = {name: param.detach().clone() for name, param in self.replicas[0].net.named_parameters()}
        rate, self.rates = sum(self.rates) / len(self.rates), []
        if self.start is None:
            self.start, self.slow = params, {name: torch.zeros_like(param) for name, param in params.items()}
            return
        for name, param in params.items():
            self.slow[name] = 0.5 * self.slow[name] + (self.start[name] - param) / rate
            self.start[name] = self.start[name] - rate * self.slow[name]
        self._put(self.start)


class DiLoCo(Averaged):
    """An outer SGD with Nesterov's momentum over x0 - x."""

    outer: dict[str, Tensor] | None = None

    def after(self, step: int) -> None:
        super().after(step)
        if not self.due(step):
            return
        params = {name: param.detach().clone() for name, param in self.replicas[0].net.named_parameters()}
        if self.outer is None:
            self.outer = {name: param.requires_grad_() for name, param in params.items()}
            self.optimizer = torch.optim.SGD(self.outer.values(), lr=0.7, momentum=0.9, nesterov=True)
            return
        for name, param in params.items():
            self.outer[name].grad = self.outer[name].detach() - param
        self.optimizer.step()
        self._put({name: param.detach().clone() for name, param in self.outer.items()})

    def model(self) -> Any:
        net = super().model()
        if self.outer is not None:
            net.load_state_dict({**net.state_dict(), **self.outer})
        return net


AVERAGERS = {"periodic": Averaged, "hierarchical": Averaged, "slowmo": SlowMo, "diloco": DiLoCo}
