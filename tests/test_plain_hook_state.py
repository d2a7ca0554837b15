"""Plain PyTorch: hooks by name where they are registered, and their state in a loop that is resumed."""

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

from lightning_ddp_hooks import DataParallel
from lightning_ddp_hooks.hooks import BlockQuantize, PowerSGD

pytestmark = pytest.mark.ranks
HOOK = PowerSGD(rank=1, start_iter=2)


def _wrap(weights: Any = None, **settings: Any) -> DataParallel:
    torch.manual_seed(0)
    model = DataParallel(nn.Linear(24, 24, bias=False), **settings)
    if weights is not None:
        model.load_state_dict(weights)
    return model


def _train(model: DataParallel, steps: range) -> torch.Tensor:
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model(torch.randn(8, 24, generator=generator)).square().sum().backward()
        with torch.no_grad():
            for param in model.parameters():
                assert param.grad is not None
                param.sub_(param.grad, alpha=1e-3)
                param.grad = None
    (weight,) = model.parameters()
    return weight.detach().clone()


def _loops() -> tuple[list[torch.Tensor], list[str]]:
    whole = _train(_wrap(comm_hook=HOOK), range(8))
    first = _wrap()
    first.register_comm_hook(None, HOOK)
    _train(first, range(5))
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "hook": first.comm_hook_state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert saved["hook"]["step"] == 5
    resumed = _wrap(saved["model"], comm_hook=HOOK)
    resumed.load_comm_hook_state_dict(saved["hook"])
    forgetful = _wrap(saved["model"], comm_hook=HOOK)
    weights = [whole, *(_train(model, range(5, 8)) for model in (resumed, forgetful))]
    assert resumed.comm_hook_state_dict()["step"] == 8

    said = []
    for state, hook in ((None, "powersdg"), (3, "powersgd"), (None, PowerSGD)):
        with pytest.raises((ValueError, TypeError)) as raised:
            _wrap().register_comm_hook(state, hook)
        said.append(str(raised.value))
    with pytest.raises(ValueError, match="hook") as other:
        _wrap(comm_hook="int8").load_comm_hook_state_dict(saved["hook"])
    said.append(str(other.value))
    named = _wrap()
    named.register_comm_hook(None, "int8")
    assert named._run.hook.declared == BlockQuantize()
    with pytest.raises(RuntimeError, match="only once"):
        named.register_comm_hook(None, "int8")
    _wrap().register_comm_hook(None, "allreduce")  # what is done anyway
    return weights, said


def test_a_resumed_loop_goes_on_and_names_are_taken() -> None:
    for (whole, resumed, forgetful), said in run_ranks(_loops):
        torch.testing.assert_close(resumed, whole, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(forgetful, whole, rtol=1e-5, atol=1e-6)
        assert "known names: allreduce" in said[0]
        assert "Expected None for the state of 'powersgd'" in said[1]
        assert "class PowerSGD" in said[2] or "Expected" in said[2]
        assert "PowerSGD" in said[3]
