"""The stream that communication runs on: the one place that knows CUDA streams and events.

    compute stream   ... backward ...[copy b0]e0 ... backward ...[copy b1]e1 ...            | wait j | optimizer
    comm stream                       e0 -> [reduce b0]        e1 -> [reduce b1][copy back] j

Each bucket waits only for its own gradients (its event), so that reduction overlaps with the rest of the backward;
the compute stream waits once, at the end (j). The host never waits.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor


class Readout(Protocol):
    """A number on its way from the device to the host."""

    def value(self) -> float:
        """Wait for the number if it is not there yet, and return it."""
        ...


class CommStream(Protocol):
    """The seam between the reducer and the device; tests put a recording fake in its place.

    Attributes:
        asynchronous: whether the host runs ahead of the device.
        stream: torch's stream object, which the native engine launches on; None where there is none.
    """

    asynchronous: bool
    stream: torch.Stream | None

    def after_compute(self) -> AbstractContextManager[object]:
        """Enter the communication stream, behind all work queued so far on the compute stream."""
        ...

    def context(self) -> AbstractContextManager[object]:
        """Enter the communication stream without waiting for the compute stream."""
        ...

    def join(self) -> None:
        """Let the compute stream wait for all work queued so far on the communication stream."""
        ...

    def read(self, tensor: Tensor) -> Readout:
        """Begin to bring a one-element tensor of the communication stream to the host."""
        ...


class _HostReadout:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def value(self) -> float:
        return float(self._tensor)


class HostStream:
    """The CPU has no streams: work happens in program order, and nothing is to be done."""

    asynchronous = False
    stream: torch.Stream | None = None

    def __init__(self) -> None:
        self._here: AbstractContextManager[object] = nullcontext()

    def after_compute(self) -> AbstractContextManager[object]:
        """Enter the communication stream, behind what the compute stream has queued."""
        return self._here

    def context(self) -> AbstractContextManager[object]:
        """Enter the communication stream."""
        return self._here

    def join(self) -> None:
        """Let the compute stream wait for the communication stream."""

    def read(self, tensor: Tensor) -> Readout:
        """Begin to bring a number to the host."""
        return _HostReadout(tensor)


class _DeviceReadout:
    def __init__(self, tensor: Tensor) -> None:
        # Pinned memory, since a copy into pageable memory would make the host wait here.
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def value(self) -> float:
        self._arrived.synchronize()
        return float(self._host)


def readout(tensor: Tensor) -> Readout:
    """Begin to bring a one-element tensor of the current stream to the host."""
    return _DeviceReadout(tensor) if tensor.is_cuda else _HostReadout(tensor)


class CudaStream:
    """A stream of high priority, so that reduction is not queued behind the kernels of the backward.

    Args:
        device: the CUDA device of the buckets.
    """

    asynchronous = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)
        self.stream: torch.Stream | None = self._stream
        # One event is enough: a wait refers to what was recorded when the wait was queued.
        self._ready = torch.cuda.Event()
        self._done = torch.cuda.Event()

    def after_compute(self) -> AbstractContextManager[object]:
        """Enter the communication stream, behind what the compute stream has queued."""
        self._ready.record(torch.cuda.current_stream(self._device))
        self._stream.wait_event(self._ready)
        return torch.cuda.stream(self._stream)

    def context(self) -> AbstractContextManager[object]:
        """Enter the communication stream."""
        return torch.cuda.stream(self._stream)

    def join(self) -> None:
        """Let the compute stream wait for the communication stream."""
        self._done.record(self._stream)
        torch.cuda.current_stream(self._device).wait_event(self._done)

    def read(self, tensor: Tensor) -> Readout:
        """Begin to bring a number to the host."""
        return _DeviceReadout(tensor)


def comm_stream(device: torch.device) -> CommStream:
    """Return the communication stream for buckets on ``device``."""
    return CudaStream(device) if device.type == "cuda" else HostStream()
