"""The hot path in Python: what happens for each gradient and for each full bucket.

    gradient ready -> count down -> bucket full -> copy in (scaled) -> launch, in bucket order

The engine tells its `EngineHost` when a pass begins, when a bucket is full and its turn has come, and when the backward
ends; only the plain mean over a group it starts by itself, so that there the native engine needs no Python. This one is
the readable twin of the native engine (``native/``), which has the same methods and gives the same bits.

A *pass* is one synchronised backward, from the first gradient to the last bucket. Under ``sync = False`` (accumulation)
gradients are only noted as used.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, Protocol

import torch
from torch import Tensor

from lightning_ddp_hooks import _compat, comm
from lightning_ddp_hooks.reducer.bucket import Bucket
from lightning_ddp_hooks.reducer.stream import CommStream

# Gradients of at least this many elements are copied as they come, while they are in the cache; smaller ones together.
EAGER_NUMEL = 16384
# Of what lies in host memory, only these dtypes are: the others are scaled a whole bucket at a time, since
# `_foreach_mul_` would round the factor to bfloat16 or float16.
_EAGER_ON_HOST = (torch.float32, torch.float64)
_NEVER_FULL = 1 << 60


class EngineHost(Protocol):
    """Whom an engine reports to; it owns the engine, and may be held weakly by it."""

    def pass_begins(self) -> None:
        """A gradient has come and no pass is open."""
        ...

    def bucket_full(self, index: int) -> None:
        """All gradients of the bucket are in its buffer, and all buckets before it were launched.

        Not called while the engine has a group to take the mean over.
        """
        ...

    def backward_ended(self) -> None:
        """The backward in which a gradient came has ended."""
        ...

    def backward_broke(self) -> None:
        """A gradient has come, and the last backward had been broken off by an exception."""
        ...


class Engine(Protocol):
    """What the reducer needs of a hot path; `PythonEngine` says more of each member."""

    backend: str
    sync: bool
    hold: bool
    armed: bool
    active: bool
    broken: bool
    launched: int

    def set_layout(self, buckets: Sequence[Bucket], streams: Sequence[CommStream], expected: Sequence[int]) -> None:
        """Take new buckets, in order of reduction."""
        ...

    def set_scale(self, scale: float) -> None:
        """Set the factor that gradients are multiplied with as they are copied in."""
        ...

    def set_mean_group(self, group: comm.ProcessGroup | None) -> None:
        """Sum full buckets over a group without asking the host."""
        ...

    def start(self) -> None:
        """Open a pass."""
        ...

    def arm(self) -> None:
        """Have the host told of the end of the backward that is running."""
        ...

    def watch(self, outputs: Sequence[Tensor]) -> None:
        """Have the host told of the end of a backward that comes through one of the tensors."""
        ...

    def stop(self) -> None:
        """Close the pass."""
        ...

    def unready(self) -> list[int]:
        """Return the parameters whose gradient has not come as often as expected."""
        ...

    def fired(self) -> list[int]:
        """Return how often each parameter's gradient has come."""
        ...

    def order(self) -> list[int]:
        """Return the parameters in the order in which they became ready; noted only under `hold`."""
        ...

    def late(self) -> list[int]:
        """Return the parameters whose gradient changed after it had been copied."""
        ...

    def used(self) -> bytes:
        """Return one byte for each parameter: 1 if it got a gradient since `forget_use`."""
        ...

    def forget_use(self) -> None:
        """Begin a new accumulation window."""
        ...

    def fill(self, bucket: int) -> None:
        """Copy into the bucket what has not been copied yet."""
        ...

    def wait(self, bucket: int) -> None:
        """Wait for the sum of a bucket that the engine launched."""
        ...

    def finish(self) -> None:
        """Wait for all sums that the engine launched, and make them the gradients."""
        ...

    def write_back(self, bucket: int, untouched: Sequence[int]) -> None:
        """Make the bucket's values the gradients, except of the parameters named (in ascending order)."""
        ...

    def close(self) -> None:
        """Remove all hooks and let go of the buckets."""
        ...


_P = ParamSpec("_P")


def _without_grad(function: Callable[_P, None]) -> Callable[_P, None]:
    """Do what ``torch.no_grad()`` does, at a tenth of its cost where gradients are off already (most backwards)."""

    @wraps(function)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> None:
        if torch.is_grad_enabled():
            with torch.no_grad():
                function(*args, **kwargs)
        else:
            function(*args, **kwargs)

    return guarded


class _EndOfBackward:
    """Told by autograd of the end of a backward; dropped without a call if an exception breaks the backward off."""

    def __init__(self, engine: PythonEngine) -> None:
        self._engine = weakref.ref(engine)
        self._ended = False

    def __call__(self) -> None:
        self._ended = True
        if (engine := self._engine()) is not None:
            engine.backward_ended()

    def __del__(self) -> None:
        if not self._ended and (engine := self._engine()) is not None:
            engine.armed, engine.broken = False, True


class PythonEngine:
    """Counts gradients, copies them into buckets and back.

    Args:
        params: the parameters to watch; each gets one hook, which runs after the gradient was accumulated and after the
            parameter's own post-accumulate hooks: what a user's hook does to the gradient is reduced.
        host: whom to report to; held weakly, and when it goes, the engine closes.
        views: let ``.grad`` become a slice of the bucket, instead of copying the result back.

    Attributes:
        backend: the name of this kind of engine.
        sync: whether gradients are to be reduced; False under accumulation.
        hold: launch nothing before `fill` is called from outside (while nothing is known about the order).
        armed: whether the host will hear of the end of the backward that is running.
        active: whether a pass is open.
        broken: whether an exception ended the last backward before its end could be told.
        launched: how many buckets were given to the host or to the group in this pass.
    """

    backend = "python"

    def __init__(self, params: Sequence[Tensor], host: EngineHost, *, views: bool) -> None:
        self.sync = True
        self.hold = True
        self.armed = False
        self.active = False
        self.broken = False
        self.launched = 0
        self._params = list(params)
        self._host = weakref.ref(host)
        self._closing = weakref.finalize(host, self.close)
        self._closing.atexit = False
        self._views = views
        self._scale = 1.0
        self._buckets: list[Bucket] = []
        self._streams: list[CommStream] = []
        self._mean_group: comm.ProcessGroup | None = None
        self._sums: dict[int, comm.Work] = {}
        self._used = bytearray(len(params))
        self._order: list[int] = []
        self._late: list[int] = []
        self._expected: list[int] = []
        self._left: list[int] = []
        self._pending_at_start: list[int] = []
        self._pending: list[int] = []
        self._bucket_of: list[int] = [0] * len(params)
        self._view_of: list[Tensor | None] = [None] * len(params)
        self._eager: list[Tensor | None] = [None] * len(params)
        self._slots: list[list[tuple[int, Tensor, Tensor]]] = []
        self._deferred: list[list[tuple[Tensor, Tensor]]] = []
        # A parameter holds the node that accumulates its gradient weakly; without these the hooks go with the graph.
        with torch.enable_grad():  # older torch finds them through a view
            self._nodes = [torch.autograd.graph.get_gradient_edge(param).node for param in self._params]
        self._handles = [
            node.register_hook(self._make_hook(index, param))
            for index, (node, param) in enumerate(zip(self._nodes, self._params, strict=True))
        ]

    def set_layout(self, buckets: Sequence[Bucket], streams: Sequence[CommStream], expected: Sequence[int]) -> None:
        """Take new buckets.

        Args:
            buckets: in order of reduction; a parameter that is in none of them is only watched.
            streams: for each bucket, the stream that it is reduced on.
            expected: for each parameter, how often its gradient comes in one backward (more than once if a re-entrant
                checkpoint uses it more than once; 0 if this rank never uses it).
        """
        self._buckets = list(buckets)
        self._streams = list(streams)
        self._expected = list(expected)
        self._left = [0] * len(self._params)
        self._pending_at_start = []
        self._slots = []
        self._deferred = []
        self._view_of = [None] * len(self._params)
        self._eager = [None] * len(self._params)
        for position, bucket in enumerate(buckets):
            self._pending_at_start.append(sum(expected[index] > 0 for index in bucket.layout.indices))
            deferred = []
            for index, view in zip(bucket.layout.indices, bucket.views, strict=True):
                self._bucket_of[index] = position
                self._view_of[index] = view
                if view.numel() >= EAGER_NUMEL and expected[index] == 1 and _may_be_eager(view):
                    self._eager[index] = view
                else:
                    deferred.append((self._params[index], view))
            self._slots.append(list(zip(bucket.layout.indices, bucket.params, bucket.views, strict=True)))
            self._deferred.append(deferred)
        # Parameters without a bucket (sparse ones) count down a bucket that never gets full.
        outside = len(buckets)
        placed = {index for bucket in buckets for index in bucket.layout.indices}
        for index in range(len(self._params)):
            if index not in placed:
                self._bucket_of[index] = outside
        self._pending_at_start.append(_NEVER_FULL)
        self._pending = list(self._pending_at_start)

    def set_scale(self, scale: float) -> None:
        """Set the factor that gradients are multiplied with as they are copied in."""
        self._scale = scale

    def set_mean_group(self, group: comm.ProcessGroup | None) -> None:
        """Sum full buckets over ``group`` without asking the host; None hands them to the host again."""
        self._mean_group = group

    def start(self) -> None:
        """Open a pass: no gradient is ready, no bucket launched."""
        self.active = True
        self.launched = 0
        self._left[:] = self._expected
        self._pending[:] = self._pending_at_start
        self._order.clear()
        self._late.clear()

    def arm(self) -> None:
        """Have the host told of the end of the backward that is running."""
        self.armed = True
        _compat.queue_end_of_backward(_EndOfBackward(self))

    def watch(self, outputs: Sequence[Tensor]) -> None:
        """Have the host told of the end of a backward that comes through one of the tensors, if `sync` is set then.

        Of backwards inside one another this is the outermost; the one in which a gradient comes may not be.
        """
        for output in outputs:
            output.register_hook(self._backward_comes)

    def _backward_comes(self, _: Tensor) -> None:
        if self.sync and not self.armed:
            self._give_up_broken()
            self.arm()

    def _give_up_broken(self) -> None:
        if self.broken and (host := self._host()) is not None:
            host.backward_broke()

    def backward_ended(self) -> None:
        """Tell the host; called by autograd."""
        self.armed = False
        host = self._host()
        if host is not None:
            host.backward_ended()

    def stop(self) -> None:
        """Close the pass, and let go of sums that nobody waited for."""
        self.active = False
        self._sums.clear()

    def _make_hook(self, index: int, param: Tensor) -> Callable[[Any, Any], None]:
        ready = self._gradient_ready
        return lambda inputs, outputs: ready(index, param)

    def _gradient_ready(self, index: int, param: Tensor) -> None:
        self._used[index] = 1
        if not self.sync:
            return
        if not (self.active and self.armed):
            self._begin_pass()
            self._used[index] = 1  # forgotten if a broken pass was given up
        left = self._left[index] - 1
        self._left[index] = left
        if left:
            if left < 0:
                self._came_again(index)
            return
        if self.hold:
            self._order.append(index)
            if self._views:
                self._adopt(param, self._view_of[index])
            return
        view = self._eager[index]
        if view is not None:
            self._copy_in(param, view)
        bucket = self._bucket_of[index]
        pending = self._pending[bucket] - 1
        self._pending[bucket] = pending
        if not pending and bucket == self.launched:
            self._launch_full()

    def _begin_pass(self) -> None:
        self._give_up_broken()
        host = self._host()
        if not self.active and host is not None:
            host.pass_begins()
        if not self.armed:
            self.arm()

    def _came_again(self, index: int) -> None:
        # Harmless as long as the gradient still lies in `.grad` alone.
        copied = self._bucket_of[index] < self.launched or self._eager[index] is not None
        if not self.hold and (copied or not self._expected[index]):
            self._late.append(index)

    def _launch_full(self) -> None:
        while self.launched < len(self._buckets) and not self._pending[self.launched]:
            index = self.launched
            self.fill(index)
            self.launched = index + 1
            host = self._host()
            if self._mean_group is None and host is not None:
                host.bucket_full(index)
            elif self._mean_group is not None:
                with _compat.span("ldh::launch"), self._streams[index].after_compute():
                    self._sums[index] = comm.all_reduce(self._buckets[index].wire, self._mean_group)

    def wait(self, bucket: int) -> None:
        """Wait for the sum of a bucket that the engine launched; on a device only the current stream waits."""
        self._sums.pop(bucket).wait()

    def finish(self) -> None:
        """Wait for all sums that the engine launched and nobody has waited for, and make them the gradients."""
        launched = list(self._sums)
        for bucket in launched:
            with self._streams[bucket].context():
                self.wait(bucket)
        for stream in {id(self._streams[bucket]): self._streams[bucket] for bucket in launched}.values():
            stream.join()
        for bucket in launched:
            self.write_back(bucket, ())

    @_without_grad
    def _adopt(self, param: Tensor, view: Tensor | None) -> None:
        """Move a gradient into its bucket as it is: it may still grow there, and does not lie in memory twice."""
        gradient = param.grad
        if view is None or gradient is None or gradient is view:
            return
        if gradient.layout is torch.strided and gradient.dtype is view.dtype:
            view.copy_(gradient)
            param.grad = view

    @_without_grad
    def _copy_in(self, param: Tensor, view: Tensor) -> None:
        gradient = param.grad
        if gradient is None:  # a Function returned None
            view.zero_()
            return
        if self._scale == 1.0:
            if gradient is not view:
                view.copy_(gradient)
        else:
            torch.mul(gradient, self._scale, out=view)
        if self._views:
            param.grad = view

    @_without_grad
    def fill(self, bucket: int) -> None:
        """Copy into the bucket what has not been copied yet; a missing gradient counts as zero."""
        if self.hold or self._pending[bucket]:
            for index, param, view in self._slots[bucket]:
                if self._eager[index] is not None and (self.hold or self._left[index] > 0):
                    self._copy_in(param, view)
        deferred = self._deferred[bucket]
        if not deferred:
            return
        targets, gradients = [], []
        for param, view in deferred:
            gradient = param.grad
            if gradient is None:
                view.zero_()
            elif gradient is not view:
                targets.append(view)
                gradients.append(gradient)
                if self._views:
                    param.grad = view
        if targets:
            _compat.foreach_copy_(targets, gradients)
        if self._scale == 1.0:
            return
        if len(deferred) == len(self._slots[bucket]):
            self._buckets[bucket].buffer.mul_(self._scale)
        else:
            _compat.foreach_mul_([view for _, view in deferred], self._scale)

    @_without_grad
    def write_back(self, bucket: int, untouched: Sequence[int]) -> None:
        """Make the bucket's values the gradients of its parameters, except of those named."""
        leave = set(untouched)
        targets, values = [], []
        for index, param, view in self._slots[bucket]:
            if index in leave:
                continue
            gradient = param.grad
            if self._views:
                if gradient is not view:
                    param.grad = view
            elif gradient is None:
                param.grad = torch.empty_like(param).copy_(view)
            else:
                targets.append(gradient)
                values.append(view)
        if targets:
            _compat.foreach_copy_(targets, values)

    def unready(self) -> list[int]:
        """Return the parameters whose gradient has not come, or not as often as expected, in this pass."""
        return [index for index, left in enumerate(self._left) if left > 0]

    def fired(self) -> list[int]:
        """Return how often each parameter's gradient has come in this pass."""
        return [expected - left for expected, left in zip(self._expected, self._left, strict=True)]

    def order(self) -> list[int]:
        """Return the parameters in the order in which they became ready; noted only under `hold`."""
        return list(self._order)

    def late(self) -> list[int]:
        """Return the parameters whose gradient changed after it had been copied into its bucket."""
        return list(self._late)

    def used(self) -> bytes:
        """Return one byte for each parameter: 1 if it got a gradient since `forget_use`, else 0."""
        return bytes(self._used)

    def forget_use(self) -> None:
        """Begin a new accumulation window."""
        self._used[:] = bytes(len(self._used))

    def close(self) -> None:
        """Remove all hooks and let go of the buckets."""
        self._closing.detach()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()
        self.set_layout([], [], [0] * len(self._params))


def _may_be_eager(view: Tensor) -> bool:
    # Complex gradients are scaled as the pairs of reals that the buffer holds.
    return not view.is_complex() and (view.device.type != "cpu" or view.dtype in _EAGER_ON_HOST)
