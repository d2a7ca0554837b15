"""What tests of compiled models share: a model of several graphs, and what was sent before each graph's backward."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

LAYERS = 4
WIDTH = 512
"""Of each layer, whose weight of 1 MiB fills a bucket and a graph of that size."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()  # type: ignore[no-any-return]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@torch.compiler.disable  # type: ignore[untyped-decorator]
def note_sent(loss: Tensor, progress: Callable[[], tuple[int, int, int]], sent: list[int]) -> None:
    """Put into ``sent``, as the backward of each compiled graph begins, how many buckets have been launched by then."""
    nodes: list[Any] = [loss.grad_fn]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
        if node.name() == "CompiledFunctionBackward":
            node.register_prehook(lambda _: sent.append(progress()[1]))


def launches_inside(sent: list[int]) -> bool:
    """Tell whether each graph but the first begins with the buckets sent that the graphs before it have filled."""
    return sent == list(range(len(sent))) and len(sent) > 1
