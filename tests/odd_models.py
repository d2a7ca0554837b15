"""Models and ways to train them that a reducer must get right, and the single-process reference of what is right.

The reference runs every rank's part on a copy of the model in one process and averages the gradients that result: a
gradient that no copy has stays None, one that some copies lack counts as zero there.
"""

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lightning_ddp_hooks as ldh

# What a case does in one step: (model as it is called, bare module, rank, step, context for backwards without sync).
Run = Callable[[Any, nn.Module, int, int, Callable[[], Any]], None]


@dataclass(frozen=True)
class Case:
    """One way to train one model.

    Attributes:
        build: makes the module.
        run: one step's forwards and backwards.
        settings: arguments of `DataParallel` that the case needs.
        optimizer: makes the optimizer.
        zero_grad: how gradients are cleared before each step.
        tolerance: relative difference to the reference that its dtypes allow.
    """

    build: Callable[[], nn.Module]
    run: Run
    settings: dict[str, Any] = field(default_factory=dict)
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] = lambda params: torch.optim.SGD(
        params, lr=0.05, momentum=0.9, weight_decay=0.01
    )
    zero_grad: str = "none"
    tolerance: float = 1e-12


def data(rank: int, step: int, *shape: int) -> Tensor:
    """Return the same random batch whenever it is asked for."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * step + rank), dtype=torch.float64)


def train(case: Case, steps: int, **settings: Any) -> tuple[list[Tensor], dict[str, Any]]:
    """Train on this rank's share with `DataParallel`; return parameters and buffers, and the facts."""
    import torch.distributed as dist

    torch.manual_seed(0)
    module = case.build()
    model = ldh.DataParallel(module, **{"bucket_cap_mb": 0.001, "first_bucket_mb": 0.0005, **case.settings, **settings})
    optimizer = case.optimizer([p for p in module.parameters() if p.requires_grad])
    for step in range(steps):
        _clear(optimizer, case.zero_grad)
        case.run(model, module, dist.get_rank(), step, model.no_sync)
        optimizer.step()
    facts = model.stats()
    model.detach()
    return [t.detach().clone() for t in module.parameters()], facts


def reference(case: Case, steps: int, world_size: int) -> list[Tensor]:
    """Return the parameters after the same steps, computed in this process."""
    torch.manual_seed(0)
    first = case.build()
    copies = [first, *(copy.deepcopy(first) for _ in range(world_size - 1))]
    optimizers = [case.optimizer([p for p in module.parameters() if p.requires_grad]) for module in copies]
    for step in range(steps):
        buffers = [buffer.clone() for buffer in first.buffers()]
        for rank, (module, optimizer) in enumerate(zip(copies, optimizers, strict=True)):
            for mine, value in zip(module.buffers(), buffers, strict=True):
                mine.data.copy_(value)
            _clear(optimizer, case.zero_grad)
            case.run(module, module, rank, step, contextlib.nullcontext)
        _average([list(module.parameters()) for module in copies])
        for optimizer in optimizers:
            optimizer.step()
    return [p.detach().clone() for p in first.parameters()]


def _average(replicas: Sequence[list[Tensor]]) -> None:
    for params in zip(*replicas, strict=True):
        if all(p.grad is None for p in params):
            continue
        scaled = [None if p.grad is None else p.grad.to_dense() * (1 / len(params)) for p in params]
        total = sum(g for g in scaled if g is not None)
        for p in params:
            p.grad = total.clone()


def _clear(optimizer: torch.optim.Optimizer, how: str) -> None:
    if how != "never":
        optimizer.zero_grad(set_to_none=how == "none")


# ---------------------------------------------------------------------- models


class Mlp(nn.Sequential):
    def __init__(self, width: int = 8, layers: int = 3) -> None:
        parts: list[nn.Module] = []
        for _ in range(layers):
            parts += [nn.Linear(width, width), nn.Tanh()]
        super().__init__(*parts)
        self.double()


class Branches(nn.Module):
    """A trunk and heads of which each step uses some."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 4) for _ in range(heads))
        self.double()

    def forward(self, x: Tensor, used: Sequence[int]) -> Tensor:
        hidden = torch.tanh(self.trunk(x))
        return sum((self.heads[index](hidden).square().mean() for index in used), hidden.sum() * 0.1)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.out = nn.Linear(8, 10, bias=False)
        self.out.weight = self.embed.weight
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.embed(tokens))


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4)
        )
        self.double().to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.to(memory_format=torch.channels_last))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex128))
        self.real = nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.register_buffer("phase", torch.randn(4, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return ((x[:, :4] * self.real).to(torch.complex128) @ self.weight * self.phase).abs().square()


class Mixed(nn.Module):
    """Parameters of three dtypes, a scalar one, an empty one and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(8, 8).to(torch.float64)
        self.single = nn.Linear(8, 8)
        self.brain = nn.Linear(8, 8).to(torch.bfloat16)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.empty = nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(8, dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.wide(x * self.frozen) * self.scale + self.empty.sum()
        return self.brain(self.single(x.float()).bfloat16()).double()


class Checkpointed(nn.Module):
    """A block that is used twice under activation checkpointing, between two plain layers."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(8, 8)
        self.block = Mlp(layers=2)
        self.last = nn.Linear(8, 8)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.last(x)


class CheckpointFirst(nn.Module):
    """All that is trained lies in re-entrant segments, of which one runs before the other has finished."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp(layers=1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 6, sparse=True)
        self.bag = nn.EmbeddingBag(20, 6, sparse=True, mode="sum")
        self.out = nn.Linear(6, 2)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.table(tokens).sum(1) + self.bag(tokens))


class SurpriseSparse(nn.Module):
    """A gradient is sparse although no module says so."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(20, 6, dtype=torch.float64))
        self.out = nn.Linear(6, 2).double()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(nn.functional.embedding(tokens, self.table, sparse=True).sum(1))


@dataclass
class Output:
    loss: Tensor
    extra: dict[str, Any]


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp()

    def forward(self, x: Tensor) -> Output:
        y = self.body(x)
        return Output(y.square().mean(), {"parts": [y, (y.sum(), "text")], "none": None})


# ---------------------------------------------------------------------- ways to train them


def plain(model: Any, module: nn.Module, rank: int, step: int, no_sync: Any) -> None:
    model(data(rank, step, 4, 8)).square().mean().backward()


def image(model: Any, module: nn.Module, rank: int, step: int, no_sync: Any) -> None:
    model(data(rank, step, 2, 3, 6, 6)).square().mean().backward()


def tokens(rank: int, step: int) -> Tensor:
    return torch.randint(0, 10, (3, 4), generator=torch.Generator().manual_seed(100 * step + rank))


def words(model: Any, module: nn.Module, rank: int, step: int, no_sync: Any) -> None:
    model(tokens(rank, step)).square().mean().backward()


def words_on_rank_0(model: Any, module: nn.Module, rank: int, step: int, no_sync: Any) -> None:
    """The other ranks reach the embeddings with no token at all."""
    model(tokens(rank, step)[: 3 if rank == 0 else 0]).square().sum().backward()


def accumulate(model: Any, module: nn.Module, rank: int, step: int, no_sync: Any) -> None:
    for micro in range(2):
        with no_sync():
            model(data(rank, 10 * step + micro, 4, 8)).square().mean().backward()
    model(data(rank, 10 * step + 9, 4, 8)).square().mean().backward()


def uneven_accumulation(model: Any, module: nn.Module, rank: int, step: int, no_sync: Any) -> None:
    """Each micro-batch uses another head, so that only the whole window uses them all."""
    for micro in range(3):
        with no_sync():
            model(data(rank, 10 * step + micro, 4, 8), [(micro + rank) % 4]).backward()
    model(data(rank, 10 * step + 3, 4, 8), [(3 + rank) % 4]).backward()


def changing_heads(model: Any, module: nn.Module, rank: int, step: int, no_sync: Any) -> None:
    used = [[0], [1, 2], [], [0, 1, 2]][(step + rank) % 4]
    model(data(rank, step, 4, 8), used).backward()


def fixed_heads(model: Any, module: nn.Module, rank: int, step: int, no_sync: Any) -> None:
    model(data(rank, step, 4, 8), [0, 1] if rank == 0 else [1]).backward()


def two_forwards(model: Any, module: nn.Module, rank: int, step: int, no_sync: Any) -> None:
    a, b = model(data(rank, step, 2, 3, 6, 6)), model(data(rank + 7, step, 2, 3, 6, 6))
    (a - b).square().mean().backward()


def backward_twice(model: Any, module: nn.Module, rank: int, step: int, no_sync: Any) -> None:
    loss = model(data(rank, step, 4, 8)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def backwards_in_a_row(model: Any, module: nn.Module, rank: int, step: int, no_sync: Any) -> None:
    for part in range(3):
        model(data(rank, 10 * step + part, 4, 8)).square().mean().backward()


def gradient_penalty(model: Any, module: nn.Module, rank: int, step: int, no_sync: Any) -> None:
    x = data(rank, step, 4, 8).requires_grad_()
    y = model(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (y.square().mean() + slope.square().sum(1).sub(1).square().mean()).backward()


def structured(model: Any, module: nn.Module, rank: int, step: int, no_sync: Any) -> None:
    output = model(data(rank, step, 4, 8))
    (output.loss + output.extra["parts"][1][0] * 0.1).backward()


def evaluate_between(model: Any, module: nn.Module, rank: int, step: int, no_sync: Any) -> None:
    with torch.no_grad():
        model(data(rank, step + 50, 4, 8))
    loss = model(data(rank, step, 4, 8)).square().mean()
    module.eval()
    with torch.inference_mode():
        model(data(rank, step + 60, 4, 8))
    module.train()
    loss.backward()


def freeze_and_thaw(model: Any, module: nn.Module, rank: int, step: int, no_sync: Any) -> None:
    module[0].requires_grad_(step not in (2, 3))
    module[4].requires_grad_(step < 4)
    model(data(rank, step, 4, 8)).square().mean().backward()


def adamw(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def sgd(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


UNUSED: dict[str, Any] = {"find_unused_parameters": True}

CASES: dict[str, Case] = {
    "plain": Case(Mlp, plain),
    "one parameter per bucket": Case(Mlp, plain, {"bucket_cap_mb": 1e-6, "first_bucket_mb": 1e-6}),
    "channels_last with BatchNorm and 1x1": Case(Conv, image),
    "tied weights": Case(Tied, words),
    "complex": Case(Complex, plain),
    "mixed dtypes, empty, scalar, frozen": Case(Mixed, plain, tolerance=1e-2),
    "checkpoint, re-entrant, twice": Case(lambda: Checkpointed(True), plain),
    "checkpoint, not re-entrant, twice": Case(lambda: Checkpointed(False), plain),
    "all re-entrant": Case(CheckpointFirst, plain),
    "re-entrant with unused": Case(lambda: Checkpointed(True), plain, UNUSED),
    "sparse embeddings": Case(Sparse, words, optimizer=sgd),
    "sparse embeddings, no token on some ranks": Case(Sparse, words_on_rank_0, optimizer=sgd),
    "sparse by surprise": Case(SurpriseSparse, words, optimizer=sgd),
    "structured output": Case(Structured, structured),
    "accumulation": Case(Mlp, accumulate),
    "accumulation over different heads": Case(Branches, uneven_accumulation),
    "heads differ by rank and step": Case(Branches, changing_heads, UNUSED),
    "heads differ, AdamW": Case(Branches, changing_heads, UNUSED, adamw),
    "heads differ, zeroed in place": Case(Branches, changing_heads, UNUSED, zero_grad="zero"),
    "heads differ, never zeroed": Case(Branches, changing_heads, UNUSED, zero_grad="never"),
    "static graph": Case(Branches, fixed_heads, {"static_graph": True}, adamw),
    "two forwards with BatchNorm": Case(Conv, two_forwards),
    "backward twice through one graph": Case(Mlp, backward_twice),
    "backwards in a row": Case(Mlp, backwards_in_a_row),
    "gradient penalty": Case(Mlp, gradient_penalty),
    "zeroed in place": Case(Mlp, plain, zero_grad="zero"),
    "never zeroed": Case(Mlp, plain, zero_grad="never"),
    "evaluation in between": Case(Mlp, evaluate_between),
    "frozen and thawed": Case(Mlp, freeze_and_thaw, optimizer=sgd),
    "frozen and thawed, unused allowed": Case(Mlp, freeze_and_thaw, UNUSED, sgd),
}
