"""The mean of the largest gradients of each rank; the others wait until they have grown."""

from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor
from torch.profiler import record_function

from lightning_ddp_hooks.hooks.contract import BindContext, BoundHook, Phases, ReplicatingHook, require_types
from lightning_ddp_hooks.hooks.error_feedback import ErrorFeedback, FeedbackHook
from lightning_ddp_hooks.hooks.registry import SHORT_NAMES
from lightning_ddp_hooks.reducer import requests
from lightning_ddp_hooks.reducer.bucket import GradBucket
from lightning_ddp_hooks.short_names import add_short_name

# Largest bucket whose indices fit into int32.
_INT32_NUMEL = 1 << 31

# On CPU: how many elements stand for all when the threshold is guessed, and how far below it the guess aims.
_SAMPLE_EVERY = 64
_SAMPLE_FROM = 1 << 16
_MARGIN = 1.25


@dataclass(frozen=True, kw_only=True)
class TopK(ReplicatingHook):
    """Sends the largest entries of each bucket, with their indices, to everybody.

    Bytes per element: ``8 ratio (world_size - 1)``; it grows with the number of ranks and is less than float32
    all-reduce while ``ratio < 1 / world_size``.

    Args:
        ratio: Share of each bucket to send, at least one entry; 0.01 if neither is given.
        k: Number of entries of each bucket to send, in place of ``ratio``.
        error_feedback: Add what was not sent to the next gradient. Without it small gradients are never sent.

    Raises:
        TypeError: A setting of the wrong type.
        ValueError: Both ``ratio`` and ``k``, or one out of range.

    Example:
        >>> DDPHooksStrategy(comm_hook=TopK(ratio=0.01))

    Choosing among coefficients of a discrete cosine transform, as DeMo does (Peng et al., 2024,
    https://arxiv.org/abs/2411.19870), was tried and left out: the same loss, for two more matrix products.

    Lin et al., "Deep gradient compression", 2018, https://arxiv.org/abs/1712.01887; Stich et al., "Sparsified SGD with
    memory", 2018, https://arxiv.org/abs/1809.07599.
    """

    sized_by = "ratio"

    ratio: float | None = None
    k: int | None = None
    error_feedback: bool = True

    def __post_init__(self) -> None:
        require_types(self, whole=("k",), numbers=("ratio",), flags=("error_feedback",))
        if self.ratio is not None and self.k is not None:
            raise ValueError(f"Expected ratio or k, got both: ratio={self.ratio}, k={self.k}.")
        if self.ratio is not None and not 0.0 < self.ratio <= 1.0:
            raise ValueError(f"Expected a ratio above 0 and up to 1, got {self.ratio}.")
        if self.k is not None and self.k < 1:
            raise ValueError(f"Expected k of at least 1, got {self.k}.")

    def entries(self, numel: int) -> int:
        """Return how many entries of a bucket of ``numel`` elements are sent."""
        ratio = 0.01 if self.ratio is None else self.ratio
        return min(max(1, ceil(ratio * numel)) if self.k is None else self.k, numel)

    def bind(self, context: BindContext) -> BoundHook:
        """Bind the hook."""
        return _BoundTopK(self, context)


class _BoundTopK(FeedbackHook):
    def __init__(self, declared: TopK, context: BindContext) -> None:
        self._error = ErrorFeedback()
        super().__init__("TopK", context, declared.error_feedback, {"residuals": self._error})
        self._entries = declared.entries
        self._world_size = context.world_size

    def reduce(self, bucket: GradBucket) -> Phases:
        buffer = bucket.buffer()
        if self._world_size == 1 or not buffer.numel():
            buffer.div_(bucket.divisor)
            return None
        if not self.keeps_state:
            return (yield from self._exchange(bucket, None))
        with self._error.preserve_unused(bucket):
            return (yield from self._exchange(bucket, self._error.of(bucket)))

    def _exchange(self, bucket: GradBucket, residual: Tensor | None) -> Phases:
        buffer = bucket.buffer()
        with record_function("ldh::top_k"):
            total = buffer.float() if residual is None else (buffer + residual).float()
            message = Entries(self._entries(total.numel()), total.numel())
            packed = message.pack(total, largest(total.abs(), message.k))
        gathered = yield requests.AllGather(packed)
        with record_function("ldh::add_up"):
            all_indices, all_values = message.unpack(gathered.view(self._world_size, -1))
            finite = all_values.isfinite().all()
            self._update.count(finite)
            mean = torch.zeros(buffer.numel(), dtype=torch.float32, device=buffer.device)
            if residual is not None:
                indices, values = message.unpack(packed)
                self._update.apply(residual, buffer, mean.index_copy(0, indices.long(), values), finite)
            # One after the other: within one rank's indices none comes twice.
            for indices, values in zip(all_indices, all_values, strict=True):
                mean.index_add_(0, indices, values)
            torch.mul(mean, 1.0 / bucket.divisor, out=buffer)
        return None


class Entries:
    """The message of ``k`` elements of a bucket: | indices | values (float32) | padding |."""

    def __init__(self, k: int, numel: int) -> None:
        self.k = k
        self.index_dtype = torch.int32 if numel <= _INT32_NUMEL else torch.int64
        self._split = k * self.index_dtype.itemsize
        self.nbytes = -(-(self._split + 4 * k) // 8) * 8  # so that the next rank's indices are aligned

    def pack(self, values: Tensor, indices: Tensor) -> Tensor:
        """Return the message of ``values[indices]``."""
        message = torch.empty(self.nbytes, dtype=torch.uint8, device=values.device)
        message[self._split + 4 * self.k :].zero_()
        packed_indices, packed_values = self.unpack(message)
        packed_indices.copy_(indices)
        torch.index_select(values, 0, indices, out=packed_values)
        return message

    def unpack(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of the indices and values of a message, or of several, one in each row."""
        values = message[..., self._split : self._split + 4 * self.k]
        return message[..., : self._split].view(self.index_dtype), values.view(torch.float32)


def largest(magnitudes: Tensor, k: int) -> Tensor:
    """Return the indices of the ``k`` largest, in any order; a NaN counts as the largest.

    On the CPU a sample tells a threshold that somewhat more than ``k`` elements will pass; selecting from those is four
    times as fast. On a device the number of those that pass would have to come to the host.
    """
    numel = magnitudes.numel()
    if magnitudes.is_cpu and numel >= _SAMPLE_FROM and k < numel // 4:
        sample = magnitudes[::_SAMPLE_EVERY]
        rank = min(ceil(_MARGIN * k / _SAMPLE_EVERY) + 8, sample.numel())
        threshold = sample.kthvalue(sample.numel() - rank + 1).values
        passing = (~(magnitudes <= threshold)).nonzero().view(-1)  # not ">", which a NaN would fail
        if passing.numel() >= k:
            return passing[torch.topk(magnitudes[passing], k, sorted=False).indices]
    return torch.topk(magnitudes, k, sorted=False).indices


add_short_name(SHORT_NAMES, "topk", TopK)
