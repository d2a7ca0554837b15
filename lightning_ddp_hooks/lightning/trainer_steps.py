"""The steps of a Trainer's loop as verbs of a training run, in automatic and in manual optimization.

begin -> the user's training_step, in `user_step` -> end
weighted -> with backward(...): the precision plugin's backward      in manual optimization within the user's step
optimizer_step

Gradients of a backward elsewhere (in a callback, in validation) stay on the rank: the reducer expects one in a manual
step, and from `backward` to the end of `optimizer_step`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.config import FitSettings
from lightning_ddp_hooks.join.samples import sample_counter
from lightning_ddp_hooks.lightning.no_sync import give_no_sync
from lightning_ddp_hooks.lightning.uneven.inputs import Inputs
from lightning_ddp_hooks.reducer.weights import AccumulationWindow
from lightning_ddp_hooks.run import SkipStepError, TrainingRun, skippable_step

if TYPE_CHECKING:
    import lightning.pytorch as pl


class TrainerSteps:
    """Runs the training steps of one fit."""

    def __init__(self, run: TrainingRun, inputs: Inputs, settings: FitSettings, *, device: torch.device) -> None:
        self._run = run
        self._reducer = run.reducer
        self._inputs = inputs
        self._manual = settings.manual
        self._trainer: pl.Trainer = run.module.trainer  # type: ignore[assignment]
        self._count = sample_counter(run.module, '`gradient_weighting="samples"`')
        self._device = device
        self._missing_loss = self._accumulates = False
        self._window = AccumulationWindow() if settings.exact_windows and not settings.manual else None
        self._before = (0, 0)
        self._take_no_sync = give_no_sync(run.module, self.accumulating)

    def close(self) -> None:
        """Leave the module as it was."""
        self._take_no_sync()

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Accumulate gradients without communication, in the tail of uneven inputs too."""
        self._accumulates = True
        try:
            with self._reducer.no_sync():
                yield
        finally:
            self._accumulates = False

    def begin(self, batch: Any) -> None:
        """Prepare for the user's step on a batch; collective."""
        if self._inputs.tail is not None and not self._accumulates:
            # Also where replicas train for themselves: one without data follows those that have some.
            self._reducer.sync = True
        self._run.before_forward()
        if self._run.weights is not None:
            self._run.weights.post(partial(self._count, batch))
        self._before = (self._reducer.synced_backwards, self._run.windowed_backwards)

    def user_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the user's step, and what all ranks that run it do at its end, before anything else collective."""
        self._reducer.expects = self._manual
        with self._run.graphs_by_bucket():
            output = step(*args, **kwargs)
        if self._manual:
            self._reducer.end_step()
            self._reducer.expects = False
        return output

    def end(self, output: Any) -> Any:
        """Take what the user's step returned, and return what Lightning is to see; collective."""
        if self._reducer.sync:
            self._reducer.buffers.changed()
        if (tail := self._inputs.tail) is not None:
            self._reducer.buffers.refresh(tail.first)
        if self._manual:
            self._end_manual_step()
        elif output is None:
            # Lightning refuses None on several ranks; a constant stands for it until the ranks have agreed.
            self._missing_loss = True
            return torch.zeros((), device=self._device, requires_grad=True)
        return output

    def _end_manual_step(self) -> None:
        run, (synced, windowed), uneven = self._run, self._before, self._inputs.uneven
        by_hand = self._reducer.synced_backwards - synced > run.windowed_backwards - windowed
        if by_hand or run.trains_alone:
            run.check_gradients()
        run.step_ended()
        if by_hand and (uneven or run.weights is not None):
            cause = '`gradient_weighting="samples"` scales' if not uneven else "UnevenInputs scales"
            raise RuntimeError(
                f"{cause} the loss in `manual_backward`; with `loss.backward()` it would have no effect. Call "
                "`self.manual_backward(loss)` instead."
            )

    def weighted(self, loss: Tensor) -> Tensor:
        """Return the loss scaled by this rank's weight; at the end of a window what came before is scaled too."""
        weights = self._run.weights
        factor = self._inputs.factor() if weights is None else weights.factor()
        if self._window is not None:
            trainer = self._trainer
            if trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0:
                self._window.begin()
            held = self._inputs.held() if weights is None else weights.total()
            of_loss, of_gradients = self._window.add(held, trainer.accumulate_grad_batches, last=not self._accumulates)
            factor *= of_loss
            self._scale_gradients(of_gradients)
        return loss if factor == 1.0 else loss * factor

    @torch.no_grad()
    def _scale_gradients(self, factor: float) -> None:
        gradients = () if factor == 1.0 else (param.grad for param in self._run.module.parameters())
        for gradient in gradients:
            if gradient is not None:
                gradient.mul_(factor)

    @contextmanager
    def backward(self, loss: Tensor) -> Iterator[bool]:
        """Surround the backward of a loss; gives whether it is to be run, or this rank takes part without."""
        missing, self._missing_loss = self._missing_loss, False
        joined = self._inputs.joined
        constant = not (missing or joined or loss.requires_grad)
        if constant:
            warnings.warn(
                f"The loss of rank {comm.rank(self._reducer.group)} does not depend on any parameter that requires a "
                "gradient; the rank takes part in the step without gradients.",
                stacklevel=4,
            )
        with self._run.backward(joined=joined):
            yield not (missing or constant or joined)
        if not self._manual:
            self._reducer.expects = self._reducer.sync  # until the optimizer steps, if it does

    def optimizer_step(self, perform: Callable[[Callable[[], Any]], Any], closure: Callable[[], Any]) -> Any:
        """Make an optimizer's step by ``perform(closure)``; in automatic optimization it ends the training step."""
        run = self._run
        self._reducer.finalize_pending_backward()
        if self._manual:
            if run.trains_alone:
                run.look_at_gradients()  # the backward may have been the user's own
            output = perform(closure)
            run.hook.note_loss_scale()
            return output

        def closure_that_may_skip() -> Any:
            result = closure()
            if self._reducer.skip_step:
                raise SkipStepError
            return result

        output = None
        with skippable_step([run]), run.stepping():
            output = perform(closure_that_may_skip)
        self._reducer.expects = False
        run.hook.note_loss_scale()
        run.step_ended()
        return output
