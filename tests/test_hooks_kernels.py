"""Codecs by themselves: what they lose, what they keep, and what they do with Inf and NaN."""

import math

import pytest
import torch
from torch import Tensor

from lightning_ddp_hooks.hooks.kernels import (
    BlockCodec,
    Chunks,
    Float8Codec,
    Int8Codec,
    SignCodec,
    affine_decode,
    affine_encode,
    uniform_noise,
)
from lightning_ddp_hooks.hooks.topk import largest

CODECS = [Int8Codec, SignCodec] + ([Float8Codec] if hasattr(torch, "float8_e4m3fn") else [])
ROUNDING_CODECS = [codec for codec in CODECS if codec is not SignCodec]

# The largest error of rounding to the nearest, in units of the block's largest magnitude.
HALF_STEP = {"int8": 0.5 / 127, "fp8": 16 / 448}


def through(codec: BlockCodec, values: Tensor, noise: Tensor | None = None) -> Tensor:
    """Encode and decode, with strided views as in a message."""
    blocks, size = values.shape[-2:]
    message = torch.zeros(*values.shape[:-2], blocks * (4 + codec.code_bytes(size)) + 8, dtype=torch.uint8)
    scales = message[..., : blocks * 4].view(torch.float32)
    codes = message[..., blocks * 4 : -8].unflatten(-1, (blocks, codec.code_bytes(size)))
    codec.encode_(values.clone(), scales, codes, noise=noise, numel=values.numel())
    return codec.decode(scales, codes, torch.empty_like(values))


@pytest.mark.parametrize("make", ROUNDING_CODECS)
def test_a_value_is_off_by_at_most_half_a_step(make: type[BlockCodec]) -> None:
    codec = make()
    values = torch.randn(3, 50, 64) * torch.logspace(-30, 30, 50).unsqueeze(-1)
    error = (through(codec, values).double() - values.double()).abs()
    bound = HALF_STEP[codec.name] * values.abs().amax(-1, keepdim=True).double()
    assert (error <= bound * (1 + 1e-5)).all()


def test_fp8_is_torchs_cast_of_the_scaled_values() -> None:
    values = torch.randn(2, 40, 128) ** 5
    scale = values.abs().amax(-1, keepdim=True) / 448
    expected = (values * scale.reciprocal()).to(torch.float8_e4m3fn).to(torch.float32) * scale
    torch.testing.assert_close(through(Float8Codec(), values), expected, rtol=1e-6, atol=0)


def test_fp8_without_the_dtype_says_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "float8_e4m3fn")
    with pytest.raises(ValueError, match=r"float8_e4m3fn.*use dtype='int8'"):
        Float8Codec()


def test_one_bit_is_the_sign_times_the_mean_magnitude() -> None:
    values = torch.randn(2, 10, 32)
    expected = torch.where(values < 0, -1.0, 1.0) * values.abs().mean(-1, keepdim=True)
    torch.testing.assert_close(through(SignCodec(), values), expected)


def test_one_bit_does_not_count_padding_in_the_mean() -> None:
    values = torch.zeros(1, 2, 16)
    values.view(-1)[:20] = -3.0
    codec = SignCodec()
    scales, codes = torch.empty(1, 2), torch.empty(1, 2, 2, dtype=torch.uint8)
    codec.encode_(values.clone(), scales, codes, noise=None, numel=20)
    assert scales.tolist() == [[3.0, 3.0]]
    assert torch.equal(codec.decode(scales, codes, torch.empty_like(values)).view(-1)[:20], values.view(-1)[:20])


def test_one_bit_loses_exactly_what_the_formula_says() -> None:
    values = torch.randn(1, 1, 4096, dtype=torch.float32)
    lost = (values - through(SignCodec(), values)).double().square().sum()
    square, sum_ = values.double().square().sum(), values.double().abs().sum()
    torch.testing.assert_close(lost, square - sum_**2 / values.numel(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("make", ROUNDING_CODECS)
def test_stochastic_rounding_is_unbiased(make: type[BlockCodec]) -> None:
    codec = make()
    values = torch.randn(1, 8, 64)
    generator = torch.Generator().manual_seed(0)
    draws = 4000
    mean = torch.zeros_like(values, dtype=torch.float64)
    for _ in range(draws):
        mean += through(codec, values, uniform_noise(values.shape, generator, values.device))
    error = (mean / draws - values).abs()
    # A rounding error of a full step has at most half a step as its standard deviation.
    five_sigma = 5 * HALF_STEP[codec.name] * values.abs().amax(-1, keepdim=True) / math.sqrt(draws)
    assert (error <= five_sigma).all()
    assert (through(codec, values) - values).abs().max() > error.max() * 3


def test_noise_is_uniform_in_the_open_interval() -> None:
    noise = uniform_noise(torch.Size([1001, 100]), torch.Generator().manual_seed(0), torch.device("cpu"))
    assert noise.shape == (1001, 100)
    assert 0 < noise.min() < 1e-4
    assert 1 - 1e-4 < noise.max() < 1
    counts = torch.histc(noise, 20, 0, 1)
    assert (counts - 5005).abs().max() < 6 * math.sqrt(5005)


@pytest.mark.parametrize("make", CODECS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_block_with_a_bad_value_decodes_to_bad_values_only_and_the_others_stay(
    make: type[BlockCodec], bad: float
) -> None:
    values = torch.randn(1, 4, 32)
    clean = through(make(), values)
    values[0, 2, 5] = bad
    decoded = through(make(), values)
    assert not decoded[0, 2].isfinite().any()
    keep = torch.tensor([0, 1, 3])
    assert torch.equal(decoded[0, keep], clean[0, keep])


@pytest.mark.parametrize("make", CODECS)
def test_zeros_and_vanishing_values_decode_to_zero_or_next_to_it(make: type[BlockCodec]) -> None:
    values = torch.zeros(1, 2, 16)
    values[0, 1] = 1e-44
    decoded = through(make(), values)
    assert torch.equal(decoded[0, 0], values[0, 0])
    assert decoded[0, 1].abs().max() <= 1e-43


def test_affine_codes_span_the_range_of_each_row_and_zero() -> None:
    rows = torch.randn(5, 100) + torch.arange(-2.0, 3.0).unsqueeze(1) * 3
    scale = (rows.amax(1).clamp(min=0) - rows.amin(1).clamp(max=0)) / 255
    zero = (-rows.amin(1).clamp(max=0) / scale).round()
    scales, zeros = torch.empty(5), torch.empty(5, dtype=torch.uint8)
    codes = affine_encode(rows.clone(), scales, zeros).to(torch.uint8)
    assert torch.equal(scales, scale)
    assert torch.equal(zeros, zero.to(torch.uint8))
    decoded = affine_decode(codes, scales, zeros, torch.empty(5, 100))
    assert ((decoded - rows).abs() <= scale.unsqueeze(1) * 1.01).all()
    assert (decoded - rows).square().mean().sqrt() < 0.35 * scale.max()


@pytest.mark.parametrize("numel", [1, 7, 8, 63, 64, 1000, 4096, 100_003])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_chunks_cover_the_bucket_once_and_pad_less_than_a_block_per_rank(numel: int, world_size: int) -> None:
    chunks = Chunks(numel, world_size, 64)
    assert sum(chunks.count(rank) for rank in range(world_size)) == numel
    assert [chunks.start(rank) for rank in range(world_size)] == sorted(chunks.start(r) for r in range(world_size))
    assert chunks.block <= 64
    assert chunks.block % 8 == 0
    assert chunks.chunk * world_size < numel + world_size * 64
    assert chunks.message_bytes(Int8Codec()) % 8 == 0


@pytest.mark.parametrize("numel", [100, 70_000, 300_000])
def test_largest_finds_what_topk_finds(numel: int) -> None:
    for values in (torch.randn(numel).abs(), torch.zeros(numel), torch.arange(numel).float() % 64):
        for k in (1, numel // 100, numel // 3):
            found = values[largest(values, k)].sort().values
            assert torch.equal(found, values.topk(k).values.sort().values)
            assert len(set(largest(values, k).tolist())) == k


def test_largest_counts_nan_as_the_largest() -> None:
    values = torch.rand(100_000)
    values[777] = math.nan
    assert 777 in largest(values, 10).tolist()
