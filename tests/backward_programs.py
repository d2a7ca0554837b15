"""Random programs of forwards and backwards over wrappers and bare modules, run by stock DDP, by us, and by hand.

All numbers are small integers, whose sums and halves are exact, so that results are the same to the last bit in
whatever order they are summed.
"""

import copy
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lightning_ddp_hooks as ldh

HEADS = 3
WIDTH = 3
WRAPPERS = 2


@dataclass(frozen=True)
class Op:
    """One operation.

    Attributes:
        kind: "local" (through the module), "no_sync", "evaluate", "zero", "sync", or "within" (as "sync", with a
            backward through the module between forward and backward).
        wrappers: Which wrappers it is about; several in one loss, or one behind the other.
        chained: Whether the first one's output is the second one's input.
        outside: How the wrapper's call is checkpointed: "", "plain", "reentrant" or "nested".
        inside: How the module's heads are checkpointed: "", "plain" or "reentrant".
        heads: For each rank, the heads that its forward uses; where none may be missing, all of them.
        apart: "" for one backward, "outputs" for one through each output, "forwards" for a forward for each head
            before them, "checkpoints" for two checkpointed forwards in one backward.
        again: Whether the backward is run a second time on the retained graph.
        to_none: Whether gradients are set to None, or to zero.
    """

    kind: str
    wrappers: tuple[int, ...] = (0,)
    chained: bool = False
    outside: str = ""
    inside: str = ""
    heads: tuple[tuple[int, ...], tuple[int, ...]] = ((0, 1, 2), (0, 1, 2))
    apart: str = ""
    again: bool = False
    to_none: bool = True

    @property
    def stock(self) -> bool:
        """Whether stock DDP reduces what comes through its outputs, too."""
        return self.kind != "within" and not self.again


@dataclass(frozen=True)
class Program:
    """Operations, and the settings of the wrappers."""

    ops: tuple[Op, ...]
    find_unused: bool
    trunk: bool
    views: bool
    seed: int

    @property
    def stock(self) -> bool:
        """Whether stock DDP does it right."""
        shared = self.trunk or self.find_unused  # a parameter's second gradient, a second look for unused ones
        return all(op.stock and not (shared and op.apart in ("outputs", "forwards")) for op in self.ops) and not (
            self.find_unused and any(op.inside == "reentrant" for op in self.ops)
        )


class Net(nn.Module):
    def __init__(self, trunk: bool, generator: torch.Generator) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH) if trunk else nn.Identity()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(HEADS))
        self.double()
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randint(-1, 2, param.shape, generator=generator))

    def forward(self, x: Tensor, heads: Sequence[int], inside: str) -> tuple[Tensor, ...]:
        h = self.trunk(x).relu()
        return tuple(
            checkpoint(self.heads[i], h, use_reentrant=inside == "reentrant") if inside else self.heads[i](h)
            for i in heads
        )


class ByHand(nn.Module):
    """Reduces only when it is told to: the reference where stock DDP does otherwise."""

    def __init__(self, module: Net) -> None:
        super().__init__()
        self.module = module
        self.used: set[int] = set()
        for index, param in enumerate(module.parameters()):
            param.register_post_accumulate_grad_hook(lambda _, index=index: self.used.add(index))

    def forward(self, *args: Any) -> tuple[Tensor, ...]:
        return self.module(*args)  # type: ignore[no-any-return]

    def no_sync(self) -> Any:
        return torch.enable_grad()

    def reduce(self) -> None:
        for index, param in enumerate(self.module.parameters()):
            flag = torch.tensor(float(index in self.used))
            dist.all_reduce(flag)
            if flag:
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
        self.used.clear()


WRAP: dict[str, Callable[..., Any]] = {
    "stock": lambda net, **settings: nn.parallel.DistributedDataParallel(net, **settings),
    "by hand": lambda net, **_: ByHand(net),
    "python": lambda net, **settings: ldh.DataParallel(net, first_bucket_mb=1e-4, reducer_backend="python", **settings),
    "native": lambda net, **settings: ldh.DataParallel(net, first_bucket_mb=1e-4, reducer_backend="native", **settings),
}


class _Machine:
    """Runs a program under one kind of wrapper."""

    def __init__(self, program: Program, subject: str) -> None:
        generator = torch.Generator().manual_seed(program.seed)
        self.nets = [Net(program.trunk, generator) for _ in range(WRAPPERS)]
        self.models = [
            WRAP[subject](
                copy.deepcopy(net),
                bucket_cap_mb=1e-4,
                find_unused_parameters=program.find_unused,
                gradient_as_bucket_view=program.views,
            )
            for net in self.nets
        ]
        self.rank = dist.get_rank()
        self.inputs = torch.Generator().manual_seed(1000 * program.seed + self.rank)

    def run(self, op: Op) -> None:
        if op.kind == "zero":
            for w in op.wrappers:
                self.models[w].module.zero_grad(set_to_none=op.to_none)
        elif op.kind == "evaluate":
            with torch.no_grad():
                self.loss(self.forward(op))
        elif op.kind == "local":
            self.loss(self.forward(op, [model.module for model in self.models])).backward()
        elif op.kind == "no_sync":
            with self.models[op.wrappers[0]].no_sync():
                self.loss(self.forward(op)).backward()
        else:
            self.sync(op)

    def sync(self, op: Op) -> None:
        forwards = [self.forward(op, heads=heads) for heads in self.parts(op)]
        if op.kind == "within":
            all_heads = ((0, 1, 2), (0, 1, 2))
            local = Op("local", op.wrappers[:1], inside=op.inside, heads=all_heads)
            self.loss(self.forward(local, [model.module for model in self.models])).backward()
        if op.apart == "outputs":
            losses = [self.loss((output,)) for outputs in forwards for output in outputs]
        elif op.apart == "checkpoints":
            losses = [self.loss(tuple(output for outputs in forwards for output in outputs))]
        else:
            losses = [self.loss(outputs) for outputs in forwards]
        for _ in range(1 + op.again):
            for number, loss in enumerate(losses):
                loss.backward(retain_graph=op.again or number + 1 < len(losses))
            for w in op.wrappers:
                if isinstance(self.models[w], ByHand):
                    self.models[w].reduce()

    def parts(self, op: Op) -> list[tuple[int, ...]]:
        heads = op.heads[self.rank % 2]
        if op.apart == "forwards":
            return [(head,) for head in heads]
        return [heads] * (2 if op.apart == "checkpoints" else 1)

    def forward(
        self, op: Op, models: Sequence[nn.Module] | None = None, heads: Sequence[int] | None = None
    ) -> tuple[Tensor, ...]:
        models = self.models if models is None else models
        heads = op.heads[self.rank % 2] if heads is None else heads
        x = torch.randint(-2, 3, (2, WIDTH), generator=self.inputs).double().requires_grad_()
        found: list[Tensor] = []
        for w in op.wrappers:
            outputs = self.call(models[w], op, x, heads)
            found += outputs
            if op.chained:
                x = torch.stack(outputs).sum(0)
        return tuple(found) if not op.chained else tuple(found[-len(heads) :])

    def call(self, model: nn.Module, op: Op, x: Tensor, heads: Sequence[int]) -> tuple[Tensor, ...]:
        if not op.outside:
            return model(x, heads, op.inside)  # type: ignore[no-any-return]
        reentrant = op.outside != "plain"

        def checkpointed(x: Tensor) -> tuple[Tensor, ...]:
            return checkpoint(model, x, heads, op.inside, use_reentrant=reentrant)  # type: ignore[no-any-return]

        return checkpoint(checkpointed, x, use_reentrant=True) if op.outside == "nested" else checkpointed(x)

    def loss(self, outputs: Sequence[Tensor]) -> Tensor:
        return torch.stack([(i + 1) * output.sum() for i, output in enumerate(outputs)]).sum()

    def gradients(self) -> list[Tensor | None]:
        params = [param for model in self.models for param in model.module.parameters()]
        return [None if param.grad is None else param.grad.clone() for param in params]


def outcome(program: Program, subject: str) -> list[list[Tensor | None]] | str:
    """Run a program on this rank; return the gradients after each operation, or what went wrong."""
    found = []
    warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")  # an evaluation
    warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")  # by stock DDP
    try:
        machine = _Machine(program, subject)
        for op in program.ops:
            machine.run(op)
            found.append(machine.gradients())
        for model in machine.models:
            if isinstance(model, ldh.DataParallel):
                model.detach()
    except Exception:
        return f"{subject}, operation {len(found)}: {traceback.format_exc()}"
    return found


def differences(programs: Sequence[Program], subjects: Sequence[str]) -> list[str]:
    """Run programs on this rank under all subjects; return how they differ from stock DDP, or from what is right."""
    texts = []
    for program in programs:
        wanted = outcome(program, "by hand")
        for subject in ("stock", *subjects) if program.stock else subjects:
            found = outcome(program, subject)
            if isinstance(found, str) or isinstance(wanted, str):
                # At once: the other rank may be waiting for this one.
                raise RuntimeError(f"{program}\n{found if isinstance(found, str) else wanted}")
            for number, (a, b) in enumerate(zip(found, wanted, strict=True)):
                off = [i for i, pair in enumerate(zip(a, b, strict=True)) if not _same(*pair)]
                if off:
                    i = off[0]
                    texts.append(f"{program}\n{subject}, operation {number}, parameters {off}: {a[i]}, not {b[i]}")
                    break
    return texts


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


@st.composite
def ops(draw: st.DrawFn, find_unused: bool) -> Op:
    """Draw an operation."""
    kind = draw(st.sampled_from(["local", "no_sync", "evaluate", "zero", "sync", "sync", "sync", "sync", "within"]))
    wrappers = draw(st.sampled_from([(0,), (1,), (0, 1), (1, 0)]))
    if kind == "zero":
        return Op(kind, wrappers, to_none=draw(st.booleans()))
    if kind in ("local", "no_sync", "evaluate", "within"):
        wrappers = wrappers[:1]
    inside = draw(st.sampled_from(["", "", "plain", "reentrant"]))
    some = st.lists(st.integers(0, HEADS - 1), min_size=1, max_size=HEADS, unique=True).map(tuple)
    heads = draw(st.tuples(some, some)) if find_unused or kind in ("local", "no_sync") else ((0, 1, 2),) * 2
    if kind == "local":
        return Op(kind, wrappers, inside=inside, heads=heads)
    outside = draw(st.sampled_from(["", "", "plain", "reentrant", "nested"]))
    if kind != "sync":
        return Op(kind, wrappers, outside=outside if kind != "within" else "", inside=inside, heads=heads)
    chained = len(wrappers) == 2 and not outside and draw(st.booleans())
    apart, again = "", False
    if len(wrappers) == 1:
        apart = draw(st.sampled_from(["", "", "outputs", "forwards"] if not outside else ["", "checkpoints"]))
        again = not outside and not apart and draw(st.sampled_from([False, False, True]))
    if apart in ("outputs", "forwards"):
        heads = (heads[0], heads[0])  # as many backwards on all ranks
    if apart == "checkpoints" and outside == "plain" and inside == "reentrant":
        inside = "plain"  # gradients would come twice in some of the backwards, which is an error
    return Op(kind, wrappers, chained, outside, inside, heads, apart, again)


@st.composite
def programs(draw: st.DrawFn, length: int = 6) -> Program:
    """Draw a program."""
    find_unused = draw(st.booleans())
    drawn = draw(st.lists(ops(find_unused), min_size=1, max_size=length).map(tuple))
    trunk = draw(st.booleans())
    if find_unused and not draw(st.booleans()):  # then one that stock DDP can run
        trunk = False
    return Program(drawn, find_unused, trunk, draw(st.booleans()), draw(st.integers(0, 1000)))
