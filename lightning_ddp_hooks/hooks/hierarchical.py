"""The mean over hosts and the ranks of each, so that a host's link carries the gradients once."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.hooks.allreduce import Mean
from lightning_ddp_hooks.hooks.contract import (
    BindContext,
    BoundHook,
    Phases,
    ReplicatingHook,
    Subgroup,
    require_types,
)
from lightning_ddp_hooks.hooks.registry import SHORT_NAMES
from lightning_ddp_hooks.hooks.workspace import PerBucket, Workspace
from lightning_ddp_hooks.reducer import requests
from lightning_ddp_hooks.reducer.bucket import GradBucket
from lightning_ddp_hooks.short_names import add_short_name


@dataclass(frozen=True, kw_only=True)
class HierarchicalAllReduce(ReplicatingHook):
    """The mean of the gradients, summed within each host first: for several ranks on each of several hosts over gloo.

    The R ranks of a host sum a share of a bucket each (reduce-scatter); ranks with the same share on all H hosts sum
    those (all-reduce); then the ranks of a host collect all shares (all-gather). So a host's link carries
    2 (H - 1) / H of the gradients once, where gloo's ring over all ranks carries up to R times as much, and all ranks
    of a host drive it together. Within a host the ranks talk through memory where they can (see the backend ``shm``).
    NCCL does the like by itself. The result is the mean, the same on all ranks, summed in another order than without
    the hook. On one host, or with one rank on each, it is the plain mean.

    The algorithm is that of "Massively distributed SGD: ImageNet/ResNet-50 training in a flash" (Mikami et al. 2018,
    arXiv 1811.05233), with hosts as rows.

    Args:
        ranks_per_host: Number of ranks that belong together, in rank order; None for those with the same host name.

    Raises:
        ValueError: Hosts have different numbers of ranks, or ``ranks_per_host`` does not divide their number; when it
            is bound.

    Example:
        >>> Trainer(num_nodes=2, devices=8, strategy=DDPHooksStrategy(comm_hook="hierarchical"))
    """

    ranks_per_host: int | None = None

    def __post_init__(self) -> None:
        require_types(self, whole=["ranks_per_host"])
        if self.ranks_per_host is not None and self.ranks_per_host < 1:
            raise ValueError(f"Expected at least one rank for `ranks_per_host`, got {self.ranks_per_host}.")

    def bind(self, context: BindContext) -> BoundHook:
        """Bind the hook."""
        size = context.world_size
        if (count := self.ranks_per_host) is None:
            hosts = ranks_by_host(context.control_group)
            if len({len(host) for host in hosts}) > 1:
                raise ValueError(
                    "HierarchicalAllReduce needs the same number of ranks on each host, and has "
                    f"{', '.join(str(len(host)) for host in hosts)}."
                )
        elif size % count:
            raise ValueError(f"`ranks_per_host={count}` does not divide the {size} ranks.")
        else:
            hosts = [list(range(first, first + count)) for first in range(0, size, count)]
        if len(hosts) == 1 or len(hosts[0]) == 1:
            return Mean(context.comm_dtype)
        return _BoundHierarchical(
            context.subgroup(hosts), context.subgroup([list(place) for place in zip(*hosts, strict=True)])
        )


class _BoundHierarchical(BoundHook):
    name = "HierarchicalAllReduce"
    takes_divided = True

    def __init__(self, host: Subgroup, across: Subgroup) -> None:
        self._host, self._across = host, across
        self._workspaces = PerBucket(lambda _: Workspace())

    def reduce(self, bucket: GradBucket) -> Phases:
        buffer, count = bucket.buffer(), len(self._host.ranks)
        if bucket.divisor != 1.0:
            buffer.mul_(1.0 / bucket.divisor)
        workspace, numel = self._workspaces.of(bucket), buffer.numel()
        share = -(-numel // count)
        whole = buffer
        if share * count != numel:
            whole = workspace.get("whole", share * count, buffer.dtype, buffer.device)
            whole[:numel].copy_(buffer)
            whole[numel:].zero_()
        part = workspace.get("part", share, buffer.dtype, buffer.device)
        yield requests.ReduceScatter(whole, part, self._host)
        yield requests.AllReduce(part, self._across)
        yield requests.AllGather(part, whole, self._host)
        if whole is not buffer:
            buffer.copy_(whole[:numel])
        return None


def ranks_by_host(group: comm.ProcessGroup) -> list[list[int]]:
    """Split the ranks of the group by the host that they run on; collective."""
    hosts = comm.all_gather_object(socket.gethostname(), group)
    return [[rank for rank, other in enumerate(hosts) if other == host] for host in dict.fromkeys(hosts)]


add_short_name(SHORT_NAMES, "hierarchical", HierarchicalAllReduce)
