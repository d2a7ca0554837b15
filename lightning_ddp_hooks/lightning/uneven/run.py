"""One fit, validation or test with uneven inputs: what a step means on this rank, and how it is run.

    process_dataloader -> wrap          a loader that goes on until all ranks have run out
    batch_to_device    -> begin_batch   the step that belongs to the batch now at hand
    *_step             -> run_step      the user's step, nothing, or a replay; then logs are mirrored
    backward           -> factor, joined
    collectives        -> place         where a collective is called from, and so which ranks take part

Training and evaluation have a queue each, since validations run in the middle of an epoch whose loader has read ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from lightning_ddp_hooks import _compat, comm
from lightning_ddp_hooks.join.agreement import DIVISORS, Divisor, Step, StepAgreement, active_text
from lightning_ddp_hooks.join.data import emptied, remove_padding
from lightning_ddp_hooks.join.loader import Announcement, JoinLoader, LoaderContext, StatefulJoinLoader
from lightning_ddp_hooks.lightning.uneven.logs import apply_record, mask_logs, record_step, undoing_effects

if TYPE_CHECKING:
    import lightning.pytorch as pl

Place = Literal["step", "batch hook", "elsewhere"]
Policy = Literal["join", "stop", "error"]
POLICIES: tuple[Policy, ...] = ("join", "stop", "error")
BATCH_HOOKS = frozenset(
    {
        *("on_train_batch_start", "on_before_zero_grad", "optimizer_zero_grad", "backward", "on_before_backward"),
        *("on_after_backward", "on_before_optimizer_step", "optimizer_step", "configure_gradient_clipping"),
        *("lr_scheduler_step", "on_train_batch_end", "on_validation_batch_start", "on_validation_batch_end"),
        *("on_test_batch_start", "on_test_batch_end"),
    }
)


@dataclass(frozen=True)
class UnevenSettings:
    """What the user declares; see `lightning_ddp_hooks.callbacks.UnevenInputs`."""

    policy: Policy
    divisor: Divisor

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"Expected `policy` to be one of {POLICIES}, got {self.policy!r}.")
        if self.divisor not in DIVISORS:
            raise ValueError(f"Expected `divisor` to be one of {DIVISORS}, got {self.divisor!r}.")


class UnevenRun:
    """The state of a run with uneven inputs; made and closed on all ranks alike, at setup and teardown."""

    def __init__(self, settings: UnevenSettings, trainer: pl.Trainer) -> None:
        self.settings = settings
        self.failed = self.broken = False  # no collective is possible any more; nor is it known what groups wait for
        self._trainer = trainer
        world = comm.resolve_group(None)
        self._agreement = StepAgreement(comm.new_group(world, cpu=True))
        self._group = comm.new_group(world, cpu=True)
        # Of each set of active ranks that comes up: at most W - 1 in an epoch, and for fixed shards in all.
        self._groups: dict[tuple[int, ...], comm.ProcessGroup] = {}
        self._solo: comm.ProcessGroup | None = None
        self._queues: dict[bool, deque[Announcement]] = {True: deque(), False: deque()}
        self._now: dict[bool, Step | None] = {True: None, False: None}
        self._loader: JoinLoader | None = None
        self._inside: Step | None = None

    @property
    def _training(self) -> bool:
        return bool(self._trainer.training)

    @property
    def step(self) -> Step | None:
        """The step that belongs to the batch now at hand, in training or in evaluation."""
        return self._now[self._training]

    @property
    def joined(self) -> bool:
        """Whether this rank has no batch in the step now at hand."""
        return self.step is not None and self.step.joined

    @property
    def tail(self) -> Step | None:
        """The step now at hand if some rank has no batch in it, else None."""
        return self.step if self.step is not None and self.step.tail else None

    def wrap(self, loader: Any) -> Any:
        """Wrap a loader that Lightning has prepared; collective."""
        trainer, settings, training = self._trainer, self.settings, self._training
        if trainer.predicting:
            return loader
        name, limit = "validation_step", trainer.limit_val_batches
        if training:
            name, limit = "training_step", trainer.limit_train_batches
        elif trainer.testing:
            name, limit = "test_step", trainer.limit_test_batches
        module = trainer.lightning_module
        step = getattr(module, name)
        if is_overridden(name, module) and is_param_in_hook_signature(step, "dataloader_iter", explicit=True):
            raise ValueError(
                f"UnevenInputs does not support `{name}(self, dataloader_iter)`: the step itself would decide how many "
                "batches it takes. Take a batch instead."
            )
        self._queues[training].clear()
        context = LoaderContext(
            agreement=self._agreement,
            group=self._group,
            announce=self._queues[training].append,
            samples=_compat.samples_in if training and settings.divisor == "samples" else None,
            stop_at_shortest=training and settings.policy == "stop",
            keep_batches=lambda: training and not module.automatic_optimization,
            limit=limit if isinstance(limit, int) and not isinstance(limit, bool) else None,
            failed=lambda: self.failed,
        )
        if not training or settings.policy == "join":  # with other policies the user may want loaders to be even
            remove_padding(loader)
        stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        return (StatefulJoinLoader if stateful else JoinLoader)(loader, context)

    def begin_batch(self) -> Step | None:
        """Turn to the step of the next batch; once for each batch that the loop uses, before any hook sees it."""
        training = self._training
        queue = self._queues[training]
        step = None
        while queue and not queue[0].current():  # of an epoch that was left before its end
            queue.popleft()
        if queue:
            announced = queue.popleft()
            step, self._loader = announced.step, announced.loader
            self._refuse_combined_loaders()
            if isinstance(self._loader, StatefulJoinLoader):
                self._loader.used()
        self._now[training] = step
        if step is None or not step.tail:
            return step
        if training and self.settings.policy == "error":
            raise RuntimeError(self._exhausted_text(step))
        if step.ranks not in self._groups:  # all ranks of the world make it, joined ones too
            self._groups[step.ranks] = comm.new_subgroup(step.ranks)
        if step.joined:
            mask_logs(_compat.logged_results(self._trainer), lambda: self.joined and self.place() == "batch hook")
        return step

    def _refuse_combined_loaders(self) -> None:
        combined = _compat.combined_loader_in_use(self._trainer)
        count = 0 if combined is None else len(combined.flattened)
        if count > 1 and self._training:
            raise ValueError(
                f"UnevenInputs supports one training dataloader, got {count}: combine them into one, such as a loader "
                "over a torch.utils.data.ConcatDataset or an iterable of your own."
            )
        if count > 1 and (mode := _compat.combined_mode(combined)) != "sequential":
            raise ValueError(
                "UnevenInputs supports several dataloaders in evaluation one after the other, not a CombinedLoader "
                f"with mode={mode!r}."
            )

    def _exhausted_text(self, step: Step) -> str:
        trainer = self._trainer
        batches = trainer.fit_loop.batch_idx + 1  # that of this step has not begun
        who = f"Rank {step.rank} exhausted all inputs" if step.joined else "Some ranks exhausted all inputs"
        return (
            f"{who} after {batches} batches of epoch {trainer.current_epoch}, at step {trainer.global_step}: "
            f'{active_text(step.ranks)}. With `UnevenInputs(policy="error")` all ranks stop here. Use `policy="join"` '
            'to train on with the ranks that have data, or `policy="stop"` to end each epoch with the shortest '
            "dataloader."
        )

    def run_step(
        self, name: str, run: Callable[..., Any], args: Any, kwargs: Any, to_device: Callable[[Any], Any]
    ) -> Any:
        """Run the user's step as this rank has to now; ``to_device`` moves a batch as if the loop had read it."""
        step = self.step
        if step is None:
            return run(*args, **kwargs)
        if not step.joined:
            with self._entered(step):
                output = run(*args, **kwargs)
            if step.tail:
                self._mirror(step, name, output)
            return output
        training = name == "training_step"
        if training and not self._trainer.lightning_module.automatic_optimization:
            return self._replay(step, run, args, kwargs, to_device)
        device = self._trainer.strategy.root_device
        output = move_data_to_device(self._mirror(step, name), device)
        has_loss = isinstance(output.get("loss") if isinstance(output, dict) else output, Tensor)
        return output if has_loss or not training else torch.zeros((), device=device)

    def _replay(
        self, step: Step, run: Callable[..., Any], args: Any, kwargs: Any, to_device: Callable[[Any], Any]
    ) -> Any:
        """Run a manual ``training_step`` on a joined rank, for the updates in it."""
        assert self._loader is not None
        batch = to_device(self._loader.latest)
        if args:
            args = (batch, *args[1:])
        else:
            kwargs = {**kwargs, next(iter(kwargs)): batch}
        with undoing_effects(self._trainer), self._entered(step):
            output = run(*args, **kwargs)
        self._mirror(step, "training_step")
        return emptied(output)

    def _mirror(self, step: Step, name: str, output: Any = None) -> Any:
        """Give joined ranks what the lowest active rank logged and returned; return the latter. Collective."""
        own = record_step(self._trainer, name, output) if step.rank == step.first else None
        record = comm.broadcast_object(own, self._group, step.first)
        if record.problem is not None:
            raise RuntimeError(record.problem)
        if step.joined:
            with self._entered(step):  # logging may reduce, which here nobody else does
                apply_record(self._trainer, record)
        return record.output

    @contextmanager
    def _entered(self, step: Step) -> Iterator[None]:
        """Have modules that communicate in the user's step use the group of the ranks that are in it."""
        self._inside = step
        modules = self._trainer.lightning_module.modules() if step.tail else ()
        # SyncBatchNorm, torchmetrics
        changed: list[tuple[Any, Any]] = [(m, m.process_group) for m in modules if hasattr(m, "process_group")]
        try:
            for module, group in changed:
                module.process_group = self.group_for(step, group)
            yield
        finally:
            self._inside = None
            for module, group in changed:
                module.process_group = group

    def factor(self) -> float:
        """Return the factor on the loss that makes the mean over ranks the wanted mean."""
        step = self._now[True]
        return 1.0 if step is None or step.joined else step.loss_factor(self.settings.divisor)

    def place(self) -> Place:
        """Tell from where a collective or a log is called."""
        if self._inside is not None:
            return "step"
        module = self._trainer.lightning_module
        return "batch hook" if _compat.current_hook(module) in BATCH_HOOKS else "elsewhere"

    def active_group(self) -> comm.ProcessGroup | None:
        """Return the group of the ranks that run the current step; None stands for all."""
        step = self._inside
        return None if step is None or not step.tail else self.group_for(step, None)

    def group_for(self, step: Step, wanted: Any) -> Any:
        """Return the group to use in a step in the tail where ``wanted`` was asked for; None stands for all ranks."""
        if step.joined:  # it replays the step without the others
            self._solo = self._solo or comm.solo_group()
            return self._solo
        if wanted is None or len(comm.global_ranks(wanted)) == len(step.active):
            return self._groups[step.ranks]
        if set(comm.global_ranks(wanted)) <= set(step.ranks):
            return wanted
        raise RuntimeError(
            f"A process group with ranks {comm.global_ranks(wanted)} is used in a step in which "
            f"{active_text(step.ranks)}. Use `self.trainer.strategy.active_group()`."
        )

    def close(self) -> None:
        """Free the groups; after an error those that can be, when other ranks may be stuck."""
        groups = [self._agreement.group, self._group]
        if not self.failed:
            for group in (*groups, *self._groups.values()):
                comm.destroy_group(group)
        elif not self.broken:
            comm.free_after_error(groups, self._agreement.pending)
            comm.free_after_error(group for ranks, group in self._groups.items() if comm.rank() in ranks)
        if self._solo is not None and not self.broken:
            comm.destroy_group(self._solo)
