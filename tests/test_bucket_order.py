"""Buckets of parameters that are left out of some backwards come last, and so hold nothing up."""

import pytest
import torch
from backends import backend_fixture  # noqa: F401
from ranks import run_ranks
from torch import Tensor, nn

import lightning_ddp_hooks as ldh
from lightning_ddp_hooks.reducer.agreement import RankReport
from lightning_ddp_hooks.reducer.layout import rebuilt_layout
from lightning_ddp_hooks.reducer.order_recorder import MAX_RECORDINGS, BucketOrderRecorder

TRUNK = 8


class TwoHeads(nn.Module):
    """A trunk and two heads that are used in turn; gradients of the heads come first."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(*(nn.Linear(32, 32) for _ in range(TRUNK)))
        self.a, self.b = nn.Linear(32, 1), nn.Linear(32, 1)

    def forward(self, x: Tensor, head: str) -> Tensor:
        output: Tensor = getattr(self, head)(self.trunk(x))
        return output


def _launched_within_backward(backend: str) -> list[tuple[int, int]]:
    torch.manual_seed(0)
    model = ldh.DataParallel(
        TwoHeads(), bucket_cap_mb=0.004, first_bucket_mb=0.001, find_unused_parameters=True,
        reducer_backend=backend,  # type: ignore[arg-type]
    )  # fmt: skip
    found: list[tuple[int, int]] = []
    first = next(model.module.parameters())
    # The first layer's gradient comes last: how many buckets are on their way by then?
    first.register_hook(lambda grad: found.append(model.reducer.progress()[1:]))
    for step in range(6):
        model.zero_grad()
        model(torch.randn(4, 32), "ab"[step % 2]).square().mean().backward()
    return found


def test_the_trunks_buckets_are_launched_during_every_backward(backend: str) -> None:
    for found in run_ranks(_launched_within_backward, backend):
        for launched, buckets in found[3:]:  # the first ones are recorded
            assert buckets >= TRUNK
            assert launched >= TRUNK - 1


def test_what_is_left_out_of_some_backwards_is_laid_out_last() -> None:
    params = [nn.Parameter(torch.zeros(4)) for _ in range(6)]
    layouts = rebuilt_layout(params, [4, 5, 0, 1, 2, 3], [32], groups=[0, 0, 0, 0, 1, 2], last=frozenset({4, 5}))
    assert [layout.indices for layout in layouts] == [(0, 1), (2, 3), (4,), (5,)]


@pytest.mark.parametrize("cap", [16, 32, 1 << 20])
def test_without_such_parameters_the_order_is_that_of_completion(cap: int) -> None:
    params = [nn.Parameter(torch.zeros(4)) for _ in range(6)]
    layouts = rebuilt_layout(params, [5, 4, 3, 2, 1, 0], [cap])
    assert [index for layout in layouts for index in layout.indices] == [5, 4, 3, 2, 1, 0]


def _report(*fired: int) -> RankReport:
    order = tuple(index for index, count in enumerate(fired) if count)
    return RankReport(order=order, fired=fired, had_loss=any(fired))


def test_a_static_graph_is_learned_when_all_ranks_have_a_loss() -> None:
    recorder = BucketOrderRecorder(3, static_graph=True, may_miss=False)
    recorder.add([_report(1, 0, 0), _report(0, 0, 0)])
    assert not recorder.conclude((0, 0, 0))
    recorder.add([_report(1, 0, 0), _report(1, 2, 0)])
    assert recorder.conclude((1, 2, 0))
    assert (recorder.dropped, recorder.expected) == ({2}, [1, 2, 0])


def test_a_rank_that_never_has_a_loss_expects_what_the_others_use() -> None:
    recorder = BucketOrderRecorder(3, static_graph=True, may_miss=False)
    for number in range(MAX_RECORDINGS):
        assert not recorder.done, number
        recorder.add([_report(1, 2, 0), _report(0, 0, 0)])
        recorder.conclude((0, 0, 0))
    assert recorder.done
    assert (recorder.dropped, recorder.expected) == ({2}, [1, 2, 0])
