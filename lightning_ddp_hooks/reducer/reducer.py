"""The gradient reducer: what wrappers and strategies call, and what the engine calls back.

hooks ---> engine ---> bucket_full ---> InFlightBuckets.launch ---> queue      (in bucket order, while backward goes on)
|
end of backward ----> BackwardEnd.finish: agree -> launch the rest -> wait -> copy out; then buckets may be planned anew
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_ddp_hooks import _compat, comm
from lightning_ddp_hooks.reducer.agreement import UnusedPolicy
from lightning_ddp_hooks.reducer.backend import engine_factory_on_all_ranks
from lightning_ddp_hooks.reducer.bucket_manager import BucketManager
from lightning_ddp_hooks.reducer.config import ReducerConfig
from lightning_ddp_hooks.reducer.end_of_backward import BackwardEnd
from lightning_ddp_hooks.reducer.in_flight import InFlightBuckets
from lightning_ddp_hooks.reducer.in_flight_bucket import BucketHook
from lightning_ddp_hooks.reducer.module_sync import Buffers, broadcast_tensors, check_same_on_all_ranks
from lightning_ddp_hooks.reducer.observer import BackwardObserver, GradientGuard
from lightning_ddp_hooks.reducer.parameters import WatchedParameters, check_parameters, claim, release, require_free
from lightning_ddp_hooks.reducer.queue import CollectiveQueue
from lightning_ddp_hooks.reducer.stream import require_no_capture
from lightning_ddp_hooks.reducer.synced_backwards import SyncedBackwards
from lightning_ddp_hooks.weak import weakly

# Looking through a large module for parameters that have changed takes as long as a small step, so it is done seldom.
_FORWARDS_PER_LOOK = 32


class Reducer(SyncedBackwards):
    """Averages the gradients of a module over the ranks of a group, bucket by bucket, during the backward.

    Construction is collective: ranks compare their models, make groups, and take rank 0's parameters (and buffers).

    Args:
        module: Module to train.
        config: Bucket sizes and modes.
        process_group: Ranks; None for all.
        policy: What a missing gradient means; by default an error, or allowed with ``find_unused_parameters``.
        skip_missing_loss: Whether a rank without a loss takes part with zeros, or makes all ranks skip the step.
        ends_steps: Whether `end_step` is called after each step, which shows if a rank ran fewer backwards than others.
        timeout: Timeout of the reducer's own groups; None for that of ``process_group``.
        agree_on: Further settings that must be the same on all ranks, by name.
        init_sync: Whether rank 0's parameters and buffers are sent to all; else they are only compared by shape.

    Attributes:
        failed: Whether this rank ends with an error, so that others may be anywhere.
        detached: Whether `detach` was called.
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
        init_sync: bool = True,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"Expected a torch.nn.Module, got {type(module).__name__}.")
        self.config = config if config is not None else ReducerConfig()
        self.parent_group = comm.resolve_group(process_group)
        self.timeout = timeout
        policy = policy or (UnusedPolicy.ALLOWED if self.config.find_unused_parameters else UnusedPolicy.FORBIDDEN)
        ignored = _compat.ignored_names(module)
        check_parameters(module)
        _compat.prepare_for_compiler("lightning_ddp_hooks")
        require_free([(name, param) for name, param in module.named_parameters() if name not in ignored])

        # Groups: nothing else uses them, so that their order of collectives is ours alone.
        self.group = comm.new_group(self.parent_group, timeout=timeout)
        self.control_group = comm.new_group(self.parent_group, cpu=True, timeout=timeout)
        self.world_size = comm.world_size(self.group)
        at_once = any(comm.is_stream_ordered(self.group, device) for device in {p.device for p in module.parameters()})
        self.queue = CollectiveQueue(self.group, at_once=at_once, timeout=timeout)
        self._in_flight = InFlightBuckets(self.queue, self.group)

        self.buffers = Buffers(module, ignored, self.group, broadcasts=self.config.broadcast_buffers)
        may_miss = policy is not UnusedPolicy.FORBIDDEN
        self._parameters = WatchedParameters(
            module, ignored, keeps_frozen=may_miss, on_unfrozen=weakly(self._unfrozen_ready)
        )
        tensors: list[tuple[str, Tensor]] = [*self._parameters.named(), *self.buffers.named().items()]
        check_same_on_all_ranks(tensors, {**self.config.settings(), **(agree_on or {})}, self.control_group)
        make_engine = engine_factory_on_all_ranks(self.config.reducer_backend, self.control_group)
        if init_sync:
            self.send_model()

        super().__init__()
        self.failed = False
        self.detached = False
        self._forwards = 0

        self._manager = BucketManager(
            self._parameters, self._in_flight, self.config, make_engine, self, may_miss=may_miss
        )
        self._end = BackwardEnd(
            self._manager,
            self._in_flight,
            self._parameters,
            self.buffers,
            self.group,
            self.control_group,
            policy=policy,
            static_graph=self.config.static_graph,
            skip_missing_loss=skip_missing_loss,
            ends_steps=ends_steps,
        )
        if self.world_size > 1:
            _compat.forget_other_graphs(module, self.bucket_bytes)
        claim((param for _, param in self._parameters.named()), self)

    @property
    def names(self) -> list[str]:
        """Names of the parameters whose gradients are reduced."""
        return self._parameters.names

    @property
    def params(self) -> list[nn.Parameter]:
        """Parameters whose gradients are reduced."""
        return self._parameters.params

    def set_hook(self, hook: BucketHook) -> None:
        """Have buckets reduced by ``hook`` instead of plain all-reduce."""
        if self._in_flight.has_hook:
            raise RuntimeError("A communication hook is already registered; it can be registered only once.")
        if self.synced_backwards or self._engine.active:
            raise RuntimeError("A communication hook must be registered before the first backward.")
        self.queue.hook, self._in_flight.has_hook = hook, True
        if self._end.uses_flags:
            # Only the flags tell which bucket is the last one, so one is kept back; and all of them where the hook may
            # block within a launch: it would wait for ranks that wait for this rank's flags.
            self._in_flight.postpones = sys.maxsize if hook.one_at_a_time else 1
        self._in_flight.select_launch_path()
        if self._manager.has_keys():
            self._manager.lay_out_initially()
        self._in_flight.apply_divisor()

    # ------------------------------------------------------------------ what the wrapper or strategy calls

    @property
    def observer(self) -> BackwardObserver | None:
        """Who is told of each backward; with one, buckets are launched from Python, also under the native engine."""
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
        """What looks at this rank's own gradients before they are sent; buckets are launched from Python then, too."""
        return self._in_flight.nonfinite

    @nonfinite.setter
    def nonfinite(self, guard: GradientGuard | None) -> None:
        self._in_flight.nonfinite = guard
        if not (self.detached or self._engine.active):
            self._in_flight.select_launch_path()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication in backwards under this context."""
        before = self.sync
        self.sync = False
        try:
            yield
        finally:
            self.sync = before

    def release_buckets(self) -> None:
        """Keep no memory for buckets until gradients are reduced again; between two backwards."""
        if not self._engine.active:
            self._manager.release()

    def before_forward(self, buffers_from: int = 0) -> None:
        """Finish what an earlier backward left behind, and refresh buffers; before each forward."""
        if self.params and torch.is_grad_enabled():
            require_no_capture(self.params[0].device)
        self.finalize_pending_backward(before_forward=True)
        self._forwards += 1
        if self._engine.recording or self._forwards % _FORWARDS_PER_LOOK == 0:
            self._look_at_structure()
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

    def settle_status(self) -> None:
        """Look at what an asynchronous device has left pending; collective, where ranks meet and the host waits anyway.

        That is before an evaluation, a checkpoint and the end of training. On the CPU nothing is ever pending.
        """
        if self.detached:
            return
        outcome = self._end.settle_status()
        if outcome.error is not None:
            raise outcome.error
        if outcome.resolution.relayout:
            self._manager.restart()

    def end_step(self) -> None:
        """End a training step whose backwards the user ran; a collective call, where `ends_steps` was set."""
        self.finalize_pending_backward()
        if self.sync and self.params:
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

    def shadow_backward(self, *, holds: bool) -> None:
        """Do this rank's part of one synced backward of the others, with zeros or with what was accumulated.

        Args:
            holds: Whether the others add to what the last synced backward has left in ``.grad``.
        """
        self.finalize_pending_backward()
        if not (holds or self.had_gradient()):
            for param in self.params:
                param.grad = None  # of a step long done
        with self.shadowing():
            self._open()
            self._finish()

    def used(self) -> bytes:
        """Return one byte for each parameter: 1 if it got a gradient since the last synced backward, else 0."""
        return self._engine.used()

    def had_gradient(self) -> bool:
        """Tell whether this rank got a gradient since the last synced backward."""
        return any(self._engine.used())

    def send_model(self, source: int = 0) -> None:
        """Give all ranks the parameters and buffers of one; collective."""
        tensors = [param for _, param in self._parameters.named()]
        broadcast_tensors([*tensors, *self.buffers.to_send()], self.group, source)
        self.buffers.changed()  # on all ranks alike

    @property
    def bucket_bytes(self) -> int:
        """Size at which a bucket is closed, in bytes."""
        return self._manager.limits()[1]

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
        """
        self.finalize_pending_backward()
        self._window_open = True
        before, expected, self.expects = self.synced_backwards, self.expects, True
        try:
            yield
        except BaseException as error:
            if self._engine.active or (self.sync and self.params and self.synced_backwards == before):
                self._note_aborted(f"{type(error).__name__}: {error}")
            raise
        finally:
            self._window_open = False
            self.expects = expected and not self._by_forward
        if self._engine.active:
            self._finish()
        elif self.sync and self.synced_backwards == before and self.params:
            if not self._end.shadowing:
                self._look_at_structure()  # a loss whose gradients all went elsewhere looks like no loss
            self.open_backward()
            self._finish()

    # ------------------------------------------------------------------ facts, end

    def stats(self) -> dict[str, object]:
        """Return facts about the reducer; names that torch's DDP logging data has mean the same here."""
        if self.detached:
            raise RuntimeError("The reducer has been detached.")
        return {
            "world_size": self.world_size,
            "rank": comm.rank(self.group),
            "iteration": self.synced_backwards,
            "backend": self._engine.backend,
            "comm_backend": comm.backend_name(self.group),
            **self._manager.facts(),
        }

    def detach(self) -> None:
        """Undo everything: remove hooks, free buckets and groups. Gradients stay, in memory of their own."""
        if self.detached:
            return
        self.detached = True
        _compat.note_graphs(self._parameters.module, self.bucket_bytes)
        if self._engine.active:
            self._give_up("detached")
        self._manager.close()
        self._parameters.close()
        release(self)
        # After an error other ranks may never join a collective that this one has begun; freeing its group would wait.
        if not (self.failed and (self.aborted_work or not comm.is_cpu_group(self.group))):
            self.queue.close()
            for group in (self.group, self.control_group):
                comm.destroy_group(group)
