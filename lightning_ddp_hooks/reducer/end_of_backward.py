"""The end of a synced backward: ranks agree, what remains is launched, all is waited for and copied out.

    finish -> agree -> launch the rest -> wait -> copy out -> (raise, on all ranks alike)

Ranks must issue the same collectives although a rank may lack gradients. There are three forms of agreement, and all
ranks are in the same one:
  * **recording** (the first backward, and after a change of the trainable set): nothing was launched; ranks exchange
    full reports first, and in the first one compare what the hook does.
  * **status** (automatic optimization): all buckets are sent, missing gradients as zeros; a status of two numbers
    travels with the last bucket (status.py, which says when it is looked at), and only if it shows a mismatch ranks
    exchange reports.
  * **flags** (manual optimization, ``find_unused_parameters=True``, ``skip_missing_loss="all"``): hosts sum one flag
    for each parameter over a CPU group before the remaining buckets are sent, so that a bucket that nobody used is not
    sent. Hosts wait for each other here, but not for their devices.

Whatever the ranks find, every launched bucket is completed on all of them before an error is raised, so that nothing is
in flight behind it. A rank whose backward an exception has ended does its part with zeros, and says so.
"""

from __future__ import annotations

import warnings
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.reducer.agreement import (
    RankReport,
    Resolution,
    UnusedPolicy,
    late_gradient_text,
    raise_if_sets_differ,
    resolve,
    steps_differ_text,
    unfrozen_once_text,
)
from lightning_ddp_hooks.reducer.bucket_manager import BucketManager
from lightning_ddp_hooks.reducer.in_flight import InFlightBuckets
from lightning_ddp_hooks.reducer.module_sync import Buffers
from lightning_ddp_hooks.reducer.observer import told_of_wait
from lightning_ddp_hooks.reducer.parameters import WatchedParameters
from lightning_ddp_hooks.reducer.sparse import mean_sparse, mean_sparse_or_dense
from lightning_ddp_hooks.reducer.status import PendingStatus, Status, StatusWriter
from lightning_ddp_hooks.reducer.stream import DeferredRead, start_read


class Outcome(NamedTuple):
    """What has come of a backward: what all ranks do now, or the error that all of them raise."""

    resolution: Resolution
    error: RuntimeError | None = None


class BackwardEnd:
    """Ends the synced backwards of a reducer.

    Attributes:
        shadowing: Whether this rank does its part of a backward for which it has no data.
    """

    def __init__(
        self,
        manager: BucketManager,
        in_flight: InFlightBuckets,
        parameters: WatchedParameters,
        buffers: Buffers,
        group: comm.ProcessGroup,
        control_group: comm.ProcessGroup,
        *,
        policy: UnusedPolicy,
        static_graph: bool,
        skip_missing_loss: Literal["zeros", "all"],
        ends_steps: bool,
    ) -> None:
        self.shadowing = False
        self._manager = manager
        self._in_flight = in_flight
        self._parameters = parameters
        self._buffers = buffers
        self._group = group
        self._control_group = control_group
        self._policy = policy
        self._static_graph = static_graph
        self._skip_missing_loss: Literal["zeros", "all"] = skip_missing_loss
        self._ends_steps = ends_steps
        self._writer = StatusWriter()
        self._pending: PendingStatus | None = None
        self._compared = False  # whether the ranks have compared what the hook does

    @property
    def uses_flags(self) -> bool:
        """Whether ranks agree by flags, and not by a status."""
        return self._policy is not UnusedPolicy.FORBIDDEN or self._skip_missing_loss == "all"

    @property
    def complete(self) -> bool:
        """Whether all expected gradients of the backward have come."""
        engine = self._manager.engine
        return engine.complete and not (self._manager.sparse and engine.unready())

    @property
    def lacks_gradients(self) -> bool:
        """Whether the backward has not brought all gradients that it must bring.

        What was accumulated before it does not count, which may be other parameters on other ranks.
        """
        engine, recorder = self._manager.engine, self._manager.recorder
        if self._policy is not UnusedPolicy.FORBIDDEN or (self._static_graph and engine.recording):
            return False
        params = self._parameters.params
        return any(params[i].requires_grad for i in engine.unready() if i not in recorder.dropped)

    @property
    def _absent(self) -> bool:
        return self.shadowing and not self._had_loss

    @property
    def _had_loss(self) -> bool:
        return any(self._manager.engine.used()) or bool(self._parameters.unfrozen_used)

    @property
    def _set_changed(self) -> bool:
        return any(param.requires_grad for param in self._parameters.frozen)

    def _found_mismatch(self, aborted: str | None) -> bool:
        """Tell whether this rank has something to report; it has not if it had no loss at all."""
        engine = self._manager.engine
        if aborted is not None or self._set_changed or engine.late() or self._buffers.replaced:
            return True
        if self._policy is not UnusedPolicy.FORBIDDEN or self.complete or not self._had_loss or self.shadowing:
            return False
        used = engine.used()
        return any(not used[index] for index in engine.unready())

    def finish(self, aborted: str | None = None) -> Outcome:
        """End a backward; collective.

        Args:
            aborted: The exception that ended this rank's backward, in words; None if none did.
        """
        if self._manager.engine.recording:
            return self._finish_recording(aborted)
        if self.uses_flags:
            return self._finish_with_flags(aborted)
        return self._finish_with_status(aborted)

    # ------------------------------------------------------------------ the three forms

    def _finish_recording(self, aborted: str | None) -> Outcome:
        if self._in_flight.nonfinite is not None:
            self._in_flight.nonfinite.order = [self._parameters.names[index] for index in self._manager.engine.order()]
        if self._ends_steps:
            self.meet(bytearray())
        reports = self._exchange(self._report(aborted))
        outcome = self._resolve(reports)
        if outcome.error is None and not outcome.resolution.discard:
            self._manager.adopt_sparse(reports)
            self._manager.recorder.add(reports)
            queue = self._in_flight.queue
            if self._in_flight.has_hook and not self._compared:
                queue.compared_over, self._compared = self._control_group, True
            try:
                self._in_flight.launch_remaining(outcome.resolution.unused)
                self._in_flight.wait_all()
            finally:
                queue.compared_over = None
            self._copy_out(outcome.resolution)
        return outcome

    def _finish_with_flags(self, aborted: str | None) -> Outcome:
        if self._in_flight.launched_by_engine:
            self._in_flight.adopt_engine_launches()
        flags, present = bytearray(self._manager.engine.used()), not self._absent
        mismatch = self._found_mismatch(aborted) or (present and not any(flags))
        flags += bytes([mismatch, present])
        sums = self.meet(flags)
        counts, mismatches, ranks = sums[:-2], sums[-2], sums[-1]
        differ = bool(((counts > 0) & (counts < ranks)).any())
        if bool(mismatches) or (differ and self._policy is UnusedPolicy.ALIKE):
            outcome = self._resolve(self._exchange(self._report(aborted)))
        else:
            outcome = Outcome(Resolution(unused=frozenset((counts == 0).nonzero().flatten().tolist())))
        gives_up = outcome.error is not None or outcome.resolution.discard
        self._in_flight.launch_remaining(
            frozenset() if gives_up else outcome.resolution.unused, as_zeros=aborted is not None
        )
        self._in_flight.wait_all()
        if not gives_up:
            self._copy_out(outcome.resolution)
        return outcome

    def _finish_with_status(self, aborted: str | None) -> Outcome:
        in_flight, complete = self._in_flight, self.complete
        loss = complete or self._had_loss
        mismatch = self._found_mismatch(aborted)
        # Where nothing is missing, what is watched is what is trainable.
        clean = complete and not mismatch
        report = RankReport(trainable=tuple(self._parameters.names)) if clean else self._report(aborted)

        copied = False
        if not in_flight.buckets:
            read = self._sum_status(mismatch, loss)
        else:
            slot = in_flight.buckets[-1].status_slot
            assert slot is not None
            self._writer.write(slot, mismatch=mismatch, loss=loss)
            if in_flight.launched_by_engine and complete and aborted is None:
                read, copied = in_flight.finish_by_engine(), True
            else:
                if in_flight.launched_by_engine:
                    in_flight.adopt_engine_launches()
                in_flight.launch_remaining(sends_status=True, as_zeros=aborted is not None)
                waited = in_flight.wait_all(reads_status=True)
                assert waited is not None
                read = waited

        if self._in_flight.queue.at_once:  # see [Note: one point] in status.py
            outcome = self._settle_earlier(
                PendingStatus(read, report), aborted, lacks_loss=not (loss or self.shadowing)
            )
        else:
            status = Status.of(read)
            if status.mismatches:
                outcome = self._resolve(self._exchange(report))
            else:
                outcome = Outcome(Resolution() if status.losses else self._skip())
        if outcome.error is None and not outcome.resolution.discard and not copied:
            self._copy_out(outcome.resolution)
        elif outcome.error is None and copied:
            self._reduce_sparse(outcome.resolution)
        return outcome

    def _settle_earlier(self, now: PendingStatus, aborted: str | None, *, lacks_loss: bool) -> Outcome:
        """Look at the status of the backward before this one; this one's is looked at in the next."""
        earlier, self._pending = self._pending, now
        outcome = Outcome(Resolution()) if earlier is None else self._look_at(earlier)
        if outcome.error is not None:
            return outcome
        if aborted is not None:
            return Outcome(Resolution(discard=True))
        if lacks_loss and not Status.of(now.read).losses:
            return Outcome(self._skip())  # all ranks come here alike, since none had a loss
        if outcome.resolution.relayout:
            self._pending = None  # what it says is of the parameters that were watched before
        elif self._set_changed:
            for _, param in self._parameters.fresh():
                param.grad = None  # on all ranks alike, until all of them know
        return outcome

    def settle_status(self) -> Outcome:
        """Look at a status that is still pending; where all ranks meet and the host waits anyway. Collective."""
        pending, self._pending = self._pending, None
        return Outcome(Resolution()) if pending is None else self._look_at(pending)

    def _look_at(self, pending: PendingStatus) -> Outcome:
        if not Status.of(pending.read).mismatches:
            return Outcome(Resolution())
        outcome = self._resolve(self._exchange(pending.report))
        if outcome.error is not None:
            return outcome
        now = self._parameters.names_now()
        try:  # by now it may have changed again
            raise_if_sets_differ(comm.all_gather_object(now, self._control_group))
        except RuntimeError as error:
            return Outcome(Resolution(), error)
        if lost := [name for name in pending.report.trainable if name not in {*now, *self._parameters.names}]:
            warnings.warn(unfrozen_once_text(lost), stacklevel=2)
        # Its gradients have been used as they were.
        return Outcome(Resolution(relayout=outcome.resolution.relayout))

    def _skip(self) -> Resolution:
        return Resolution(unused=frozenset(range(len(self._parameters.params))), skip_step=True)

    def _sum_status(self, mismatch: bool, loss: bool) -> DeferredRead:
        status = torch.tensor([int(mismatch), int(loss)], dtype=torch.int32)
        with told_of_wait(self._in_flight.observer):
            comm.all_reduce(status, self._control_group).wait()
        return start_read(status)

    # ------------------------------------------------------------------ reports

    def _report(self, aborted: str | None) -> RankReport:
        engine, params, recorder = self._manager.engine, self._parameters, self._manager.recorder
        recording = engine.recording
        late = [(params.names[index], recorder.expected[index]) for index in sorted(set(engine.late()))]
        return RankReport(
            missing=tuple(
                index for index, flag in enumerate(engine.used()) if not flag and index not in recorder.dropped
            ),
            trainable=params.names_now(),
            sparse=tuple(index for index, param in enumerate(params.params) if _is_sparse(param.grad)),
            had_loss=self._had_loss,
            shadowing=self.shadowing,
            order=tuple(engine.order()),
            fired=tuple(engine.fired()) if recording else (),
            structure=params.digest() if recording else "",
            problem=late_gradient_text(late),
            aborted=aborted,
            buffers_replaced=self._buffers.replaced,
        )

    def _exchange(self, report: RankReport) -> list[RankReport]:
        with told_of_wait(self._in_flight.observer):
            return comm.all_gather_object(report, self._control_group)

    def _resolve(self, reports: list[RankReport]) -> Outcome:
        hook = self._in_flight.queue.hook
        recording = self._manager.engine.recording
        # A static graph learns in its recorded backward which parameters it does not use.
        learns = self._static_graph and recording
        keeps_state = not recording and getattr(hook, "keeps_state", False)  # while recording it has seen nothing
        try:
            resolution = resolve(
                reports,
                self._parameters.names,
                UnusedPolicy.ALLOWED if learns else self._policy,
                skip_missing_loss=self._skip_missing_loss,
                stateful_hook=hook.name if keeps_state else None,
            )
            if any(report.buffers_replaced for report in reports):
                self._buffers.agree(self._control_group)
        except RuntimeError as error:
            return Outcome(Resolution(), error)
        return Outcome(resolution)

    def meet(self, flags: bytearray, *, at_end_of_step: bool = False) -> Tensor:
        """Sum flags over the ranks; collective."""
        flags.append(at_end_of_step)
        counts = torch.frombuffer(flags, dtype=torch.uint8).to(torch.int32)
        with told_of_wait(self._in_flight.observer):
            comm.all_reduce(counts, self._control_group).wait()
        if 0 < int(counts[-1]) < comm.world_size(self._control_group):
            raise RuntimeError(steps_differ_text(comm.all_gather_object(at_end_of_step, self._control_group)))
        return counts[:-1]

    def end_step(self) -> None:
        """Say that this rank has ended its step; collective."""
        # As many flags as a backward has that the others may be in.
        flags = 0 if self._manager.engine.recording else len(self._parameters.params) + 2
        self.meet(bytearray(flags), at_end_of_step=True)

    # ------------------------------------------------------------------ gradients

    def _copy_out(self, resolution: Resolution) -> None:
        self._in_flight.copy_out(resolution.unused)
        self._reduce_sparse(resolution)

    def _reduce_sparse(self, resolution: Resolution) -> None:
        for index in self._manager.sparse:
            if index not in resolution.unused:
                param = self._parameters.params[index]
                if self._in_flight.nonfinite is not None and param.grad is not None:
                    self._in_flight.nonfinite.look_at(self._parameters.names[index], param.grad)
                param.grad = mean_sparse(param.grad, param, self._in_flight.divisor, self._group)

    def reduce_unfrozen(self) -> None:
        """Reduce each by itself, this once, what has been unfrozen and is not watched yet; the same on all ranks."""
        nonfinite, divisor = self._in_flight.nonfinite, self._in_flight.divisor
        for name, param in self._parameters.fresh():
            has = torch.tensor([int(param.grad is not None)], dtype=torch.int32)
            comm.all_reduce(has, self._control_group).wait()
            if has and nonfinite is not None and param.grad is not None:
                nonfinite.look_at(name, param.grad)
            if has:
                sparse = self._manager.expects_sparse(param)
                param.grad = mean_sparse_or_dense(param.grad, param, divisor, self._group, sparse=sparse)


def _is_sparse(gradient: Tensor | None) -> bool:
    return gradient is not None and gradient.layout is not torch.strided
