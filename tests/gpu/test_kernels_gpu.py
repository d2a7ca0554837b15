"""What the hooks' kernels compute on a GPU, beside the same in float64 on the CPU."""

import on_gpu
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

import lightning_ddp_hooks as ldh
from lightning_ddp_hooks.hooks import kernels

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]

BLOCKS, SIZE = 64, 256
# The largest error of rounding to the nearest, in units of the block's largest magnitude.
HALF_STEP = {"int8": 0.5 / 127, "fp8": 16 / 448}


def _through(codec: kernels.BlockCodec, values: Tensor, noise: Tensor | None = None) -> Tensor:
    scales = torch.zeros(values.shape[:-1], device=values.device)
    codes = torch.zeros(*values.shape[:-1], codec.code_bytes(SIZE), dtype=torch.uint8, device=values.device)
    codec.encode_(values.clone(), scales, codes, noise=noise, numel=values.numel())
    return codec.decode(scales, codes, torch.empty_like(values))


def _codecs() -> dict[str, tuple[float, float]]:
    """Return for each codec the largest error in units of its bound, and of the mean of many noisy roundings."""
    device, found = on_gpu.own_device(), {}
    generator = torch.Generator(device).manual_seed(0)
    values = (torch.randn(BLOCKS, SIZE) * torch.logspace(-20, 20, BLOCKS).unsqueeze(-1)).to(device)
    exact = values.cpu().double()
    largest = exact.abs().amax(-1, keepdim=True)
    for codec in (kernels.Int8Codec(), kernels.Float8Codec()):
        off = (_through(codec, values).cpu().double() - exact).abs() / largest
        noisy = [
            _through(codec, values, kernels.uniform_noise(values.shape, generator, device)).cpu().double()
            for _ in range(64)
        ]
        drift = (torch.stack(noisy).mean(0) - exact) / largest
        step = HALF_STEP[codec.name]
        found[codec.name] = float(off.max()) / step, float(drift.abs().mean()) / step
    signs = _through(kernels.SignCodec(), values).cpu().double()
    mean = exact.abs().mean(-1, keepdim=True) * torch.where(exact < 0, -1.0, 1.0)
    found["onebit"] = float(((signs - mean) / mean.abs()).abs().max()), 0.0
    rows = values.clone()
    scales, zeros = torch.zeros(BLOCKS, device=device), torch.zeros(BLOCKS, device=device)
    codes = kernels.affine_encode(rows, scales, zeros)
    decoded = kernels.affine_decode(codes, scales, zeros, torch.empty_like(values)).cpu().double()
    span = exact.amax(-1, keepdim=True).clamp(min=0) - exact.amin(-1, keepdim=True).clamp(max=0)
    found["affine"] = float(((decoded - exact).abs() / span).max()) * 255, 0.0
    return found


def test_codecs_lose_no_more_than_they_do_on_the_cpu() -> None:
    [found] = run_ranks(_codecs, world_size=1, timeout=100)
    assert set(found) == {"int8", "fp8", "onebit", "affine"}
    for name in ("int8", "fp8"):
        assert found[name][0] <= 1 + 1e-4, name
        assert found[name][1] <= 0.3, name  # of 64 roundings, each off by at most two half steps
    assert found["onebit"][0] < 1e-5
    assert found["affine"][0] <= 1 + 1e-3  # the value and the zero are rounded


def _non_finite() -> list[bool]:
    device = on_gpu.own_device()
    found = []
    for codec in (kernels.Int8Codec(), kernels.Float8Codec(), kernels.SignCodec()):
        for bad in (float("inf"), float("-inf"), float("nan")):
            values = torch.randn(2, SIZE, device=device)
            values[1, 7] = bad
            decoded = _through(codec, values)
            found.append(bool(decoded[0].isfinite().all()) and not bool(decoded[1].isfinite().any()))
    return found


def test_a_block_with_a_value_that_is_not_finite_shows() -> None:
    [found] = run_ranks(_non_finite, world_size=1, timeout=100)
    assert all(found)


def _casts() -> dict[str, float]:
    """Return for each dtype the largest relative error of the mean over the ranks, beside float64."""
    device, found = on_gpu.own_device(), {}
    for name, hook in {
        "fp16": "fp16",
        "bf16": "bf16",
        "bf16, float32 sum": ldh.hooks.Cast(dtype="bfloat16", accumulate="float32"),
    }.items():
        net = on_gpu.layers(3, 64, device)
        model = ldh.DataParallel(net, comm_hook=hook, bucket_cap_mb=0.01)
        inputs = [torch.randn(16, 64, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
        for _ in range(2):
            model.zero_grad()
            model(inputs[dist.get_rank()].to(device)).square().mean().backward()
        twin = on_gpu.layers(3, 64, torch.device("cpu")).double()
        torch.stack([twin(x.double()).square().mean() for x in inputs]).mean().backward()
        errors = [
            float((a.grad.cpu().double() - b.grad).norm() / b.grad.norm())  # type: ignore[union-attr]
            for a, b in zip(net.parameters(), twin.parameters(), strict=True)
        ]
        found[name] = max(errors)
        model.detach()
    return found


def test_casts_round_as_their_dtype_does() -> None:
    for found in run_ranks(_casts, timeout=100):
        assert found["fp16"] < 2**-10
        assert found["bf16"] < 2**-7
        assert found["bf16, float32 sum"] < 2**-8
