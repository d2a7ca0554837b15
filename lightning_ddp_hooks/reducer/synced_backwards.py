r"""The life of a synced backward: opened by its first gradient, finished on all ranks, aborted, or given up.

open_backward -> bucket_full, bucket_full, ... -> backward_ended      all ranks have the mean
\--- gradients missing, and an output left whose backward may bring them: it stays open until that, or a step
\--- an exception: noted (by the window, or by the callback that autograd drops), and finished with zeros by
|    whatever begins next (forward, window, gradient): all ranks drop their gradients, or raise if some had none
\--- communication fails: given up; the ranks' collectives match no more, so that no further one may begin

[Note: which backwards are synced] Those that `sync` and `expects` allow. A reducer by itself expects a backward at any
time, a Trainer's in its steps. A wrapper's forward makes it expect one, until it has ended; beyond that it expects each
backward that comes through an output of such a forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_ddp_hooks import _compat, comm
from lightning_ddp_hooks.reducer.autograd_hooks import OutputHooks
from lightning_ddp_hooks.reducer.backend import Engine
from lightning_ddp_hooks.reducer.bucket_manager import BucketManager
from lightning_ddp_hooks.reducer.end_of_backward import BackwardEnd
from lightning_ddp_hooks.reducer.in_flight import InFlightBuckets
from lightning_ddp_hooks.reducer.parameters import WatchedParameters
from lightning_ddp_hooks.reducer.stream import require_no_capture


class SyncedBackwards:
    """The part of `Reducer` that opens and ends synced backwards; what engines call.

    Attributes:
        on_backward_begin: Called when a synced backward begins.
        on_backward_end: Called when a synced backward has ended without an error.
        synced_backwards: Number of synced backwards that have ended.
        skip_step: Whether all ranks are to skip the step of the last backward.
        aborted_work: Whether collectives were begun that nobody waits for any more.
        aborted_at: Where an aborted backward was: `progress` and `waits_for`; None while none is aborted.
    """

    world_size: int
    group: comm.ProcessGroup
    control_group: comm.ProcessGroup
    _parameters: WatchedParameters
    _in_flight: InFlightBuckets
    _manager: BucketManager
    _end: BackwardEnd

    def __init__(self) -> None:
        self.on_backward_begin: Callable[[], None] | None = None
        self.on_backward_end: Callable[[], None] | None = None
        self.synced_backwards = 0
        self.skip_step = False
        self.aborted_work = False
        self.aborted_at: tuple[int, int, int, str] | None = None
        self._aborted: str | None = None  # the exception that has ended the backward that is still open
        self._unusable: str | None = None  # why ranks can go on no more
        self._window_open = False
        self._sync = self._expects = True
        self._by_forward = False  # each forward says anew that a backward is expected
        self._outputs = OutputHooks(self._backward_comes)
        self._came_through_outputs = False  # the backward whose end will be told
        self._backward: int | None = None  # its number, if it came through outputs
        self._stays_open: bool | None = None  # None: it never has, so that no optimizer's step is watched

    @property
    def _engine(self) -> Engine:
        return self._manager.engine

    # ------------------------------------------------------------------ which backwards, see the note

    @property
    def sync(self) -> bool:
        """Whether backwards reduce gradients, or only accumulate them."""
        return self._sync

    @sync.setter
    def sync(self, value: bool) -> None:
        self._sync = value
        self._engine.sync = self._sync and self._expects

    @property
    def expects(self) -> bool:
        """Whether a backward that begins now is one of those that `sync` is about; others stay on this rank."""
        return self._expects

    @expects.setter
    def expects(self, value: bool) -> None:
        self._expects = value
        self._engine.sync = self._sync and self._expects

    def expect_backward_of(self, outputs: Sequence[Tensor]) -> None:
        """Expect a backward, and each one that comes through ``outputs``."""
        self._by_forward = self.expects = True
        self._outputs.watch(outputs)

    def _backward_comes(self) -> None:
        engine, backward = self._engine, _compat.current_backward_id()
        # A device's thread may be yet to let go of the callback of a backward that an exception has ended.
        is_dead = engine.callback_queued and self._backward not in (None, backward)
        if not engine.callback_queued or (is_dead and not _compat.backward_is_nested()):
            self.backward_aborted()
            engine.queue_callback()
            self._came_through_outputs, self._backward = True, backward
        engine.sync = True

    # ------------------------------------------------------------------ what engines call

    def open_backward(self) -> None:
        """Prepare for a synced backward, whose first gradient has come."""
        if self._parameters.params:
            require_no_capture(self._parameters.params[0].device)
        if torch.is_grad_enabled() and _compat.current_backward_id() != -1:
            raise RuntimeError(
                "backward(create_graph=True) cannot be reduced over ranks: the mean of gradients is not part of the "
                "graph. Compute the inner gradient with torch.autograd.grad(..., create_graph=True), or run this "
                "backward under no_sync()."
            )
        if self.on_backward_begin is not None:
            self.on_backward_begin()
        self._open()

    def _open(self) -> None:
        self._require_usable()
        self.aborted_at = None
        # Not before: until now gradients may have lain in the old buckets, and most are gone when new ones come.
        self._manager.use_planned()
        if self._in_flight.observer is not None:
            self._in_flight.observer.backward_opened()
        self._in_flight.start()
        self._engine.start()

    def bucket_full(self, index: int) -> None:
        """Launch a bucket that is full."""
        try:
            self._in_flight.bucket_full(index)
        except Exception as error:  # a hook's; what it has sent and not sent is not known
            self._note_unusable(f"{type(error).__name__}: {error}")
            raise

    def backward_ended(self) -> bool:
        """End the backward, unless it goes on in the window, in an enclosing backward (True), or in a later one.

        What comes through the outputs of a forward has all come at the end of that backward, also where both run inside
        another one (a checkpointed wrapper). A gradient alone may come in a backward that runs inside the whole.
        """
        through_outputs, self._came_through_outputs, self._backward = self._came_through_outputs, False, None
        if not self._engine.active:
            self.expects = self._expects  # no gradient has come through the outputs
        elif self._end.complete:
            self._finish()
        elif not self._window_open:
            if not through_outputs and _compat.backward_is_nested():
                return True
            if self._outputs.more_may_come and self._end.lacks_gradients:
                self._stay_open()
            else:
                self._finish()
        return False

    def _stay_open(self) -> None:
        """Wait for a backward through the other outputs; an optimizer's step or the next forward ends the wait."""
        if self._stays_open is None:
            own = weakref.ref(self)

            def before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
                if (reducer := own()) is not None and reducer._stays_open:
                    watched = {id(param) for param in reducer._parameters.params}
                    if any(id(param) in watched for group in optimizer.param_groups for param in group["params"]):
                        reducer.finalize_pending_backward()

            weakref.finalize(self, register_optimizer_step_pre_hook(before_step).remove).atexit = False
        self._stays_open = True

    def finalize_pending_backward(self, *, before_forward: bool = False) -> None:
        """Bring a backward that is still open to its end, also one that an exception has ended; collective."""
        if _compat.current_backward_id() != -1:
            return  # a forward within a backward (checkpointing)
        if before_forward and self._stays_open and not torch.is_grad_enabled():
            return  # an evaluation between the backwards of two outputs
        self._notice_aborted()
        if self._engine.active or self._aborted is not None:
            self._finish(self._aborted)

    def backward_aborted(self) -> None:
        """Finish a backward that an exception has ended, before another one goes on without a forward between them."""
        self._notice_aborted()
        if self._aborted is not None:
            self._finish(self._aborted, keeps_gradients=True)

    def _notice_aborted(self) -> None:
        engine = self._engine
        if engine.take_aborted() and (engine.active or engine.sync) and self._aborted is None:
            self._note_aborted("an exception")

    def _note_aborted(self, error: str) -> None:
        self._engine.take_aborted()
        self._aborted = error
        if self._engine.active:
            self.aborted_at = (*self.progress(), self.waits_for())

    def _finish(self, aborted: str | None = None, *, keeps_gradients: bool = False) -> None:
        self._require_usable()
        try:
            if aborted is not None and not self._engine.active:
                if self.on_backward_begin is not None:
                    self.on_backward_begin()
                self._open()
            with _compat.span("ldh::finish"), torch.no_grad():
                self._finish_backward(aborted, keeps_gradients=keeps_gradients)
        except BaseException as error:
            if self._engine.active:  # it was not brought to its end
                self._give_up(f"{type(error).__name__}: {error}")
            raise

    def _finish_backward(self, aborted: str | None, *, keeps_gradients: bool) -> None:
        engine = self._engine
        self.skip_step = False
        recorded, own_fired = engine.recording, engine.fired() if engine.recording else []  # before buckets may change
        outcome = self._end.finish(aborted)
        resolution = outcome.resolution
        self._in_flight.forget()
        engine.stop()
        self._let_go()
        self.synced_backwards += 1
        self.skip_step = resolution.skip_step
        if resolution.discard and not keeps_gradients:
            for param in self._parameters.params:
                param.grad = None
        if aborted is not None and self._in_flight.nonfinite is not None:
            self._in_flight.nonfinite.forget()
        if self._in_flight.observer is not None:
            observer = self._in_flight.observer
            (observer.backward_finished if aborted is None else observer.backward_aborted)()
        if outcome.error is not None:
            raise outcome.error
        if resolution.relayout:
            self._end.reduce_unfrozen()
            self._manager.restart()
        elif recorded and not resolution.discard:
            self._manager.conclude(own_fired, self.group, self.control_group)
        if self.on_backward_end is not None:
            self.on_backward_end()

    def _note_unusable(self, error: str) -> None:
        if self.world_size > 1:  # one rank alone cannot part ways with anybody
            self._unusable = self._unusable or error

    def _require_usable(self) -> None:
        if self._unusable is not None:
            raise RuntimeError(
                "The ranks cannot go on: in an earlier backward the communication of gradients broke off "
                f"({self._unusable}), so that their collectives do not match any more. Resume from a checkpoint."
            )

    def _give_up(self, error: str) -> None:
        """Leave a backward whose communication has failed; nothing that it has sent is waited for."""
        if self._engine.active:
            self.aborted_at = (*self.progress(), self.waits_for())
        self.aborted_work |= self._in_flight.under_way
        self._note_unusable(error)
        self._engine.stop()
        self._engine.take_aborted()
        self._let_go()
        self._in_flight.forget()
        if self._in_flight.nonfinite is not None:
            self._in_flight.nonfinite.forget()
        if self._in_flight.observer is not None:
            self._in_flight.observer.backward_aborted()

    def _let_go(self) -> None:
        self._aborted = None
        self._outputs.forget()
        self._came_through_outputs, self._backward = False, None
        self._stays_open = self._stays_open and False
        self.expects = self._expects and not self._by_forward
        self.forget_use()

    def forget_use(self) -> None:
        """Begin a new accumulation window: gradients that came so far were used up without being reduced."""
        self._engine.forget_use()
        self._parameters.forget_use()

    def progress(self) -> tuple[int, int, int]:
        """Count ended synced backwards, then of the open one the buckets sent and all buckets (0 while none is open).

        From any thread, so that it may be out of date.
        """
        if not self._engine.active:
            return self.synced_backwards, 0, 0
        return self.synced_backwards, self._in_flight.sent, len(self._in_flight.buckets)

    def waits_for(self) -> str:
        """Say which buckets the open backward waits for; from any thread, so that it may be out of date."""
        return self._in_flight.waits_for() if self._engine.active else ""
