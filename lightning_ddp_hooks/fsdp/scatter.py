"""The reduce-scatter of plain FSDP in fewer bytes: each rank gets the sum of its shard, added up in float32.

    rank 0   [ shard 0 | shard 1 | shard 2 ]  --encode--> --all-to-all-->  shard 0 of all ranks: decode, sum in float32
    rank 1   [ shard 0 | shard 1 | shard 2 ]                               shard 1 of all ranks: decode, sum in float32
    rank 2   [ shard 0 | shard 1 | shard 2 ]                               shard 2 of all ranks: decode, sum in float32

A value is rounded once. What was not sent is not kept: residuals would be as large as the model on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from lightning_ddp_hooks import comm, traffic
from lightning_ddp_hooks._compat.of_fsdp import scale_of
from lightning_ddp_hooks.hooks.allreduce import narrower, scale_into
from lightning_ddp_hooks.hooks.block_quantize import BlockQuantize
from lightning_ddp_hooks.hooks.cast import Cast
from lightning_ddp_hooks.hooks.contract import CommHook, hook_name
from lightning_ddp_hooks.hooks.kernels import BlockCodec, Chunks, Float8Codec, Int8Codec, Message, uniform_noise
from lightning_ddp_hooks.hooks.registry import resolve_hook
from lightning_ddp_hooks.hooks.workspace import Workspace
from lightning_ddp_hooks.reducer import requests
from lightning_ddp_hooks.reducer.queue import carry_out

Scatter = Generator[requests.Request, Any, None]
_CODECS: dict[str, Callable[[], BlockCodec]] = {"int8": Int8Codec, "fp8": Float8Codec}
_NO_STATE = "residuals of whole gradients would take the memory that sharding saves"


class ReduceScatter:
    """What FSDP2 calls for each parameter group; torch's interface of that name."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for an input or an output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: comm.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Write the sum of this rank's part over the ranks, or their mean, into ``output_tensor``."""
        scale = scale_of(op, comm.world_size(group))
        if scale is None:
            raise RuntimeError(
                "A communication hook on the reduce-scatter cannot multiply by a number of yours: with "
                "`set_gradient_divide_factor(...)` also call `model.set_force_sum_reduction_for_comms(True)`."
            )
        with record_function("ldh::reduce_scatter"), traffic.counted_as("gradients"):
            carry_out(self.run(output_tensor, input_tensor, scale, group), group)

    def run(self, output: Tensor, tensor: Tensor, scale: float, group: comm.ProcessGroup) -> Scatter:
        """Yield the collectives; may overwrite ``tensor``."""
        raise NotImplementedError


class _CastScatter(ReduceScatter):
    def __init__(self, dtype: torch.dtype, *, wide_sum: bool) -> None:
        self._dtype = dtype
        self._wide_sum = wide_sum
        self._workspace = Workspace()

    def run(self, output: Tensor, tensor: Tensor, scale: float, group: comm.ProcessGroup) -> Scatter:
        dtype = narrower(tensor.dtype, self._dtype)
        narrow = self._workspace.get(tensor.numel(), tensor.numel(), dtype, tensor.device)
        scale_into(narrow, tensor, scale)  # before the cast: float16 cannot overflow in the sum
        if not self._wide_sum:
            output.copy_((yield requests.ReduceScatter(narrow)))
            return
        size = comm.world_size(group)
        received = self._workspace.get((tensor.numel(), "received"), tensor.numel(), dtype, tensor.device)
        yield requests.AllToAll(narrow, received)
        output.copy_(received.view(size, -1).sum(dim=0, dtype=torch.float32))


class _QuantizedScatter(ReduceScatter):
    def __init__(self, declared: BlockQuantize, rank: int, step: Callable[[], int]) -> None:
        self._declared = declared
        self._codec = _CODECS[declared.dtype]()
        self._rank, self._step = rank, step
        self._draw = (-1, 0)
        self._messages: dict[tuple[int, torch.device], tuple[Message, Message]] = {}

    def run(self, output: Tensor, tensor: Tensor, scale: float, group: comm.ProcessGroup) -> Scatter:
        size, device = comm.world_size(group), tensor.device
        chunks = Chunks(tensor.numel(), size, self._declared.block_size)
        key = (tensor.numel(), device)
        if key not in self._messages:
            sent, received = (Message(chunks, self._codec, size, device) for _ in range(2))
            self._messages[key] = sent, received
        sent, received = self._messages[key]
        share = tensor.numel() // size
        values = torch.zeros(size, chunks.blocks, chunks.block, dtype=torch.float32, device=device)
        values.view(size, -1)[:, :share].copy_(tensor.view(size, -1))
        noise = self._noise(values)
        self._codec.encode_(values, sent.scales, sent.codes, noise=noise, numel=values.numel())
        yield requests.AllToAll(sent.bytes, received.bytes)
        self._codec.decode(received.scales, received.codes, values)
        output.copy_(values.sum(dim=0).view(-1)[:share].mul_(scale))

    def _noise(self, values: Tensor) -> Tensor | None:
        """Return noise for stochastic rounding, which follows from rank, step and place in the step."""
        if not self._declared.stochastic_rounding:
            return None
        step = self._step()
        self._draw = (step, self._draw[1] + 1 if self._draw[0] == step else 0)
        seed = 0
        for part in (self._declared.seed, self._rank, *self._draw):
            seed = (seed * 6364136223846793005 + part + 1442695040888963407) % (1 << 63)
        return uniform_noise(values.shape, torch.Generator(values.device).manual_seed(seed), values.device)


def reduce_scatter_by(hook: CommHook, rank: int, step: Callable[[], int]) -> ReduceScatter:
    """Return the reduce-scatter that a hook stands for in plain FSDP.

    Raises:
        ValueError: There is none.
    """
    if isinstance(hook, Cast) and resolve_hook(hook.inner) is None:
        return _CastScatter(hook.comm_dtype, wide_sum=hook.accumulate == "float32")
    if isinstance(hook, BlockQuantize) and hook.dtype in _CODECS:
        if hook.error_feedback:
            raise ValueError(
                f"BlockQuantize(error_feedback=True) cannot work on the reduce-scatter of plain FSDP: {_NO_STATE}. Use "
                "BlockQuantize(error_feedback=False, stochastic_rounding=True), or a mesh with replicas, between which "
                "only shards are sent."
            )
        return _QuantizedScatter(hook, rank, step)
    raise ValueError(
        f"{hook_name(hook)} makes an all-reduce, which plain FSDP has none of: on a mesh of one dimension gradients "
        "are reduced and scattered, which Cast (without `inner`) and BlockQuantize can do. Use one of them, or shard "
        "the model on a mesh with replicas (hosts x devices of a host), between which any hook can work."
    )
