"""The process group backend ``shm``: collectives on the CPU between ranks of one host, through memory they share.

A Trainer or Fabric whose user has named no backend makes its world of gloo, which takes what users send themselves, and
lets a run's gradients go through memory where all ranks can reach each other's (`group_of_neighbors`).
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.reducer.native import build

_log = logging.getLogger(__name__)

# Worlds whose users have named no backend -> their ranks as a group of this backend, once one was asked for.
_worlds: WeakKeyDictionary[comm.ProcessGroup, comm.ProcessGroup | None] = WeakKeyDictionary()


def register() -> None:
    """Make ``torch.distributed.init_process_group("shm")`` and `new_group` know the backend."""
    comm.register_cpu_backend("shm", _make)


def why_not() -> str | None:
    """Say why the backend cannot work on this machine as it is; None if it can."""
    if sys.platform != "linux":
        return "it needs Linux"
    if not build.is_built():
        return "it needs the native build"
    try:
        build.load()
    except ImportError as error:
        return f"the native build cannot be loaded: {error}"
    return None


def _make(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    try:
        if sys.platform != "linux":
            raise RuntimeError("The shm backend needs Linux.")
        build.build()
        native = build.load()
    except (RuntimeError, ImportError) as error:
        store.set(f"card/{rank}", f"{error}\0")  # what the others wait for (rendezvous.cpp): they raise as well
        raise RuntimeError(f"shm backend: {error}") from error
    return native.make_shm_backend(store, rank, size, timeout)


def make_world(make: Callable[[], object], *, named: bool) -> None:
    """Make the default group, if there is none; unless its backend is ``named``, gradients may take another one."""
    exists = comm.is_initialized()
    make()
    if not (exists or named) and comm.is_initialized():
        _worlds[comm.resolve_group(None)] = None


def group_of_neighbors(timeout: timedelta | None = None) -> comm.ProcessGroup | None:
    """Return the ranks of the world as a group that talks through memory; None if they cannot, or are not to.

    Collective. That a host is the same is shown by a file that each rank opens, not by names; what is compared before
    only saves the attempt.
    """
    if not _may_choose() or comm.world_size() == 1:
        return None
    world = comm.resolve_group(None)
    if (group := _worlds[world]) is None:
        places = comm.all_gather_object(_place(), world)
        if None in places:
            _log.info("Ranks talk over gloo: the native library, which lets them talk through memory, is not built.")
        elif len(set(places)) > 1:
            _log.info("Ranks talk over gloo: they are on several hosts, in several containers, or several users'.")
        else:
            try:
                group = _worlds[world] = comm.new_group(world, backend="shm", timeout=timeout)
            except RuntimeError as error:  # on all ranks
                del _worlds[world]
                if comm.rank() == 0:
                    _log.warning("Ranks talk over gloo, since they cannot share memory: %s", error)
    return group


def split_group(
    parent: comm.ProcessGroup, parts: Sequence[Sequence[int]], *, timeout: timedelta | None = None
) -> comm.ProcessGroup:
    """Split ``parent`` as `comm.split_group` does; parts that lie on one host each talk through memory, if they may."""
    backend = None
    if _may_choose() and comm.backend_name(parent) == "gloo":
        places = comm.all_gather_object(_place(), parent)
        if None not in places and all(len({places[rank] for rank in part}) == 1 for part in parts):
            backend = "shm"
    return comm.split_group(parent, parts, backend=backend, timeout=timeout)


def _may_choose() -> bool:
    """Tell whether nobody has named a backend for the world, so that gloo is only the default."""
    if not comm.is_initialized():
        return False
    world = comm.resolve_group(None)
    return world in _worlds and comm.backend_name(world) == "gloo"


def _place() -> tuple[object, ...] | None:
    """Return what processes that can share memory have in common; None without the library."""
    if not build.is_built() or sys.platform != "linux":
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return boot, socket.gethostname(), os.getuid(), os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None
