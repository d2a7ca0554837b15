"""The process group backend ``shm``: collectives on the CPU between ranks of one host, through memory they share."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.reducer.native import build


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
