"""Random programs in a Trainer, on ranks; and what is compared with the loop of plain PyTorch."""

import logging
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import MixedPrecision
from program_reference import Expected, Simulation
from programs import (
    NEAR_HOOKS,
    OPTIMIZERS,
    ROUNDING_HOOKS,
    Program,
    ProgramNet,
    describe,
    draw,
    frozen_layers,
    make_batch,
)
from ranks import run_ranks
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torchmetrics import CatMetric
from trainer_runs import State, make_trainer, rank, state_of
from uneven_runs import Position, PositionStream, Stream

from lightning_ddp_hooks.averaging import DiLoCo, HierarchicalModelAverager, PeriodicModelAverager, SlowMo
from lightning_ddp_hooks.callbacks import UnevenInputs
from lightning_ddp_hooks.config import FitSettings
from lightning_ddp_hooks.conflicts import RULES
from lightning_ddp_hooks.hooks import (
    BatchedPowerSGD,
    PerParameter,
    PostLocalSGD,
    PowerSGD,
    Rule,
    Schedule,
    Stage,
    TopK,
)
from lightning_ddp_hooks.optim import OptimizerInHook


def sum_by_divisor(_: Any, bucket: Any) -> Any:
    work = dist.all_reduce(bucket.buffer().div_(bucket.divisor), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


HOOKS: Mapping[str, Any] = {
    "None": None,
    "allreduce": "allreduce",
    "torch's": (None, allreduce_hook),
    "by divisor": (None, sum_by_divisor),
    "full rank": PowerSGD(rank=6, start_iter=1, min_compression_rate=0.01),
    "all of topk": TopK(ratio=1.0),
    "per parameter": PerParameter([Rule("allreduce", ndim=2)]),
    "schedule": Schedule([Stage(0, None), Stage(2, "allreduce")]),
    "fp16": "fp16",
    "powersgd": PowerSGD(rank=1, start_iter=1, min_compression_rate=0.5),
    "batched_powersgd": BatchedPowerSGD(rank=1, start_iter=1, min_compression_rate=0.5),
    "int8": "int8",
    "onebit": "onebit",
    "topk": TopK(ratio=0.5),
}


def strategy_of(program: Program) -> dict[str, Any]:
    """Return the arguments of the strategy."""
    averager, warmup = None, 0
    if program.averager is not None:
        kind, period, warmup = program.averager
        kinds: Mapping[str, Any] = {"periodic": PeriodicModelAverager, "slowmo": SlowMo, "diloco": DiLoCo}
        if kind == "hierarchical":
            averager: Any = HierarchicalModelAverager(
                period_group_size_dict={period: program.world}, warmup_steps=warmup
            )
        else:
            averager = kinds[kind](period=period, warmup_steps=warmup)
    local = PostLocalSGD(start_local_sgd_iter=warmup, subgroup_size=1)
    return {
        "first_bucket_mb": None,
        "failure_timeout": None,
        **program.settings,
        "comm_hook": local if program.hook == "post_local_sgd" else HOOKS[program.hook],
        "averager": averager,
        "optimizer_in_hook": None if program.in_hook is None else OptimizerInHook(**program.in_hook),
        "gradient_weighting": program.weighting,
        "accumulation": "exact" if program.exact else "lightning",
        "skip_missing_loss": program.skip,
        "find_unused_parameters": program.find_unused,
    }


def is_allowed(program: Program) -> bool:
    """Whether the settings go together, and the reference knows what they mean together."""
    strategy = strategy_of(program)
    run = FitSettings(
        **strategy,
        policy=program.policy,
        divisor=program.divisor if program.policy else None,
        manual=program.manual is not None,
        gradient_clip_val=program.clip and program.clip[1],
        accumulate_grad_batches=program.accumulate,
        scaler=program.scaler,
    )
    if program.hook == "post_local_sgd" and (program.policy or program.missing or program.unused):
        return False
    return not any(rule.verdict == "refused" and rule.found(run) for rule in RULES)


def programs(first: int, count: int, world: int) -> list[Program]:
    """Return so many allowed programs, of seeds from ``first`` on."""
    found: list[Program] = []
    while len(found) < count:
        program = draw(first, world)
        first += 1
        if is_allowed(program):
            found.append(program)
    return found


class Scaled(MixedPrecision):
    """A GradScaler, in float64."""

    def __init__(self) -> None:
        super().__init__("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3))

    def forward_context(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


@dataclass
class Found:
    """What a rank ended with; as `Expected`."""

    state: State = field(default_factory=dict)
    scale: float = 1.0
    losses: list[Tensor] = field(default_factory=list)
    mean_losses: list[float] = field(default_factory=list)
    val_losses: list[float] = field(default_factory=list)
    resumed: State | None = None
    resumed_scale: float = 1.0
    error: str = ""


class Batches(Stream):
    """A loader with a length."""

    def __len__(self) -> int:
        return len(self.shard)


class Module(LightningModule):
    """Does what a program says, on one of its ranks."""

    def __init__(self, program: Program, save: str = "") -> None:
        super().__init__()
        self.does, self.save, self.net = program, save, ProgramNet(program)
        self.automatic_optimization = program.manual is None
        self.metric = CatMetric()
        self.found = Found()

    def _step(self, batch_idx: int) -> int:
        return self.current_epoch * self.does.steps + batch_idx // self.does.accumulate

    def _loss(self, batch: Any, batch_idx: int, part: int = 0) -> Tensor:
        place = (self._step(batch_idx), rank())
        overflow = place in self.does.overflows and batch_idx % self.does.accumulate == 0
        loss = self.net.loss(batch, branch=place not in self.does.unused, overflow=overflow, part=part)
        if part == 0:
            self.metric.update(loss.detach())
            self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(batch[0]))
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.does.accumulate == 0:
            frozen = frozen_layers(self.does, self._step(batch_idx))
            for number, layer in enumerate(self.net.layers if self.does.freezes else ()):
                layer.requires_grad_(number not in frozen)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.does.manual is not None:
            return self._manual_step(batch, batch_idx)
        loss = self._loss(batch, batch_idx)
        return None if (self._step(batch_idx), rank()) in self.does.missing else loss

    def _manual_step(self, batch: Any, batch_idx: int) -> None:
        does, optimizers = self.does, self.optimizers()
        for number, optimizer in enumerate(optimizers if isinstance(optimizers, list) else [optimizers]):
            if does.toggles:
                self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            for part in range(does.parts):
                # The first forward of a step is the one that is logged.
                loss = self._loss(batch, batch_idx, part + number)
                accumulates = does.local and part < does.parts - 1
                with self.trainer.model.no_sync() if accumulates else nullcontext():  # type: ignore[union-attr]
                    self.manual_backward(loss)
            optimizer.step()
            if does.toggles:
                self.untoggle_optimizer(optimizer)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.net.loss(batch), sync_dist=True, batch_size=len(batch[0]))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.save and (self.current_epoch, batch_idx) == self.does.resume:
            self.trainer.save_checkpoint(self.save)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch:
            self.take_mean()

    def on_train_epoch_end(self) -> None:
        self.found.losses.append(torch.as_tensor(self.metric.compute()).double().reshape(-1).sort().values)
        self.metric.reset()

    def on_validation_end(self) -> None:
        self.found.val_losses.append(float(self.trainer.callback_metrics["val"]))

    def take_mean(self) -> None:
        logged = self.trainer.callback_metrics.get("loss")  # none if it resumed behind the last step
        self.found.mean_losses.append(math.nan if logged is None else float(logged))

    def configure_optimizers(self) -> Any:
        make, options = OPTIMIZERS[self.does.optimizer]
        made = [make(params, **options) for params in self.net.split(self.does.manual or 1)]
        if not self.does.schedule:
            return made
        scheduler = torch.optim.lr_scheduler.LambdaLR(made[0], lambda step: 0.9**step)
        return made, [{"scheduler": scheduler, "interval": "step"}]

    def train_dataloader(self) -> Any:
        does = self.does
        batches = [make_batch(does, rank(), index) for index in range(does.counts[rank()])]
        if does.loader == "stream":
            return Stream(batches)
        if does.loader == "position":
            # Lightning itself reads one batch ahead of a stream, and saves the position behind it.
            return (Position if does.seed % 2 or does.policy is None else PositionStream)(batches)
        return Batches(batches)

    def val_dataloader(self) -> Any:
        counts = self.does.validate
        count = counts[rank()] if counts else 0
        return Batches([make_batch(self.does, rank(), index, validation=True) for index in range(count)])


def _fit(program: Program, *, save: str = "", resume: str | None = None) -> tuple[Module, float]:
    torch.manual_seed(rank())
    if resume is None:
        torch.manual_seed(10 * rank())  # that rank 0's weights are used is the strategy's doing
    module = Module(program, save)
    trainer = make_trainer(
        strategy_of(program),
        max_epochs=program.epochs,
        accumulate_grad_batches=program.accumulate,
        callbacks=[UnevenInputs(policy=program.policy, divisor=program.divisor)] if program.policy else [],
        plugins=[Scaled()] if program.scaler else [],
        gradient_clip_val=program.clip and program.clip[1],
        gradient_clip_algorithm=program.clip and program.clip[0],
        use_distributed_sampler=False,
        limit_val_batches=None if program.validate else 0,
        val_check_interval=program.validate_every or None,
    )
    trainer.fit(module, ckpt_path=resume)
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    module.take_mean()
    return module, 64.0 if scaler is None else scaler.get_scale()


def fit_program(program: Program, folder: Path) -> Found:
    """Fit on this rank, and once more from the checkpoint."""
    save = str(folder / f"{program.seed}.ckpt") if program.resume else ""
    module, scale = _fit(program, save=save)
    found = module.found
    found.state, found.scale = state_of(module.net), scale
    if save:
        again, found.resumed_scale = _fit(program, resume=save)
        found.resumed = state_of(again.net)
    return found


def fit_programs(chosen: Sequence[Program], folder: str) -> list[Found]:
    """Fit each on this rank; for `run_ranks`. An error, which comes alike on all ranks, is returned as a text."""
    for name in ("lightning.pytorch", "lightning_ddp_hooks", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    results = []
    for program in chosen:
        Path(folder, f"rank {rank()}").write_text(f"{program.world} ranks, seed {program.seed}")
        try:
            results.append(fit_program(program, Path(folder)))
        except Exception as error:
            results.append(Found(error=f"{type(error).__name__}: {error}"))
    return results


# ---------------------------------------------------------------------- what is compared


def judge(chosen: Sequence[Program], timeout: float = 200) -> list[str]:
    """Run programs of one world on ranks and by the reference; return what is wrong, each with its seed."""
    with tempfile.TemporaryDirectory() as folder:
        results = run_ranks(fit_programs, chosen, folder, world_size=chosen[0].world, timeout=timeout)
    wrong = []
    for number, program in enumerate(chosen):
        found, expected = [result[number] for result in results], Simulation(program).run()
        texts = list(_problems(program, found, expected))
        wrong += ["\n  ".join([describe(program), *texts])] if texts else []
    return wrong


def _problems(program: Program, found: Sequence[Found], expected: Expected) -> Iterator[str]:
    for number, each in enumerate(found):
        if each.error:
            yield f"rank {number} raised {each.error}"
            return
    params = {name for name, _ in ProgramNet(program).named_parameters()}
    exact = program.hook not in NEAR_HOOKS
    for number, each in enumerate(found):
        names = params if number else set(each.state)  # only rank 0's buffers count
        if any(not torch.equal(each.state[name], found[0].state[name]) for name in params):
            yield f"rank {number} differs from rank 0"
        atol = ROUNDING_HOOKS.get(program.hook, 1e-9)
        if exact and (off := _off(each.state, expected.state, names, atol)):
            yield f"rank {number} is {off:.2g} off"
        if each.resumed is not None and (exact or program.hook == "powersgd"):
            if off := _off(each.resumed, each.state, params, atol):
                yield f"rank {number}, resumed, is {off:.2g} off"
            if program.scaler and exact and each.resumed_scale != expected.scale:
                yield f"rank {number}, resumed, has the scale {each.resumed_scale}, not {expected.scale}"
        if program.scaler and exact and each.scale != expected.scale:
            yield f"rank {number} has the scale {each.scale}, not {expected.scale}"
        if exact:
            yield from _wrong_logs(program, each, expected)


def _wrong_logs(program: Program, found: Found, expected: Expected) -> Iterator[str]:
    for epoch, losses in enumerate(expected.losses):
        values = torch.tensor([loss for loss, _ in losses], dtype=torch.float64).sort().values
        if not torch.allclose(found.losses[epoch], values.float().double(), rtol=1e-4):
            yield f"the metric of epoch {epoch} holds {found.losses[epoch]}, not {values}"
        # Lightning's own mean over ranks rounds their numbers of samples.
        mean = expected.mean_loss(epoch)
        if (program.policy or len(program.sizes) == 1) and abs(found.mean_losses[epoch] - mean) > 1e-4 * mean:
            yield f"the logged loss of epoch {epoch} is {found.mean_losses[epoch]}, not {mean}"
    for epoch, mean in enumerate(expected.val_losses):
        if (program.policy or len(program.sizes) == 1) and abs(found.val_losses[epoch] - mean) > 1e-4 * mean:
            yield f"the validation after epoch {epoch} gives {found.val_losses[epoch]}, not {mean}"


def _off(found: State, expected: Mapping[str, Tensor], names: set[str], atol: float) -> float:
    """Return the largest difference beyond the rounding of float64."""
    pairs = [(found[name].double(), expected[name].double()) for name in names]
    off = max(float((one - other).abs().nan_to_num(nan=float("inf")).max()) for one, other in pairs)
    return 0.0 if all(torch.allclose(one, other, rtol=1e-7, atol=atol) for one, other in pairs) else off
