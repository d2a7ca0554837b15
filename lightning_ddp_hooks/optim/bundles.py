"""Which parameters lie in one bucket, and so are better owned by one rank."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_ddp_hooks.reducer.reducer import Reducer


def bucket_bundles(reducer: Reducer) -> Sequence[Sequence[Tensor]]:
    """Return the parameters of each bucket as it is laid out now."""
    params = reducer.params
    layout = reducer.stats()["bucket_param_indices"]
    assert isinstance(layout, list)
    return [[params[index] for index in indices] for indices in layout]
