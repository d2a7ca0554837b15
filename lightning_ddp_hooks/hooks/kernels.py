"""Quantisation of blocks of gradients, in vectorised torch operations; no state and no communication.

A codec turns float32 values of shape ``(..., blocks, block_size)`` into one float32 scale and a few bytes for each
block:

    values  (..., blocks, block_size) float32
    scales  (..., blocks)             float32     both may be strided views into one message
    codes   (..., blocks, bytes)      uint8

[Note: non-finite blocks] A block with an Inf or a NaN gets a non-finite scale, whatever its codes are, and decodes to
non-finite values only. So it stays visible to every rank that sees the scales, and nobody has to look at the values.

These are the reference. On the CPU the native module, where it is built, does the same in fewer passes (stages.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

# Below this a float32 loses digits, and its reciprocal overflows; such a block counts as zero.
_SMALLEST = torch.finfo(torch.float32).tiny

SCALE_BYTES = 4
"""Bytes of a block's scale."""


class BlockCodec:
    """How the values of a block become bytes."""

    name: str

    def code_bytes(self, block_size: int) -> int:
        """Return the number of bytes for the values of one block."""
        return block_size

    def encode_(self, values: Tensor, scales: Tensor, codes: Tensor, *, noise: Tensor | None, numel: int) -> None:
        """Quantise ``values`` into ``scales`` and ``codes``; overwrites ``values``.

        Args:
            values: float32, contiguous, shape ``(..., blocks, block_size)``.
            scales: float32, shape ``(..., blocks)``; written.
            codes: uint8, shape ``(..., blocks, code_bytes)``; written.
            noise: same shape as ``values``, uniform in (0, 1): round up with the probability of the remainder. None: to
                the nearest.
            numel: how many of the values, in the order of memory, are real; the others are zeros behind them.
        """
        raise NotImplementedError

    def decode(self, scales: Tensor, codes: Tensor, out: Tensor) -> Tensor:
        """Write what ``scales`` and ``codes`` stand for into ``out``, shaped like ``values`` above, and return it."""
        raise NotImplementedError


def _scale_of(values: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """Return each block's scale, by which its largest magnitude becomes ``largest``, and the inverse to multiply by."""
    magnitude = torch.maximum(values.amax(-1), values.amin(-1).neg_())
    scale = magnitude.div_(largest)
    inverse = scale.reciprocal()
    vanishing = scale < _SMALLEST
    scale.masked_fill_(vanishing, 0.0)
    inverse.masked_fill_(vanishing, 0.0)
    return scale, inverse.unsqueeze_(-1)


class Int8Codec(BlockCodec):
    """Symmetric 8 bit integers: ``value ~ code * scale`` with codes of -127 to 127; off by at most half a scale."""

    name = "int8"

    def encode_(self, values: Tensor, scales: Tensor, codes: Tensor, *, noise: Tensor | None, numel: int) -> None:
        """Quantise; see `BlockCodec`."""
        scale, inverse = _scale_of(values, 127.0)
        scales.copy_(scale)
        values.mul_(inverse)
        if noise is None:
            values.round_()
        else:
            # A product may exceed 127 in its last bit, and noise may lift that over the limit.
            values.add_(noise).floor_().clamp_(-127.0, 127.0)
        codes.view(torch.int8).copy_(values)

    def decode(self, scales: Tensor, codes: Tensor, out: Tensor) -> Tensor:
        """Undo it; see `BlockCodec`."""
        return torch.mul(codes.view(torch.int8), scales.unsqueeze(-1), out=out)


class Float8Codec(BlockCodec):
    """8 bit floats (1 sign, 4 exponent and 3 mantissa bits): small values of a block keep more digits than in int8.

    Raises:
        ValueError: this torch build has no such dtype.
    """

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
        """Quantise; see `BlockCodec`."""
        scale, inverse = _scale_of(values, self.largest)
        scales.copy_(scale)
        values.mul_(inverse)
        if noise is not None:
            # To the neighbouring codes below and above. Their distance is 2**(exponent - 3), and 2**-9 below 2**-6; as
            # a float32 it is made from the exponent bits, which takes a tenth of the time of frexp and ldexp.
            exponent = values.view(torch.int32).bitwise_right_shift(23).bitwise_and_(0xFF).clamp_(min=127 - 6)
            spacing = exponent.sub_(3).bitwise_left_shift_(23).view(torch.float32)
            values.div_(spacing).add_(noise).floor_().mul_(spacing)
        codes.view(self._dtype).copy_(values.clamp_(-self.largest, self.largest))

    def decode(self, scales: Tensor, codes: Tensor, out: Tensor) -> Tensor:
        """Undo it; see `BlockCodec`."""
        if codes.device.type != "cpu":
            out.copy_(codes.view(self._dtype))
            return out.mul_(scales.unsqueeze(-1))
        # torch's own conversion takes 20 times as long on CPU. The bits of an e4m3 number, moved up by 7 under the
        # sign, are those of a float16 that is 2**8 times smaller, subnormal ones included.
        halves = codes.view(torch.int8).to(torch.int16).mul_(128).bitwise_and_(~0x4000)
        return torch.mul(halves.view(torch.float16), (scales * 256.0).unsqueeze(-1), out=out)


class SignCodec(BlockCodec):
    """One bit per value: ``value ~ +-scale``, where the scale is the block's mean magnitude.

    That scale leaves the smallest squared error that signs can leave: ``|x|^2 (1 - |x|_1^2 / (n |x|_2^2))``.
    """

    name = "onebit"

    def __init__(self) -> None:
        self._tables: dict[torch.device, Tensor] = {}

    def code_bytes(self, block_size: int) -> int:
        """Return the number of bytes for the values of one block."""
        return block_size // 8

    def encode_(self, values: Tensor, scales: Tensor, codes: Tensor, *, noise: Tensor | None, numel: int) -> None:
        """Quantise; see `BlockCodec`."""
        # The sign bit of each float32 becomes a byte of 0 or 1; a multiplication gathers eight of them in the top byte.
        negative = values.view(torch.int32).bitwise_right_shift(31).to(torch.int8).view(torch.int64)
        bits = negative.bitwise_and_(0x0101010101010101).mul_(0x0102040810204080).bitwise_right_shift_(56)
        codes.copy_(bits)
        total = values.abs_().sum(-1)
        scales.copy_(total.div_(_real_per_block(values, numel)))

    def decode(self, scales: Tensor, codes: Tensor, out: Tensor) -> Tensor:
        """Undo it; see `BlockCodec`."""
        table = self._tables.get(out.device)
        if table is None:
            table = self._tables[out.device] = _sign_table().to(out.device)
        signs = table.index_select(0, codes.to(torch.int32).view(-1)).view(torch.int8)
        return torch.mul(signs.view(out.shape), scales.unsqueeze(-1), out=out)


def _real_per_block(values: Tensor, numel: int) -> Tensor:
    """Return for each block how many of its values are not padding, at least 1, in the shape of the scales."""
    size = values.shape[-1]
    starts = torch.arange(0, values.numel(), size, device=values.device)
    return (numel - starts).clamp_(1, size).view(values.shape[:-1])


def _sign_table() -> Tensor:
    """Return for each byte the int64 whose eight bytes are +1 where the bit is 0 and -1 where it is 1."""
    byte = torch.arange(256).unsqueeze(1)
    bit = byte.bitwise_right_shift(torch.arange(8)).bitwise_and_(1)
    return (1 - 2 * bit).to(torch.int8).contiguous().view(torch.int64).view(256)


def uniform_noise(shape: torch.Size, generator: torch.Generator, device: torch.device) -> Tensor:
    """Return random numbers from (0, 1), with 16 random bits each and a mean of exactly one half.

    Four of them are cut out of one 64 bit number: a quarter of the time of ``torch.rand``, which is most of the time of
    stochastic rounding. What that biases is below 2**-17 of a step.
    """
    numel = shape.numel()
    words = torch.empty(-(-numel // 4), dtype=torch.int64, device=device)
    words.random_(-(1 << 63), (1 << 63) - 1, generator=generator)
    return words.view(torch.int16)[:numel].view(shape).to(torch.float32).add_(32768.5).mul_(1.0 / 65536.0)


def affine_encode(rows: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Quantise each row to 0 ... 255 over its range, which is made to include zero; overwrites ``rows``.

    Args:
        rows: float32, shape ``(rows, row_size)``.
        scales: float32, shape ``(rows,)``; written.
        zeros: uint8, shape ``(rows,)``; written with the code that stands for 0.0.

    Returns:
        ``rows``, now holding the codes as float32.
    """
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
