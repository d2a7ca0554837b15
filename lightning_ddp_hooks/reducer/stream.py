"""The stream that communication runs on: the one place that knows streams and events, of whatever accelerator.

    compute stream   ... backward ...[copy b0]e0 ... backward ...[copy b1]e1 ...            | wait j | optimizer
    comm stream                       e0 -> [reduce b0]        e1 -> [reduce b1][copy back] j

Each bucket waits only for its own gradients (its event), so that reduction overlaps with the rest of the backward;
the compute stream waits once, at the end (j). The host never waits.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from lightning_ddp_hooks import _compat


class DeferredRead:
    """A few numbers on their way to the host; this one, of host memory, has them there."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def values(self) -> list[float]:
        """Wait for the numbers if they are not there yet, and return them."""
        return list(map(float, self._tensor.flatten().tolist()))


class CommStream:
    """Stream that communication runs on; this one, the CPU's, does nothing: work happens in program order.

    Attributes:
        stream: Torch's stream object, which the native engine launches on; None where there is none.
    """

    stream: torch.Stream | None = None

    def after_compute(self) -> AbstractContextManager[object]:
        """Enter the communication stream, behind all work queued so far on the compute stream."""
        return self.context()

    def context(self) -> AbstractContextManager[object]:
        """Enter the communication stream without waiting for the compute stream."""
        return _NO_STREAM

    def join(self) -> None:
        """Let the compute stream wait for all work queued so far on the communication stream."""

    def read(self, tensor: Tensor) -> DeferredRead:
        """Begin to bring a small tensor of this stream to the host; within its context."""
        return start_read(tensor)


_NO_STREAM: AbstractContextManager[object] = nullcontext()


class _DeviceRead(DeferredRead):
    def __init__(self, tensor: Tensor) -> None:
        # Pinned memory, since a copy into pageable memory would make the host wait here.
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._arrived = torch.Event(device=tensor.device)
        self._arrived.record(torch.accelerator.current_stream(tensor.device))

    def values(self) -> list[float]:
        if not self._arrived.query():  # so that a trace shows a wait only where the host really waits
            self._arrived.synchronize()
        return list(map(float, self._host.flatten().tolist()))


def has_streams(device: torch.device) -> bool:
    """Tell whether work on ``device`` is queued on streams, so that the host runs ahead of it."""
    return device.type not in ("cpu", "meta")


def require_no_capture(device: torch.device) -> None:
    """Raise if the current stream of ``device`` is captured into a graph."""
    if has_streams(device) and _compat.is_capturing(device):
        raise RuntimeError(
            "A step that reduces gradients cannot be captured into a graph: in each backward the host looks at what "
            "the ranks tell each other, and a replay leaves the host out. Capture the module before it is wrapped "
            "(`torch.cuda.make_graphed_callables`), or compile it (`torch.compile(mode='reduce-overhead')`): then its "
            "gradients are accumulated, and reduced, outside of the graphs."
        )


def start_read(tensor: Tensor) -> DeferredRead:
    """Begin to bring a small tensor of the current stream to the host."""
    return _DeviceRead(tensor) if has_streams(tensor.device) else DeferredRead(tensor)


class DeviceStream(CommStream):
    """A stream of high priority, so that reduction is not queued behind the kernels of the backward."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device=device, priority=-1)  # devices without priorities take no notice
        self.stream: torch.Stream | None = self._stream
        # One event is enough: a wait refers to what was recorded when the wait was queued.
        self._ready = torch.Event(device=device)
        self._done = torch.Event(device=device)

    def after_compute(self) -> AbstractContextManager[object]:
        """Enter the communication stream, behind what the compute stream has queued."""
        self._ready.record(torch.accelerator.current_stream(self._device))
        self._stream.wait_event(self._ready)
        return self.context()

    def context(self) -> AbstractContextManager[object]:
        """Enter the communication stream."""
        return _compat.OnStream(self._stream)

    def join(self) -> None:
        """Let the compute stream wait for the communication stream."""
        self._done.record(self._stream)
        torch.accelerator.current_stream(self._device).wait_event(self._done)


def comm_stream(device: torch.device) -> CommStream:
    """Return the communication stream for buckets on ``device``."""
    return DeviceStream(device) if has_streams(device) else CommStream()
