"""The only caller of ``torch.distributed``: groups, collectives and their error texts."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_hooks import _compat, traffic
from lightning_ddp_hooks._compat import TorchGradBucket as TorchGradBucket
from lightning_ddp_hooks.traffic import Collective

ProcessGroup = dist.ProcessGroup
DEFAULT_TIMEOUT: timedelta = dist.default_pg_timeout
Work = dist.Work


class Store(Protocol):
    """A table that all ranks share; torch's stores are such."""

    def set(self, key: str, value: str, /) -> None:
        """Write an entry, of text."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a number, 0 at first; return what it is then."""

    def check(self, keys: list[str], /) -> bool:
        """Tell whether all entries are there."""

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Return the bytes of entries; waits for those that are not there."""


def is_initialized() -> bool:
    """Tell whether the default process group exists."""
    return bool(dist.is_available() and dist.is_initialized())


def backend_names() -> list[str]:
    """Return the names of all backends that are built in or registered, whether or not they are there."""
    return sorted(set(dist.Backend.backend_list) - {dist.Backend.UNDEFINED})


def backends() -> dict[str, bool]:
    """Return for each backend that torch knows whether it is there."""
    available = bool(dist.is_available())
    return {
        "gloo": available and dist.is_gloo_available(),
        "nccl": available and dist.is_nccl_available(),
        "mpi": available and dist.is_mpi_available(),
    }


def register_cpu_backend(name: str, make: Callable[[Any, int, int, timedelta], Any]) -> None:
    """Let process groups on the CPU be made with a further backend: ``make(store, rank, size, timeout)``."""
    if dist.is_available():
        dist.Backend.register_backend(name, make, devices=["cpu"])


def join_world(device: torch.device) -> None:
    """Make the default group of the ranks that torchrun has started: gloo, or NCCL on a GPU."""
    if not dist.is_torchelastic_launched():
        raise ValueError("This process has no other ranks: start one on each host with torchrun.")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")


def join_attempt(name: str, backend: str, timeout: timedelta | None, device: torch.device | None) -> None:
    """Make the default group of ranks that torchrun has started again, with names of its own in torchrun's store."""
    timeout = timeout or DEFAULT_TIMEOUT
    shared, this_rank, size = next(dist.rendezvous("env://", timeout=timeout))  # type: ignore[attr-defined]
    store = _compat.PrefixStore(name, shared)
    dist.init_process_group(backend, store=store, rank=this_rank, world_size=size, timeout=timeout, device_id=device)


def leave_world() -> None:
    """Destroy the default group, after all ranks have come this far."""
    dist.barrier()
    dist.destroy_process_group()


def resolve_group(group: ProcessGroup | None) -> ProcessGroup:
    """Return ``group``, or the default group for None."""
    if not is_initialized():
        raise RuntimeError(
            "The default process group is not initialized: call torch.distributed.init_process_group(...) first "
            "(under a Trainer the strategy does it)."
        )
    if group is None:
        return dist.group.WORLD  # type: ignore[return-value]
    if isinstance(group, int):  # what torch hands to a rank that is not in a group
        raise ValueError(f"Rank {dist.get_rank()} is not a member of the given process group.")
    if not isinstance(group, ProcessGroup):
        raise TypeError(f"Expected a torch.distributed.ProcessGroup or None, got {type(group).__name__}.")
    return group


def world_size(group: ProcessGroup | None = None) -> int:
    """Return the number of ranks in the group."""
    return int(dist.get_world_size(group))


def rank(group: ProcessGroup | None = None) -> int:
    """Return this process's rank within the group."""
    return int(dist.get_rank(group))


def global_ranks(group: ProcessGroup) -> list[int]:
    """Return the global rank of each member, in the order of the group."""
    try:
        return list(dist.get_process_group_ranks(group))
    except KeyError:
        raise ValueError(
            "The ranks of the process group are not known to torch.distributed: make it by torch.distributed.new_group."
        ) from None


def backend_name(group: ProcessGroup) -> str:
    """Return the name of the group's backend, such as ``gloo`` or ``nccl``."""
    return str(dist.get_backend(group))


def is_cpu_group(group: ProcessGroup) -> bool:
    """Tell whether the group takes tensors on the CPU alone; such a one can be freed whatever other ranks do."""
    return backend_name(group) in ("gloo", "shm")


def is_stream_ordered(group: ProcessGroup, device: torch.device) -> bool:
    """Tell whether waiting for a collective on ``device`` only queues behind it, as NCCL's does and gloo's does not."""
    return device.type != "cpu" and _compat.backend_for(group, device) != "gloo"


def new_group(
    parent: ProcessGroup, *, cpu: bool = False, backend: str | None = None, timeout: timedelta | None = None
) -> ProcessGroup:
    """Make a further group over the ranks of ``parent`` (on the CPU with ``cpu``); a collective call of all of them."""
    ranks = global_ranks(parent)
    if backend is None:
        backend = "gloo" if cpu and backend_name(parent) != "shm" else backend_name(parent)
    return _make(ranks, backend, timeout or timeout_of(parent))


def group_name(group: ProcessGroup) -> str:
    """Return the name that torch has given the group, the same on all its ranks and used once."""
    return str(group.group_name)


def timeout_of(group: ProcessGroup) -> timedelta:
    """Return how long a collective of the group may take."""
    return _compat.group_timeout(group) or DEFAULT_TIMEOUT


# How many groups some ranks of a world have made alone, which makes the same name on all of them, whatever other groups
# each has made.
_parts_made: WeakKeyDictionary[ProcessGroup, Counter[tuple[int, ...]]] = WeakKeyDictionary()


def _make(ranks: Sequence[int], backend: str, timeout: timedelta) -> ProcessGroup:
    """Make a group; a collective call of its ranks, or of the whole world where it is one."""
    if len(ranks) == dist.get_world_size():
        group = dist.new_group(list(ranks), timeout=timeout, backend=backend)
        assert isinstance(group, ProcessGroup)
        return group
    members = tuple(sorted(ranks))
    made = _parts_made.setdefault(resolve_group(None), Counter())
    name = f"ddp_hooks_{'_'.join(map(str, members))}_{made[members]}"
    made[members] += 1
    return _compat.new_group_of_members(members, name, backend, timeout)


def split_group(
    parent: ProcessGroup,
    parts: Sequence[Sequence[int]],
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
) -> ProcessGroup:
    """Split ``parent`` into any parts and return the group of this rank's part; a collective call of all its ranks."""
    names, backend = global_ranks(parent), backend or backend_name(parent)
    timeout = timeout or timeout_of(parent)
    if len(names) < dist.get_world_size():
        own_part = next(part for part in parts if rank(parent) in part)
        return _make([names[index] for index in own_part], backend, timeout)
    own: ProcessGroup | None = None
    for part in parts:  # over the whole world all ranks make all parts
        group = dist.new_group([names[index] for index in part], timeout=timeout, backend=backend)
        own = group if rank(parent) in part else own
    assert isinstance(own, ProcessGroup)
    return own


def new_subgroup(ranks: Sequence[int]) -> ProcessGroup:
    """Make a group of some ranks with the default backend; a collective call of *all* ranks of the world.

    Making it among its members only would deadlock once ranks have made different groups before.
    """
    world = resolve_group(None)
    return dist.new_group(list(ranks), timeout=timeout_of(world))  # type: ignore[no-any-return]


def solo_group() -> ProcessGroup:
    """Make a group of this process alone, without asking anybody."""
    world = resolve_group(None)
    return _make([dist.get_rank()], backend_name(world), timeout_of(world))


def connect_store(prefix: str, timeout: timedelta) -> Store:
    """Connect a thread to the store through which the ranks have met: threads must not share a connection."""
    return _compat.second_connection(_compat.default_store(), prefix, timeout)


def store_host() -> str:
    """Return where the store is through which the ranks have met, in words."""
    return _compat.store_host(_compat.default_store())


def abort_groups() -> None:
    """Make collectives of this process fail, also those that other threads wait in; from any thread. Not gloo's."""
    for group in _compat.process_groups():
        with suppress(RuntimeError, AttributeError):  # a backend, or a torch, that does not know how
            group.abort()


def collectives_begun() -> int:
    """Return how many collectives this process has begun, in all groups that count theirs; from any thread."""
    return sum(_compat.collectives_begun(group) for group in _compat.process_groups())


def last_collectives(count: int = 20) -> list[str]:
    """Return lines on the last collectives that this process has begun, as torch's flight recorder knows them."""
    entries = _compat.flight_record().get("entries") or []
    lines = [
        f"  {entry.get('profiling_name')} of {entry.get('input_sizes')}, number {entry.get('collective_seq_id')} of "
        f"group {' '.join(map(str, entry.get('process_group') or ()))}"
        for entry in entries[-count:]
    ]
    return ["Last collectives that it began, done or not:", *lines] if lines else []


# gloo raises plain RuntimeErrors.
_COLLECTIVE_ERRORS = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Operation timed out")


def is_collective_error(error: BaseException | None) -> bool:
    """Tell whether a collective or the store failed, or whether an error was raised because of that."""
    while error is not None:
        text = str(error)
        if isinstance(error, dist.DistError):
            return True
        if isinstance(error, RuntimeError) and any(part in text for part in _COLLECTIVE_ERRORS):
            return True
        error = error.__cause__
    return False


# In older torch the last reference to a group waits for its threads while it holds Python's lock, which one of them may
# need to let go of a collective that has just ended. So they are given the time until further groups are destroyed.
_destroyed: list[ProcessGroup] = []
_KEPT_DESTROYED = 8


def destroy_group(group: ProcessGroup) -> None:
    """Free a group made by `new_group`; nothing happens once torch itself has been torn down."""
    if not is_initialized():
        return
    dist.destroy_process_group(group)
    if _compat.FREES_GROUPS_UNDER_THE_LOCK:
        _destroyed[:] = [*_destroyed, group][-_KEPT_DESTROYED:]


def free_after_error(groups: Iterable[ProcessGroup], in_flight: bool = False) -> None:
    """Free groups after an error, when other ranks may be anywhere; not while collectives are in flight: it waits."""
    if in_flight or not is_initialized():
        return
    for group in groups:
        if is_cpu_group(group):
            dist.destroy_process_group(group)


def empty(numel: int, dtype: torch.dtype, device: torch.device, group: ProcessGroup | None) -> Tensor:
    """Return memory that has not been written, where the group's ranks reach it without a copy, if there is such."""
    tensor = _compat.allocate(group, numel, dtype, device) if group and backend_name(group) == "shm" else None
    return torch.empty(numel, dtype=dtype, device=device) if tensor is None else tensor


# ---------------------------------------------------------------------- what is sent


def _count(collective: Collective, nbytes: int, group: ProcessGroup, root: int = 0) -> None:
    if traffic.counter is not None:
        tree = collective != "broadcast" or backend_name(group) == "gloo"
        traffic.counter.count(collective, nbytes, group.size(), rank=group.rank(), root=root, tree=tree)


def _count_object(collective: Collective, value: Any, group: ProcessGroup, root: int = 0) -> None:
    """Count an exchange of pickles: first their sizes, 8 bytes each; the longest one's padding is not known here."""
    if traffic.counter is not None:
        _count("broadcast" if collective == "broadcast" else "all_gather", 8, group, root)
        _count(collective, len(pickle.dumps(value)), group, root)


# ---------------------------------------------------------------------- collectives


def _started(work: Work | None) -> Work:
    assert work is not None, "this rank is not in the group"
    return work


def all_reduce(tensor: Tensor, group: ProcessGroup) -> Work:
    """Start summing ``tensor`` over the group in place."""
    _count("all_reduce", tensor.nbytes, group)
    return _started(dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group, async_op=True))


def succeeded(work: Work) -> bool:
    """Tell, without waiting, whether a collective is done, and not because it failed."""
    if not work.is_completed():
        return False
    try:
        work.get_future().value()
    except RuntimeError:
        return False
    return True


def start_sum(tensor: Tensor, group: ProcessGroup) -> Work:
    """Do what `all_reduce` does, past the checks and logs that cost more than a few numbers on a CPU group."""
    _count("all_reduce", tensor.nbytes, group)
    return group.allreduce([tensor])


def broadcast(tensor: Tensor, group: ProcessGroup, src: int = 0) -> Work:
    """Start sending ``tensor`` from the group's rank ``src`` to all others, in place."""
    _count("broadcast", tensor.nbytes, group, src)
    return _started(dist.broadcast(tensor, src=global_ranks(group)[src], group=group, async_op=True))


def start_all_to_all(
    output: Tensor, tensor: Tensor, group: ProcessGroup, sizes: tuple[Sequence[int], Sequence[int]] | None = None
) -> Work:
    """Start sending the i-th of ``world_size`` parts of ``tensor`` to rank i; ``output`` gets one of each.

    ``sizes``: elements sent to each rank, and got from each; None for equal parts.
    """
    if sizes is None:
        _count("all_to_all", tensor.nbytes, group)
        return _started(dist.all_to_all_single(output, tensor, group=group, async_op=True))
    sent, received = map(list, sizes)
    # The formula for equal parts, turned round: what goes to others is counted.
    to_others = (tensor.numel() - sent[group.rank()]) * tensor.element_size()
    _count("all_to_all", -(-to_others * group.size() // max(1, group.size() - 1)), group)
    flat = output.view(-1), tensor.view(-1)
    return _started(dist.all_to_all_single(*flat, received, sent, group=group, async_op=True))


def start_reduce_scatter(output: Tensor, tensor: Tensor, group: ProcessGroup) -> Work:
    """Start summing the i-th of ``world_size`` equal parts of all ranks' tensors into ``output`` of rank i."""
    _count("reduce_scatter", tensor.nbytes, group)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # the older name warns now
    return _started(scatter(output.view(-1), tensor.view(-1), group=group, async_op=True))


def start_all_gather(output: Tensor, tensor: Tensor, group: ProcessGroup) -> Work:
    """Start gathering every rank's ``tensor`` into ``output``, one behind the other in rank order."""
    _count("all_gather", tensor.nbytes, group)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the older name warns now
    # Flat, since gloo takes an output of another number of dimensions for one of another size.
    return _started(gather(output.view(-1), tensor.view(-1), group=group, async_op=True))


def all_gather(tensor: Tensor, group: ProcessGroup) -> list[Tensor]:
    """Return every rank's tensor (same shape on all), in rank order; blocks."""
    _count("all_gather", tensor.nbytes, group)
    gathered = [torch.empty_like(tensor) for _ in range(world_size(group))]
    dist.all_gather(gathered, tensor, group=group)
    return gathered


def all_gather_object(value: Any, group: ProcessGroup) -> list[Any]:
    """Return every rank's picklable ``value`` in rank order; for rare exchanges on a CPU group."""
    _count_object("all_gather", value, group)
    gathered: list[Any] = [None] * world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def gather_object(value: Any, group: ProcessGroup) -> list[Any] | None:
    """Return every rank's picklable ``value`` in rank order on the group's first rank, None elsewhere; a CPU group."""
    _count_object("gather", value, group)
    first = rank(group) == 0
    gathered: list[Any] | None = [None] * world_size(group) if first else None
    dist.gather_object(value, gathered, dst=global_ranks(group)[0], group=group)
    return gathered


def broadcast_object(value: Any, group: ProcessGroup, src: int) -> Any:
    """Return the picklable ``value`` of the group's rank ``src`` on all ranks; for rare exchanges on a CPU group."""
    box = [value]
    dist.broadcast_object_list(box, src=global_ranks(group)[src], group=group)
    _count_object("broadcast", box[0], group, src)
    return box[0]


def reduce_in_place(tensor: Tensor, op: Literal["sum", "max", "min", "product"], group: ProcessGroup) -> Tensor:
    """Reduce ``tensor`` over the group in place, and return it; blocks."""
    _count("all_reduce", tensor.nbytes, group)
    dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op.upper()), group=group)
    return tensor


def barrier(group: ProcessGroup) -> None:
    """Wait for all ranks of the group."""
    dist.barrier(group=group)


def all_gather_padded(tensor: Tensor, group: ProcessGroup) -> list[Tensor]:
    """Return every rank's tensor where the first dimension may differ between ranks; blocks."""
    lengths = torch.tensor([tensor.shape[0]], dtype=torch.int64, device=tensor.device)
    sizes = [int(n) for n in torch.cat(all_gather(lengths, group)).tolist()]
    padded = tensor.new_zeros((max(sizes), *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    return [part[:n] for part, n in zip(all_gather(padded, group), sizes, strict=True)]


def raise_on_any_rank(error: Exception | None, group: ProcessGroup) -> None:
    """Make an error of one rank an error of all; a collective call."""
    texts = all_gather_object(None if error is None else f"{type(error).__name__}: {error}", group)
    if error is not None:
        raise error
    for position, text in enumerate(texts):
        if text is not None:
            raise RuntimeError(f"Rank {position} failed: {text}")
