"""The mean of gradients that were quantized to 8 bits once, by gathering everybody's codes.

The protocol of torch's quantization hooks: each rank quantises its bucket to 0 ... 255, all ranks gather all codes and
scales, and each of them decodes and averages. Here scales, zero points and codes travel in one message:

    | scale of each row (float32) | code of 0.0 of each row (uint8) | codes of each row (uint8) |
"""

# No postponed annotations: torch's DDP looks at those of the functions when it is given one.
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import record_function

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.hooks.allreduce import OptionalGroup, TensorFuture, divisor_of, done
from lightning_ddp_hooks.hooks.contract import BindContext, BoundHook, Phases, ReplicatingHook, require_types
from lightning_ddp_hooks.hooks.kernels import affine_decode, affine_encode
from lightning_ddp_hooks.hooks.registry import SHORT_NAMES
from lightning_ddp_hooks.reducer import requests
from lightning_ddp_hooks.reducer.bucket import GradBucket
from lightning_ddp_hooks.short_names import add_short_name


@dataclass(frozen=True, kw_only=True)
class QuantizePerTensor(ReplicatingHook):
    """Sends 8 bits per gradient and one scale per bucket, to everybody, as torch's ``quantization_pertensor_hook``.

    Bytes per element: 1 times ``world_size - 1``, so it grows with the number of ranks and passes that of float32
    all-reduce at 8 of them; `BlockQuantize` does not grow and is more exact. One value is off by at most half of 1/255
    of the range of the bucket, which one outlier can make large. No error feedback.

    Example:
        >>> DDPHooksStrategy(comm_hook="quantize_per_tensor")
    """

    def bind(self, context: BindContext) -> BoundHook:
        """Bind the hook."""
        return _GatherHook("QuantizePerTensor", context, None)


@dataclass(frozen=True, kw_only=True)
class QuantizePerChannel(ReplicatingHook):
    """Sends 8 bits per gradient and a scale for each channel, to all, as torch's ``quantization_perchannel_hook``.

    Bytes per element: ``1 + 5 / bucket_size`` times ``world_size - 1``; see `QuantizePerTensor`. One value is off by at
    most half of 1/255 of the range of its channel.

    Args:
        bucket_size: Number of elements of a channel.

    Raises:
        TypeError: A setting of the wrong type.
        ValueError: ``bucket_size`` is not positive.

    Example:
        >>> DDPHooksStrategy(comm_hook=QuantizePerChannel(bucket_size=128))
    """

    bucket_size: int = 512

    def __post_init__(self) -> None:
        require_types(self, whole=("bucket_size",))
        if self.bucket_size < 1:
            raise ValueError(f"Expected bucket_size of at least 1, got {self.bucket_size}.")

    def bind(self, context: BindContext) -> BoundHook:
        """Bind the hook."""
        return _GatherHook("QuantizePerChannel", context, self.bucket_size)


def quantization_pertensor_hook(process_group: OptionalGroup, bucket: comm.TorchGradBucket) -> TensorFuture:
    """Average the bucket over the ranks of the group (None: all), see `QuantizePerTensor`; by torch's contract.

    Example:
        >>> ddp_model.register_comm_hook(None, quantization_pertensor_hook)
    """
    return _gather_mean(process_group, bucket, None)


def quantization_perchannel_hook(
    process_group: OptionalGroup, bucket: comm.TorchGradBucket, bucket_size: int = 512
) -> TensorFuture:
    """Average the bucket over the ranks of the group (None: all), see `QuantizePerChannel`; by torch's contract.

    Example:
        >>> ddp_model.register_comm_hook(None, quantization_perchannel_hook)
    """
    return _gather_mean(process_group, bucket, bucket_size)


def _gather_mean(process_group: OptionalGroup, bucket: comm.TorchGradBucket, row_size: int | None) -> TensorFuture:
    group, buffer = comm.resolve_group(process_group), bucket.buffer()
    world_size = comm.world_size(group)
    if world_size == 1 or not buffer.numel():
        return done(buffer)
    rows = _Rows(buffer.numel(), row_size)
    message = rows.encode(buffer)
    gathered = message.new_empty(world_size, message.numel())
    future = comm.start_all_gather(gathered, message, group).get_future()
    # The callback computes only; a collective in it could overtake those of other buckets.
    divisor = divisor_of(bucket, group)
    return future.then(lambda _: rows.decode_mean(gathered, divisor, buffer))


class _GatherHook(BoundHook):
    def __init__(self, name: str, context: BindContext, row_size: int | None) -> None:
        self.name = name
        self._world_size = context.world_size
        self._row_size = row_size

    def reduce(self, bucket: GradBucket) -> Phases:
        buffer = bucket.buffer()
        if self._world_size == 1 or not buffer.numel():
            buffer.div_(bucket.divisor)
            return None
        rows = _Rows(buffer.numel(), self._row_size)
        with record_function("ldh::quantize"):
            message = rows.encode(buffer)
        gathered = yield requests.AllGather(message)
        with record_function("ldh::dequantize"):
            return rows.decode_mean(gathered.view(self._world_size, -1), bucket.divisor, buffer)


class _Rows:
    """A bucket cut into rows of ``row_size`` (None: into one) with one scale each; the last is filled up with zeros."""

    def __init__(self, numel: int, row_size: int | None) -> None:
        self.numel = numel
        self.row = numel if row_size is None else min(row_size, numel)
        self.rows = -(-numel // self.row)

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
        nbytes = -(-self.rows * (4 + 1 + self.row) // 4) * 4  # so that the next message's scales are aligned
        message = torch.zeros(nbytes, dtype=torch.uint8, device=buffer.device)
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


add_short_name(SHORT_NAMES, "quantize_per_tensor", QuantizePerTensor)
add_short_name(SHORT_NAMES, "quantize_per_channel", QuantizePerChannel)
