"""Measures, in some steps, what a hook does to gradients; see quality.py for what the figures mean.

    launch_begins   copy of the gradients, and squared norms behind it --all-reduce, on a group of its own-->
    bucket_done     <-- mean of the ranks' gradients; what came out is compared; a few numbers go to the host

The host reads them when the step's instants have passed, so that it does not wait for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_ddp_hooks import comm, traffic
from lightning_ddp_hooks.monitor.quality import Norms, group_names
from lightning_ddp_hooks.traffic import ByteTotal


class Read(Protocol):
    """Numbers on their way to the host."""

    def values(self) -> list[float]:
        """Return them; waits until they are there."""


class QualityMeter:
    """Measures every few steps, the same on all ranks.

    Args:
        group: Group that nobody else uses, for tensors on the device of the gradients.
        every_n_steps: In which steps it measures.
        read: Begins to bring a small tensor of the current stream to the host.
        group_of: Names the parameter group of a parameter's name.
        is_exact: Whether what comes out is the mean, so that it need not be summed once more.
        error_memory: Returns what was not sent yet, flat, by the names of parameters, in the bucket's units.
    """

    def __init__(
        self,
        group: comm.ProcessGroup,
        every_n_steps: int,
        read: Callable[[Tensor], Read],
        *,
        group_of: Callable[[str], str] = lambda name: "all",
        is_exact: bool = False,
        error_memory: Callable[[], Mapping[str, Tensor]] = dict,
    ) -> None:
        self.group = group
        self.every_n_steps = every_n_steps
        self.read = read
        self.group_of = group_of
        self.is_exact = is_exact
        self.error_memory = error_memory
        self.world_size = comm.world_size(group)

    @classmethod
    def of_run(
        cls, run: Any, group: comm.ProcessGroup, every_n_steps: int, read: Callable[[Tensor], Read]
    ) -> QualityMeter:
        """Return a meter for a `TrainingRun`, with its optimizers' parameter groups, or else the parts of its model."""
        names, params, bound = list(run.reducer.names), list(run.reducer.params), run.hook.bound
        name_of = {id(param): name for name, param in zip(names, params, strict=True)}
        groups = [group["params"] for optimizer in run.optimizers() for group in optimizer.param_groups]
        labels = group_names(names, [[name_of[id(p)] for p in group if id(p) in name_of] for group in groups])
        by_name = dict(zip(names, params, strict=True))

        def group_of(name: str) -> str:
            hook = None if bound is None else bound.hook_of(name, by_name[name])
            return labels[name] if hook is None or hook.name == bound.name else f"{hook.name}: {labels[name]}"

        return cls(
            group,
            every_n_steps,
            read,
            group_of=group_of,
            is_exact=bound is None and run.driver is None,
            error_memory=dict if bound is None else bound.error_memory,
        )

    def begin(self, bucket: Any, scale: float) -> Measurement:
        """Begin to measure a full bucket (a `GradBucket`); the communication stream is current."""
        return Measurement(self, bucket, scale)


class Measurement:
    """One bucket on its way; the sum over ranks of what is in its buffer, times ``scale``, is the mean."""

    def __init__(self, meter: QualityMeter, bucket: Any, scale: float) -> None:
        self._meter = meter
        self._scale = scale
        self._names: tuple[str, ...] = bucket.names
        self._numels = [param.numel() * (2 if param.is_complex() else 1) for param in bucket.parameters()]
        # Neighbours of the same group are measured together.
        self._pieces: list[tuple[str, int, int]] = []
        offset = 0
        for name, numel in zip(self._names, self._numels, strict=True):
            label = meter.group_of(name)
            begin = self._pieces.pop()[1] if self._pieces and self._pieces[-1][0] == label else offset
            offset += numel
            self._pieces.append((label, begin, offset))
        buffer = bucket.buffer().detach()
        dtype = buffer.dtype if buffer.dtype.itemsize >= 4 else torch.float32
        self._own = self._squares(buffer)
        memory = self._memory()
        self._due = None if memory is None else self._squares(buffer + memory)
        gradients = () if meter.is_exact else (buffer,)
        self._sums = torch.cat([*(part.to(dtype) for part in (*gradients, self._own))])
        with traffic.counted_in(ByteTotal()):  # not the run's own traffic
            self._work = comm.all_reduce(self._sums, meter.group)

    def _squares(self, flat: Tensor) -> Tensor:
        """Return the squared norm of each piece."""
        dtype = torch.promote_types(flat.dtype, torch.float32)
        norms = [torch.linalg.vector_norm(flat[begin:end], dtype=dtype) for _, begin, end in self._pieces]
        return torch.stack(norms).float().square()

    def _memory(self) -> Tensor | None:
        """Return this rank's error memory as one tensor; None if it has none of this bucket."""
        known = self._meter.error_memory()
        if not any(name in known for name in self._names):
            return None
        like, sized = self._own, zip(self._names, self._numels, strict=True)  # what was loaded may lie on the CPU
        return torch.cat([known[n].to(like) if n in known else like.new_zeros(numel) for n, numel in sized])

    def end(self, reduced: Tensor) -> MeasuredBucket:
        """Compare what came out; the communication stream is current."""
        self._work.wait()
        pieces, n = len(self._pieces), self._meter.world_size
        total, squares = self._sums[:-pieces], self._sums[-pieces:]
        mean = reduced if self._meter.is_exact else total.mul_(self._scale)
        as_mean = (self._scale * n) ** 2  # the buffer holds sums, or parts of the mean
        memory = self._memory()
        zero = torch.zeros_like(self._own)
        # One that has just come to be held nothing before.
        due = zero if memory is None else self._own if self._due is None else self._due
        rows = [
            squares.float() * (as_mean / n),
            self._squares(mean),
            zero if self._meter.is_exact else self._squares(reduced.to(mean.dtype).sub(mean)),
            zero if memory is None else self._own * as_mean,
            due * as_mean,
            zero if memory is None else self._squares(memory) * as_mean,
        ]
        read = self._meter.read(torch.stack(rows).flatten())
        return MeasuredBucket([label for label, _, _ in self._pieces], read)


class MeasuredBucket:
    """A bucket's figures, on their way to the host."""

    def __init__(self, labels: Sequence[str], read: Read) -> None:
        self._labels = labels
        self._read = read

    def norms(self) -> tuple[Norms, ...]:
        """Return the figures by group, once they have come."""
        values, pieces = self._read.values(), len(self._labels)
        rows = [values[at::pieces] for at in range(pieces)]
        return tuple(Norms(label, *row) for label, row in zip(self._labels, rows, strict=True))
