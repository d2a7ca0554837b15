"""A hook's memory follows the scale of the loss: from the first backward in the new scale, and read without waiting."""

from typing import Any

import pytest
import torch

from lightning_ddp_hooks import _compat
from lightning_ddp_hooks.hooks.contract import BoundHook
from lightning_ddp_hooks.run_hook import RunHook


class Memory(BoundHook):
    def __init__(self) -> None:
        self.factors: list[float] = []

    def reduce(self, bucket: Any) -> Any:
        raise NotImplementedError

    def rescale(self, factor: float) -> None:
        self.factors.append(factor)


class NoMemory(BoundHook):
    def reduce(self, bucket: Any) -> Any:
        raise NotImplementedError


def make_hook(bound: BoundHook, scaler: Any, restored: dict[str, Any] | None = None) -> RunHook:
    hook = RunHook(None, None, scaler, restored, lambda: 0, pytest.fail)  # type: ignore[arg-type]
    hook.bound = bound
    return hook


def make_scaler(monkeypatch: pytest.MonkeyPatch, scale: float) -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(torch.ones(()))  # from now on the scale is a tensor
    monkeypatch.setattr(scaler, "get_scale", lambda: pytest.fail("waits for the device"))
    return scaler


def test_the_memory_is_rescaled_before_the_first_backward_in_the_new_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, scaler = Memory(), make_scaler(monkeypatch, 4.0)
    hook = make_hook(memory, scaler, {"loss_scale": 4.0})
    hook.note_loss_scale()
    hook.follow_loss_scale()
    assert memory.factors == []

    scaler.update(new_scale=8.0)
    hook.note_loss_scale()
    assert (memory.factors, hook.loss_scale) == ([], 4.0)  # what a checkpoint saved now says of the memory is right
    hook.follow_loss_scale()
    hook.follow_loss_scale()
    assert (memory.factors, hook.loss_scale) == ([2.0], 8.0)


def test_without_a_scaler_memory_from_a_scaled_run_is_scaled_back_at_once() -> None:
    memory = Memory()
    hook = make_hook(memory, None, {"loss_scale": 4.0})
    hook.note_loss_scale()
    assert (memory.factors, hook.loss_scale) == ([0.25], 1.0)


def test_a_scale_that_nobody_needs_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compat, "loss_scale", lambda _: pytest.fail("read"))
    make_hook(NoMemory(), object()).note_loss_scale()
