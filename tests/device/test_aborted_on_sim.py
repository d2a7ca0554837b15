"""A backward that an exception ends, and another one of the same forward: what was sent must not come back."""

import itertools
import time
from typing import Any, Literal

import pytest
import sim
import torch
import torch.distributed as dist
from on_sim import Net, batch, wrap
from ranks import run_ranks
from torch import Tensor

import lightning_ddp_hooks as ldh
from lightning_ddp_hooks import hooks

pytestmark = pytest.mark.ranks

Backend = Literal["python", "native"]
WARM, STEPS = 3, 6


class Boom(Exception):
    pass


class _KeepsItsLoss(Net):
    """Returns nothing that a backward could come through."""

    loss: Tensor

    def forward(self, batch: Tensor) -> Any:
        self.loss = super().forward(batch).square().mean()


class _Late(hooks.CommHook, hooks.BoundHook):
    """The mean, which is back in the bucket long after it was taken from there."""

    def bind(self, context: hooks.BindContext) -> hooks.BoundHook:
        return self

    def reduce(self, bucket: ldh.GradBucket) -> hooks.Phases:
        total = bucket.buffer().div(bucket.divisor)
        yield hooks.requests.AllReduce(total)
        if total.device.type != "cpu":
            sim.sleep(40)
        bucket.buffer().copy_(total)
        return None


def _train(backend: Backend, views: bool, to_none: bool, keeps: bool, on_device: bool) -> list[list[Tensor]] | str:
    rank = dist.get_rank()
    device = sim.join_world(seed=rank, delayed=0.2, longest_ms=1) if on_device else torch.device("cpu")
    torch.manual_seed(0)
    net = (_KeepsItsLoss() if keeps else Net()).to(device)
    model = wrap(net, comm_hook=_Late(), reducer_backend=backend, gradient_as_bucket_view=views)
    fails = False

    def boom(grad: Tensor) -> None:
        if fails:
            raise Boom

    net.layers[0].register_forward_hook(lambda module, args, out: out.register_hook(boom) and None)
    found = []
    for step in range(STEPS):
        fails = step == WARM
        model.zero_grad()
        output = model(batch(step, rank).to(device))
        loss = net.loss if keeps else output.square().mean()
        if fails:
            with pytest.raises(Boom):
                loss.backward(retain_graph=True)
            time.sleep(0.01)  # what is being sent has been read, and is not back yet
            model.zero_grad(set_to_none=to_none)
            if on_device:
                torch.accelerator.synchronize()
            fails = False
        try:
            loss.backward()
        except RuntimeError as error:
            return str(error)
        found.append([param.grad.clone() for param in net.parameters()])  # type: ignore[union-attr]
    return [[value.cpu() for value in values] for values in found]


def _all(backend: Backend, on_device: bool) -> dict[tuple[bool, bool, bool], list[list[Tensor]] | str]:
    ways = itertools.product([True, False], repeat=3)
    return {
        (views, to_none, keeps): _train(backend, views, to_none, keeps, on_device) for views, to_none, keeps in ways
    }


def reference() -> list[list[Tensor]]:
    torch.manual_seed(0)
    net = Net().double()
    found = []
    for step in range(STEPS):
        net.zero_grad()
        torch.stack([net(batch(step, rank).double()).square().mean() for rank in range(2)]).mean().backward()
        found.append([param.grad.clone() for param in net.parameters()])  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize(("backend", "on_device"), [("python", True), ("native", True), ("native", False)])
def test_a_second_backward_of_the_forward(backend: Backend, on_device: bool) -> None:
    for found in run_ranks(_all, backend, on_device, timeout=100):
        for (views, to_none, keeps), steps in found.items():
            if on_device and views and keeps and not to_none:
                # Its first gradient is noticed when it has been added to what was being sent.
                assert "again after an exception has ended it: call `zero_grad()`" in steps
                continue
            assert not isinstance(steps, str), steps
            for step, (values, wanted) in enumerate(zip(steps, reference(), strict=True)):
                for value, expected in zip(values, wanted, strict=True):
                    torch.testing.assert_close(
                        value.double(), expected, rtol=1e-4, atol=1e-6, msg=f"{views=} {to_none=} {keeps=} {step=}"
                    )
