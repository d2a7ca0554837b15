"""The mean of gradients that were quantised to 8 bits once, by gathering everybody's codes.

The protocol of torch's quantization hooks: each rank quantises its bucket to 0 ... 255, all ranks gather all codes and
scales, and each of them decodes and averages. Here scales, zero points and codes travel in one message:

    | scale of row 0, row 1, ... (float32) | code of 0.0 of row 0, row 1, ... (uint8) | codes of row 0, row 1, ...
    (uint8) |
"""

# No postponed annotations: torch's DDP looks at those of the functions when it is given one.
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import record_function

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.hooks.allreduce import divisor_of, done
from lightning_ddp_hooks.hooks.contract import BindContext, BoundHook, Phases, ReplicatingHook, require_types
from lightning_ddp_hooks.hooks.kernels import affine_decode, affine_encode
from lightning_ddp_hooks.hooks.registry import SHORT_NAMES
from lightning_ddp_hooks.reducer import requests
from lightning_ddp_hooks.reducer.bucket import GradBucket


@dataclass(frozen=True, kw_only=True)
class QuantizePerTensor(ReplicatingHook):
    """Sends 8 bits per gradient and one scale per bucket, to everybody.

    Wire bytes per element: 1 times ``world_size - 1``, so it grows with the number of ranks and passes that of float32
    all-reduce at 8 of them; `BlockQuantize` does not grow and is more exact. One value is off by at most half of 1/255
    of the range of the bucket, which one outlier can make large. No error feedback.

    Example:
        >>> DDPHooksStrategy(comm_hook="quantize_per_tensor")

    The all-gather protocol is that of torch's ``quantization_pertensor_hook``.
    """

    def bind(self, context: BindContext) -> BoundHook:
        """Bind the hook."""
        return _GatherHook("QuantizePerTensor", context, None)


@dataclass(frozen=True, kw_only=True)
class QuantizePerChannel(ReplicatingHook):
    """Sends 8 bits per gradient and a scale for each ``bucket_size`` of them, to everybody.

    Wire bytes per element: ``1 + 5 / bucket_size`` times ``world_size - 1``, so it grows with the number of ranks and
    passes that of float32 all-reduce at 8 of them; `BlockQuantize` does not grow. One value is off by at most half of
    1/255 of the range of its channel. No error feedback.

    Args:
        bucket_size: elements of a channel.

    Raises:
        TypeError: a setting of the wrong type.
        ValueError: ``bucket_size`` is not positive.

    Example:
        >>> DDPHooksStrategy(comm_hook=QuantizePerChannel(bucket_size=128))

    The all-gather protocol is that of torch's ``quantization_perchannel_hook``.
    """

    bucket_size: int = 512

    def __post_init__(self) -> None:
        """Check the size."""
        require_types(self, whole=("bucket_size",))
        if self.bucket_size < 1:
            raise ValueError(f"Expected bucket_size of at least 1, got {self.bucket_size}.")

    def bind(self, context: BindContext) -> BoundHook:
        """Bind the hook."""
        return _GatherHook("QuantizePerChannel", context, self.bucket_size)


def quantization_pertensor_hook(
    process_group: comm.ProcessGroup | None, bucket: comm.TorchGradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket in 8 bits with one scale; by torch's contract, for torch's DDP and for our reducer.

    Args:
        process_group: Ranks to average over; None for all.
        bucket: Gradients, not divided.

    Returns:
        A future of the mean, which lies in the bucket's buffer. See `QuantizePerTensor`.

    Example:
        >>> ddp_model.register_comm_hook(None, quantization_pertensor_hook)
    """
    return _gather_mean(process_group, bucket, None)


def quantization_perchannel_hook(
    process_group: comm.ProcessGroup | None, bucket: comm.TorchGradBucket, bucket_size: int = 512
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket in 8 bits with a scale per channel; by torch's contract, for torch's DDP and for our reducer.

    Args:
        process_group: Ranks to average over; None for all.
        bucket: Gradients, not divided.
        bucket_size: elements of a channel.

    Returns:
        A future of the mean, which lies in the bucket's buffer. See `QuantizePerChannel`.

    Example:
        >>> ddp_model.register_comm_hook(None, quantization_perchannel_hook)
    """
    return _gather_mean(process_group, bucket, bucket_size)


def _gather_mean(
    process_group: comm.ProcessGroup | None, bucket: comm.TorchGradBucket, row_size: int | None
) -> torch.futures.Future[torch.Tensor]:
    group = comm.resolve_group(process_group)
    buffer = bucket.buffer()
    world_size = comm.world_size(group)
    if world_size == 1 or not buffer.numel():
        return done(buffer)
    rows = _Rows.build(buffer.numel(), row_size)
    message = rows.encode(buffer)
    gathered = message.new_empty(world_size, message.numel())
    work = comm.start_all_gather(gathered, message, group)
    # The callback computes only; a collective in it could overtake those of other buckets.
    divisor = divisor_of(bucket, group)
    return work.get_future().then(lambda _: rows.decode_mean(gathered, divisor, buffer))


class _GatherHook(BoundHook):
    """The bound form: one all-gather per bucket."""

    def __init__(self, name: str, context: BindContext, row_size: int | None) -> None:
        self.name = name
        self._world_size = context.world_size
        self._row_size = row_size

    def reduce(self, bucket: GradBucket) -> Phases:
        buffer = bucket.buffer()
        if self._world_size == 1 or not buffer.numel():
            buffer.div_(bucket.divisor)
            return None
        rows = _Rows.build(buffer.numel(), self._row_size)
        with record_function("ldh::quantize"):
            message = rows.encode(buffer)
        gathered = yield requests.AllGather(message)
        with record_function("ldh::dequantize"):
            return rows.decode_mean(gathered.view(self._world_size, -1), bucket.divisor, buffer)


@dataclass(frozen=True)
class _Rows:
    """How a bucket is cut into rows with one scale each; the last one is filled up with zeros."""

    numel: int  # of the bucket
    row: int  # number of elements of a row
    rows: int

    @classmethod
    def build(cls, numel: int, row_size: int | None) -> "_Rows":
        """Cut ``numel`` elements into rows of ``row_size``; None for one row."""
        row = numel if row_size is None else min(row_size, numel)
        return cls(numel, row, -(-numel // row) if numel else 0)

    @property
    def message_bytes(self) -> int:
        """Bytes of a message, a multiple of 4 so that the next one's scales are aligned."""
        return -(-self.rows * (4 + 1 + self.row) // 4) * 4

    def parts(self, message: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return views of one message's scales, zero points and codes."""
        zeros, codes = 4 * self.rows, 5 * self.rows
        rows = message[codes : codes + self.rows * self.row].view(self.rows, self.row)
        return message[:zeros].view(torch.float32), message[zeros:codes], rows

    def encode(self, buffer: Tensor) -> Tensor:
        """Return the message that stands for ``buffer``."""
        values = torch.empty(self.rows * self.row, dtype=torch.float32, device=buffer.device)
        values[: self.numel].copy_(buffer)
        values[self.numel :].zero_()
        message = torch.zeros(self.message_bytes, dtype=torch.uint8, device=buffer.device)
        scales, zeros, codes = self.parts(message)
        codes.copy_(affine_encode(values.view(self.rows, self.row), scales, zeros))
        return message

    def decode_mean(self, gathered: Tensor, divisor: float, out: Tensor) -> Tensor:
        """Write the sum of what the messages stand for, divided, into ``out`` and return it."""
        total = torch.zeros(self.rows, self.row, dtype=torch.float32, device=out.device)
        values = torch.empty_like(total)
        for message in gathered:
            scales, zeros, codes = self.parts(message)
            total.add_(affine_decode(codes, scales, zeros, out=values))
        return torch.mul(total.view(-1)[: self.numel], 1.0 / divisor, out=out)


SHORT_NAMES["quantize_per_tensor"] = QuantizePerTensor
SHORT_NAMES["quantize_per_channel"] = QuantizePerChannel
