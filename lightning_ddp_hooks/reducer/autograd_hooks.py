"""Where the reducer meets autograd: hooks on the nodes that accumulate gradients, and the end of a backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook

from lightning_ddp_hooks import _compat


class GradientHooks:
    """One hook for each parameter, which runs after its gradient was accumulated.

    It runs behind the parameter's own post-accumulate hooks, so what a user's hook does to the gradient is reduced.
    """

    def __init__(self, params: Sequence[Tensor], ready: Callable[[int, Tensor], None]) -> None:
        # A parameter holds the node that accumulates its gradient weakly; without these the hooks go with the graph.
        with torch.enable_grad():  # older torch finds them through a view
            self._nodes = [torch.autograd.graph.get_gradient_edge(param).node for param in params]
        self._handles = [
            node.register_hook(lambda *_, index=index, param=param: ready(index, param))
            for index, (node, param) in enumerate(zip(self._nodes, params, strict=True))
        ]

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()


class EndOfBackward:
    """Calls ``ended`` at the end of the backward that is running, and ``dropped`` when autograd lets go of it.

    That is in the enclosing backward, if there is one; ``dropped`` is told whether the end has come, or an exception.
    """

    def __init__(self, ended: Callable[[], None], dropped: Callable[[bool], None]) -> None:
        self._ended = ended
        self._dropped = dropped
        self._has_ended = False
        _compat.queue_end_of_backward(self)

    def __call__(self) -> None:
        """End the backward; called by autograd."""
        self._has_ended = True
        self._ended()

    def __del__(self) -> None:
        self._dropped(self._has_ended)


class OutputHooks:
    """Tells of backwards that come through the outputs of a forward.

    Args:
        comes: Called when a gradient has come to one of them.
    """

    def __init__(self, comes: Callable[[], None]) -> None:
        self._comes = weakref.WeakMethod(comes)
        self._own = weakref.ref(self)
        self._unvisited: weakref.WeakSet[_Output] = weakref.WeakSet()
        self._any_visited = False

    def watch(self, outputs: Sequence[Tensor]) -> None:
        """Watch outputs, as long as their graph lives."""
        for tensor in outputs:
            output = _Output(self._own)
            self._unvisited.add(output)
            tensor.register_hook(output)

    def visited(self, output: _Output) -> None:
        """Take note that a gradient has come to an output."""
        if (comes := self._comes()) is not None:
            self._unvisited.discard(output)
            self._any_visited = True
            comes()

    @property
    def more_may_come(self) -> bool:
        """Whether there is an output that no backward has come through since `forget`, and one still may."""
        return len(self._unvisited) > 0

    def forget(self) -> None:
        """Expect no more from the outputs watched so far, once a backward has come through one of them."""
        if self._any_visited:
            self._unvisited.clear()
            self._any_visited = False


@unserializable_hook  # an output is saved without it
class _Output:
    """The hook of one output, which lives as long as its graph."""

    def __init__(self, hooks: weakref.ref[OutputHooks]) -> None:
        self._hooks = hooks

    def __call__(self, _: Tensor) -> None:
        if (hooks := self._hooks()) is not None:
            hooks.visited(self)


@contextmanager
def hookable(params: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let hooks be registered on frozen parameters too, which torch refuses."""
    frozen = [param for param in params if not param.requires_grad]
    for param in frozen:
        param.requires_grad_(True)
    yield
    for param in frozen:
        param.requires_grad_(False)


def roots_in(value: object) -> list[Tensor]:
    """Return the tensors of a module's output through which a backward comes into the module.

    Looks into nested mappings, sequences and dataclasses.
    """
    return [tensor for tensor in _tensors_in(value) if tensor.requires_grad and not tensor.is_leaf]


def _tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from _tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for entry in fields(value):
            yield from _tensors_in(getattr(value, entry.name))
