"""Measures a module's training step on this process alone: when each gradient is ready, and all around it."""

from __future__ import annotations

import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from typing_extensions import override

from lightning_ddp_hooks.advisor.profile import BackwardProfile, StepSample, profile_of
from lightning_ddp_hooks.cli.target import Target

WARM_STEPS = 3
PLENTY = 100_000
"""``max_steps`` of a run that a callback ends: schedulers ask how long it is, and not all take infinity."""

_Mark = float | torch.cuda.Event


class BackwardTimer(Callback):
    """Notes, in each training step, when the backward begins, when each gradient comes, and when it ends.

    A *step* ends with the optimizer; with accumulation it has several batches, and the last one's backward is the one
    that would reduce gradients. In manual optimisation a step is a batch, and its backwards count as one.

    Args:
        steps: how many to measure; training stops after them.
        warm_steps: how many come before.
    """

    def __init__(self, steps: int, warm_steps: int = WARM_STEPS) -> None:
        self._steps = steps
        self._warm = warm_steps
        self._marks: list[tuple[_Mark, _Mark, _Mark, _Mark, dict[int, _Mark]]] = []
        self._taken = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._device = pl_module.device
        named = [(name, param) for name, param in pl_module.named_parameters() if param.requires_grad]
        if not named:
            raise ValueError("The module has no trainable parameter: there is nothing to communicate.")
        self._named = named
        self._handles = [
            param.register_post_accumulate_grad_hook(self._noting(index)) for index, (_, param) in enumerate(named)
        ]
        self._begin = self._mark()
        self._step_before = trainer.global_step
        self._open(self._begin)

    def _open(self, begin: _Mark) -> None:
        self._backward_begin: _Mark | None = None
        self._backward_end = begin
        self._ready: dict[int, _Mark] = {}

    def _noting(self, index: int) -> Any:
        def note(_: Tensor) -> None:
            self._ready[index] = self._mark()

        return note

    def _mark(self) -> _Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if pl_module.automatic_optimization or self._backward_begin is None:
            self._backward_begin = self._mark()
            self._ready.clear()

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._backward_end = self._mark()

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == self._step_before and pl_module.automatic_optimization:
            return  # in the middle of an accumulation window
        self._step_before = trainer.global_step
        end = self._mark()
        self._taken += 1
        if self._taken > self._warm and self._backward_begin is not None:
            self._marks.append((self._begin, self._backward_begin, self._backward_end, end, dict(self._ready)))
        self._begin = end
        self._open(end)
        if self._taken >= self._warm + self._steps:
            trainer.should_stop = True

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for handle in self._handles:
            handle.remove()

    def profile(self) -> BackwardProfile:
        """Return the typical step.

        Raises:
            ValueError: no step was measured.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if not self._marks:
            raise ValueError(
                f"No training step was measured: the data ends before step {self._warm + 1}, or training_step returns "
                "no loss."
            )
        params = [param for _, param in self._named]
        return profile_of(
            [name for name, _ in self._named],
            [tuple(param.shape) for param in params],
            [str(param.dtype).removeprefix("torch.") for param in params],
            [param.numel() * param.element_size() for param in params],
            [self._sample(*marks) for marks in self._marks],
        )

    def _sample(self, begin: _Mark, first: _Mark, last: _Mark, end: _Mark, ready: dict[int, _Mark]) -> StepSample:
        backward = seconds_between(first, last)
        times = tuple(
            min(seconds_between(first, ready[index]), backward) if index in ready else None
            for index in range(len(self._named))
        )
        return StepSample(times, seconds_between(begin, first), backward, seconds_between(last, end))


def seconds_between(first: _Mark, second: _Mark) -> float:
    """Return the time from one mark to another, which is not negative."""
    if isinstance(first, torch.cuda.Event):
        assert isinstance(second, torch.cuda.Event)
        return max(0.0, float(first.elapsed_time(second)) / 1e3)
    assert isinstance(second, float)
    return max(0.0, second - first)


def measure_compute(target: Target, steps: int, device: torch.device) -> BackwardProfile:
    """Train for a few steps on this process alone.

    Args:
        target: what to train.
        steps: how many to measure, after three to warm up.
        device: on what.

    Raises:
        ValueError: nothing could be measured.
    """
    module, data = target.make()
    if data is None and not _has_loader(module):
        raise ValueError(
            f"{type(module).__name__} has no train_dataloader: name its data by --data, by a --config with `data`, or "
            "give a function that makes a batch by --batch."
        )
    timer = BackwardTimer(steps)
    # Also under torchrun each process trains by itself here.
    trainer = Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=1 if device.type != "cuda" else [device.index or 0],
        strategy=SingleDeviceStrategy(device=device),
        max_steps=PLENTY,
        max_epochs=-1,
        callbacks=[timer],
        **QUIET,
        **target.trainer,
    )
    trainer.fit(module, **fit_arguments(data))
    return timer.profile()


QUIET: dict[str, Any] = {
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""Trainer arguments for a run that trains and does nothing else."""


def fit_arguments(data: Any) -> dict[str, Any]:
    """Return how `Trainer.fit` is given the data."""
    if data is None:
        return {}
    return {"train_dataloaders": data} if isinstance(data, torch.utils.data.DataLoader) else {"datamodule": data}


def _has_loader(module: LightningModule) -> bool:
    return type(module).train_dataloader is not LightningModule.train_dataloader
