"""The hot path in Python: what happens for each gradient and for each full bucket.

    gradient ready -> count down -> bucket full -> copy in (scaled) -> announce it, in bucket order

The engine tells its `EngineCallbacks` when a synced backward begins, when a bucket is full and its turn has come, and
when the backward ends. The last bucket it leaves to the end of the backward (end_of_backward.py): only there is known
what a rank has to tell the others, which travels with that bucket. This engine is the readable twin of the native one
(``native/``), which has the same methods, gives the same bits, and can launch plain all-reduce by itself.

Under ``sync = False`` (accumulation) gradients are only noted as used.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import wraps
from typing import ParamSpec

import torch
from torch import Tensor

from lightning_ddp_hooks import _compat
from lightning_ddp_hooks.reducer.autograd_hooks import EndOfBackward, GradientHooks
from lightning_ddp_hooks.reducer.bucket import Bucket
from lightning_ddp_hooks.reducer.engine import EAGER_NUMEL, EngineCallbacks
from lightning_ddp_hooks.reducer.real_values import is_lazy
from lightning_ddp_hooks.reducer.stream import CommStream

_NEVER_FULL = 1 << 60
# Of what lies in host memory, only these dtypes are: the others are scaled a whole bucket at a time, since
# `_foreach_mul_` would round the factor to bfloat16 or float16.
_EAGER_ON_HOST = (torch.float32, torch.float64)

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


class PythonEngine:
    """Counts gradients, copies them into buckets and back.

    Args:
        params: Parameters whose gradients come.
        callbacks: Whom it reports to.
        views: Whether ``.grad`` is to be a slice of the bucket.
        skips_undefined: Whether a gradient that is None, as a Function may return it, counts as one that has not come,
            and not as zeros.

    Attributes:
        backend: Name of this kind of engine.
        launches_mean: Whether it can launch the mean by itself.
        sync: Whether gradients are to be reduced; False under accumulation.
        recording: Whether nothing is launched during the backward, since nothing is known about its order.
        callback_queued: Whether the end of the backward that is running will be told.
        active: Whether a synced backward is open.
        launched: Number of buckets that were announced in this backward.
    """

    backend = "python"
    launches_mean = False

    def __init__(
        self, params: Sequence[Tensor], callbacks: EngineCallbacks, *, views: bool, skips_undefined: bool = False
    ) -> None:
        self.sync = True
        self.recording = True
        self.callback_queued = False
        self.active = False
        self._aborted = False
        self._callback_number = 0
        # Then autograd drops a callback in the thread that has called it, which alone may touch gradients.
        self._on_host = all(param.is_cpu for param in params)
        self.launched = 0
        self._params = list(params)
        self._callbacks = weakref.ref(callbacks)
        self._closing = weakref.finalize(callbacks, self.close)
        self._closing.atexit = False
        self._views = views
        self._skips_undefined = skips_undefined
        self._scale = 1.0
        self._buckets: list[Bucket] = []
        self._used = bytearray(len(params))
        self._expected = [0] * len(params)
        self._left = [0] * len(params)  # how often the gradient of each parameter is still to come
        self._bucket_of = [0] * len(params)
        self._pending: list[int] = []  # how many parameters of each bucket are not ready; last: those without a bucket
        self._pending_at_start: list[int] = []
        self._order: list[int] = []
        self._late: list[int] = []
        self._view_of: list[Tensor | None] = [None] * len(params)
        self._eager: list[Tensor | None] = [None] * len(params)
        self._slots: list[list[tuple[int, Tensor, Tensor]]] = []
        self._deferred: list[list[tuple[Tensor, Tensor]]] = []
        self._hooks = GradientHooks(self._params, self._gradient_ready)

    @property
    def complete(self) -> bool:
        """Whether all gradients of the backward have come that lie in buckets."""
        last = len(self._buckets) - 1
        return not self.recording and self.launched == max(last, 0) and (last < 0 or not self._pending[last])

    def set_layout(self, buckets: Sequence[Bucket], streams: Sequence[CommStream], expected: Sequence[int]) -> None:
        """Take new buckets."""
        self._buckets = list(buckets)
        self._expected = list(expected)
        self._left = [0] * len(expected)
        self._bucket_of = [len(buckets)] * len(expected)  # without a bucket
        self._pending_at_start = [sum(expected[index] > 0 for index in b.layout.indices) for b in buckets]
        # What this rank expects nothing for may not be sent at all, if no other rank uses it: that shows at the end.
        self._pending_at_start[:-1] = [count or _NEVER_FULL for count in self._pending_at_start[:-1]]
        self._pending_at_start.append(_NEVER_FULL)
        self._pending = list(self._pending_at_start)
        self._slots = []
        self._deferred = []
        self._view_of = [None] * len(self._params)
        self._eager = [None] * len(self._params)
        for position, bucket in enumerate(buckets):
            deferred = []
            for index, view in zip(bucket.layout.indices, bucket.views, strict=True):
                self._view_of[index] = view
                self._bucket_of[index] = position
                if view.numel() >= EAGER_NUMEL and expected[index] == 1 and _may_be_eager(view):
                    self._eager[index] = view
                else:
                    deferred.append((self._params[index], view))
            self._slots.append(list(zip(bucket.layout.indices, bucket.params, bucket.views, strict=True)))
            self._deferred.append(deferred)

    def set_scale(self, scale: float) -> None:
        """Set the factor that gradients are multiplied with as they are copied in."""
        self._scale = scale

    def start(self) -> None:
        """Begin to count the gradients of a synced backward."""
        self.active = True
        self.launched = 0
        self._left[:] = self._expected
        self._pending[:] = self._pending_at_start
        self._order.clear()
        self._late.clear()

    def queue_callback(self) -> None:
        """Have the end of the backward that is running told; then of those around it, as long as that is asked for."""
        self.callback_queued = True
        self._callback_number += 1
        own, number = weakref.ref(self), self._callback_number

        def ended() -> None:
            if (engine := own()) is not None:
                engine._backward_ended()

        def dropped(has_ended: bool) -> None:  # in the thread of a device maybe, when the main thread has long gone on
            engine = own()
            if engine is None or number != engine._callback_number or not engine.callback_queued:
                return
            engine.callback_queued, engine._aborted = False, not has_ended
            if not has_ended and engine._on_host:
                engine._take_gradients_out()
            elif has_ended and _compat.current_backward_id() != -1:
                engine.queue_callback()

        EndOfBackward(ended, dropped)

    def take_aborted(self) -> bool:
        """Tell whether an exception has ended the last backward, and forget it; between two backwards."""
        aborted = self._aborted or self.callback_queued  # autograd has dropped the callback, or is about to
        if aborted:
            self._take_gradients_out()
        self._callback_number += 1  # one that is dropped from now on is of the past
        self._aborted = self.callback_queued = False
        return aborted

    @_without_grad
    def _take_gradients_out(self) -> None:
        """Move gradients out of buckets that may still be written over, where a further backward would add to them.

        What a device was sending is gone: when that is written over, and what has been done to it since, nobody knows.
        """
        for index, (param, view) in enumerate(zip(self._params, self._view_of, strict=True)):
            if view is not None and param.grad is view:
                param.grad = torch.zeros_like(view) if self._is_being_sent(index) else view.clone()

    def _is_being_sent(self, index: int) -> bool:
        return not self._on_host and self.active and self._bucket_of[index] < self.launched

    def _report_aborted(self) -> None:
        if self._aborted and (callbacks := self._callbacks()) is not None:
            callbacks.backward_aborted()

    def _backward_ended(self) -> None:
        self.callback_queued = False
        if (callbacks := self._callbacks()) is not None:
            self.callback_queued = callbacks.backward_ended()  # then `dropped` queues it anew

    def stop(self) -> None:
        """Close the backward."""
        self.active = False

    def _gradient_ready(self, index: int, param: Tensor) -> None:
        came = not self._skips_undefined or param.grad is not None
        self._used[index] |= came
        if not self.sync:
            return
        if not (self.active and self.callback_queued):
            self._begin(index)
            self._used[index] |= came  # forgotten if an aborted backward was given up
        if not came:
            return
        left = self._left[index] - 1
        self._left[index] = left
        if left:
            if left < 0:
                self._came_again(index)
            return
        if self.recording:
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
            self._announce_full()

    def _begin(self, index: int) -> None:
        # The gradient that begins a backward has been added to what an aborted one was sending.
        lost = self._aborted and self._is_being_sent(index) and self._params[index].grad is self._view_of[index]
        self._report_aborted()
        callbacks = self._callbacks()
        if not self.active and callbacks is not None:
            callbacks.open_backward()
        if not self.callback_queued:
            self.queue_callback()
        if lost:
            self._late.append(index)

    def _came_again(self, index: int) -> None:
        # Harmless as long as the gradient still lies in `.grad` alone.
        copied = self._bucket_of[index] < self.launched or self._eager[index] is not None
        if not self.recording and (copied or not self._expected[index]):
            self._late.append(index)

    def _announce_full(self) -> None:
        while self.launched < len(self._buckets) - 1 and not self._pending[self.launched]:
            index = self.launched
            self.fill(index)
            self.launched = index + 1
            if (callbacks := self._callbacks()) is not None:
                callbacks.bucket_full(index)

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
        if self.recording or self._pending[bucket]:
            for index, param, view in self._slots[bucket]:
                if self._eager[index] is not None and (self.recording or self._left[index] > 0):
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
    def copy_out(self, bucket: int, untouched: Sequence[int]) -> None:
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
            elif gradient is None or is_lazy(gradient):
                param.grad = torch.empty_like(param).copy_(view)
            else:
                targets.append(gradient)
                values.append(view)
        if targets:
            _compat.foreach_copy_(targets, values)

    def unready(self) -> list[int]:
        """Return the parameters whose gradient has not come, or not as often as expected, in this backward."""
        return [index for index, left in enumerate(self._left) if left > 0]

    def fired(self) -> list[int]:
        """Return how often each parameter's gradient has come in this backward."""
        return [expected - left for expected, left in zip(self._expected, self._left, strict=True)]

    def order(self) -> list[int]:
        """Return the parameters in the order in which they became ready; noted only while `recording`."""
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

    def restore_use(self, indices: Sequence[int]) -> None:
        """Count parameters as used, too, whose gradients came under another engine in the same window."""
        for index in indices:
            self._used[index] = 1

    def close(self) -> None:
        """Remove all hooks and let go of the buckets."""
        self._closing.detach()
        self._hooks.remove()
        self.set_layout([], [], [0] * len(self._params))


def _may_be_eager(view: Tensor) -> bool:
    # Complex gradients are scaled as the pairs of reals that the buffer holds.
    return not view.is_complex() and (view.device.type != "cpu" or view.dtype in _EAGER_ON_HOST)
