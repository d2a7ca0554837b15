"""Samplers that neither repeat nor drop a sample."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DistributedSampler


def remove_padding(loader: Any) -> None:
    """Have torch's `DistributedSampler` deal out each index once, instead of repeating some to make shares equal.

    Ranks then differ by at most one sample, and so by at most one batch. With ``drop_last=True`` the user asked for
    equal shares, and the sampler stays as it is.

    Args:
        loader: of any kind; its sampler, or that of its batch sampler, is changed in place.
    """
    for holder in (loader, getattr(loader, "batch_sampler", None)):
        sampler = getattr(holder, "sampler", None)
        if isinstance(sampler, DistributedSampler) and not sampler.drop_last:
            sampler.total_size = len(sampler.dataset)  # type: ignore[arg-type]
            sampler.num_samples = len(range(sampler.rank, sampler.total_size, sampler.num_replicas))
