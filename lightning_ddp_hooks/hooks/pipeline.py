"""Runs a bound hook on buckets: phases advance in bucket order, from the thread of the engine."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.hooks.contract import BoundHook, Phases, Waitable, check_result, describe, is_done, phases_of
from lightning_ddp_hooks.reducer.bucket import Bucket, GradBucket


class HookComm:
    """A hook in the place of the plain mean; see [Note: staged hooks] in contract.py.

    On CPU a phase that is done is followed up when the next bucket is launched, and else when the reducer waits. On a
    device waiting only queues, so that all phases of a bucket are issued at once.

    Args:
        hook: the hook to run.
        eager: run all phases at launch (devices, where waiting does not block the host).
        groups: made for the hook, to be freed with it.
    """

    def __init__(self, hook: BoundHook, *, eager: bool, groups: Sequence[comm.ProcessGroup] = ()) -> None:
        self.hook = hook
        self.divides = hook.takes_divided
        self.carries_tail = hook.carries_tail
        self._eager = eager
        self._groups = groups
        self._tasks: list[_Task] = []

    def group_of(self, name: str, param: Tensor) -> Hashable:
        """Return the hook's key for the parameter: those with different keys do not share a bucket."""
        return self.hook.group_of(name, param)

    def launch(self, bucket: GradBucket, storage: Bucket) -> _Task:
        """Start the first phase, after following up what is done of earlier buckets."""
        if all(task.finished for task in self._tasks) or bucket.index() <= self._tasks[-1].index:
            self._tasks = []  # of an earlier backward, which may have been broken off
        if self.divides:
            bucket.divisor = 1.0
        if self.carries_tail:
            self.hook.take_wire(bucket.index(), storage.wire)
        task = _Task(self, bucket)
        self._tasks.append(task)
        self.advance()
        if self._eager:
            task.wait()
        return task

    def close(self) -> None:
        """Free the hook's groups."""
        for group in self._groups:
            comm.destroy_group(group)

    def advance(self) -> None:
        """Move every bucket on as far as it can go without waiting and without overtaking the one before it."""
        before: _Task | None = None
        for task in self._tasks:
            if self.hook.one_at_a_time and before is not None and not before.finished:
                return
            while not task.finished and task.may_go_on(before):
                task.step()
            before = task

    def wait_for(self, task: _Task) -> None:
        """Block until the bucket is done, moving later ones on meanwhile."""
        while not task.finished:
            self.advance()
            for earliest in self._tasks:
                if not earliest.finished:
                    earliest.block()
                    break
        if all(task.finished for task in self._tasks):
            self._tasks = []  # they hold their buckets, which may be about to give way to others


class _Task:
    """One bucket on its way through the phases of the hook.

    Attributes:
        index: of the bucket.
        phase: the number of the collective that is on its way.
        finished: whether it has been reduced.
        on_collective: told of each collective that is issued from now on, if not None.
        on_finished: told when it has been reduced, if not None.
    """

    def __init__(self, owner: HookComm, bucket: GradBucket) -> None:
        self._owner = owner
        self._bucket = bucket
        self.index = bucket.index()
        self._phases: Phases | None = None
        self._current: Waitable | None = None
        self._result: Tensor | None = None
        self.phase = -1
        self.finished = False
        self.on_collective: Callable[[Waitable], None] | None = None
        self.on_finished: Callable[[], None] | None = None
        # Later phases are issued while other buckets are at work, but count for what this one was launched for.
        self._tally = comm.current_total()

    @property
    def begun(self) -> bool:
        """Whether the hook has issued its first collective, or has none."""
        return self.phase >= 0 or self.finished

    @property
    def collective(self) -> Waitable | None:
        """What is on its way."""
        return self._current

    def may_go_on(self, before: _Task | None) -> bool:
        """Tell whether the current phase is done, and the bucket before this one has begun the next one."""
        if before is not None and not before.finished and before.phase <= self.phase:
            return False
        return self._current is None or is_done(self._current)

    def block(self) -> None:
        """Wait for the current phase."""
        if self._current is not None:
            self._failing_clearly(self._current.wait)
            self._current = None
        self.step()

    def step(self) -> None:
        """Run the hook up to its next collective, or to its end."""
        if self._phases is None:
            self._phases = phases_of(self._owner.hook, self._bucket)
        try:
            # Not in the generator, where it would reach into the code that runs between two phases.
            with torch.no_grad(), comm.counted_in(self._tally):
                self._current = next(self._phases)
            self.phase += 1
            if self.on_collective is not None:
                self.on_collective(self._current)
        except StopIteration as end:
            if end.value is not None:
                self._result = check_result(self._owner.hook.name, self._bucket, end.value)
            self.finished = True
            self._current = None
            if self.on_finished is not None:
                self.on_finished()

    def _failing_clearly(self, wait: object) -> None:
        try:
            wait()  # type: ignore[operator]
        except Exception as error:
            raise RuntimeError(
                f"Communication hook {self._owner.hook.name} failed on {describe(self._bucket)}: {error}"
            ) from error

    def wait(self) -> Tensor | None:
        """Block until the bucket is reduced; None if the values are in the bucket's own buffer."""
        self._owner.wait_for(self)
        result = self._bucket.buffer() if self._result is None else self._result
        self._phases = None
        return result
