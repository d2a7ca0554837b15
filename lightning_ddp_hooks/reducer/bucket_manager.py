"""Which parameters lie in which bucket, and when that is learned anew.

recording    one bucket of everything (or, where parameters may be left out, buckets in order of registration); nothing
is launched before the end of the backward; ranks tell each other the order in which gradients came
planned      buckets in that order

Buckets are made at the beginning of a synced backward: until then gradients may lie in the old ones, and a run that
never reduces gradients has none.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence

import torch

from lightning_ddp_hooks import _compat, comm
from lightning_ddp_hooks.reducer.agreement import RankReport
from lightning_ddp_hooks.reducer.autograd_hooks import hookable
from lightning_ddp_hooks.reducer.backend import Engine, EngineFactory
from lightning_ddp_hooks.reducer.bucket import Bucket
from lightning_ddp_hooks.reducer.buffer_pool import GradBufferPool
from lightning_ddp_hooks.reducer.config import ReducerConfig
from lightning_ddp_hooks.reducer.engine import EngineCallbacks
from lightning_ddp_hooks.reducer.in_flight import InFlightBuckets
from lightning_ddp_hooks.reducer.layout import UNLIMITED, BucketLayout, initial_layout, rebuilt_layout
from lightning_ddp_hooks.reducer.link import best_bucket_bytes, measure_link
from lightning_ddp_hooks.reducer.order_recorder import BucketOrderRecorder
from lightning_ddp_hooks.reducer.parameters import WatchedParameters
from lightning_ddp_hooks.reducer.sparse import expects_sparse_gradient


class BucketManager:
    """Lays parameters out in buckets, by what recorded backwards show.

    Attributes:
        engine: The engine at work.
        recorder: What recorded backwards have shown.
        sparse: Parameters whose gradients are sparse, which lie in no bucket.
        planned: Buckets for the next backward, if they change; else None.
    """

    engine: Engine
    recorder: BucketOrderRecorder

    def __init__(
        self,
        parameters: WatchedParameters,
        in_flight: InFlightBuckets,
        config: ReducerConfig,
        make_engine: EngineFactory,
        callbacks: EngineCallbacks,
        *,
        may_miss: bool,
    ) -> None:
        self.sparse: list[int] = []
        self.planned: list[BucketLayout] | None = None
        self._parameters = parameters
        self._in_flight = in_flight
        self._config = config
        self._make_engine: Callable[..., Engine] = make_engine
        self._callbacks = weakref.ref(callbacks)
        self._may_miss = may_miss
        self._auto_cap_bytes: int | None = None
        self._sparse_ids = expects_sparse_gradient(parameters.module)
        self._pool = GradBufferPool(in_flight.queue.group)
        self.start_recording()

    # ------------------------------------------------------------------ recording

    def start_recording(self) -> None:
        """Hook on to the parameters that are watched now, and begin to record their order."""
        params = self._parameters.params
        self.sparse = [index for index, param in enumerate(params) if id(param) in self._sparse_ids]
        self.recorder = BucketOrderRecorder(
            len(params), static_graph=self._config.static_graph, may_miss=self._may_miss
        )
        with hookable(params):
            self.engine = self._make_engine(
                params,
                self._callbacks(),
                views=self._config.gradient_as_bucket_view,
                skips_undefined=self._config.find_unused_parameters,
            )
        self._in_flight.engine = self.engine
        self._in_flight.select_launch_path()
        self.lay_out_initially()

    def restart(self) -> None:
        """Watch the parameters that require a gradient by now, and record anew."""
        sync, flags, watched = self.engine.sync, self.engine.used(), self._parameters
        used = {id(param) for param, flag in zip(watched.params, flags, strict=True) if flag} | watched.unfrozen_used
        self.engine.close()
        watched.track()
        self.start_recording()
        self.engine.sync = sync
        self.engine.restore_use([index for index, param in enumerate(watched.params) if id(param) in used])

    def lay_out_initially(self) -> None:
        """Plan buckets before the order is known."""
        limits = self.limits() if self._may_miss else [UNLIMITED]
        self.planned = initial_layout(self._parameters.params, limits, self._dense_indices(), self._keys())

    def adopt_sparse(self, reports: Iterable[RankReport]) -> None:
        """Take parameters out of the buckets whose gradient turned out to be sparse on some rank."""
        found = {index for report in reports for index in report.sparse}
        if found <= set(self.sparse):
            return
        self.sparse = sorted({*self.sparse, *found})
        self._sparse_ids |= {id(self._parameters.params[index]) for index in found}
        self._use(initial_layout(self._parameters.params, [UNLIMITED], self._dense_indices(), self._keys()))

    def conclude(self, own_fired: Sequence[int], group: comm.ProcessGroup, control_group: comm.ProcessGroup) -> None:
        """End a recorded backward: plan the buckets in its order, once enough has been seen. Collective."""
        if not self.recorder.conclude(own_fired):
            return
        params = self._parameters.params
        self.sparse = [index for index in self.sparse if index not in self.recorder.dropped]
        if self._config.bucket_cap_mb == "auto" and self._auto_cap_bytes is None and params:
            link = measure_link(group, control_group, params[0].device)
            total = sum(param.numel() * param.element_size() for param in params)
            before = self.limits()[1]
            self._auto_cap_bytes = best_bucket_bytes(total, link)
            if self._auto_cap_bytes != before:
                _compat.forget_other_graphs(self._parameters.module, self._auto_cap_bytes)
        order = self.recorder.layout_order(self.sparse)
        self.planned = rebuilt_layout(
            params, order, self.limits(), self.recorder.keys(self._keys()), last=self.recorder.sometimes_unused()
        )
        self.engine.recording = False

    # ------------------------------------------------------------------ layout

    def limits(self) -> list[int]:
        """Return bucket sizes in bytes: of the first bucket, of all others."""
        return self._config.limits(self._auto_cap_bytes)

    def layouts(self) -> list[BucketLayout]:
        """Return the layout in use, or the one that is to come."""
        return [bucket.layout for bucket in self._in_flight.buckets] if self.planned is None else self.planned

    def expects_sparse(self, param: torch.Tensor) -> bool:
        """Tell whether the gradients of a parameter are known to be sparse."""
        return id(param) in self._sparse_ids

    def use_planned(self) -> None:
        """Use the planned buckets, if there are any; gradients that still lie in the old ones move."""
        if self.planned is not None:
            self._use(self.planned)

    def _keys(self) -> list[Hashable]:
        """Return for each parameter the hook's key: those with different keys do not share a bucket."""
        named = zip(self._parameters.names, self._parameters.params, strict=True)
        return [self._in_flight.bucket_key(name, param) for name, param in named]

    def has_keys(self) -> bool:
        """Tell whether the hook wants some parameters in buckets of their own."""
        return any(key is not None for key in self._keys())

    def _dense_indices(self) -> list[int]:
        outside = {*self.sparse, *self.recorder.dropped}
        return [index for index in range(len(self._parameters.params)) if index not in outside]

    def _use(self, layouts: Sequence[BucketLayout]) -> None:
        """Allocate buckets, and move gradients that lie in the old ones."""
        self.planned = None
        in_flight = self._in_flight
        names, params, expected = self._parameters.names, self._parameters.params, self.recorder.expected
        old = [
            (param, view)
            for bucket in in_flight.buckets  # of other parameters, maybe
            for param, view in zip(bucket.params, bucket.views, strict=True)
        ]
        moved = [(param, view) for param, view in old if param.grad is view]
        in_flight.use_buckets([], (), expected)
        if moved or any(self._pool.holds(param.grad) for param, _ in old):
            self._pool.forget()  # somebody's gradients lie there, maybe by another tensor on the same memory
        buckets = self._pool.place(layouts, params)
        _move_gradients(moved, buckets)
        in_flight.use_buckets(buckets, names, expected)
        in_flight.apply_divisor()

    def release(self) -> None:
        """Leave the memory to the gradients that lie in it, and make the buckets anew when they are needed."""
        if self._in_flight.buckets:
            self.planned = self.layouts()
            self._in_flight.use_buckets([], (), self.recorder.expected)
            self._pool.forget()

    def facts(self) -> dict[str, object]:
        """Return what `Reducer.stats` says about settings and buckets."""
        config, params, recorder = self._config, self._parameters.params, self.recorder
        first, cap = self.limits()
        layouts = self.layouts()
        sizes, indices = [layout.nbytes for layout in layouts], [list(layout.indices) for layout in layouts]
        facts: dict[str, object] = {
            "bucket_cap_bytes": cap,
            "first_bucket_bytes": first,
            "bucket_sizes": sizes,
            "bucket_param_indices": indices,
            "num_parameter_tensors": len(params),
            "total_parameter_size_bytes": sum(p.numel() * p.element_size() for p in params),
            "gradient_as_bucket_view": config.gradient_as_bucket_view,
            "find_unused_parameters": config.find_unused_parameters,
            "static_graph": config.static_graph,
            "broadcast_buffers": config.broadcast_buffers,
            "has_rebuilt_buckets": recorder.done,
        }
        if recorder.done:
            facts["rebuilt_bucket_sizes"] = sizes
            facts["rebuilt_per_bucket_param_indices"] = indices
            facts["prev_iteration_grad_ready_order_indices"] = list(recorder.order)
        return facts

    def close(self) -> None:
        """Remove all hooks, and leave the memory to those gradients that still lie in it."""
        self._in_flight.close()
        self.engine.close()
        self._pool.forget()


@torch.no_grad()
def _move_gradients(moved: Sequence[tuple[torch.Tensor, torch.Tensor]], buckets: Sequence[Bucket]) -> None:
    """Move gradients into new buckets; one that has left the buckets keeps what it has."""
    places = {id(param): view for b in buckets for param, view in zip(b.params, b.views, strict=True)}
    for param, view in moved:
        param.grad = places[id(param)].copy_(view) if id(param) in places else view.clone()
