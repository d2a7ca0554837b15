"""Which parameters are watched, and how a change of that set is noticed."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_ddp_hooks import _compat
from lightning_ddp_hooks.reducer.structure import Structure, changed_text


class TrainableSet:
    """The parameters that require a gradient, and those that do not but may again.

    Args:
        module: whose parameters they are.
        ignored: names of parameters that are left alone.
        keeps_frozen: watch a parameter further once it is frozen: where parameters may be left out, that is all there
            is to it (a GAN freezes one network while it trains the other).
        on_thawed: called when a parameter that is not watched gets a gradient.

    Attributes:
        names: of the watched parameters.
        params: the watched parameters.
        frozen: the parameters that are not watched since they require no gradient.
        thawed_used: whether one of `frozen` got a gradient since `forget_use`.
    """

    def __init__(
        self, module: nn.Module, ignored: AbstractSet[str], *, keeps_frozen: bool, on_thawed: Callable[[], None]
    ) -> None:
        self._module = module
        self._ignored = ignored
        self._keeps_frozen = keeps_frozen
        self._on_thawed = on_thawed
        self._handles: dict[int, RemovableHandle] = {}
        self.names: list[str] = []
        self.params: list[nn.Parameter] = []
        self.frozen: list[nn.Parameter] = []
        self.thawed_used = False
        self._structure = Structure.of([])
        self.track()

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """List all parameters of the module, watched or not, but those that are ignored."""
        return [(name, p) for name, p in self._module.named_parameters() if name not in self._ignored]

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
        self._structure = Structure.of(watched)
        self.close()

    def fresh(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters that require a gradient by now and are not watched."""
        known = {id(param) for param in self.params}
        return [(name, param) for name, param in self.named() if param.requires_grad and id(param) not in known]

    def digest(self) -> str:
        """Return a short text that is the same on ranks that watch parameters of the same names and kinds."""
        return self._structure.digest()

    def look(self, *, may_begin_anew: bool) -> bool:
        """Look for parameters that were added or replaced.

        Args:
            may_begin_anew: whether it is early enough to `track` again.

        Returns:
            Whether to begin anew.

        Raises:
            RuntimeError: a watched parameter was replaced, and it is too late.
        """
        named = self.named()
        changed = self._structure.changed(named)
        if changed and not may_begin_anew:
            raise RuntimeError(changed_text(changed))
        if not changed and self._structure.added(named):
            watched = {id(param) for param in self.params}
            self.frozen = [param for _, param in named if id(param) not in watched]
        return bool(changed)

    def watch_thawed(self) -> None:
        """Notice the gradient of a parameter that was frozen and is not any more, in case no other one gets any."""
        for param in self.frozen:
            if param.requires_grad and id(param) not in self._handles:
                self._handles[id(param)] = param.register_post_accumulate_grad_hook(self._thawed_ready)

    def _thawed_ready(self, _: Tensor) -> None:
        self.thawed_used = True
        self._on_thawed()

    def forget_use(self) -> None:
        """Begin a new accumulation window."""
        self.thawed_used = False

    def close(self) -> None:
        """Remove all hooks."""
        self.thawed_used = False
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()


def check_parameters(module: nn.Module) -> None:
    """Refuse parameters that cannot be trained in place.

    Raises:
        ValueError: a parameter without values, or one whose elements share memory.
    """
    for name, param in module.named_parameters():
        if param.is_meta:
            raise ValueError(f"Parameter {name!r} is on the meta device and has no values: materialise it first.")
        if _compat.is_uninitialized(param):
            raise ValueError(
                f"Parameter {name!r} of a lazy module has no shape yet: run one forward with example data first."
            )
        if _compat.overlaps_itself(param):
            raise ValueError(
                f"Elements of parameter {name!r} share memory (it was expanded), so it cannot be written: clone it."
            )
