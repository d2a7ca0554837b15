"""Short names: what a string stands for in Python, in YAML, and on command lines, where its settings follow as flags.

    comm_hook="powersgd"                                        PowerSGD()
    --...comm_hook=powersgd --...comm_hook.rank=2               PowerSGD(rank=2)
    comm_hook: {class_path: powersgd, init_args: {rank: 2}}     PowerSGD(rank=2)

A command line (jsonargparse) looks a name up among the subclasses of what an argument takes. So each short name is the
name of a subclass in this module. Calling it makes an object of the class that it stands for: no instance of it exists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import make_dataclass
from typing import Any, ClassVar, TypeVar, get_type_hints

T = TypeVar("T")


class _ShortName:
    _made: ClassVar[Callable[..., Any]]

    def __new__(cls, **settings: Any) -> Any:
        return cls._made(**settings)


def add_short_name(names: dict[str, Callable[..., T]], name: str, cls: Callable[..., T], **defaults: Any) -> None:
    """Let a name stand for a class, with defaults of its own; ``names`` holds those of one argument."""
    bases: Any = (cls, _ShortName)  # in this order types are looked up where the class was defined
    inside: dict[str, Any] = {"_made": staticmethod(lambda **given: cls(**{**defaults, **given}))}
    inside |= {"__module__": __name__, "__doc__": cls.__doc__}
    if defaults:  # a command line reads them off the signature
        types = get_type_hints(cls)
        fields = [(field, types[field], value) for field, value in defaults.items()]
        short = make_dataclass(name, fields, bases=bases, namespace=inside, frozen=True, kw_only=True)
    else:
        short = type(name, bases, inside)
    globals()[name] = names[name] = short


def known_names(names: dict[str, Callable[..., T]]) -> str:
    """List names in a message."""
    return ", ".join(sorted(names))
