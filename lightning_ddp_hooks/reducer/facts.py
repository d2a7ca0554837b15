"""Facts about a reducer, for people and for tests."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_ddp_hooks.reducer.config import ReducerConfig
from lightning_ddp_hooks.reducer.layout import BucketLayout


def bucket_facts(
    config: ReducerConfig,
    limits: Sequence[int],
    layouts: Sequence[BucketLayout],
    params: Sequence[Tensor],
    ready_order: Sequence[int] | None,
) -> dict[str, object]:
    """Return what `Reducer.stats` says about settings and buckets.

    Args:
        config: the settings.
        limits: bucket sizes in bytes, as in use.
        layouts: the buckets.
        params: all watched parameters.
        ready_order: the order in which gradients became ready; None if the buckets were not rebuilt by it yet.
    """
    first, cap = limits
    sizes = [layout.nbytes for layout in layouts]
    indices = [list(layout.indices) for layout in layouts]
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
        "has_rebuilt_buckets": ready_order is not None,
    }
    if ready_order is not None:
        facts["rebuilt_bucket_sizes"] = sizes
        facts["rebuilt_per_bucket_param_indices"] = indices
        facts["prev_iteration_grad_ready_order_indices"] = list(ready_order)
    return facts
