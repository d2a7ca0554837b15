"""Measures a module's training step on this process alone: when each gradient is ready, and the time around it."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from typing_extensions import override

from lightning_ddp_hooks.advisor.profile import BackwardProfile, StepSample, profile_of
from lightning_ddp_hooks.cli.target import Target
from lightning_ddp_hooks.monitor.clock import Instant, clock_for

_WARM_STEPS = 3
_Ready = dict[int, Instant]  # when the gradient of each parameter was complete

_QUIET: dict[str, Any] = {
    "max_steps": 100_000,  # schedulers ask how long a run is, and not all take infinity
    "max_epochs": -1,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class StepCallback(Callback):
    """Counts training steps: those of the optimizer, or in manual optimization batches."""

    def __init__(self) -> None:
        self.steps = 0
        self._global_step = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._global_step = trainer.global_step

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == self._global_step and pl_module.automatic_optimization:
            return  # in the middle of an accumulation window
        self._global_step = trainer.global_step
        self.steps += 1
        self.step_ended(trainer, pl_module)

    def step_ended(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called after each step."""


class BackwardTimer(StepCallback):
    """Notes, in some training steps after the first three, when the backward begins and ends, and each gradient comes.

    With accumulation a step has several batches, and the last one's backward is the one that would reduce gradients.
    In manual optimization a step is a batch, and its backwards count as one. Training stops after the last step.
    """

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._last_step = _WARM_STEPS + steps
        self._measured: list[tuple[Instant, Instant, Instant, Instant, _Ready]] = []

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._clock = clock_for(pl_module.device, queues_waits=False)
        self._named = [(name, param) for name, param in pl_module.named_parameters() if param.requires_grad]
        if not self._named:
            raise ValueError("The module has no trainable parameter: there is nothing to communicate.")
        self._handles = [
            param.register_post_accumulate_grad_hook(lambda _, index=index: self._note_ready(index))
            for index, (_, param) in enumerate(self._named)
        ]
        self._open(self._clock.stamp())

    def _open(self, begin: Instant) -> None:
        self._begin = self._backward_end = begin
        self._backward_begin: Instant | None = None
        self._ready: _Ready = {}

    def _note_ready(self, index: int) -> None:
        self._ready[index] = self._clock.stamp()

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if pl_module.automatic_optimization or self._backward_begin is None:
            self._backward_begin = self._clock.stamp()
            self._ready.clear()

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._backward_end = self._clock.stamp()

    @override
    def step_ended(self, trainer: Trainer, pl_module: LightningModule) -> None:
        end = self._clock.stamp()
        if self.steps > _WARM_STEPS and self._backward_begin is not None:
            self._measured.append((self._begin, self._backward_begin, self._backward_end, end, self._ready))
        self._open(end)
        if self.steps >= self._last_step:
            trainer.should_stop = True

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for handle in self._handles:
            handle.remove()

    def profile(self) -> BackwardProfile:
        """Return the typical step."""
        self._clock.synchronize()
        if not self._measured:
            raise ValueError(
                f"No training step was measured: the data ends before step {_WARM_STEPS + 1}, or training_step returns "
                "no loss."
            )
        params = [param for _, param in self._named]
        return profile_of(
            [name for name, _ in self._named],
            [tuple(param.shape) for param in params],
            [str(param.dtype).removeprefix("torch.") for param in params],
            [param.nbytes for param in params],
            [self._sample(*marks) for marks in self._measured],
        )

    def _sample(self, begin: Instant, first: Instant, last: Instant, end: Instant, ready: _Ready) -> StepSample:
        def between(start: Instant, stop: Instant) -> float:
            return max(0.0, self._clock.seconds(stop) - self._clock.seconds(start))

        backward = between(first, last)
        times = (min(between(first, ready[i]), backward) if i in ready else None for i in range(len(self._named)))
        return StepSample(tuple(times), between(begin, first), backward, between(last, end))


def measure_compute(target: Target, steps: int, device: torch.device) -> BackwardProfile:
    """Train for a few steps on this process alone, also under torchrun; raises ValueError where nothing is measured."""
    module, data = target.make()
    if data is None and type(module).train_dataloader is LightningModule.train_dataloader:
        raise ValueError(
            f"{type(module).__name__} has no train_dataloader: name its data by --data, by a --config with `data`, or "
            "give a function that makes a batch by --batch."
        )
    timer = BackwardTimer(steps)
    devices = 1 if device.type != "cuda" else [device.index or 0]
    train(target, module, data, timer, device, devices=devices, strategy=SingleDeviceStrategy(device=device))
    return timer.profile()


def train(
    target: Target, module: LightningModule, data: Any, callback: Callback, device: torch.device, **settings: Any
) -> None:
    """Train, and do nothing else, until the callback ends it."""
    accelerator = "gpu" if device.type == "cuda" else "cpu"
    trainer = Trainer(accelerator=accelerator, callbacks=[callback], **settings, **_QUIET, **target.trainer)
    if data is None:
        trainer.fit(module)
    elif isinstance(data, torch.utils.data.DataLoader):
        trainer.fit(module, data)
    else:
        trainer.fit(module, datamodule=data)
