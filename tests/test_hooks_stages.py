"""The stages in C++ beside those in torch: the same bits where rounding decides, and the same care with Inf and NaN."""

import math

import pytest
import torch
from backends import require
from torch import Tensor

from lightning_ddp_hooks.hooks import stages as stages_module
from lightning_ddp_hooks.hooks.error_feedback import ResidualUpdate
from lightning_ddp_hooks.hooks.kernels import BlockCodec, Chunks, Float8Codec, Int8Codec, SignCodec
from lightning_ddp_hooks.hooks.stages import Residuals, StageBuffers, TwoStageKernels
from lightning_ddp_hooks.reducer.native import build

pytestmark = pytest.mark.timeout(900)  # the first test may have to compile

CODECS = [Int8Codec, SignCodec] + ([Float8Codec] if hasattr(torch, "float8_e4m3fn") else [])


def run(stages: TwoStageKernels, codec: BlockCodec, gradient: Tensor, feedback: bool, rank: int) -> dict[str, Tensor]:
    """Play all three steps of one rank of three, with made-up messages from the others."""
    torch.manual_seed(1)
    chunks = Chunks(gradient.numel(), 3, 64)
    buffers = StageBuffers(chunks, codec, rank, gradient.device)
    gradient = gradient.clone()
    residuals = Residuals(torch.randn_like(gradient), torch.randn(chunks.count(rank))) if feedback else Residuals()
    carry = ResidualUpdate()
    stages.encode(buffers, gradient, residuals, None)
    buffers.received.bytes.copy_(buffers.sent.bytes[[rank, (rank + 1) % 3, rank]])
    stages.add_up(buffers, residuals, None)
    buffers.received.bytes.copy_(buffers.sent.bytes)
    buffers.received.bytes[rank] = buffers.answer.bytes[0]
    sent, answer = buffers.sent.bytes.clone(), buffers.answer.bytes.clone()
    stages.finish(buffers, gradient, 1 / 3, residuals, carry)
    found = {"sent": sent, "answer": answer, "mean": gradient, "sum": buffers.sum, "left": torch.tensor(carry.left_out)}
    if residuals.worker is not None and residuals.server is not None:
        found |= {"worker": residuals.worker, "server": residuals.server}
    return found


@pytest.mark.parametrize("make", CODECS)
@pytest.mark.parametrize("feedback", [False, True])
def test_native_gives_what_torch_gives(make: type[BlockCodec], feedback: bool) -> None:
    require("native")
    for numel in (1, 9, 64, 1000, 30_000):
        gradient = torch.randn(numel) * torch.logspace(-25, 25, numel)
        for rank in (0, 2):
            ours = run(TwoStageKernels(make(), build.load()), make(), gradient, feedback, rank)
            reference = run(TwoStageKernels(make()), make(), gradient, feedback, rank)
            for name, tensor in reference.items():
                if make is not SignCodec:
                    assert torch.equal(ours[name], tensor), (name, numel)
                elif tensor.is_floating_point():  # magnitudes are added in another order
                    slack = 1e-5 * float(gradient.abs().max())
                    torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=slack)


@pytest.mark.parametrize("make", CODECS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_native_shows_a_bad_value_and_leaves_the_residuals_alone(make: type[BlockCodec], bad: float) -> None:
    require("native")
    gradient = torch.randn(1000)
    gradient[130] = bad
    torch.manual_seed(1)
    worker, server = torch.randn(1000), torch.randn(Chunks(1000, 3, 64).count(0))
    for stages in (TwoStageKernels(make(), build.load()), TwoStageKernels(make())):
        found = run(stages, make(), gradient, True, 0)
        assert not found["mean"][128:192].isfinite().any()
        assert torch.equal(found["worker"], worker)
        assert torch.equal(found["server"], server)
        assert found["left"] == 1


def test_what_native_cannot_take_goes_through_torch() -> None:
    require("native")
    codec = Int8Codec()
    for dtype in (torch.float64, torch.bfloat16):
        gradient = torch.randn(500).to(dtype)
        ours = run(TwoStageKernels(codec, build.load()), codec, gradient, True, 1)
        reference = run(TwoStageKernels(codec), codec, gradient, True, 1)
        for name, tensor in reference.items():
            torch.testing.assert_close(ours[name], tensor, rtol=1e-6, atol=1e-6)


def test_without_the_native_module_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages_module.build, "is_built", lambda: False)
    assert stages_module.native_module.__wrapped__() is None


@pytest.mark.gpu
@pytest.mark.parametrize("make", CODECS)
def test_a_device_gives_what_the_cpu_gives(make: type[BlockCodec]) -> None:
    for numel in (9, 30_000):
        gradient = torch.randn(numel)
        for rank in (0, 2):
            reference = run(TwoStageKernels(make()), make(), gradient, False, rank)
            there = run(TwoStageKernels(make()), make(), gradient.cuda(), False, rank)
            # A device divides and adds in its own order: a value next to a tie may get the neighboring code.
            step = 0.1 * float(gradient.abs().max()) if make is not SignCodec else 1e-5
            torch.testing.assert_close(there["mean"].cpu(), reference["mean"], rtol=1e-5, atol=step)
            assert (there["mean"].cpu() != reference["mean"]).float().mean() < 0.02 or make is SignCodec
