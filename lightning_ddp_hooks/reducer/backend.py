"""Which engine runs the hot path: the native one, or its twin in Python."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Literal

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.reducer.engine import EAGER_NUMEL
from lightning_ddp_hooks.reducer.native import build
from lightning_ddp_hooks.reducer.python_engine import PythonEngine

_log = logging.getLogger(__name__)

Engine = PythonEngine  # the native one has the same members

EngineFactory = Callable[..., Engine]
"""Makes an engine, from what `PythonEngine` takes."""

BUILD_COMMAND = "python -m lightning_ddp_hooks build-native"

_NOT_BUILT = f"The reducer runs in Python. The native one takes less time; to build it once: {BUILD_COMMAND}"
_BEING_BUILT = (
    "The reducer runs in Python. The native one, which takes less time, is being compiled in the background for later "
    "runs (DDP_HOOKS_BUILD=never in the environment prevents that)."
)


def engine_factory(backend: Literal["auto", "native", "python"], *, say: bool = True) -> EngineFactory:
    """Return what makes engines of the wanted kind. Ranks need not choose alike: what they send is the same."""
    if backend == "python":
        return PythonEngine
    if backend == "auto" and not build.is_built():
        later = build.start_build()
        if say:
            _say_once(_BEING_BUILT if later else _NOT_BUILT)
        return PythonEngine
    if backend == "native":
        build.build()
    try:
        native = build.load()
    except ImportError as error:
        if backend == "native":
            raise RuntimeError(f"The native reducer was built but cannot be loaded: {error}") from error
        if say:
            _say_once(f"The reducer runs in Python, since the native one cannot be loaded: {error}")
        return PythonEngine

    return partial(native.NativeEngine, eager_numel=EAGER_NUMEL)


def engine_factory_on_all_ranks(
    backend: Literal["auto", "native", "python"], control_group: comm.ProcessGroup
) -> EngineFactory:
    """Do what `engine_factory` does, and raise on all ranks if it fails on one; collective for ``"native"``."""
    if backend != "native":
        return engine_factory(backend, say=comm.rank(control_group) == 0)
    factory, failure = None, None
    try:
        factory = engine_factory(backend)
    except RuntimeError as error:
        failure = error
    comm.raise_on_any_rank(failure, control_group)
    assert factory is not None
    return factory


@cache
def _say_once(text: str) -> None:
    _log.warning(text)
