"""Callbacks that do not keep their owner alive.

Objects that a wrapper owns hold it, if at all, by these: so it goes with its last reference, and its hooks and
memory with it, without waiting for a garbage collection.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import ParamSpec, TypeVar, cast
from weakref import WeakMethod

P = ParamSpec("P")
T = TypeVar("T")


def weakly(method: Callable[P, T]) -> Callable[P, T]:
    """Return a bound method as a function that does not hold its object, and is not called once that is gone."""
    if not isinstance(method, MethodType):
        return method
    reference = WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        bound = cast("Callable[P, T] | None", reference())
        assert bound is not None, "called after its owner was dropped"
        return bound(*args, **kwargs)

    return call
