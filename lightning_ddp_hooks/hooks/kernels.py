"""Quantization of blocks of gradients, in vectorized torch operations; no state and no communication.

A codec turns the values of each block into one scale and a few bytes:

    values  (..., blocks, block_size) float32
    scales  (..., blocks)             float32     both may be strided views into one message
    codes   (..., blocks, bytes)      uint8

[Note: non-finite blocks] A block with an Inf or a NaN gets a non-finite scale, whatever its codes are, and decodes to
non-finite values only. So it stays visible to every rank that sees the scales, and nobody has to look at the values.

These are the reference. On the CPU the native module, where it is built, does the same in fewer passes (stages.py).

Where the blocks of a bucket lie: one chunk for each rank, and one message for each chunk.

    bucket    | block | block | block | block | block | block | bl. + padding |
              |------ chunk 0 --------|------ chunk 1 --------|--- chunk 2 ----
    message   | scale of each block (float32) | codes of each block | up to 7 bytes of padding |
"""

from __future__ import annotations

import torch
from torch import Tensor

# Below this a float32 loses digits, and its reciprocal overflows; such a block counts as zero.
_SMALLEST = torch.finfo(torch.float32).tiny
_SCALE_BYTES = 4


class Chunks:
    """How a bucket is cut into one chunk for each rank; the last ones are filled up with zeros."""

    def __init__(self, numel: int, world_size: int, block_size: int) -> None:
        self.numel, self.world_size = numel, world_size
        share = -(-numel // world_size)
        # A multiple of 8, as `block_size`; fewer where the bucket is too small for one such block per chunk.
        self.block = min(block_size, -(-share // 8) * 8)
        self.blocks = -(-share // self.block) if share else 0  # of a chunk
        self.chunk = self.blocks * self.block  # elements, with padding

    def start(self, rank: int) -> int:
        """Return where the chunk of ``rank`` begins in the bucket; its end, if the chunk is all padding."""
        return min(rank * self.chunk, self.numel)

    def count(self, rank: int) -> int:
        """Return how many elements of the chunk of ``rank`` are not padding."""
        return self.start(rank + 1) - self.start(rank)

    def message_bytes(self, codec: BlockCodec) -> int:
        """Return the bytes of one chunk's message, a multiple of 8."""
        return -(-self.blocks * (_SCALE_BYTES + codec.code_bytes(self.block)) // 8) * 8


class Message:
    """One or more messages, one behind the other, and the views of their parts."""

    def __init__(self, chunks: Chunks, codec: BlockCodec, count: int, device: torch.device) -> None:
        self.bytes = torch.zeros(count, chunks.message_bytes(codec), dtype=torch.uint8, device=device)
        split, code_bytes = chunks.blocks * _SCALE_BYTES, codec.code_bytes(chunks.block)
        self.scales = self.bytes[:, :split].view(torch.float32)
        self.codes = self.bytes[:, split : split + chunks.blocks * code_bytes].view(count, chunks.blocks, code_bytes)


class BlockCodec:
    """How the values of a block become bytes."""

    name: str

    def code_bytes(self, block_size: int) -> int:
        """Return the number of bytes for the values of one block."""
        return block_size

    def encode_(self, values: Tensor, scales: Tensor, codes: Tensor, *, noise: Tensor | None, numel: int) -> None:
        """Quantise contiguous ``values`` into ``scales`` and ``codes``; overwrites ``values``.

        Rounds to the nearest or, with ``noise`` from (0, 1) for each value, up with the probability of the remainder.
        Only the first ``numel`` values are real; behind them are zeros.
        """
        raise NotImplementedError

    def decode(self, scales: Tensor, codes: Tensor, out: Tensor) -> Tensor:
        """Write what ``scales`` and ``codes`` stand for into ``out``, shaped like ``values`` above, and return it."""
        raise NotImplementedError


def _normalize_(values: Tensor, scales: Tensor, largest: float) -> None:
    """Scale each block so that its largest magnitude becomes ``largest``; write the scale that undoes it."""
    scale = torch.maximum(values.amax(-1), values.amin(-1).neg_()).div_(largest)
    inverse, vanishing = scale.reciprocal(), scale < _SMALLEST
    scales.copy_(scale.masked_fill_(vanishing, 0.0))
    values.mul_(inverse.masked_fill_(vanishing, 0.0).unsqueeze_(-1))


class Int8Codec(BlockCodec):
    """Symmetric 8 bit integers: ``value ~ code * scale`` with codes of -127 to 127; off by at most half a scale."""

    name = "int8"

    def encode_(self, values: Tensor, scales: Tensor, codes: Tensor, *, noise: Tensor | None, numel: int) -> None:
        """Quantise."""
        _normalize_(values, scales, 127.0)
        if noise is None:
            values.round_()
        else:
            # A product may exceed 127 in its last bit, and noise may lift that over the limit.
            values.add_(noise).floor_().clamp_(-127.0, 127.0)
        codes.view(torch.int8).copy_(values)

    def decode(self, scales: Tensor, codes: Tensor, out: Tensor) -> Tensor:
        """Undo it."""
        return torch.mul(codes.view(torch.int8), scales.unsqueeze(-1), out=out)


class Float8Codec(BlockCodec):
    """8 bit floats (1 sign, 4 exponent and 3 mantissa bits): small values of a block keep more digits than in int8."""

    name = "fp8"
    largest = 448.0

    def __init__(self) -> None:
        dtype = getattr(torch, "float8_e4m3fn", None)
        if dtype is None:
            raise ValueError(
                f"dtype='fp8' needs torch.float8_e4m3fn, which torch {torch.__version__} does not have; "
                "use dtype='int8'."
            )
        self._dtype: torch.dtype = dtype

    def encode_(self, values: Tensor, scales: Tensor, codes: Tensor, *, noise: Tensor | None, numel: int) -> None:
        """Quantise."""
        _normalize_(values, scales, self.largest)
        if noise is not None:
            # To the neighboring codes below and above. Their distance is 2**(exponent - 3), and 2**-9 below 2**-6; as
            # a float32 it is made from the exponent bits, which takes a tenth of the time of frexp and ldexp.
            exponent = values.view(torch.int32).bitwise_right_shift(23).bitwise_and_(0xFF).clamp_(min=127 - 6)
            spacing = exponent.sub_(3).bitwise_left_shift_(23).view(torch.float32)
            values.div_(spacing).add_(noise).floor_().mul_(spacing)
        codes.view(self._dtype).copy_(values.clamp_(-self.largest, self.largest))

    def decode(self, scales: Tensor, codes: Tensor, out: Tensor) -> Tensor:
        """Undo it."""
        if codes.device.type != "cpu":
            out.copy_(codes.view(self._dtype))
            return out.mul_(scales.unsqueeze(-1))
        # torch's own conversion takes 20 times as long on CPU. The bits of an e4m3 number, moved up by 7 under the
        # sign, are those of a float16 that is 2**8 times smaller, subnormal ones included.
        halves = codes.view(torch.int8).to(torch.int16).mul_(128).bitwise_and_(~0x4000)
        return torch.mul(halves.view(torch.float16), (scales * 256.0).unsqueeze(-1), out=out)


class SignCodec(BlockCodec):
    """One bit per value: ``value ~ +-scale``; the mean magnitude as scale leaves the smallest squared error."""

    name = "onebit"

    def __init__(self) -> None:
        self._tables: dict[torch.device, Tensor] = {}

    def code_bytes(self, block_size: int) -> int:
        """Return the number of bytes for the values of one block."""
        return block_size // 8

    def encode_(self, values: Tensor, scales: Tensor, codes: Tensor, *, noise: Tensor | None, numel: int) -> None:
        """Quantise."""
        # The sign bit of each float32 becomes a byte of 0 or 1; a multiplication gathers eight of them in the top byte.
        negative = values.view(torch.int32).bitwise_right_shift(31).to(torch.int8).view(torch.int64)
        bits = negative.bitwise_and_(0x0101010101010101).mul_(0x0102040810204080).bitwise_right_shift_(56)
        codes.copy_(bits)
        total = values.abs_().sum(-1)
        size = values.shape[-1]
        starts = torch.arange(0, values.numel(), size, device=values.device)
        scales.copy_(total.div_((numel - starts).clamp_(1, size).view(total.shape)))  # padding does not count

    def decode(self, scales: Tensor, codes: Tensor, out: Tensor) -> Tensor:
        """Undo it."""
        table = self._tables.get(out.device)
        if table is None:  # for each byte eight bytes in an int64: +1 where the bit is 0, and -1 where it is 1
            bits = torch.arange(256).unsqueeze(1).bitwise_right_shift(torch.arange(8)).bitwise_and_(1)
            table = (1 - 2 * bits).to(torch.int8).contiguous().view(torch.int64).view(256).to(out.device)
            self._tables[out.device] = table
        signs = table.index_select(0, codes.to(torch.int32).view(-1)).view(torch.int8)
        return torch.mul(signs.view(out.shape), scales.unsqueeze(-1), out=out)


def uniform_noise(shape: torch.Size, generator: torch.Generator, device: torch.device) -> Tensor:
    """Return random numbers from (0, 1), with 16 random bits each and a mean of exactly one half."""
    # Four are cut out of one 64 bit number, in a quarter of the time of `torch.rand`.
    numel = shape.numel()
    words = torch.empty(-(-numel // 4), dtype=torch.int64, device=device)
    words.random_(-(1 << 63), (1 << 63) - 1, generator=generator)
    return words.view(torch.int16)[:numel].view(shape).to(torch.float32).add_(32768.5).mul_(1.0 / 65536.0)


def affine_encode(rows: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Overwrite each row with codes 0 ... 255 over its range and zero; write its scale and the code that is 0.0."""
    low = rows.amin(-1).clamp_(max=0.0)
    high = rows.amax(-1).clamp_(min=0.0)
    scale = high.sub_(low).div_(255.0)
    vanishing = scale < _SMALLEST
    inverse = scale.reciprocal().masked_fill_(vanishing, 0.0)
    zero = low.neg_().mul_(inverse).round_().clamp_(0.0, 255.0)
    scales.copy_(scale.masked_fill_(vanishing, 0.0))
    zeros.copy_(zero)
    return rows.mul_(inverse.unsqueeze_(-1)).round_().add_(zero.unsqueeze_(-1)).clamp_(0.0, 255.0)


def affine_decode(codes: Tensor, scales: Tensor, zeros: Tensor, out: Tensor) -> Tensor:
    """Write what codes of `affine_encode` stand for into ``out``, shape ``(rows, row_size)``, and return it."""
    torch.sub(codes, zeros.to(torch.float32).unsqueeze(-1), out=out)
    return out.mul_(scales.unsqueeze(-1))
