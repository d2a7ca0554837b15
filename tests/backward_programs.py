"""Random programs of forwards and backwards over wrappers and bare modules, run by stock DDP, by us, and by hand.

All numbers are small integers, whose sums and halves are exact, so that results are the same to the last bit in
whatever order they are summed.
"""

import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lightning_ddp_hooks as ldh

HEADS = 3
WIDTH = 3
WRAPPERS = 2


Heads = tuple[tuple[int, ...], tuple[int, ...]]
ALL: Heads = ((0, 1, 2), (0, 1, 2))


@dataclass(frozen=True)
class Op:
    """One operation.

    Attributes:
        kind: "local" (through the module), "no_sync", "evaluate", "zero" or "sync". "abort": an exception ends a
            backward in its middle, on all ranks. "drop": the wrapper goes, and the module is used bare until "wrap".
            "join": an epoch in a Join context.
        wrappers: Which wrappers it is about; several in one loss, or one behind the other.
        chained: Whether the first one's output is the second one's input.
        outside: How the wrapper's call is checkpointed: "", "plain", "reentrant" or "nested".
        inside: How the module's heads are checkpointed: "", "plain" or "reentrant".
        heads: For each rank, the heads that its forward uses; where none may be missing, all of them.
        apart: "" for one backward, "outputs" for one through each output, "forwards" for a forward for each head
            before them, "checkpoints" for two checkpointed forwards in one backward.
        again: Whether the backward is run a second time on the retained graph.
        to_none: Whether gradients are set to None, or to zero.
        between: What runs between forward and backward of "sync": another kind, or "forward".
        mixes: Whether the loss has a part that was computed under `no_sync`.
        under: What is aborted: "local", "no_sync" or "sync". Of "drop" and "wrap": "sync" if the old wrapper's outputs
            have their backward afterwards.
        batches: How many batches each rank has in an epoch.
        accumulates: Whether each batch in an epoch comes in two halves, the first one under `no_sync`.
        by_world: Whether gradients of an epoch are divided by the number of all ranks.
        clears: When an epoch clears gradients: at the "begin" or the "end" of a batch, or "never".
    """

    kind: str
    wrappers: tuple[int, ...] = (0,)
    chained: bool = False
    outside: str = ""
    inside: str = ""
    heads: Heads = ALL
    apart: str = ""
    again: bool = False
    to_none: bool = True
    between: str = ""
    mixes: bool = False
    under: str = "local"
    batches: tuple[int, ...] = (1,)
    accumulates: bool = False
    by_world: bool = True
    clears: str = "begin"

    @property
    def stock(self) -> bool:
        """Whether stock DDP reduces what comes through its outputs, too."""
        if self.kind == "join":  # in the others' backwards a rank without data sends zeros, whatever it holds
            return self.clears != "never" and min(self.batches) > 0
        if self.kind in ("abort", "wrap") and self.under == "sync":  # wrapping writes to what the backward needs
            return False
        return not (self.between in ("local", "no_sync") or self.again)

    @property
    def stock_static(self) -> bool:
        """Whether stock DDP can run it with a static graph, too; of local backwards it makes internal errors."""
        if self.kind in ("drop", "wrap"):
            return self.under != "sync"
        return (
            self.kind in ("evaluate", "zero", "sync", "join")
            and not (self.mixes or self.accumulates)
            and not self.between
        )


@dataclass(frozen=True)
class Program:
    """Operations, and the settings of the wrappers."""

    ops: tuple[Op, ...]
    find_unused: bool = False
    static_graph: bool = False
    trunk: bool = True
    views: bool = True
    seed: int = 0

    @property
    def stock(self) -> bool:
        """Whether stock DDP does it right."""
        if self.static_graph and not all(op.stock_static for op in self.ops):
            return False
        shared = self.trunk or self.find_unused  # a parameter's second gradient, a second look for unused ones
        return all(op.stock and not (shared and op.apart in ("outputs", "forwards")) for op in self.ops) and not (
            self.find_unused
            and any(
                op.inside == "reentrant" or op.mixes or op.between or op.kind == "join" or op.under == "sync"
                for op in self.ops
            )
        )


class Failure(Exception):
    """Raised in the middle of a backward."""


def _fail(_: Tensor) -> None:
    raise Failure


class Net(nn.Module):
    def __init__(self, trunk: bool, generator: torch.Generator) -> None:
        super().__init__()
        self.fails = False
        self.trunk = nn.Linear(WIDTH, WIDTH) if trunk else nn.Identity()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(HEADS))
        self.double()
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randint(-1, 2, param.shape, generator=generator))

    def forward(self, x: Tensor, heads: Sequence[int], inside: str) -> tuple[Tensor, ...]:
        h = self.trunk(x).relu()
        if self.fails and h.requires_grad:
            h.register_hook(_fail)
        return tuple(
            checkpoint(self.heads[i], h, use_reentrant=inside == "reentrant") if inside else self.heads[i](h)
            for i in heads
        )


class Bare(nn.Module):
    """A module without a wrapper."""

    def __init__(self, module: Net) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> tuple[Tensor, ...]:
        return self.module(*args)  # type: ignore[no-any-return]

    def no_sync(self) -> Any:
        return torch.enable_grad()

    def reduce(self) -> None:
        """Nothing is reduced."""


class ByHand(Bare):
    """Reduces only when it is told to: the reference where stock DDP does otherwise."""

    def __init__(self, module: Net, *, static_graph: bool = False) -> None:
        super().__init__(module)
        self.static_graph = static_graph
        self.learned = False  # what is used, in a backward of all ranks
        self.reduced: set[int] = set()
        self.used: set[int] = set()
        for index, param in enumerate(module.parameters()):
            param.register_post_accumulate_grad_hook(lambda _, index=index: self.used.add(index))

    def reduce(self, divisor: int = 0, *, shadows: bool = False, adds: bool = True) -> None:
        """Reduce what has been accumulated; a rank that ``shadows`` the others ``adds`` what it holds, or nothing."""
        params = list(self.module.parameters())
        flags = torch.tensor([float(index in self.used) for index in range(len(params))] + [float(not shadows)])
        dist.all_reduce(flags)
        *counts, ranks = flags.tolist()
        used = {index for index, count in enumerate(counts) if count}
        if self.static_graph and self.learned:
            used |= self.reduced
        for index, param in enumerate(params):
            if not (adds or self.used):
                param.grad = None
            if index in used:
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
                dist.all_reduce(param.grad)
                param.grad /= divisor or dist.get_world_size()
        self.learned |= ranks == dist.get_world_size()
        self.reduced |= used
        self.used.clear()

    def drop_gradients(self) -> None:
        """Do what follows an exception on all ranks."""
        self.used.clear()
        self.module.zero_grad()


def _ours(backend: str) -> Callable[..., Any]:
    return lambda net, **settings: ldh.DataParallel(net, first_bucket_mb=1e-4, reducer_backend=backend, **settings)


WRAP: dict[str, Callable[..., Any]] = {
    "stock": lambda net, **settings: nn.parallel.DistributedDataParallel(net, **settings),
    "by hand": lambda net, static_graph, **_: ByHand(net, static_graph=static_graph),
    "python": _ours("python"),
    "native": _ours("native"),
}


class _Machine:
    """Runs a program under one kind of wrapper.

    Attributes:
        found: Gradients after each operation, and after each batch of an epoch.
    """

    def __init__(self, program: Program, subject: str) -> None:
        generator = torch.Generator().manual_seed(program.seed)
        self.subject = subject
        self.settings = {
            "bucket_cap_mb": 1e-4,
            "find_unused_parameters": program.find_unused,
            "static_graph": program.static_graph,
            "gradient_as_bucket_view": program.views,
        }
        self.models = [self.wrapped(Net(program.trunk, generator)) for _ in range(WRAPPERS)]
        self.rank = dist.get_rank()
        self.inputs = torch.Generator().manual_seed(1000 * program.seed + self.rank)
        self.found: dict[str, list[Tensor | None]] = {}

    def wrapped(self, net: Net) -> Any:
        return WRAP[self.subject](net, **self.settings)

    def run(self, number: int, op: Op) -> None:
        self.number = number
        getattr(self, op.kind)(op)
        self.record("end")

    def zero(self, op: Op) -> None:
        for w in op.wrappers:
            self.models[w].module.zero_grad(set_to_none=op.to_none)

    def evaluate(self, op: Op) -> None:
        with torch.no_grad():
            self.loss(self.forward(op))

    def local(self, op: Op) -> None:
        self.loss(self.forward(op, [model.module for model in self.models])).backward()

    def no_sync(self, op: Op) -> None:
        with self.models[op.wrappers[0]].no_sync():
            self.loss(self.forward(op)).backward()

    def abort(self, op: Op) -> None:
        for w in op.wrappers:
            self.models[w].module.fails = True
        with suppress(Failure):
            getattr(self, op.under)(op)
        for w in op.wrappers:
            model = self.models[w]
            model.module.fails = False
            if op.under == "sync" and isinstance(model, ByHand):
                model.drop_gradients()
        self.evaluate(op)  # what is left of the backward ends here

    def drop(self, op: Op) -> None:
        (w,) = op.wrappers
        outputs = self.forward(op) if op.under == "sync" else ()
        self.models[w] = Bare(self.models[w].module)
        if op.kind == "wrap":
            self.models[w] = self.wrapped(self.models[w].module)
        if outputs:
            self.loss(outputs).backward()

    wrap = drop

    def join(self, op: Op) -> None:
        (w,) = op.wrappers
        model = self.models[w]
        batches = [op.batches[rank % len(op.batches)] for rank in range(dist.get_world_size())]
        if isinstance(model, Bare):
            if isinstance(model, ByHand):
                self.join_by_hand(op, model, batches)
            return
        with model.join(divide_by_initial_world_size=op.by_world):
            for number in range(batches[self.rank]):
                self.batch(op, number, model, lambda: None)
        self.epoch_ended(op, model, batches)

    def join_by_hand(self, op: Op, model: ByHand, batches: Sequence[int]) -> None:
        for number in range(max(batches)):
            active = sum(count > number for count in batches)
            divisor = 0 if op.by_world else active
            if batches[self.rank] > number:
                self.batch(op, number, model, lambda divisor=divisor: model.reduce(divisor))
            else:
                holds = op.clears == "never" or (op.clears == "end" and number == 0)  # the sums the others add to
                model.reduce(divisor, shadows=True, adds=op.by_world and holds)
        if batches[self.rank] < max(batches) and op.clears == "end":
            model.module.zero_grad()
        self.epoch_ended(op, model, batches)

    def batch(self, op: Op, number: int, model: Any, reduce: Callable[[], None]) -> None:
        if op.clears == "begin":
            model.module.zero_grad()
        if op.accumulates:
            self.no_sync(op)
        self.sync(op, reduce)
        self.record(f"batch {number}")
        if op.clears == "end":
            model.module.zero_grad()

    def epoch_ended(self, op: Op, model: Any, batches: Sequence[int]) -> None:
        if self.subject != "stock" or batches[self.rank] == max(batches):
            self.record("end of epoch")
        if op.clears != "never":
            model.module.zero_grad()

    def sync(self, op: Op, reduce: Callable[[], None] | None = None) -> None:
        forwards = [self.forward(op, heads=heads) for heads in self.parts(op)]
        if op.between:
            getattr(self, op.between)(Op(op.between, op.wrappers[:1], inside=op.inside, heads=op.heads))
        if op.apart == "outputs":
            losses = [self.loss((output,)) for outputs in forwards for output in outputs]
        elif op.apart == "checkpoints":
            losses = [self.loss(tuple(output for outputs in forwards for output in outputs))]
        else:
            losses = [self.loss(outputs) for outputs in forwards]
        if op.mixes:
            with self.models[op.wrappers[0]].no_sync():
                losses[0] = losses[0] + self.loss(self.forward(op))
        for _ in range(1 + op.again):
            for number, loss in enumerate(losses):
                loss.backward(retain_graph=op.again or number + 1 < len(losses))
            for w in op.wrappers:
                if isinstance(self.models[w], Bare):
                    (reduce or self.models[w].reduce)()

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

    def record(self, what: str) -> None:
        params = [param for model in self.models for param in model.module.parameters()]
        gradients = [None if param.grad is None else param.grad.clone() for param in params]
        self.found[f"operation {self.number}, {what}"] = gradients


def outcome(program: Program, subject: str) -> dict[str, list[Tensor | None]] | str:
    """Run a program on this rank; return the gradients after each operation, or what went wrong."""
    warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")  # an evaluation
    warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")  # by stock DDP
    number = -1
    try:
        machine = _Machine(program, subject)
        for number, op in enumerate(program.ops):
            machine.run(number, op)
        for model in machine.models:
            if isinstance(model, ldh.DataParallel):
                model.detach()
    except Exception:
        return f"{subject}, operation {number}: {traceback.format_exc()}"
    return machine.found


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
            for what, gradients in found.items():
                right = wanted[what]
                off = [i for i, pair in enumerate(zip(gradients, right, strict=True)) if not _same(*pair)]
                if off:
                    i = off[0]
                    texts.append(f"{program}\n{subject}, {what}, parameters {off}: {gradients[i]}, not {right[i]}")
                    break
    return texts


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)
