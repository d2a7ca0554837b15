"""The gradient reducer: one backward from the first gradient to the last bucket, and what all ranks agree on.

    hooks ---> engine ---> Reducer.bucket_full ---> Flights.launch          (in bucket order, while backward goes on)
                 |
    end of backward ----> Reducer._finish: agree on what is missing -> launch the rest -> wait -> write back -> rebuild

[Note: three ways to agree] Ranks must issue the same collectives although a rank may lack gradients:
  * recording (the first backward, and after a change of the trainable set): nothing is launched before the end; ranks
    exchange full reports, then reduce, then rebuild the buckets in the order that was seen;
  * counting (automatic optimisation): all buckets are sent, missing gradients as zeros; the number of oddities is
    summed in one element behind the last bucket, and only if it is not zero do ranks exchange reports;
  * flags (manual optimisation, ``find_unused_parameters=True``): ranks sum one flag for each parameter before the
    remaining buckets are sent, so that a bucket that nobody used is not sent at all.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_ddp_hooks import _compat, comm
from lightning_ddp_hooks.reducer.agreement import Report, UnusedPolicy, Verdict, judge, steps_differ_text
from lightning_ddp_hooks.reducer.arena import Arena
from lightning_ddp_hooks.reducer.backend import EngineFactory, engine_factory
from lightning_ddp_hooks.reducer.bucket import Bucket
from lightning_ddp_hooks.reducer.buffers import Buffers
from lightning_ddp_hooks.reducer.claim import claim, release, require_free
from lightning_ddp_hooks.reducer.communication import BucketComm
from lightning_ddp_hooks.reducer.config import ReducerConfig
from lightning_ddp_hooks.reducer.engine import Engine
from lightning_ddp_hooks.reducer.facts import bucket_facts
from lightning_ddp_hooks.reducer.flights import Flights
from lightning_ddp_hooks.reducer.layout import UNLIMITED, BucketLayout, initial_layout, rebuilt_layout
from lightning_ddp_hooks.reducer.learning import Learning
from lightning_ddp_hooks.reducer.link import best_bucket_bytes, measure_link
from lightning_ddp_hooks.reducer.observer import BackwardObserver, told_of_wait
from lightning_ddp_hooks.reducer.replicate import broadcast_tensors
from lightning_ddp_hooks.reducer.sparse import expects_sparse_gradient, mean_sparse
from lightning_ddp_hooks.reducer.stream import Readout
from lightning_ddp_hooks.reducer.trainable import TrainableSet, check_parameters
from lightning_ddp_hooks.reducer.verify import check_same_on_all_ranks

# Looking through a large module for parameters that have changed takes as long as a small step, so it is done seldom.
_FORWARDS_PER_LOOK = 32


class Reducer:
    """Averages the gradients of a module over the ranks of a group, bucket by bucket, during the backward.

    Construction is collective: it compares the model over the ranks, makes the groups, and sends rank 0's parameters
    (and buffers) to all.

    Args:
        module: the module to train.
        config: bucket sizes and modes.
        process_group: the ranks; None for all.
        policy: what a missing gradient means; by default an error, or allowed with ``find_unused_parameters``.
        skip_missing_loss: whether a rank without a loss takes part with zeros, or makes all ranks skip the step.
        ends_steps: whether `end_step` is called after each training step, so that ranks notice if one runs fewer
            backwards than others.
        timeout: of the reducer's own groups; None for that of ``process_group``.
        agree_on: further settings that must be the same on all ranks, by name.

    Raises:
        RuntimeError: the ranks' models or settings differ, or there is no process group.
        TypeError: ``module`` is not a module.
        ValueError: a parameter is not initialised, or has a reducer already.
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
        self._module = module
        self._skip_missing_loss = skip_missing_loss
        self._ends_steps = ends_steps
        self._policy = policy or (
            UnusedPolicy.ALLOWED if self.config.find_unused_parameters else UnusedPolicy.FORBIDDEN
        )
        ignored = _compat.ignored_names(module)
        check_parameters(module)
        require_free([(name, param) for name, param in module.named_parameters() if name not in ignored])

        # Groups: nothing else uses them, so that their order of collectives is ours alone.
        self.group = comm.new_group(self.parent_group, timeout=timeout)
        self.control_group = comm.new_group(self.parent_group, cpu=True, timeout=timeout)
        self.world_size = comm.world_size(self.group)
        self._flights = Flights(self.group)

        self.buffers = Buffers(module, ignored, self.group, broadcasts=self.config.broadcast_buffers)
        self._trainable = TrainableSet(
            module,
            ignored,
            keeps_frozen=self._policy is not UnusedPolicy.FORBIDDEN,
            on_thawed=self._thawed_ready,
        )
        tensors: list[tuple[str, Tensor]] = list(self._trainable.named())
        if self.config.broadcast_buffers:
            tensors += [(name, b) for name, b in module.named_buffers() if name not in ignored]
        check_same_on_all_ranks(tensors, {**self.config.settings(), **(agree_on or {})}, self.control_group)
        self._make_engine = self._choose_engine()
        broadcast_tensors([*(param for _, param in self._trainable.named()), *self.buffers.now()], self.group)

        # One pass (see engine.py).
        self._oddities = 0
        self._window_open = False
        self.synced_backwards = 0
        self._late_readout: Readout | None = None
        self._shadowing = False
        self.on_backward_begin: Callable[[], None] | None = None
        self.skip_step = False
        self.failed = False
        self.detached = False
        self.aborted_work = False
        self.aborted_at: tuple[int, int, int, str] | None = None

        self._learning: Learning
        self._planned: list[BucketLayout] | None = None
        self._auto_cap_bytes: int | None = None

        self._sparse_ids = expects_sparse_gradient(module)
        self._arena = Arena()
        self._engine: Engine
        self._forwards = 0
        self._begin_learning()
        claim((param for _, param in self._trainable.named()), self)

    @property
    def names(self) -> list[str]:
        """The names of the parameters whose gradients are reduced."""
        return self._trainable.names

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters whose gradients are reduced."""
        return self._trainable.params

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

    def _begin_learning(self) -> None:
        """Hook on to the parameters that are watched now, and begin to record their order."""
        params = self.params
        self._sparse = [index for index, param in enumerate(params) if id(param) in self._sparse_ids]
        self._learning = Learning(
            len(params),
            static_graph=self.config.static_graph,
            may_miss=self._policy is not UnusedPolicy.FORBIDDEN,
        )
        with _hookable(params):
            self._engine = self._make_engine(params, self, self.config.gradient_as_bucket_view)
        self._flights.engine = self._engine
        self._flights.share_out()
        self._engine.hold = True
        self._lay_out_initially()

    def _begin_anew(self) -> None:
        """Watch the parameters that require a gradient by now."""
        sync = self._engine.sync
        self._engine.close()
        self._trainable.track()
        self._begin_learning()
        self._engine.sync = sync

    def _lay_out_initially(self) -> None:
        one_bucket = self._policy is UnusedPolicy.FORBIDDEN
        limits = [UNLIMITED] if one_bucket else self._limits()
        self._set_layout(initial_layout(self.params, limits, self._dense_indices(), self._hook_keys()))

    def _hook_keys(self) -> list[Hashable]:
        """Ask the hook which parameters it wants in buckets of their own."""
        return [self._flights.comm.group_of(name, param) for name, param in zip(self.names, self.params, strict=True)]

    def _limits(self) -> list[int]:
        return self.config.limits(self._auto_cap_bytes)

    def _dense_indices(self) -> list[int]:
        outside = {*self._sparse, *self._learning.dropped}
        return [index for index in range(len(self.params)) if index not in outside]

    def _set_layout(self, layouts: Sequence[BucketLayout]) -> None:
        """Allocate buckets, and move gradients that lie in the old ones."""
        self._planned = None
        params, expected = self.params, self._learning.expected
        old = [
            (param, view)
            for bucket in self._flights.buckets  # of other parameters, maybe
            for param, view in zip(bucket.params, bucket.views, strict=True)
        ]
        moved = [(param, view) for param, view in old if param.grad is view]
        keeps = moved or any(self._arena.holds(param.grad) for param, _ in old)
        self._flights.use_buckets([], (), expected)
        if keeps:  # somebody's gradients lie there, maybe by another tensor on the same memory
            self._arena.forget()
        buckets = self._arena.place(layouts, params)
        if moved:
            new_views = {
                id(param): view for bucket in buckets for param, view in zip(bucket.params, bucket.views, strict=True)
            }
            with torch.no_grad():
                for param, view in moved:
                    # One that has left the buckets keeps what it has.
                    param.grad = new_views[id(param)].copy_(view) if id(param) in new_views else view.clone()
        self._flights.use_buckets(buckets, self.names, expected)
        self._flights.apply_divisor()

    def set_comm(self, bucket_comm: BucketComm) -> None:
        """Have buckets reduced by ``bucket_comm`` instead of the plain mean.

        Raises:
            RuntimeError: a second call, or one after the first backward.
        """
        if self._flights.custom:
            raise RuntimeError("A communication hook is already registered; it can be registered only once.")
        if self.synced_backwards or self._engine.active:
            raise RuntimeError("A communication hook must be registered before the first backward.")
        self._flights.comm, self._flights.custom = bucket_comm, True
        self._flights.share_out()
        if any(key is not None for key in self._hook_keys()):
            self._lay_out_initially()
        self._flights.apply_divisor()

    # ------------------------------------------------------------------ what the wrapper or strategy calls

    @property
    def observer(self) -> BackwardObserver | None:
        """Who is told of each pass; None by default.

        With an observer buckets are launched from Python, also under the native engine; the results are the same.
        """
        return self._flights.observer

    @observer.setter
    def observer(self, observer: BackwardObserver | None) -> None:
        if observer is not None and self._engine.active:
            raise RuntimeError("An observer can be set only between two backwards.")
        self._flights.observer = observer
        # One may leave at any time, such as when an error has broken a backward off, whose buckets stay what they are.
        if not (self.detached or self._engine.active):
            self._flights.share_out()

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
        """Finish or abandon what an earlier backward left behind, and refresh buffers; before each forward.

        Args:
            buffers_from: the rank whose buffers are taken.
        """
        self.finalize_pending_backward()
        self._forwards += 1
        if self._engine.hold or self._forwards % _FORWARDS_PER_LOOK == 0:
            self._look_at_structure()
        self._trainable.watch_thawed()
        if self.buffers.refresh_due:
            self.buffers.refresh(buffers_from)

    def _look_at_structure(self) -> None:
        """Notice parameters that were added or replaced; before the buckets are laid out, begin anew with them."""
        idle = not (self._engine.active or any(self._engine.used()))
        if self._trainable.look(may_begin_anew=self._engine.hold and idle):
            self._begin_anew()

    def _thawed_ready(self) -> None:
        if self._engine.sync and not self._engine.active:
            self.pass_begins()
        if self._engine.sync and not self._engine.armed:
            self._engine.arm()

    def finalize_pending_backward(self) -> None:
        """Bring a backward that is still open to its end."""
        engine = self._engine
        if _compat.current_backward_id() != -1:
            return  # a forward within a backward (checkpointing)
        if engine.armed or engine.broken:  # an exception broke the backward off before its end could be told
            self._abort()
        elif engine.active:
            self._finish()

    def settle_status(self) -> None:
        """Settle what an asynchronous device has left pending; on all ranks alike, where the host waits anyway.

        Raises:
            RuntimeError: gradients were missing, or the like, in a way that the policy forbids.
        """

    def end_step(self) -> None:
        """End a training step whose backwards the user ran; a collective call, where `ends_steps` was set.

        Raises:
            RuntimeError: other ranks are in a further backward of theirs.
        """
        self.finalize_pending_backward()
        if self._engine.sync and self.params:
            flags = 0 if self._engine.hold else len(self.params) + 2
            self._meet(bytearray(flags), at_end_of_step=True)

    @contextmanager
    def shadowing(self, shadowing: bool = True) -> Iterator[None]:
        """Let this rank do its part of backwards for which it has no data (if so).

        What lies in ``.grad`` is sent. A rank that has accumulated nothing since the last synchronised backward counts
        as absent: no gradient is missed from it, and its missing loss makes nobody skip the step.
        """
        self._shadowing = shadowing
        try:
            yield
        finally:
            self._shadowing = False

    def shadow_backward(self) -> None:
        """Do this rank's part of one synchronised backward of the others, with zeros or with what was accumulated."""
        self.finalize_pending_backward()
        if not any(self._engine.used()):
            for param in self.params:
                param.grad = None  # of a step long done
        with self.shadowing():
            self._open_pass()
            self._finish()

    def _absent(self) -> bool:
        return self._shadowing and not (any(self._engine.used()) or self._trainable.thawed_used)

    def had_gradient(self) -> bool:
        """Tell whether this rank got a gradient since the last synchronised backward."""
        return any(self._engine.used())

    def forget_use(self) -> None:
        """Begin a new accumulation window: gradients that came so far were used up without being reduced."""
        self._engine.forget_use()
        self._trainable.forget_use()

    @property
    def divisor(self) -> float:
        """What sums over ranks are divided by; the number of ranks by default."""
        return self._flights.divisor

    def set_divisor(self, divisor: float) -> None:
        """Set what sums over ranks are divided by; before the first gradient of a pass comes."""
        if divisor != self.divisor:
            self._flights.divisor = divisor
            self._flights.apply_divisor()

    @contextmanager
    def backward_window(self) -> Iterator[None]:
        """Surround the code that runs one step's backward, in whatever way and even if there is none.

        At the end all gradients are reduced; a rank that had nothing to reduce does its part with zeros.

        Raises:
            RuntimeError: gradients are missing in a way that the policy forbids.
        """
        self.finalize_pending_backward()
        self._window_open = True
        passes = self.synced_backwards
        try:
            yield
        except BaseException:
            self._abort()
            raise
        finally:
            self._window_open = False
        if self._engine.active:
            self._finish()
        elif self._engine.sync and self.synced_backwards == passes and self.params:
            if not self._shadowing:
                self._look_at_structure()  # a loss whose gradients all went elsewhere looks like no loss
            self.pass_begins()
            self._finish()

    def watch_backward_of(self, outputs: Sequence[Tensor]) -> None:
        """Learn of the end of the outermost backward through ``outputs``, also with re-entrant checkpointing."""
        self._engine.watch(outputs)

    # ------------------------------------------------------------------ what the engine calls

    def pass_begins(self) -> None:
        """Open a pass: count the oddities that are known already."""
        if torch.is_grad_enabled() and _compat.current_backward_id() != -1:
            raise RuntimeError(
                "backward(create_graph=True) cannot be reduced over ranks: the mean of gradients is not part of the "
                "graph. Compute the inner gradient with torch.autograd.grad(..., create_graph=True), or run this "
                "backward under no_sync()."
            )
        if self.on_backward_begin is not None:
            self.on_backward_begin()
        self._open_pass()

    def _open_pass(self) -> None:
        self.aborted_at = None
        if self._planned is not None:
            # Not before: until now gradients may have lain in the old buckets, and most are gone when new ones come.
            self._set_layout(self._planned)
        self._count_oddities(sum(param.requires_grad for param in self._trainable.frozen))
        if self.observer is not None:
            self.observer.backward_opened()
        self._flights.pass_opens()
        self._engine.start()

    def bucket_full(self, index: int) -> None:
        """Launch the bucket."""
        self._flights.launch(index)

    def backward_broke(self) -> None:
        """Give up the pass of a backward that an exception broke off."""
        self._abort()

    def backward_ended(self) -> None:
        """End the pass, unless it goes on in an enclosing backward or in the rest of the window."""
        if not self._engine.active:
            return
        if self._complete() or not (self._window_open or _compat.backward_is_nested()):
            self._finish()

    def _complete(self) -> bool:
        engine = self._engine
        return (
            not engine.hold
            and engine.launched == len(self._flights.buckets)
            and not (self._sparse and engine.unready())
        )

    # ------------------------------------------------------------------ the end of a pass

    def _abort(self) -> None:
        if self._engine.active:
            self.aborted_at = (*self.progress(), self.waits_for())
        self.aborted_work |= self._flights.under_way or (self._engine.active and self._engine.launched > 0)
        self._engine.stop()
        self._engine.armed, self._engine.broken = False, False
        self._engine.forget_use()
        self._trainable.forget_use()
        self._flights.forget()
        if self.observer is not None:
            self.observer.backward_aborted()

    def _finish(self) -> None:
        try:
            with _compat.span("ldh::finish"), torch.no_grad():
                self._finish_pass()
        except BaseException:
            self._abort()
            raise

    def _finish_pass(self) -> None:
        engine = self._engine
        self.skip_step = False
        # Where something may be missing, the engine's buckets are looked after here; else it ends the pass by itself.
        if self._flights.by_engine and not (self._policy is UnusedPolicy.FORBIDDEN and self._complete()):
            self._flights.take_over()
        if engine.hold:
            if self._ends_steps:
                self._meet(bytearray())
            verdict = self._exchange()
            self._flights.launch_rest(verdict.unused)
            self._flights.collect()
        elif self._policy is UnusedPolicy.FORBIDDEN:
            verdict = self._reduce_counting()
        else:
            verdict = self._share_flags()
            self._flights.launch_rest(verdict.unused)
            self._flights.collect()
        self._flights.write_back(verdict.unused)
        self._reduce_sparse(verdict.unused)
        if problem := self._late_problem():
            raise RuntimeError(problem)

        self.synced_backwards += 1
        self.buffers.changed()
        self.skip_step = verdict.skip_step
        recorded, own_fired = engine.hold, engine.fired() if engine.hold else []
        engine.stop()
        self.forget_use()
        if self.observer is not None:
            self.observer.backward_finished()
        if verdict.relayout:
            self._follow_trainable_set()
        elif recorded:
            self._learn(own_fired)

    def _report(self) -> Report:
        engine = self._engine
        used = engine.used()
        return Report(
            missing=tuple(index for index, flag in enumerate(used) if not flag and index not in self._learning.dropped),
            trainable=self._trainable.names_now(),
            sparse=tuple(index for index, param in enumerate(self.params) if _is_sparse(param.grad)),
            had_loss=any(used) or self._trainable.thawed_used,
            absent=self._absent(),
            order=tuple(engine.order()),
            fired=tuple(engine.fired()) if engine.hold else (),
            structure=self._trainable.digest() if engine.hold else "",
            problem=self._late_problem(),
        )

    def _exchange(self) -> Verdict:
        with told_of_wait(self.observer):
            reports = comm.all_gather_object(self._report(), self.control_group)
        verdict = judge(reports, self.names, self._policy_now(), skip_missing_loss=self._skip_missing_loss)
        if self._engine.hold:
            self._adopt_sparse({index for report in reports for index in report.sparse})
            self._learning.note(reports)
        return verdict

    def _policy_now(self) -> UnusedPolicy:
        # A static graph learns in its recorded backward which parameters it does not use.
        if self.config.static_graph and self._engine.hold:
            return UnusedPolicy.ALLOWED
        return self._policy

    def _reduce_counting(self) -> Verdict:
        engine = self._engine
        if not self._complete():
            used = engine.used()
            missing = 0 if self._absent() else sum(not used[index] for index in engine.unready())
            self._count_oddities(self._oddities + missing + len(engine.late()))
        self._flights.launch_rest(frozenset())
        count: Readout | None = None
        if self._counts_in_tail():
            self._flights.collect()
            tail = self._flights.buckets[-1].tail
            assert tail is not None
            stream = self._flights.streams[-1]
            with stream.context():
                count = stream.read(tail)
                if stream.asynchronous:  # the number may be looked at only after the tail has been used again
                    tail.zero_()
        else:
            number = torch.tensor([self._oddities], dtype=torch.int32)
            work = comm.all_reduce(number, self.control_group)
            self._flights.collect()
            with told_of_wait(self.observer):
                work.wait()
            count = _HostNumber(number)
        # A device's number is looked at one pass later, unless this rank knows already that it is not zero.
        if self._defers_reading() and not self._oddities:
            count, self._late_readout = self._late_readout, count
        if self._oddities or (count is not None and count.value()):
            if self._counts_in_tail():
                self._flights.buckets[-1].tail.zero_()  # type: ignore[union-attr]
            return self._exchange()
        return Verdict()

    def _count_oddities(self, number: int) -> None:
        """Note the number of oddities, and have it travel behind the last bucket."""
        self._oddities = number
        tail = self._flights.buckets[-1].tail if self._flights.buckets else None
        if number and tail is not None:
            tail.fill_(number)

    def _counts_in_tail(self) -> bool:
        return self._flights.comm.carries_tail and not self._sparse and bool(self._flights.buckets)

    def _defers_reading(self) -> bool:
        if not self._counts_in_tail() or self._skip_missing_loss != "zeros":
            return False
        return self._flights.streams[-1].asynchronous

    def _share_flags(self) -> Verdict:
        used, present = bytearray(self._engine.used()), not self._absent()
        used.append(min(255, self._oddities + len(self._engine.late()) + (present and not any(used))))
        used.append(present)
        flags = self._meet(used)
        counts, oddities, ranks = flags[:-2], flags[-2], flags[-1]
        differ = bool(((counts > 0) & (counts < ranks)).any())
        if bool(oddities) or (differ and self._policy is UnusedPolicy.ALIKE):
            return self._exchange()
        return Verdict(unused=frozenset((counts == 0).nonzero().flatten().tolist()))

    def _meet(self, flags: bytearray, *, at_end_of_step: bool = False) -> Tensor:
        """Sum flags over the ranks; find out if some are in a backward while others have ended their step."""
        flags.append(at_end_of_step)
        counts = torch.frombuffer(flags, dtype=torch.uint8).to(torch.int32)
        with told_of_wait(self.observer):
            comm.all_reduce(counts, self.control_group).wait()
        if 0 < int(counts[-1]) < self.world_size:
            raise RuntimeError(steps_differ_text(comm.all_gather_object(at_end_of_step, self.control_group)))
        return counts[:-1]

    def _reduce_sparse(self, unused: frozenset[int]) -> None:
        for index in self._sparse:
            if index not in unused:
                param = self.params[index]
                param.grad = mean_sparse(param.grad, param, self.divisor, self.group)

    # ------------------------------------------------------------------ learning and rebuilding

    def _adopt_sparse(self, found: set[int]) -> None:
        """Take parameters out of the buckets whose gradient turned out to be sparse on some rank."""
        if found <= set(self._sparse):
            return
        self._sparse = sorted({*self._sparse, *found})
        self._sparse_ids |= {id(self.params[index]) for index in found}
        self._set_layout(initial_layout(self.params, [UNLIMITED], self._dense_indices(), self._hook_keys()))

    def _learn(self, own_fired: Sequence[int]) -> None:
        """Plan the buckets in the order of the backward, once enough of it has been seen."""
        if not self._learning.conclude(own_fired):
            return
        if self.config.bucket_cap_mb == "auto" and self._auto_cap_bytes is None and self.params:
            link = measure_link(self.group, self.control_group, self.params[0].device)
            total = sum(param.numel() * param.element_size() for param in self.params)
            self._auto_cap_bytes = best_bucket_bytes(total, link)
        order = self._learning.layout_order(self._sparse)
        self._planned = rebuilt_layout(self.params, order, self._limits(), self._learning.keys(self._hook_keys()))
        self._engine.hold = False

    def _follow_trainable_set(self) -> None:
        """Reduce what has been unfrozen by itself this once, and begin again with the new set."""
        for param in self._trainable.fresh():
            has = torch.tensor([int(param.grad is not None)], dtype=torch.int32)
            comm.all_reduce(has, self.control_group).wait()
            if not has:
                continue
            gradient = torch.zeros_like(param) if param.grad is None else param.grad
            if id(param) in self._sparse_ids:
                param.grad = mean_sparse(param.grad, param, self.divisor, self.group)
                continue
            bucket = Bucket(BucketLayout.build([0], [param]), [param])
            torch.mul(gradient, 1.0 / self.divisor, out=bucket.views[0])
            comm.all_reduce(bucket.wire, self.group).wait()
            param.grad = gradient.copy_(bucket.views[0])
        self._begin_anew()

    def _late_problem(self) -> str | None:
        """Say what is wrong if a gradient changed after it had been sent."""
        late = self._engine.late()
        if not late:
            return None
        names = ", ".join(repr(self.names[index]) for index in sorted(set(late))[:8])
        if any(not self._learning.expected[index] for index in late):
            return (
                f"Parameters got a gradient that the first backward did not use: {names}. `static_graph=True` promises "
                "that the graph never changes; use `find_unused_parameters=True` instead."
            )
        return (
            f"Parameters got a further gradient after their bucket had been sent: {names}. This happens with "
            "re-entrant activation checkpointing when a block is used a varying number of times; pass "
            "`use_reentrant=False` to torch.utils.checkpoint.checkpoint."
        )

    # ------------------------------------------------------------------ facts, end

    def stats(self) -> dict[str, object]:
        """Return facts about the reducer; names that torch's DDP logging data has mean the same here.

        Returns:
            ``world_size``, ``iteration`` (synchronised backwards), ``backend`` (of the hot path), ``comm_backend``,
            ``bucket_cap_bytes``, ``first_bucket_bytes``, ``bucket_sizes`` (bytes of each bucket in use),
            ``bucket_param_indices``, ``num_parameter_tensors``, ``total_parameter_size_bytes``,
            ``gradient_as_bucket_view``, ``find_unused_parameters``, ``static_graph``, ``broadcast_buffers``,
            ``has_rebuilt_buckets``, and after a rebuild ``rebuilt_bucket_sizes``, ``rebuilt_per_bucket_param_indices``
            and ``prev_iteration_grad_ready_order_indices``.
        """
        if self.detached:
            raise RuntimeError("The reducer has been detached.")
        layouts = [bucket.layout for bucket in self._flights.buckets] if self._planned is None else self._planned
        return {
            "world_size": self.world_size,
            "rank": comm.rank(self.group),
            "iteration": self.synced_backwards,
            "backend": self._engine.backend,
            "comm_backend": comm.backend_name(self.group),
            **bucket_facts(
                self.config, self._limits(), layouts, self.params, self._learning.order if self._learning.done else None
            ),
        }

    def progress(self) -> tuple[int, int, int]:
        """Say how far it has come; from any thread, so that it may be out of date.

        Returns:
            The number of ended passes; of the pass that is open, how many buckets were sent, and how many there are (0
            while none is open).
        """
        if not self._engine.active:
            return self.synced_backwards, 0, 0
        return self.synced_backwards, self._flights.sent, len(self._flights.buckets)

    def waits_for(self) -> str:
        """Say which buckets the open pass waits for; from any thread, so that it may be out of date."""
        return self._flights.waits_for() if self._engine.active else ""

    def detach(self) -> None:
        """Undo everything: remove hooks, free buckets and groups. Gradients stay, in memory of their own."""
        if self.detached:
            return
        self.detached = True
        self._abort()
        self._flights.close()
        self._engine.close()
        self._trainable.close()
        release(self)
        self._arena.forget()
        # After an error other ranks may never join a collective that this one has begun; freeing its group would wait.
        if not (self.failed and (self.aborted_work or comm.backend_name(self.group) != "gloo")):
            self._flights.comm.close()
            for group in (self.group, self.control_group):
                comm.destroy_group(group)


class _HostNumber:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def value(self) -> float:
        return float(self._tensor)


@contextmanager
def _hookable(params: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let hooks be registered on frozen parameters too, which torch refuses."""
    frozen = [param for param in params if not param.requires_grad]
    for param in frozen:
        param.requires_grad_(True)
    yield
    for param in frozen:
        param.requires_grad_(False)


def _is_sparse(gradient: Tensor | None) -> bool:
    return gradient is not None and gradient.layout is not torch.strided
