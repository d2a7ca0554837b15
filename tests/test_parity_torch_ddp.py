"""Side by side with torch's DistributedDataParallel: the same steps give the same bits."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import lightning_ddp_hooks as ldh

pytestmark = pytest.mark.ranks


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def conv() -> nn.Module:
    net = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.Flatten())
    return nn.Sequential(nn.Unflatten(1, (4, 2, 2)), nn.ZeroPad2d(2), net.to(memory_format=torch.channels_last))


def recurrent() -> nn.Module:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTM(4, 8, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.cell(x.view(len(x), 4, 4))[0][:, -1]

    return Last()


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "conv": conv, "recurrent": recurrent}


def _train(
    wrap: Callable[[nn.Module], Any], net: nn.Module, dtype: torch.dtype, accumulate: int, zeroing: str = "to none"
) -> list[torch.Tensor]:
    model = wrap(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for step in range(5):
        if zeroing != "never":
            optimizer.zero_grad(set_to_none=zeroing == "to none")
        for micro in range(accumulate):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + dist.get_rank())
            x = torch.randn(4, 16, generator=generator).to(dtype)
            if micro < accumulate - 1:
                with model.no_sync():
                    model(x).square().mean().backward()
            else:
                model(x).square().mean().backward()
        optimizer.step()
    return [t.clone() for t in net.state_dict().values()]


def _compare(name: str, dtype: torch.dtype, accumulate: int, views: bool, hook: str | None) -> bool:
    torch.manual_seed(dist.get_rank())
    net = MODELS[name]().to(dtype)
    limits = {"bucket_cap_mb": 0.002, "gradient_as_bucket_view": views}

    def with_hook(model: Any) -> Any:
        if hook is not None:
            model.register_comm_hook(None, getattr(default_hooks, hook))
        return model

    def theirs(module: nn.Module) -> Any:
        return with_hook(nn.parallel.DistributedDataParallel(module, **limits))  # type: ignore[arg-type]

    def ours(module: nn.Module) -> Any:
        return with_hook(ldh.DataParallel(module, first_bucket_mb=0.002, **limits))  # type: ignore[arg-type]

    wanted = _train(theirs, copy.deepcopy(net), dtype, accumulate)
    found = _train(ours, net, dtype, accumulate)
    return all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


@pytest.mark.parametrize(
    ("name", "dtype", "accumulate", "views", "hook"),
    [
        ("mlp", torch.float32, 1, True, None),
        ("mlp", torch.float64, 3, False, None),
        ("mlp", torch.bfloat16, 2, True, None),
        ("conv", torch.float32, 1, True, None),
        ("conv", torch.float32, 2, False, None),
        ("recurrent", torch.float32, 1, True, None),
        ("mlp", torch.float32, 1, True, "allreduce_hook"),
        ("mlp", torch.float32, 2, False, "fp16_compress_hook"),
    ],
)
def test_training_is_bitwise_torch_ddps(
    name: str, dtype: torch.dtype, accumulate: int, views: bool, hook: str | None
) -> None:
    assert run_ranks(_compare, name, dtype, accumulate, views, hook) == [True, True]


def _compare_zeroing(zeroing: str, views: bool) -> bool:
    torch.manual_seed(dist.get_rank())
    net = mlp()
    limits = {"bucket_cap_mb": 0.002, "gradient_as_bucket_view": views}
    theirs, ours = copy.deepcopy(net), net
    wanted = _train(
        lambda module: nn.parallel.DistributedDataParallel(module, **limits),  # type: ignore[arg-type]
        theirs,
        torch.float32,
        2,
        zeroing,
    )
    found = _train(
        lambda module: ldh.DataParallel(module, first_bucket_mb=0.002, **limits),  # type: ignore[arg-type]
        ours,
        torch.float32,
        2,
        zeroing,
    )
    return all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize("zeroing", ["in place", "never"])
def test_gradients_that_outlive_a_step_give_the_bits_of_torch_ddp(zeroing: str, views: bool) -> None:
    assert run_ranks(_compare_zeroing, zeroing, views) == [True, True]


def _train_with_aliased_gradients(
    wrap: Callable[[nn.Module], Any], net: nn.Module, zeroing: bool
) -> list[torch.Tensor]:
    model = wrap(net)
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model(torch.randn(4, 16, generator=generator)).square().mean().backward()
        for param in net.parameters():
            assert param.grad is not None
            param.grad = param.grad.detach()  # another tensor on the same memory
            if zeroing:
                param.grad.zero_()
    return [param.grad.clone() for param in net.parameters() if param.grad is not None]


def _compare_aliases(zeroing: bool) -> bool:
    torch.manual_seed(dist.get_rank())
    net = mlp()
    wanted = _train_with_aliased_gradients(
        lambda module: nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True),
        copy.deepcopy(net),
        zeroing,
    )
    found = _train_with_aliased_gradients(ldh.DataParallel, net, zeroing)
    return all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


@pytest.mark.parametrize("zeroing", [True, False])
def test_gradients_that_are_another_tensor_on_the_same_memory_survive_a_rebuild(zeroing: bool) -> None:
    assert run_ranks(_compare_aliases, zeroing) == [True, True]
