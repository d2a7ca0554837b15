"""Which parameters are reduced: who owns them, and how a change of the set or of a parameter itself is noticed.

Hooks sit on the parameters that were there at construction. A parameter that came later, or whose storage was swapped
(``module.double()``, ``load_state_dict(assign=True)``), would silently be left out of the mean.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from lightning_ddp_hooks import _compat
from lightning_ddp_hooks.reducer.autograd_hooks import hookable


def _kind(param: Tensor) -> tuple[object, ...]:
    return (param.dtype, param.device, tuple(param.shape))


def changed_text(names: Sequence[str]) -> str:
    """Say what is wrong when parameters changed while training."""
    shown = ", ".join(repr(name) for name in names[:8]) + (", ..." if len(names) > 8 else "")
    return (
        f"Parameters were replaced or changed their dtype, device or shape during training: {shown}. Do so before the "
        "first backward (in `configure_model`, `setup` or `on_fit_start`), or build the reducer anew."
    )


class WatchedParameters:
    """The parameters that require a gradient, and those that do not but may again.

    Args:
        module: Module that has them.
        ignored: Names of parameters that are left alone.
        keeps_frozen: Whether a parameter is watched further once it is frozen: where parameters may be left out, that
            is all it means (a GAN freezes one network while it trains the other).
        on_unfrozen: Called when a parameter that is not watched gets a gradient.

    Attributes:
        names: Names of the watched parameters.
        params: The watched parameters.
        frozen: Parameters that are not watched since they require no gradient.
        unfrozen_used: Which of `frozen` got a gradient since `forget_use`, by id.
    """

    def __init__(
        self, module: nn.Module, ignored: AbstractSet[str], *, keeps_frozen: bool, on_unfrozen: Callable[[], None]
    ) -> None:
        self.module = module
        self._ignored = ignored
        self._keeps_frozen = keeps_frozen
        self._on_unfrozen = on_unfrozen
        self._handles: dict[int, RemovableHandle] = {}
        self.names: list[str] = []
        self.params: list[nn.Parameter] = []
        self.frozen: list[nn.Parameter] = []
        self.unfrozen_used: set[int] = set()
        self._watched: dict[str, Tensor] = {}
        self._kinds: dict[str, tuple[object, ...]] = {}  # as they were when they began to be watched
        self.track()

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """List all parameters of the module, watched or not, but those that are ignored."""
        return [(name, p) for name, p in self.module.named_parameters() if name not in self._ignored]

    def names_now(self) -> tuple[str, ...]:
        """Return the names of all parameters that require a gradient now."""
        return tuple(name for name, param in self.named() if param.requires_grad)

    def track(self) -> None:
        """Watch the parameters that require a gradient now."""
        named = self.named()
        before = {id(param) for param in self.params} if self._keeps_frozen else set()
        watched = [(name, param) for name, param in named if param.requires_grad or id(param) in before]
        self.names = [name for name, _ in watched]
        self.params = [param for _, param in watched]
        self.frozen = [param for _, param in named if not param.requires_grad and id(param) not in before]
        self._watched = dict(watched)
        self._kinds = {name: _kind(param) for name, param in watched}
        self.close()
        self._watch_frozen()

    def fresh(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters that require a gradient by now and are not watched."""
        known = {id(param) for param in self.params}
        return [(name, param) for name, param in self.named() if param.requires_grad and id(param) not in known]

    def digest(self) -> str:
        """Return a short text that is the same on ranks that watch parameters of the same names and kinds."""
        return hashlib.sha256(repr(sorted(self._kinds.items())).encode()).hexdigest()

    def look(self, *, may_begin_anew: bool) -> bool:
        """Look for parameters that were added or replaced."""
        named = self.named()
        known = [(name, param) for name, param in named if name in self._watched]
        changed = [n for n, param in known if param is not self._watched[n] or _kind(param) != self._kinds[n]]
        if changed and not may_begin_anew:
            raise RuntimeError(changed_text(changed))
        if not changed and any(param.requires_grad and name not in self._watched for name, param in named):
            watched = {id(param) for param in self.params}
            self.frozen = [param for _, param in named if id(param) not in watched]
            self._watch_frozen()
        return bool(changed)

    def _watch_frozen(self) -> None:
        """Notice the gradient of a parameter that is frozen now, whenever it is unfrozen; others may get none then."""
        ready = partial(_unfrozen_ready, weakref.ref(self))
        new = [param for param in self.frozen if id(param) not in self._handles and _can_be_trained(param)]
        with hookable(new):
            self._handles |= {id(param): param.register_post_accumulate_grad_hook(ready) for param in new}

    def unfrozen_ready(self, param: Tensor) -> None:
        """Take note of the gradient of one of `frozen`."""
        self.unfrozen_used.add(id(param))
        self._on_unfrozen()

    def forget_use(self) -> None:
        """Begin a new accumulation window."""
        self.unfrozen_used.clear()

    def close(self) -> None:
        """Remove all hooks."""
        self.forget_use()
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()


def _unfrozen_ready(own: weakref.ref[WatchedParameters], param: Tensor) -> None:
    if (self := own()) is not None:
        self.unfrozen_ready(param)


def _can_be_trained(param: Tensor) -> bool:
    return (param.is_floating_point() or param.is_complex()) and not param.is_inference()


def check_parameters(module: nn.Module) -> None:
    """Refuse parameters that cannot be trained in place."""
    for name, param in module.named_parameters():
        if param.is_meta:
            raise ValueError(f"Parameter {name!r} is on the meta device and has no values: materialize it first.")
        if _compat.is_uninitialized(param):
            raise ValueError(
                f"Parameter {name!r} of a lazy module has no shape yet: run one forward with example data first."
            )
        if _compat.overlaps_itself(param):
            raise ValueError(
                f"Elements of parameter {name!r} share memory (it was expanded), so it cannot be written: clone it."
            )


# ---------------------------------------------------------------------- ownership

_claims: WeakIdKeyDictionary = WeakIdKeyDictionary()


def require_free(named: Iterable[tuple[str, Tensor]]) -> None:
    """Make sure that nobody has claimed these parameters."""
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
