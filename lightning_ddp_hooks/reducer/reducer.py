"""The gradient reducer: what wrappers and strategies call, and what the engine calls back.

hooks ---> engine ---> bucket_full ---> InFlightBuckets.launch ---> queue      (in bucket order, while backward goes on)
|
end of backward ----> BackwardEnd.finish: agree -> launch the rest -> wait -> copy out; then buckets may be planned anew
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_ddp_hooks import _compat, comm
from lightning_ddp_hooks.reducer.agreement import UnusedPolicy
from lightning_ddp_hooks.reducer.backend import EngineFactory, engine_factory
from lightning_ddp_hooks.reducer.bucket_manager import BucketManager
from lightning_ddp_hooks.reducer.config import ReducerConfig
from lightning_ddp_hooks.reducer.end_of_backward import BackwardEnd
from lightning_ddp_hooks.reducer.engine import Engine
from lightning_ddp_hooks.reducer.facts import bucket_facts
from lightning_ddp_hooks.reducer.in_flight import InFlightBuckets
from lightning_ddp_hooks.reducer.in_flight_bucket import BucketHook
from lightning_ddp_hooks.reducer.module_sync import Buffers, broadcast_tensors, check_same_on_all_ranks
from lightning_ddp_hooks.reducer.observer import BackwardObserver, GradientGuard
from lightning_ddp_hooks.reducer.parameters import WatchedParameters, check_parameters, claim, release, require_free
from lightning_ddp_hooks.reducer.queue import CollectiveQueue
from lightning_ddp_hooks.reducer.sparse import mean_sparse_or_dense

# Looking through a large module for parameters that have changed takes as long as a small step, so it is done seldom.
_FORWARDS_PER_LOOK = 32
_SOME_EXCEPTION = "an exception"


class Reducer:
    """Averages the gradients of a module over the ranks of a group, bucket by bucket, during the backward.

    Construction is collective: it compares the model over the ranks, makes the groups, and sends rank 0's parameters
    (and buffers) to all.

    Args:
        module: Module to train.
        config: Bucket sizes and modes.
        process_group: Ranks; None for all.
        policy: What a missing gradient means; by default an error, or allowed with ``find_unused_parameters``.
        skip_missing_loss: Whether a rank without a loss takes part with zeros, or makes all ranks skip the step.
        ends_steps: Whether `end_step` is called after each training step, so that ranks notice if one runs fewer
            backwards than others.
        timeout: Timeout of the reducer's own groups; None for that of ``process_group``.
        agree_on: Further settings that must be the same on all ranks, by name.

    Attributes:
        on_backward_begin: Called when a synced backward begins.
        synced_backwards: Number of synced backwards that have ended.
        skip_step: Whether all ranks are to skip the step of the last backward.
        failed: Whether this rank ends with an error, so that others may be anywhere.
        detached: Whether `detach` was called.
        aborted_work: Whether collectives were begun that nobody waits for any more.
        aborted_at: Where an aborted backward was: `progress` and `waits_for`; None while none is aborted.

    Raises:
        RuntimeError: The ranks' models or settings differ, or there is no process group.
        TypeError: ``module`` is not a module.
        ValueError: A parameter is not initialized, or has a reducer already.
    """

    # ------------------------------------------------------------------ construction

    def __init__(
        self,
        module: nn.Module,
        config: ReducerConfig | None = None,
        *,
        process_group: comm.ProcessGroup | None = None,
        policy: UnusedPolicy | None = None,
        skip_missing_loss: Literal["zeros", "all"] = "zeros",
        ends_steps: bool = False,
        timeout: timedelta | None = None,
        agree_on: Mapping[str, object] | None = None,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"Expected a torch.nn.Module, got {type(module).__name__}.")
        self.config = config if config is not None else ReducerConfig()
        self.parent_group = comm.resolve_group(process_group)
        self.timeout = timeout
        policy = policy or (UnusedPolicy.ALLOWED if self.config.find_unused_parameters else UnusedPolicy.FORBIDDEN)
        ignored = _compat.ignored_names(module)
        check_parameters(module)
        require_free([(name, param) for name, param in module.named_parameters() if name not in ignored])

        # Groups: nothing else uses them, so that their order of collectives is ours alone.
        self.group = comm.new_group(self.parent_group, timeout=timeout)
        self.control_group = comm.new_group(self.parent_group, cpu=True, timeout=timeout)
        self.world_size = comm.world_size(self.group)
        at_once = any(comm.is_stream_ordered(self.group, device) for device in {p.device for p in module.parameters()})
        self.queue = CollectiveQueue(self.group, at_once=at_once, timeout=timeout)
        self._in_flight = InFlightBuckets(self.queue, self.group)

        self.buffers = Buffers(module, ignored, self.group, broadcasts=self.config.broadcast_buffers)
        self._parameters = WatchedParameters(
            module,
            ignored,
            keeps_frozen=policy is not UnusedPolicy.FORBIDDEN,
            on_unfrozen=self._unfrozen_ready,
        )
        tensors: list[tuple[str, Tensor]] = list(self._parameters.named())
        if self.config.broadcast_buffers:
            tensors += [(name, b) for name, b in module.named_buffers() if name not in ignored]
        check_same_on_all_ranks(tensors, {**self.config.settings(), **(agree_on or {})}, self.control_group)
        make_engine = self._choose_engine()
        broadcast_tensors([*(param for _, param in self._parameters.named()), *self.buffers.now()], self.group)

        self.on_backward_begin: Callable[[], None] | None = None
        self.synced_backwards = 0
        self.skip_step = False
        self.failed = False
        self.detached = False
        self.aborted_work = False
        self.aborted_at: tuple[int, int, int, str] | None = None
        self._aborted: str | None = None  # the exception that has ended the backward that is still open
        self._unusable: str | None = None  # why ranks can go on no more
        self._window_open = False
        self._forwards = 0

        self._manager = BucketManager(
            self._parameters,
            self._in_flight,
            self.config,
            make_engine,
            self,
            may_miss=policy is not UnusedPolicy.FORBIDDEN,
        )
        self._end = BackwardEnd(
            self._manager,
            self._in_flight,
            self._parameters,
            self.group,
            self.control_group,
            policy=policy,
            static_graph=self.config.static_graph,
            skip_missing_loss=skip_missing_loss,
            ends_steps=ends_steps,
        )
        claim((param for _, param in self._parameters.named()), self)

    @property
    def names(self) -> list[str]:
        """Names of the parameters whose gradients are reduced."""
        return self._parameters.names

    @property
    def params(self) -> list[nn.Parameter]:
        """Parameters whose gradients are reduced."""
        return self._parameters.params

    @property
    def _engine(self) -> Engine:
        return self._manager.engine

    def _choose_engine(self) -> EngineFactory:
        """Choose the engine, alike on all ranks or not; collective where choosing can fail."""
        backend = self.config.reducer_backend
        if backend != "native":
            return engine_factory(backend, say=comm.rank(self.group) == 0)
        factory, failure = None, None
        try:
            factory = engine_factory(backend)
        except RuntimeError as error:
            failure = error
        comm.raise_on_any_rank(failure, self.control_group)
        assert factory is not None
        return factory

    def set_hook(self, hook: BucketHook) -> None:
        """Have buckets reduced by ``hook`` instead of the plain mean.

        Raises:
            RuntimeError: A second call, or one after the first backward.
        """
        if self._in_flight.has_hook:
            raise RuntimeError("A communication hook is already registered; it can be registered only once.")
        if self.synced_backwards or self._engine.active:
            raise RuntimeError("A communication hook must be registered before the first backward.")
        self.queue.hook, self._in_flight.has_hook = hook, True
        # One that blocks within a launch would wait for ranks that wait for its rank's flags.
        self._in_flight.postpones = hook.one_at_a_time and self._end.uses_flags
        self._in_flight.select_launch_path()
        if self._manager.has_keys():
            self._manager.lay_out_initially()
        self._in_flight.apply_divisor()

    # ------------------------------------------------------------------ what the wrapper or strategy calls

    @property
    def observer(self) -> BackwardObserver | None:
        """Who is told of each backward; None by default.

        With an observer buckets are launched from Python, also under the native engine; the results are the same.
        """
        return self._in_flight.observer

    @observer.setter
    def observer(self, observer: BackwardObserver | None) -> None:
        if observer is not None and self._engine.active:
            raise RuntimeError("An observer can be set only between two backwards.")
        self._in_flight.observer = observer
        # One may leave at any time, such as when an error has ended a backward, whose buckets stay what they are.
        if not (self.detached or self._engine.active):
            self._in_flight.select_launch_path()

    @property
    def nonfinite(self) -> GradientGuard | None:
        """What looks at this rank's own gradients before they are sent; None by default.

        With it buckets are launched from Python, also under the native engine.
        """
        return self._in_flight.nonfinite

    @nonfinite.setter
    def nonfinite(self, guard: GradientGuard | None) -> None:
        self._in_flight.nonfinite = guard
        if not (self.detached or self._engine.active):
            self._in_flight.select_launch_path()

    @property
    def sync(self) -> bool:
        """Whether the next backward reduces gradients, or only accumulates them."""
        return self._engine.sync

    @sync.setter
    def sync(self, value: bool) -> None:
        self._engine.sync = value

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication in backwards under this context."""
        before = self.sync
        self.sync = False
        try:
            yield
        finally:
            self.sync = before

    def before_forward(self, buffers_from: int = 0) -> None:
        """Finish what an earlier backward left behind, and refresh buffers; before each forward.

        Args:
            buffers_from: Rank whose buffers are taken.
        """
        self.finalize_pending_backward()
        self._forwards += 1
        if self._engine.recording or self._forwards % _FORWARDS_PER_LOOK == 0:
            self._look_at_structure()
        self._parameters.watch_unfrozen()
        if self.buffers.refresh_due:
            self.buffers.refresh(buffers_from)

    def _look_at_structure(self) -> None:
        """Notice parameters that were added or replaced; before the buckets are laid out, begin anew with them."""
        idle = not (self._engine.active or any(self._engine.used()))
        if self._parameters.look(may_begin_anew=self._engine.recording and idle):
            self._manager.restart()

    def _unfrozen_ready(self) -> None:
        if self._engine.sync and not self._engine.active:
            self.open_backward()
        if self._engine.sync and not self._engine.callback_queued:
            self._engine.queue_callback()

    def finalize_pending_backward(self) -> None:
        """Bring a backward that is still open to its end, also one that an exception has ended; collective.

        Raises:
            RuntimeError: Gradients are missing in a way that the policy forbids, or an exception has ended the backward
                of some ranks only.
        """
        if _compat.current_backward_id() != -1:
            return  # a forward within a backward (checkpointing)
        self._notice_aborted()
        if self._aborted is not None:
            self._finish(self._aborted)
        elif self._engine.active:
            self._finish()

    def settle_status(self) -> None:
        """Look at what an asynchronous device has left pending; where all ranks meet and the host waits. Collective.

        To be called before an evaluation, a checkpoint and the end of training. On the CPU nothing is ever pending.

        Raises:
            RuntimeError: Gradients were missing in the last backward in a way that the policy forbids.
        """
        if self.detached:
            return
        outcome = self._end.settle_status()
        if outcome.error is not None:
            raise outcome.error
        if outcome.resolution.relayout:
            self._manager.restart()

    def end_step(self) -> None:
        """End a training step whose backwards the user ran; a collective call, where `ends_steps` was set.

        Raises:
            RuntimeError: Other ranks are in a further backward of theirs.
        """
        self.finalize_pending_backward()
        if self._engine.sync and self.params:
            self._end.end_step()

    @contextmanager
    def shadowing(self, shadowing: bool = True) -> Iterator[None]:
        """Let this rank do its part of backwards for which it has no data (if so).

        What lies in ``.grad`` is sent. A rank that has accumulated nothing since the last synced backward counts as
        absent: no gradient is missed from it, and its missing loss makes nobody skip the step.
        """
        self._end.shadowing = shadowing
        try:
            yield
        finally:
            self._end.shadowing = False

    def shadow_backward(self) -> None:
        """Do this rank's part of one synced backward of the others, with zeros or with what was accumulated."""
        self.finalize_pending_backward()
        if not any(self._engine.used()):
            for param in self.params:
                param.grad = None  # of a step long done
        with self.shadowing():
            self._open()
            self._finish()

    def had_gradient(self) -> bool:
        """Tell whether this rank got a gradient since the last synced backward."""
        return any(self._engine.used())

    def forget_use(self) -> None:
        """Begin a new accumulation window: gradients that came so far were used up without being reduced."""
        self._engine.forget_use()
        self._parameters.forget_use()

    @property
    def divisor(self) -> float:
        """What sums over ranks are divided by; the number of ranks by default."""
        return self._in_flight.divisor

    def set_divisor(self, divisor: float) -> None:
        """Set what sums over ranks are divided by; before the first gradient of a backward comes."""
        if divisor != self.divisor:
            self._in_flight.divisor = divisor
            self._in_flight.apply_divisor()

    @contextmanager
    def backward_window(self) -> Iterator[None]:
        """Surround the code that runs one step's backward, in whatever way and even if there is none.

        At the end all gradients are reduced; a rank that had nothing to reduce does its part with zeros.

        Raises:
            RuntimeError: Gradients are missing in a way that the policy forbids.
        """
        self.finalize_pending_backward()
        self._window_open = True
        before = self.synced_backwards
        try:
            yield
        except BaseException as error:
            if self._engine.active or (self._engine.sync and self.params and self.synced_backwards == before):
                self._note_aborted(f"{type(error).__name__}: {error}")
            raise
        finally:
            self._window_open = False
        if self._engine.active:
            self._finish()
        elif self._engine.sync and self.synced_backwards == before and self.params:
            if not self._end.shadowing:
                self._look_at_structure()  # a loss whose gradients all went elsewhere looks like no loss
            self.open_backward()
            self._finish()

    def watch_backward_of(self, outputs: Sequence[Tensor]) -> None:
        """Learn of the end of the outermost backward through ``outputs``, also with re-entrant checkpointing."""
        self._engine.watch(outputs)

    # ------------------------------------------------------------------ what the engine calls

    def open_backward(self) -> None:
        """Prepare for a synced backward, whose first gradient has come."""
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
        if self.observer is not None:
            self.observer.backward_opened()
        self._in_flight.start()
        self._engine.start()

    def bucket_full(self, index: int) -> None:
        """Launch a bucket that is full."""
        try:
            self._in_flight.bucket_full(index)
        except Exception as error:  # a hook's; what it has sent and not sent is not known
            self._note_unusable(f"{type(error).__name__}: {error}")
            raise

    def backward_ended(self) -> None:
        """End the backward, unless it goes on in an enclosing backward or in the rest of the window."""
        if not self._engine.active:
            return
        if self._end.complete or not (self._window_open or _compat.backward_is_nested()):
            self._finish()

    def backward_aborted(self) -> None:
        """Finish a backward that an exception has ended, before another one goes on without a forward between them."""
        self._notice_aborted()
        if self._aborted is not None:
            self._finish(self._aborted, keeps_gradients=True)

    # ------------------------------------------------------------------ the end of a backward

    def _notice_aborted(self) -> None:
        engine = self._engine
        if engine.callback_queued or engine.aborted:  # an exception has dropped the callback, or is about to
            engine.callback_queued = engine.aborted = False
            if engine.active and self._aborted is None:
                self._note_aborted(_SOME_EXCEPTION)

    def _note_aborted(self, error: str) -> None:
        engine = self._engine
        engine.callback_queued = engine.aborted = False
        self._aborted = error
        if engine.active:
            self.aborted_at = (*self.progress(), self.waits_for())

    def _finish(self, aborted: str | None = None, *, keeps_gradients: bool = False) -> None:
        self._require_usable()
        try:
            if aborted is not None and not self._engine.active:
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
        self.forget_use()
        self._aborted = None
        self.synced_backwards += 1
        self.buffers.changed()
        self.skip_step = resolution.skip_step
        if resolution.discard and not keeps_gradients:
            for param in self.params:
                param.grad = None
        if aborted is not None and self.nonfinite is not None:
            self.nonfinite.forget()
        if self.observer is not None:
            (self.observer.backward_finished if aborted is None else self.observer.backward_aborted)()
        if outcome.error is not None:
            raise outcome.error
        if resolution.relayout:
            self._reduce_unfrozen()
            self._manager.restart()
        elif recorded and not resolution.discard:
            self._manager.conclude(own_fired, self.group, self.control_group)

    def _reduce_unfrozen(self) -> None:
        """Reduce by itself, this once, what has been unfrozen and is not watched yet; the same on all ranks."""
        for name, param in self._parameters.fresh():
            has = torch.tensor([int(param.grad is not None)], dtype=torch.int32)
            comm.all_reduce(has, self.control_group).wait()
            if has and self.nonfinite is not None and param.grad is not None:
                self.nonfinite.look_at(name, param.grad)
            if has:
                sparse = self._manager.expects_sparse(param)
                param.grad = mean_sparse_or_dense(param.grad, param, self.divisor, self.group, sparse=sparse)

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
        self._aborted = None
        self._engine.stop()
        self._engine.callback_queued = self._engine.aborted = False
        self.forget_use()
        self._in_flight.forget()
        if self.nonfinite is not None:
            self.nonfinite.forget()
        if self.observer is not None:
            self.observer.backward_aborted()

    # ------------------------------------------------------------------ facts, end

    def stats(self) -> dict[str, object]:
        """Return facts about the reducer; names that torch's DDP logging data has mean the same here.

        Returns:
            ``world_size``, ``iteration`` (synced backwards), ``backend`` (of the hot path), ``comm_backend``,
            ``bucket_cap_bytes``, ``first_bucket_bytes``, ``bucket_sizes`` (bytes of each bucket in use),
            ``bucket_param_indices``, ``num_parameter_tensors``, ``total_parameter_size_bytes``,
            ``gradient_as_bucket_view``, ``find_unused_parameters``, ``static_graph``, ``broadcast_buffers``,
            ``has_rebuilt_buckets``, and after a rebuild ``rebuilt_bucket_sizes``, ``rebuilt_per_bucket_param_indices``
            and ``prev_iteration_grad_ready_order_indices``.
        """
        if self.detached:
            raise RuntimeError("The reducer has been detached.")
        recorder = self._manager.recorder
        return {
            "world_size": self.world_size,
            "rank": comm.rank(self.group),
            "iteration": self.synced_backwards,
            "backend": self._engine.backend,
            "comm_backend": comm.backend_name(self.group),
            **bucket_facts(
                self.config,
                self._manager.limits(),
                self._manager.layouts(),
                self.params,
                recorder.order if recorder.done else None,
            ),
        }

    def progress(self) -> tuple[int, int, int]:
        """Say how far it has come; from any thread, so that it may be out of date.

        Returns:
            The number of ended synced backwards; of the backward that is open, how many buckets were sent, and how many
            there are (0 while none is open).
        """
        if not self._engine.active:
            return self.synced_backwards, 0, 0
        return self.synced_backwards, self._in_flight.sent, len(self._in_flight.buckets)

    def waits_for(self) -> str:
        """Say which buckets the open backward waits for; from any thread, so that it may be out of date."""
        return self._in_flight.waits_for() if self._engine.active else ""

    def detach(self) -> None:
        """Undo everything: remove hooks, free buckets and groups. Gradients stay, in memory of their own."""
        if self.detached:
            return
        self.detached = True
        if self._engine.active:
            self._give_up("detached")
        self._manager.close()
        self._parameters.close()
        release(self)
        # After an error other ranks may never join a collective that this one has begun; freeing its group would wait.
        if not (self.failed and (self.aborted_work or comm.backend_name(self.group) != "gloo")):
            self.queue.close()
            for group in (self.group, self.control_group):
                comm.destroy_group(group)
