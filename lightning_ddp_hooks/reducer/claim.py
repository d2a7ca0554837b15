"""A parameter has one reducer: two would both sum its gradient, each in its own order of collectives."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_claims: WeakIdKeyDictionary = WeakIdKeyDictionary()


def require_free(named: Iterable[tuple[str, Tensor]]) -> None:
    """Make sure that nobody has claimed these parameters.

    Raises:
        ValueError: somebody has.
    """
    for name, param in named:
        if _owner(param) is not None:
            raise ValueError(
                f"Parameter {name!r} is reduced already, by a wrapper or strategy that is still at work: wrap a module "
                "once, and call the wrapper's `detach()` before it is wrapped anew."
            )


def claim(params: Iterable[Tensor], owner: object) -> None:
    """Make ``owner`` the one that reduces gradients of these parameters, as long as it lives."""
    for param in params:
        _claims[param] = weakref.ref(owner)


def release(owner: object) -> None:
    """Give up all that ``owner`` has claimed."""
    for param in [param for param in list(_claims) if _owner(param) is owner]:
        del _claims[param]


def _owner(param: Tensor) -> object | None:
    reference = _claims.get(param)
    return None if reference is None else reference()
