"""Both engines by themselves, under a host that only takes notes: what they promise the reducer."""

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from backends import backend_fixture  # noqa: F401
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_ddp_hooks.reducer.backend import Engine, engine_factory
from lightning_ddp_hooks.reducer.bucket import Bucket
from lightning_ddp_hooks.reducer.engine import EAGER_NUMEL
from lightning_ddp_hooks.reducer.layout import BucketLayout
from lightning_ddp_hooks.reducer.stream import CommStream

LARGE = (EAGER_NUMEL // 64, 64)


class Host:
    """Lets the engine go on by itself, and notes what it hears."""

    def __init__(self, params: Sequence[Tensor], backend: str, *, views: bool = True) -> None:
        self.heard: list[Any] = []
        self.params = list(params)
        self.engine: Engine = engine_factory(backend)(self.params, self, views=views)  # type: ignore[arg-type]
        self.on: dict[str, Callable[[], None]] = {}
        self.buckets: list[Bucket] = []
        self.closed = False
        self.goes_on = False

    def close(self) -> None:
        self.closed = True
        self.engine.close()

    def lay_out(self, *buckets: Sequence[int], expected: Sequence[int] | None = None, scale: float = 0.5) -> None:
        self.buckets = [Bucket(BucketLayout.build(indices, self.params), self.params) for indices in buckets]
        streams = [CommStream() for _ in buckets]
        self.engine.set_layout(self.buckets, streams, expected or [1] * len(self.params))
        self.engine.set_scale(scale)
        self.engine.recording = False

    def _hear(self, what: str, *rest: int) -> None:
        self.heard.append((what, *rest) if rest else what)
        self.on.get(what, lambda: None)()

    def open_backward(self) -> None:
        self.engine.start()
        self._hear("begins")

    def bucket_full(self, index: int) -> None:
        self._hear("full", index)

    def backward_ended(self) -> bool:
        # The engine leaves the last bucket to whoever ends the backward.
        last = len(self.buckets) - 1
        if self.engine.complete and last >= 0 and not self.closed:
            self.engine.fill(last)
            self.engine.launched = len(self.buckets)
            self._hear("full", last)
        self._hear("ended")
        return self.goes_on

    def backward_aborted(self) -> None:
        self.engine.stop()
        self.engine.take_aborted()
        self._hear("broke")


def weights(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]


def loss(params: Sequence[Tensor], factor: float = 3.0) -> Tensor:
    return torch.stack([(p * p).sum().abs() * factor for p in params]).sum()


def gradients(params: Sequence[Tensor], factor: float = 3.0) -> list[Tensor]:
    return list(torch.autograd.grad(loss(params, factor), params))


def test_a_full_bucket_holds_the_scaled_gradients_and_is_announced_in_bucket_order(backend: str) -> None:
    params = weights((3, 4), LARGE, (5,), (0, 2))
    host = Host(params, backend)
    host.lay_out([0, 3], [1, 2])
    expected = [g * 0.5 for g in gradients(params)]
    loss(params).backward()
    assert host.heard == ["begins", ("full", 0), ("full", 1), "ended"]
    for bucket in host.buckets:
        for index, view in zip(bucket.layout.indices, bucket.views, strict=True):
            assert torch.equal(view, expected[index])


@pytest.mark.parametrize("views", [True, False])
def test_write_back_makes_the_buckets_values_the_gradients(backend: str, views: bool) -> None:
    params = weights((3, 4), LARGE)
    host = Host(params, backend, views=views)
    host.lay_out([0, 1])
    loss(params).backward()
    before = params[1].grad
    host.buckets[0].buffer.fill_(7)
    host.engine.copy_out(0, [1])
    assert params[1].grad is before
    host.engine.copy_out(0, [])
    for param, view in zip(params, host.buckets[0].views, strict=True):
        assert param.grad is not None
        assert (param.grad is view) == views
        assert torch.equal(param.grad, torch.full_like(param, 7))


def test_write_back_gives_a_gradient_to_a_parameter_that_has_none(backend: str) -> None:
    for views in (True, False):
        params = [nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))]
        host = Host(params, backend, views=views)
        host.lay_out([0])
        host.buckets[0].buffer.fill_(7)
        host.engine.copy_out(0, [])
        assert params[0].grad is not None
        assert params[0].grad.stride() == params[0].stride()
        assert torch.equal(params[0].grad, torch.full_like(params[0], 7))


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128]


@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scaling_has_the_bits_of_torchs_product(backend: str, dtype: torch.dtype, views: bool) -> None:
    params = weights(LARGE, (3, 5), (7,), dtype=dtype)
    with torch.no_grad():
        params[1][0, 0] = -0.0
        params[2][0] = float("inf")
    host = Host(params, backend, views=views)
    host.lay_out([0, 1, 2], scale=1 / 3)
    found = gradients(params)
    real = [torch.view_as_real(g) if g.is_complex() else g for g in found]
    loss(params).backward()
    for view, wanted in zip(host.buckets[0].views, real, strict=True):
        got = torch.view_as_real(view) if view.is_complex() else view
        assert torch.equal(got.reshape(-1).view(torch.uint8), (wanted * (1 / 3)).reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("threads", [1, 2])
def test_gradients_of_any_layout_find_their_place(backend: str, threads: int) -> None:
    params = [
        nn.Parameter(torch.randn(8, 3, 5, 5).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.randn(8, 6, 1, 1).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.randn(6, 4).t()),
        nn.Parameter(torch.randn(1, 4).expand(3, 4)),
        nn.Parameter(torch.randn(300, 300).t()),
        nn.Parameter(torch.randn(10, 10)[:, ::2]),
    ]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for views in (True, False):
            for param in params:
                param.grad = None
            host = Host(params, backend, views=views)
            host.lay_out([0, 1, 2, 3, 4, 5])
            expected = [g * 0.5 for g in gradients(params)]
            loss(params).backward()
            for view, wanted in zip(host.buckets[0].views, expected, strict=True):
                assert torch.equal(view, wanted)
            host.engine.close()
    finally:
        torch.set_num_threads(before)


def test_a_gradient_that_lies_in_the_bucket_already_is_scaled_where_it_is(backend: str) -> None:
    params = weights((3, 4), LARGE)
    host = Host(params, backend)
    host.lay_out([0, 1])
    loss(params).backward()
    host.engine.copy_out(0, [])
    host.engine.stop()
    expected = [(p.grad + g) * 0.5 for p, g in zip(params, gradients(params), strict=True)]
    loss(params).backward()
    for view, wanted in zip(host.buckets[0].views, expected, strict=True):
        assert torch.equal(view, wanted)


def test_without_sync_gradients_are_only_noted_as_used(backend: str) -> None:
    params = weights((3,), (4,))
    host = Host(params, backend)
    host.lay_out([0, 1])
    host.engine.sync = False
    loss(params[:1]).backward()
    assert host.heard == []
    assert host.engine.used() == b"\x01\x00"
    host.engine.forget_use()
    assert host.engine.used() == b"\x00\x00"


@pytest.mark.parametrize("views", [True, False])
def test_on_hold_the_order_is_noted_and_nothing_is_launched(backend: str, views: bool) -> None:
    params = weights((3,), (4,), (5,))
    host = Host(params, backend, views=views)
    host.lay_out([0, 1, 2])
    host.engine.recording = True
    expected = torch.autograd.grad(params[0].sum() * 2 * params[2].sum(), [params[0], params[2]])
    (params[0].sum() * 2 * params[2].sum()).backward()
    assert host.heard == ["begins", "ended"]
    assert sorted(host.engine.order()) == [0, 2]
    assert host.engine.unready() == [1]
    assert host.engine.fired() == [1, 0, 1]
    # With views a gradient moves into its bucket at once, not scaled yet, so that it does not lie in memory twice.
    for index, gradient in zip((0, 2), expected, strict=True):
        assert (params[index].grad is host.buckets[0].views[index]) == views
        assert torch.equal(params[index].grad, gradient)
    assert params[1].grad is None
    host.engine.fill(0)
    assert torch.equal(host.buckets[0].views[0], expected[0] * 0.5)
    assert torch.equal(host.buckets[0].views[1], torch.zeros(4))


@pytest.mark.parametrize("views", [True, False])
def test_on_hold_a_gradient_may_come_again(backend: str, views: bool) -> None:
    params = weights((3, 4), LARGE, (5,), dtype=torch.float64) + weights((4,), dtype=torch.bfloat16)
    host = Host(params, backend, views=views)
    host.lay_out([0, 1, 2], [3])
    host.engine.recording = True
    expected = [g + 2 * g for g in gradients(params, 1.0)]
    loss(params, 1.0).backward()
    loss(params, 2.0).backward()  # the pass is still open: as after the first of two re-entrant segments
    assert host.engine.fired() == [2, 2, 2, 2]
    assert host.engine.late() == []
    for bucket in range(2):
        host.engine.fill(bucket)
        for index, view in zip(host.buckets[bucket].layout.indices, host.buckets[bucket].views, strict=True):
            assert torch.equal(view, expected[index] * 0.5)


def test_on_hold_a_sparse_gradient_stays_where_it_is(backend: str) -> None:
    params = weights((6, 2))
    host = Host(params, backend)
    host.lay_out([0])
    host.engine.recording = True
    nn.functional.embedding(torch.tensor([1, 4]), params[0], sparse=True).sum().backward()
    assert params[0].grad is not None
    assert params[0].grad.is_sparse


def test_a_function_that_returns_no_gradient_counts_as_zero(backend: str) -> None:
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
            return g, None

    params = weights((3,), LARGE, (4,))
    host = Host(params, backend)
    host.lay_out([0, 1, 2])
    host.buckets[0].buffer.fill_(7)
    x = Nothing.apply(Nothing.apply(params[0] * 1, params[1]), params[2])
    x.sum().backward()
    assert ("full", 0) in host.heard
    assert params[1].grad is None
    assert not host.buckets[0].views[1].any()
    assert not host.buckets[0].views[2].any()


def test_a_gradient_that_comes_too_often_is_late_only_if_it_was_copied(backend: str) -> None:
    params = weights((3,), (4,), LARGE)
    host = Host(params, backend)
    host.lay_out([0], [1, 2])

    def twice(*used: Tensor) -> Tensor:  # each use in a backward of its own
        x = torch.ones(1, requires_grad=True)
        for w in used:
            x = x + checkpoint(lambda x, w=w: x * w.sum(), x, use_reentrant=True)
        return x

    twice(params[0], params[0], params[1], params[1], params[2]).sum().backward()
    assert set(host.engine.late()) <= {0, 1}
    assert 0 in host.engine.late()
    host.engine.stop()
    host.lay_out([0, 1, 2], expected=[2, 2, 1])
    twice(params[0], params[0], params[1], params[1], params[2]).sum().backward()
    assert host.engine.late() == []
    assert ("full", 0) in host.heard


def _in_backward(body: Callable[[], None], fails: bool = False) -> Tensor:
    """Return a loss in whose backward another piece of code runs."""

    class Run(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            with torch.enable_grad():
                body()
            if fails:
                raise RuntimeError("as planned")
            return g

    return Run.apply(torch.ones(1, requires_grad=True)).sum()  # type: ignore[no-any-return, no-untyped-call]


def test_the_end_is_told_in_each_enclosing_backward_as_long_as_the_host_asks_for_it(backend: str) -> None:
    params = weights((3,), (4,))
    host = Host(params, backend)
    host.lay_out([0, 1])
    host.goes_on = True
    depth: list[int] = []

    def nested() -> None:
        loss(params).backward()
        depth.append(host.heard.count("ended"))

    def twice_nested() -> None:
        _in_backward(nested).backward()
        depth.append(host.heard.count("ended"))

    _in_backward(twice_nested).backward()
    assert depth == [1, 2]
    assert host.heard.count("ended") == 3
    assert not host.engine.callback_queued  # the outermost has ended
    assert not host.engine.take_aborted()


def test_an_exception_in_the_enclosing_backward_aborts(backend: str) -> None:
    params = weights((3,), (4,))
    host = Host(params, backend)
    host.lay_out([0, 1])
    host.goes_on = True
    with pytest.raises(RuntimeError, match="as planned"):
        _in_backward(lambda: loss(params).backward(), fails=True).backward()
    assert host.heard.count("ended") == 1
    assert host.engine.take_aborted()


@pytest.mark.parametrize("moment", ["begins", "full", "ended"])
def test_an_exception_of_the_host_leaves_backward_unchanged(backend: str, moment: str) -> None:
    class Mine(Exception):
        pass

    def fail() -> None:
        raise Mine("told you so")

    params = weights((3,), (4,))
    host = Host(params, backend)
    host.lay_out([0], [1])
    host.on[moment] = fail
    with pytest.raises(Mine, match="told you so"):
        loss(params).backward()
    host.on.clear()
    host.heard.clear()
    if moment != "full":
        host.engine.stop()
    loss(params).backward()
    # Before the first gradient is counted, and once the end has been told, there is nothing to give up.
    told = ["broke"] if moment == "full" else []
    assert host.heard == [*told, "begins", ("full", 0), ("full", 1), "ended"]


@pytest.mark.parametrize("moment", ["never", "begins", "full", "ended"])
def test_a_closed_engine_hears_nothing_more(backend: str, moment: str) -> None:
    params = weights((3,), LARGE)
    host = Host(params, backend)
    host.lay_out([0, 1])
    host.on[moment] = host.close
    if moment == "never":
        host.close()
    graph = loss(params)
    graph.backward()
    host.engine.stop()
    host.heard.clear()
    for param in params:
        param.grad = None
    loss(params).backward()
    assert host.heard == []
    for param, wanted in zip(params, gradients(params), strict=True):
        assert torch.equal(param.grad, wanted)
    host.engine.close()  # a second time does no harm


def test_an_engine_may_go_before_the_backward(backend: str) -> None:
    params = weights((3,), LARGE)
    host = Host(params, backend)
    host.lay_out([0, 1])
    graph = loss(params)
    host.engine.close()
    gone = weakref.ref(host)
    del host
    gc.collect()
    assert gone() is None
    graph.backward()
    assert all(p.grad is not None for p in params)


def test_an_engine_may_go_while_it_calls_its_host(backend: str) -> None:
    params = weights((3,), (4,))
    host = Host(params, backend)
    host.lay_out([0, 1])
    holder = [host]
    host.on["full"] = lambda: (holder.clear(), gc.collect())  # type: ignore[assignment]
    del host
    loss(params).backward()
    loss(params).backward()


def test_engines_come_and_go_without_leaving_anything(backend: str) -> None:
    params = weights(LARGE, (3,))

    def live() -> int:
        gc.collect()
        return sum(type(o) in (Host, Bucket, Tensor) for o in gc.get_objects())

    def round_trip() -> weakref.ref[Host]:
        host = Host(params, backend)
        host.lay_out([0, 1])
        loss(params).backward()
        host.engine.close()
        for param in params:
            param.grad = None
        return weakref.ref(host)

    round_trip()
    before = live()
    hosts = [round_trip() for _ in range(100)]
    assert live() == before
    assert all(host() is None for host in hosts)


def test_hooks_of_users_on_the_parameter_come_first(backend: str) -> None:
    params = weights((3,), LARGE)
    host = Host(params, backend)
    host.lay_out([0, 1])
    for param in params:
        param.register_post_accumulate_grad_hook(_clamp)
    expected = [g.clamp(max=0.25) * 0.5 for g in gradients(params)]
    loss(params).backward()
    for view, wanted in zip(host.buckets[0].views, expected, strict=True):
        assert torch.equal(view, wanted)


def test_what_the_engine_writes_is_seen_by_the_check_of_saved_tensors(backend: str) -> None:
    params = weights((3,), LARGE)
    host = Host(params, backend)
    host.lay_out([0, 1])
    loss(params).backward()
    host.engine.copy_out(0, [])
    host.engine.stop()
    scale = torch.ones((), requires_grad=True)
    kept = sum((p.grad * scale * p.grad).sum() for p in params)
    for param in params:
        param.grad = None
    loss(params).backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()  # type: ignore[union-attr]


def _clamp(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.clamp_(max=0.25)
