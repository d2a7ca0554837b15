"""Random programs over the Trainer: what ranks hold, what the module does, and which settings they train with.

A program is plain data. `program_runs.fit_program` runs it in a Trainer on ranks; `program_reference.simulate` does the
same in one process by a loop of plain PyTorch, which shares with the package nothing but this description.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 4
HIDDEN = 6
LAYERS = 3
Place = tuple[int, int]
"""A training step, from 0 over all epochs, and a rank."""


@dataclass(frozen=True)
class Program:
    """What is trained on what, and how.

    Attributes:
        counts: of batches in an epoch, for each rank.
        sizes: of batches, in turn.
        loader: "list", "stream" without a length, or "position", which can resume.
        policy: of `UnevenInputs`; None without the callback.
        divisor: of `UnevenInputs`.
        weighting: `gradient_weighting` of the strategy.
        accumulate: micro-batches of a step.
        exact: whether a window's gradient is the mean over what it holds.
        manual: None for automatic optimization, or the number of optimizers.
        parts: backwards of a step in manual optimization, for each optimizer.
        local: whether all but the last one of them run under `no_sync`.
        toggles: whether other optimizers' parameters are frozen during an optimizer's backward.
        optimizer: "sgd", "adamw" or "adagrad".
        in_hook: arguments of `OptimizerInHook`.
        schedule: whether the learning rate falls in each step.
        clip: algorithm and value of gradient clipping.
        scaler: whether a GradScaler is used, in float64.
        overflows: where gradients are infinite.
        hook: its name in `HOOKS`.
        averager: its name, period and warm-up.
        unused: where the branch is left out.
        missing: where there is no loss.
        skip: `skip_missing_loss` of the strategy.
        freezes: which layer is (un)frozen before a step.
        norm: whether there is a BatchNorm.
        validate: batches of the validation for each rank; none without.
        validate_every: after so many batches of each epoch; 0 at its end.
        resume: epoch and batch after which a checkpoint is written, from which another run goes on.
        settings: of the strategy, that change nothing.
    """

    seed: int
    world: int
    counts: tuple[int, ...]
    epochs: int = 2
    sizes: tuple[int, ...] = (3,)
    loader: str = "list"
    policy: str | None = None
    divisor: str = "active"
    weighting: str = "ranks"
    accumulate: int = 1
    exact: bool = False
    manual: int | None = None
    parts: int = 1
    local: bool = False
    toggles: bool = False
    optimizer: str = "sgd"
    in_hook: Mapping[str, bool] | None = None
    schedule: bool = False
    clip: tuple[str, float] | None = None
    scaler: bool = False
    overflows: frozenset[Place] = frozenset()
    hook: str = "None"
    averager: tuple[str, int, int] | None = None
    find_unused: bool = False
    unused: frozenset[Place] = frozenset()
    missing: frozenset[Place] = frozenset()
    skip: str = "zeros"
    freezes: Mapping[int, tuple[int, bool]] = field(default_factory=dict)
    norm: bool = False
    validate: tuple[int, ...] = ()
    validate_every: int = 0
    resume: tuple[int, int] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def batches(self) -> int:
        """Batches of an epoch, as the Trainer counts them."""
        return min(self.counts) if self.policy == "stop" else max(self.counts)

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return -(-self.batches // self.accumulate)

    @property
    def by_samples(self) -> bool:
        return "samples" in (self.weighting, self.divisor)

    @property
    def exact_windows(self) -> bool:
        return self.exact or self.by_samples

    def window(self, step: int) -> range:
        """Return the batches of a step within its epoch."""
        first = step % self.steps * self.accumulate
        return range(first, min(first + self.accumulate, self.batches))

    def size(self, rank: int, index: int) -> int:
        return self.sizes[(rank + index) % len(self.sizes)]


def make_batch(program: Program, rank: int, index: int, *, validation: bool = False) -> tuple[Tensor, Tensor]:
    """Return a rank's batch."""
    generator = torch.Generator().manual_seed(10000 * validation + 100 * rank + index)
    x = torch.randn(program.size(rank, index), WIDTH, generator=generator, dtype=torch.float64)
    return x, x.sin().sum(1, keepdim=True)


class ProgramNet(nn.Module):
    """The model of all programs."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        widths = [WIDTH, *[HIDDEN] * (LAYERS - 1), 1]
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))
        self.norm = nn.BatchNorm1d(WIDTH, affine=False) if program.norm else nn.Identity()
        self.branch = nn.Linear(WIDTH, 1)
        self.double()

    def loss(self, batch: Sequence[Tensor], *, branch: bool = True, overflow: bool = False, part: int = 0) -> Tensor:
        """Return the mean over the samples of a batch; ``part`` tells several losses of a step from each other."""
        x, y = batch
        hidden = self.norm(x)
        for layer in self.layers[:-1]:
            hidden = layer(hidden).tanh()
        output = self.layers[-1](hidden)
        if overflow and output.requires_grad:
            output.register_hook(lambda gradient: gradient / 0)
        loss = (output - (part + 1) * y).square().mean()
        return loss + self.branch(x).square().mean() if branch else loss

    def split(self, number: int) -> list[list[nn.Parameter]]:
        """Return the parameters of each optimizer."""
        params = list(self.parameters())
        return [params[index::number] for index in range(number)]


OPTIMIZERS: Mapping[str, tuple[type[torch.optim.Optimizer], Mapping[str, float]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.02, "eps": 1e-3}),  # in which rounding of small gradients does not grow
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05, "eps": 1e-3}),
}

EXACT_HOOKS = ("None", "allreduce", "torch's", "by divisor", "full rank", "per parameter", "schedule")
ROUNDING_HOOKS = {"all of topk": 1e-5, "fp16": 1e-2}
"""Hooks that round, and how far off the reference they may be."""
NEAR_HOOKS = ("powersgd", "batched_powersgd", "int8", "onebit", "topk")
"""Hooks that compress: no reference, but ranks are equal."""


def draw(seed: int, world: int) -> Program:
    """Draw a program that the rules of `lightning_ddp_hooks.conflicts` allow; see `program_runs.is_allowed`."""
    choose = random.Random(seed)

    def often(probability: float) -> bool:
        return choose.random() < probability

    epochs = choose.choice((1, 2, 2, 3))
    uneven = often(0.45)
    policy = choose.choice(("join", "join", "join", "stop")) if uneven else None
    even = choose.randrange(2, 7)
    counts = tuple(choose.randrange(0 if policy == "join" else 1, 7) if uneven else even for _ in range(world))
    if not max(counts):
        counts = (*counts[:-1], 3)
    divisor = choose.choice(("active", "active", "samples", "world")) if uneven else "active"
    weighting = "samples" if (divisor == "samples" or not uneven) and often(0.3) else "ranks"
    manual = choose.choice((1, 1, 2)) if often(0.3) else None
    accumulate = 1 if manual else choose.choice((1, 1, 2, 3))
    averager = None
    if often(0.45):
        kind = choose.choice(("periodic", "hierarchical", "slowmo", "diloco"))
        averager = (kind, choose.choice((1, 2, 3)), choose.choice((0, 1, 2, 4)))
    in_hook = None
    if averager is None and often(0.3):
        in_hook = choose.choice(
            (
                {},
                {"shard": True},
                {"shard": True, "interleaved": False},
                {"shard": True, "shard_buckets": True},
                {"shard": True, "overlap": False},
                {"shard": True, "overlap": False},
            )
        )
    early = in_hook is not None and in_hook.get("overlap", True)  # needs a plain step
    manual = None if early else manual
    scaler = often(0.3) and not early
    hook = choose.choice((*EXACT_HOOKS, *ROUNDING_HOOKS, *NEAR_HOOKS)) if often(0.7) else "None"
    if averager is not None and often(0.2):
        hook = "post_local_sgd"
    program = Program(
        seed=seed,
        world=world,
        epochs=epochs,
        counts=counts,
        sizes=choose.choice(((3,), (3, 2), (4, 2, 3))),
        loader=choose.choice(("list", "stream", "position")),
        policy=policy,
        divisor=divisor,
        weighting=weighting,
        accumulate=accumulate,
        exact=not manual and often(0.4),
        manual=manual,
        parts=choose.choice((1, 1, 2)),
        local=often(0.5),
        toggles=manual == 2 and often(0.5),
        optimizer=choose.choice(list(OPTIMIZERS)),
        in_hook=in_hook,
        schedule=not manual and often(0.3),
        clip=None if manual or early or not often(0.3) else choose.choice((("norm", 0.5), ("value", 0.05))),
        scaler=scaler,
        hook=hook,
        averager=averager,
        find_unused=often(0.3),
        skip=choose.choice(("zeros", "all")) if not (manual or averager or early) else "zeros",
        norm=often(0.3)
        and (averager is None or policy is None)
        and ((policy is None and averager is None) or accumulate == 1),
        settings={
            "gradient_as_bucket_view": often(0.6),
            "reducer_backend": choose.choice(("python", "native")),
            "bucket_cap_mb": choose.choice((25, 0.0003)),
            "check_replicas_every_n_steps": choose.choice((None, 1)) if averager is None else None,
        },
    )
    return _with_events(program, choose)


def _with_events(program: Program, choose: random.Random) -> Program:
    """Add what happens in some steps and on some ranks only."""
    steps = program.epochs * program.steps
    changes: dict[str, Any] = {"settings": dict(program.settings)}

    def some(probability: float) -> frozenset[Place]:
        places = ((step, rank) for step in range(steps) for rank in range(program.world))
        return frozenset(place for place in places if choose.random() < probability)

    if program.scaler:
        changes["overflows"] = some(0.12)
    if program.find_unused:
        changes["unused"] = some(0.4)
    elif program.manual is None and choose.random() < 0.2:
        changes["settings"]["static_graph"] = True
    if program.manual is None and program.accumulate == 1 and not program.by_samples and choose.random() < 0.4:
        changes["missing"] = some(0.2)
        if program.clip is not None and program.averager is not None:
            changes["clip"] = ("norm", 0.5)  # where there is no gradient at all, torch cannot clip by value
    static = changes["settings"].get("static_graph", False)
    if not static and not program.toggles and choose.random() < 0.35:
        changes["freezes"] = _freezes(steps, choose)
    if choose.random() < 0.3:
        low = 0 if program.policy else 2
        counts = tuple(choose.randrange(low, 4) for _ in range(program.world))
        changes["validate"] = counts if program.policy and max(counts) else (2,) * program.world
    if choose.random() < 0.4:
        batch = choose.randrange(program.batches)
        if program.loader == "position":  # at the end of a step, anywhere in an epoch
            end = min((batch // program.accumulate + 1) * program.accumulate, program.batches) - 1
            changes["resume"] = (choose.randrange(program.epochs), end)
        elif program.epochs > 1 and program.loader == "list":  # at the end of an epoch
            changes["resume"] = (choose.randrange(program.epochs - 1), program.batches - 1)
    if changes.get("validate") and choose.random() < 0.5 and not (program.norm and program.accumulate > 1):
        changes["validate_every"] = choose.randrange(1, program.batches + 1)
    if not program.scaler and choose.random() < 0.2:
        changes["settings"]["detect_nonfinite"] = True
    return Program(**{**vars(program), **changes})


def _freezes(steps: int, choose: random.Random) -> dict[int, tuple[int, bool]]:
    """Freeze and unfreeze layers, but not the last one."""
    found = {}
    for step in range(steps):
        if choose.random() < 0.3:
            found[step] = (choose.randrange(LAYERS - 1), choose.random() < 0.5)
    return found


def frozen_layers(program: Program, step: int) -> set[int]:
    """Return which layers are frozen in a step."""
    frozen: set[int] = set()
    for at in range(step + 1):
        if at in program.freezes:
            layer, trainable = program.freezes[at]
            frozen = frozen - {layer} if trainable else frozen | {layer}
    return frozen


def features(program: Program) -> frozenset[str]:
    """Return what a program is made of, in words."""
    found = {f"{name} {bool(value)}" for name, value in vars(program).items() if isinstance(value, (frozenset, dict))}
    choices = {**vars(program), **program.settings}
    found |= {f"{name} {value}" for name, value in choices.items() if name != "seed" and _is_choice(value)}
    found |= {f"in_hook {program.in_hook}", f"averager {program.averager and program.averager[0]}"}
    return frozenset(found | {f"clip {program.clip and program.clip[0]}", f"resume {program.resume is not None}"})


def _is_choice(value: object) -> bool:
    return value is None or isinstance(value, (str, bool, int))


def varied(candidates: Sequence[Program], count: int) -> list[Program]:
    """Return so many programs in which as many pairs of features occur as can be; the same in each process."""
    made_of = {program.seed: features(program) for program in candidates}
    pairs = {seed: set(combinations(sorted(found), 2)) for seed, found in made_of.items()}
    chosen: list[Program] = []
    seen: set[str] = set()
    seen_pairs: set[tuple[str, str]] = set()

    def gain(program: Program) -> int:
        return 20 * len(made_of[program.seed] - seen) + len(pairs[program.seed] - seen_pairs)

    for _ in range(count):
        chosen.append(max(candidates, key=gain))
        seen |= made_of[chosen[-1].seed]
        seen_pairs |= pairs[chosen[-1].seed]
    return chosen


def describe(program: Program) -> str:
    """Return what of a program is not plain."""
    return ", ".join(f"{name}={value!r}" for name, value in _facts(program))


def _facts(program: Program) -> Iterator[tuple[str, Any]]:
    for name, value in vars(program).items():
        if value not in (None, False, frozenset(), {}, ()):
            yield name, set(value) if isinstance(value, frozenset) else value
