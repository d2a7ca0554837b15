"""Short names of model averagers."""

from collections.abc import Callable

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
    if averager is None or isinstance(averager, ModelAverager):
        return averager
    if isinstance(averager, str):
        if averager not in AVERAGERS:
            raise ValueError(f"Unknown averager {averager!r}; known names: {known_names(AVERAGERS)}.")
        return AVERAGERS[averager]()
    got = f"the class {averager.__name__}; make one" if isinstance(averager, type) else type(averager).__name__
    raise TypeError(f"Expected a ModelAverager or its short name for `averager`, got {got}.")
