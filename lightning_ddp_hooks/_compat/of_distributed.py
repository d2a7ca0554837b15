"""Private names of ``torch.distributed``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore, GradBucket, ProcessGroup, Store, TCPStore
from torch._C._distributed_c10d import PrefixStore as PrefixStore

# ``torch.distributed.GradBucket`` is this class, but type checkers find it only where it is declared.
TorchGradBucket = GradBucket


def group_timeout(group: ProcessGroup) -> timedelta | None:
    """Return how long a collective of the group may take, or None if its backend does not say."""
    for device in group._device_types:
        try:
            options = group._get_backend(device).options
        except (RuntimeError, AttributeError):  # no backend for this device, or one without options
            continue
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return None


def backend_for(group: ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend that moves tensors on ``device``; a group may have one for each kind of device."""
    return str(group._get_backend(device).name()).lower()


def allocate(group: ProcessGroup, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    """Return memory that the group's backend prefers, not initialized; None if it, or this torch, has no such."""
    backend: Any = group._get_backend(device)
    if not hasattr(backend, "allocate_tensor"):
        return None
    tensor: torch.Tensor = backend.allocate_tensor(numel, dtype=dtype, device=device)
    return tensor


def default_store() -> Store:
    """Return the store through which the ranks of the default process group have met."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def new_group_of_members(ranks: Sequence[int], name: str, backend: str, timeout: timedelta) -> ProcessGroup:
    """Make a group; a call of its members alone.

    ``torch.distributed.new_group`` can do that too (``use_local_synchronization``), but names the group by how many
    others the process has, or has made, and torch 2.14 counts it for the names of later groups of all ranks. Ranks
    that have made different groups then wait for each other under different names.
    """
    from torch.distributed import distributed_c10d as c10d

    make: Any = c10d._new_process_group_helper  # whose types differ between versions
    own = ranks.index(c10d.get_rank())
    group: ProcessGroup
    group, _ = make(len(ranks), own, list(ranks), c10d.Backend(backend), default_store(), name, timeout=timeout)
    c10d._world.pg_group_ranks[group] = {global_rank: index for index, global_rank in enumerate(ranks)}
    return group


def second_connection(store: Store, prefix: str, timeout: timedelta) -> Store:
    """Return a store that has those keys of ``store`` that begin with a prefix, and a connection of its own.

    That stores can be cloned is not in torch's documentation, and older torch cannot: it dials the address once more.
    """
    if hasattr(store, "clone"):
        clone: Store = store.clone()
    else:
        base: Any = getattr(store, "_underlying_non_prefix_store", store)
        if isinstance(base, TCPStore):
            clone = TCPStore(base.host, base.port, is_master=False, timeout=timeout, wait_for_workers=False)
        elif isinstance(base, FileStore):
            clone = FileStore(base.path)  # type: ignore[attr-defined]
        else:
            raise NotImplementedError(f"{type(base).__name__} cannot be cloned")
    clone.set_timeout(timeout)
    return PrefixStore(prefix, clone)


def store_host(store: Store) -> str:
    """Return the address of a TCPStore, below any prefixes; the kind of another store."""
    base: Any = getattr(store, "_underlying_non_prefix_store", store)
    return f"{base.host}:{base.port}" if isinstance(base, TCPStore) else type(base).__name__


def process_groups() -> list[ProcessGroup]:
    """Return all process groups that this process has made and not destroyed."""
    from torch.distributed.distributed_c10d import _world

    return list(_world.pg_map)


# A guess by age, since torch does not say so.
FREES_GROUPS_UNDER_THE_LOCK = not hasattr(ProcessGroup, "abort")


def collectives_begun(group: ProcessGroup) -> int:
    """Return how many collectives a group has begun; 0 if its backend does not count."""
    try:
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    except (RuntimeError, AttributeError):
        return 0


def flight_record() -> dict[str, Any]:
    """Return what torch's flight recorder holds; gloo's collectives are "scheduled" in it even when they are done."""
    try:
        from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]

        return dict(json.loads(_dump_fr_trace_json(True, False)))
    except (ImportError, RuntimeError, TypeError, ValueError):
        return {}


@contextmanager
def simulated_world(world_size: int) -> Iterator[None]:
    """Be rank 0 of a world whose collectives are done at once and move nothing: what is computed around them stays.

    For measurements. torch keeps this backend among its testing tools.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("A process group is initialized already: simulate a world in a process of its own.")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
