"""Whether a module still is what the reducer was built for: parameters added, replaced, or of another dtype since then.

Hooks sit on the parameters that were there at construction. A parameter that came later, or whose storage was swapped
(``module.double()``, ``load_state_dict(assign=True)``), would silently be left out of the mean.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Named = Sequence[tuple[str, torch.nn.Parameter]]


def _kind(param: Tensor) -> tuple[object, ...]:
    return (param.dtype, param.device, tuple(param.shape))


@dataclass(frozen=True)
class Structure:
    """The watched parameters as they were when the reducer looked at them.

    Attributes:
        params: the parameters themselves, by name.
        kinds: dtype, device and shape of each, by name.
    """

    params: dict[str, Tensor]
    kinds: dict[str, tuple[object, ...]]

    @classmethod
    def of(cls, watched: Named) -> Structure:
        """Remember parameters."""
        return cls(dict(watched), {name: _kind(param) for name, param in watched})

    def changed(self, named: Named) -> tuple[str, ...]:
        """Return the names of watched parameters that are another tensor, or of another kind, now."""
        return tuple(
            name
            for name, param in named
            if name in self.params and (param is not self.params[name] or _kind(param) != self.kinds[name])
        )

    def added(self, named: Named) -> tuple[str, ...]:
        """Return the names of parameters that require a gradient and have never been watched."""
        return tuple(name for name, param in named if param.requires_grad and name not in self.params)

    def digest(self) -> str:
        """Return a short text that is the same on ranks that watch parameters of the same names and kinds."""
        return hashlib.sha256(repr(sorted(self.kinds.items())).encode()).hexdigest()


def changed_text(names: Sequence[str]) -> str:
    """Say what is wrong when parameters changed while training."""
    shown = ", ".join(repr(name) for name in names[:8]) + (", ..." if len(names) > 8 else "")
    return (
        f"Parameters were replaced or changed their dtype, device or shape during training: {shown}. Do so before the "
        "first backward (in `configure_model`, `setup` or `on_fit_start`), or build the reducer anew."
    )
