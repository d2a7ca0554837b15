"""Short names of model averagers."""

from collections.abc import Callable
from typing import Any

from lightning_ddp_hooks.averaging.averager import ModelAverager
from lightning_ddp_hooks.averaging.diloco import DiLoCo
from lightning_ddp_hooks.averaging.periodic import HierarchicalModelAverager, PeriodicModelAverager
from lightning_ddp_hooks.averaging.slowmo import SlowMo
from lightning_ddp_hooks.short_names import add_short_name, known_names

# In this order a command line takes class paths for classes.
AveragerLike = ModelAverager | str

AVERAGERS: dict[str, Callable[..., ModelAverager]] = {}
"""Short name -> what makes the averager."""

add_short_name(AVERAGERS, "local_sgd", PeriodicModelAverager)
add_short_name(AVERAGERS, "hierarchical", HierarchicalModelAverager)
add_short_name(AVERAGERS, "slowmo", SlowMo)
add_short_name(AVERAGERS, "diloco", DiLoCo)


def resolve_averager(averager: AveragerLike | None) -> ModelAverager | None:
    """Return the averager that the user gave, or that a short name stands for."""
    given: Any = averager
    if given is None or isinstance(given, ModelAverager):
        return given
    if isinstance(given, str):
        if given not in AVERAGERS:
            raise ValueError(f"Unknown averager {given!r}; known names: {known_names(AVERAGERS)}.")
        return AVERAGERS[given]()
    got = f"the class {given.__name__}; make one" if isinstance(given, type) else type(given).__name__
    raise TypeError(f"Expected a ModelAverager or its short name for `averager`, got {got}.")
