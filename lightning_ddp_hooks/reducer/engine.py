"""The hot path in Python: what happens for each gradient and for each full bucket.

    gradient ready -> count down -> bucket full -> copy in (scaled) -> launch, in bucket order

The engine knows nothing of groups, hooks or other ranks: it tells its `EngineHost` when a pass begins, when a bucket is
full and its turn has come, and when the backward ends. It is the readable twin of the native engine (``native/``), which
has the same methods and gives the same bits.

A *pass* is one synchronised backward, from the first gradient to the last bucket. Under ``sync = False`` (accumulation)
gradients are only noted as used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from lightning_ddp_hooks import _compat
from lightning_ddp_hooks.reducer.bucket import Bucket

# Gradients of at least this many elements are copied as they come, while they are in the cache; smaller ones together.
EAGER_NUMEL = 16384
_NEVER_FULL = 1 << 60


class EngineHost(Protocol):
    """Whom an engine reports to."""

    def pass_begins(self) -> None:
        """A gradient has come and no pass is open."""
        ...

    def bucket_full(self, index: int) -> None:
        """All gradients of the bucket are in its buffer, and all buckets before it were launched."""
        ...

    def backward_ended(self) -> None:
        """The backward in which a gradient came has ended."""
        ...


class Engine(Protocol):
    """What the reducer needs of a hot path. See `PythonEngine` for the meaning of each member."""

    sync: bool
    hold: bool
    armed: bool
    active: bool
    launched: int

    def set_layout(self, buckets: Sequence[Bucket], expected: Sequence[int]) -> None: ...
    def set_scale(self, scale: float) -> None: ...
    def start(self) -> None: ...
    def arm(self) -> None: ...
    def stop(self) -> None: ...
    def unready(self) -> list[int]: ...
    def fired(self) -> list[int]: ...
    def order(self) -> list[int]: ...
    def late(self) -> list[int]: ...
    def used(self) -> bytes: ...
    def forget_use(self) -> None: ...
    def fill(self, bucket: int) -> None: ...
    def write_back(self, bucket: int, untouched: Sequence[int]) -> None: ...
    def close(self) -> None: ...


class PythonEngine:
    """Counts gradients, copies them into buckets and back.

    Args:
        params: the parameters to watch; each gets one post-accumulate-gradient hook.
        host: whom to report to.
        views: let ``.grad`` become a slice of the bucket, instead of copying the result back.

    Attributes:
        sync: whether gradients are to be reduced; False under accumulation.
        hold: launch nothing before `fill` is called from outside (while nothing is known about the order).
        armed: whether the host will hear of the end of the backward that is running.
        active: whether a pass is open.
        launched: how many buckets were given to the host in this pass.
    """

    def __init__(self, params: Sequence[Tensor], host: EngineHost, *, views: bool) -> None:
        self.sync = True
        self.hold = True
        self.armed = False
        self.active = False
        self.launched = 0
        self._params = list(params)
        self._host = host
        self._views = views
        self._scale = 1.0
        self._buckets: list[Bucket] = []
        self._used = bytearray(len(params))
        self._order: list[int] = []
        self._late: list[int] = []
        self._expected: list[int] = []
        self._left: list[int] = []
        self._pending_at_start: list[int] = []
        self._pending: list[int] = []
        self._bucket_of: list[int] = [0] * len(params)
        self._eager: list[Tensor | None] = [None] * len(params)
        self._deferred: list[list[tuple[Tensor, Tensor]]] = []
        self._handles = [
            param.register_post_accumulate_grad_hook(self._make_hook(index)) for index, param in enumerate(self._params)
        ]

    def set_layout(self, buckets: Sequence[Bucket], expected: Sequence[int]) -> None:
        """Take new buckets.

        Args:
            buckets: in order of reduction; a parameter that is in none of them is only watched.
            expected: for each parameter, how often its gradient comes in one backward (more than once if a re-entrant
                checkpoint uses it more than once; 0 if this rank never uses it).
        """
        self._buckets = list(buckets)
        self._expected = list(expected)
        self._left = [0] * len(self._params)
        self._pending_at_start = []
        self._deferred = []
        self._eager = [None] * len(self._params)
        for position, bucket in enumerate(buckets):
            self._pending_at_start.append(sum(expected[index] > 0 for index in bucket.layout.indices))
            deferred = []
            for index, view in zip(bucket.layout.indices, bucket.views, strict=True):
                self._bucket_of[index] = position
                if view.numel() >= EAGER_NUMEL and expected[index] == 1:
                    self._eager[index] = view
                else:
                    deferred.append((self._params[index], view))
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
        _compat.queue_end_of_backward(self._backward_ended)

    def _backward_ended(self) -> None:
        self.armed = False
        self._host.backward_ended()

    def stop(self) -> None:
        """Close the pass."""
        self.active = False

    def _make_hook(self, index: int) -> Callable[[Tensor], None]:
        ready = self._gradient_ready
        return lambda param: ready(index, param)

    def _gradient_ready(self, index: int, param: Tensor) -> None:
        self._used[index] = 1
        if not self.sync:
            return
        if not (self.active and self.armed):
            if not self.active:
                self._host.pass_begins()
            if not self.armed:
                self.arm()
        left = self._left[index] - 1
        self._left[index] = left
        if left:
            if left < 0:
                self._came_again(index)
            return
        if self.hold:
            self._order.append(index)
            return
        view = self._eager[index]
        if view is not None:
            self._copy_in(param, view)
        bucket = self._bucket_of[index]
        pending = self._pending[bucket] - 1
        self._pending[bucket] = pending
        if not pending and bucket == self.launched:
            self._launch_full()

    def _came_again(self, index: int) -> None:
        # Harmless as long as the gradient still lies in `.grad` alone.
        copied = self._bucket_of[index] < self.launched or self._eager[index] is not None
        if not self.hold and (copied or not self._expected[index]):
            self._late.append(index)

    def _launch_full(self) -> None:
        while self.launched < len(self._buckets) and not self._pending[self.launched]:
            self.fill(self.launched)
            self.launched += 1
            self._host.bucket_full(self.launched - 1)

    @torch.no_grad()
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

    @torch.no_grad()
    def fill(self, bucket: int) -> None:
        """Copy into the bucket what has not been copied yet; a missing gradient counts as zero."""
        storage = self._buckets[bucket]
        deferred = self._deferred[bucket]
        targets, gradients = [], []
        for param, view in deferred:
            gradient = param.grad
            if gradient is None:
                view.zero_()
            elif gradient is not view:
                targets.append(view)
                gradients.append(gradient)
        for index, view in zip(storage.layout.indices, storage.views, strict=True):
            if self._eager[index] is not None and (self.hold or self._left[index] > 0):
                self._copy_in(self._params[index], view)
        if targets:
            _compat.foreach_copy_(targets, gradients)
        if self._scale != 1.0 and deferred:
            if len(deferred) == len(storage.views):
                storage.buffer.mul_(self._scale)
            else:
                _compat.foreach_mul_([view for _, view in deferred], self._scale)
        if self._views:
            for param, view in deferred:
                if param.grad is not None:
                    param.grad = view

    @torch.no_grad()
    def write_back(self, bucket: int, untouched: Sequence[int]) -> None:
        """Make the bucket's values the gradients of its parameters, except of those named."""
        storage = self._buckets[bucket]
        leave = set(untouched)
        targets, values = [], []
        for index, view in zip(storage.layout.indices, storage.views, strict=True):
            if index in leave:
                continue
            param = self._params[index]
            if self._views:
                if param.grad is not view:
                    param.grad = view
            elif param.grad is None:
                param.grad = torch.empty_like(param).copy_(view)
            else:
                targets.append(param.grad)
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
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.set_layout([], [0] * len(self._params))
