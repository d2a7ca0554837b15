"""One fit, validation or test with uneven inputs: what a step means on this rank, and how it is run.

    process_dataloader -> wrap          a loader that goes on until all ranks are out
    batch_to_device    -> begin_batch   the step that belongs to the batch now at hand
    *_step             -> run_step      the user's step, nothing, or a replay; then logs are mirrored
    backward           -> factor, joined
    collectives        -> place         whose collective this is

Training and evaluation have a queue each, since validations run in the middle of an epoch whose loader has read ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from lightning_ddp_hooks import _compat, comm
from lightning_ddp_hooks.lightning.uneven.collectives import BATCH_HOOKS, describe
from lightning_ddp_hooks.lightning.uneven.logs import StepRecord, mask_logs, record_step, take_over, without_traces
from lightning_ddp_hooks.join.agreement import StepAgreement
from lightning_ddp_hooks.join.batches import emptied
from lightning_ddp_hooks.join.groups import ActiveGroups
from lightning_ddp_hooks.join.loader import Announcement, JoinLoader, LoaderContext, StatefulJoinLoader
from lightning_ddp_hooks.join.samplers import remove_padding
from lightning_ddp_hooks.join.steps import Step

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_ddp_hooks.lightning.callbacks.uneven_inputs import UnevenInputs

Place = Literal["step", "batch hook", "elsewhere"]


class UnevenRun:
    """The state of a run with uneven inputs; made and closed on all ranks alike.

    Args:
        settings: what the user declared.
        trainer: the Trainer, at setup.
    """

    def __init__(self, settings: UnevenInputs, trainer: pl.Trainer) -> None:
        self.settings = settings
        self.failed = self.broken = False
        self._trainer = trainer
        world = comm.resolve_group(None)
        self._agreement = StepAgreement(comm.new_group(world, cpu=True))
        self._group = comm.new_group(world, cpu=True)
        self._groups = ActiveGroups()
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
        step = self.step
        return step is not None and step.joined

    @property
    def tail(self) -> Step | None:
        """The step now at hand if some rank has no batch in it, else None."""
        step = self.step
        return step if step is not None and step.tail else None

    # ------------------------------------------------------------------ data

    def wrap(self, loader: Any) -> Any:
        """Wrap a loader that Lightning has prepared; collective.

        Raises:
            ValueError: several training loaders, or a step that takes ``dataloader_iter``.
        """
        trainer = self._trainer
        if trainer.predicting:
            return loader
        self._refuse_iterator_steps()
        training, settings = self._training, self.settings
        limit = (
            trainer.limit_train_batches
            if training
            else trainer.limit_test_batches
            if trainer.testing
            else trainer.limit_val_batches
        )
        self._queues[training].clear()
        context = LoaderContext(
            agreement=self._agreement,
            group=self._group,
            announce=self._queues[training].append,
            samples=_compat.samples_in if training and settings.divisor == "samples" else None,
            stop_at_shortest=training and settings.policy == "stop",
            keep_batches=lambda: training and not trainer.lightning_module.automatic_optimization,
            limit=limit if isinstance(limit, int) and not isinstance(limit, bool) else None,
            failed=lambda: self.failed,
        )
        # Padding makes loaders even; with the other policies that is what the user wants of it in training.
        if not training or settings.policy == "join":
            remove_padding(loader)
        stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        return (StatefulJoinLoader if stateful else JoinLoader)(loader, context)

    def _refuse_iterator_steps(self) -> None:
        module = self._trainer.lightning_module
        name = "training_step" if self._training else "test_step" if self._trainer.testing else "validation_step"
        if is_overridden(name, module) and is_param_in_hook_signature(
            getattr(module, name), "dataloader_iter", explicit=True
        ):
            raise ValueError(
                f"UnevenInputs does not support `{name}(self, dataloader_iter)`: the step itself would decide how many "
                "batches it takes. Take a batch instead."
            )

    def _refuse_combined_loaders(self) -> None:
        combined = _compat.combined_loader_in_use(self._trainer)
        if combined is None or len(combined.flattened) < 2:
            return
        if self._training:
            raise ValueError(
                f"UnevenInputs supports one training dataloader, got {len(combined.flattened)}: combine them into one, "
                "such as a loader over a torch.utils.data.ConcatDataset or an iterable of your own."
            )
        if _compat.combined_mode(combined) != "sequential":
            raise ValueError(
                "UnevenInputs supports several dataloaders in evaluation one after the other, not a CombinedLoader "
                f"with mode={_compat.combined_mode(combined)!r}."
            )

    def begin_batch(self) -> Step | None:
        """Turn to the step of the next batch; once for each batch that the loop uses, before any hook sees it.

        Raises:
            RuntimeError: some rank has run out, and the policy is ``"error"``.
        """
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
        self._groups.prepare(step.ranks)
        if step.joined:
            mask_logs(_compat.logged_results(self._trainer), self._masks_logs)
        return step

    def _exhausted_text(self, step: Step) -> str:
        trainer = self._trainer
        batches = trainer.fit_loop.batch_idx + 1  # that of this step has not begun
        who = f"Rank {step.rank} exhausted all inputs" if step.joined else "Some ranks exhausted all inputs"
        return (
            f"{who} after {batches} batches of epoch {trainer.current_epoch}, at step {trainer.global_step}: "
            f'{describe(step)}. With `UnevenInputs(policy="error")` all ranks stop here. Use `policy="join"` to train '
            'on with the ranks that have data, or `policy="stop"` to end each epoch with the shortest dataloader.'
        )

    def _masks_logs(self) -> bool:
        return self.joined and self.place() == "batch hook"

    def emptied_to_device(self, batch: Any, device: torch.device) -> Any:
        """Move a joined rank's batch, without the user's transfer hooks."""
        return move_data_to_device(batch, device)

    # ------------------------------------------------------------------ steps

    def run_step(
        self, name: str, run: Callable[..., Any], args: Any, kwargs: Any, to_device: Callable[[Any], Any]
    ) -> Any:
        """Run the user's step as this rank has to in this step.

        Args:
            name: of the step function.
            run: calls it.
            args: for it.
            kwargs: for it.
            to_device: moves a batch as if the loop had read it.
        """
        step = self.step
        if step is None:
            return run(*args, **kwargs)
        if not step.joined:
            with self._entered(step):
                output = run(*args, **kwargs)
            if step.tail:
                self._mirror(step, name, output)
            return output
        replays = name == "training_step" and not self._trainer.lightning_module.automatic_optimization
        if replays:
            return self._replay(step, run, args, kwargs, to_device)
        device = self._trainer.strategy.root_device
        output = move_data_to_device(self._mirror(step, name, None).output, device)
        return _as_loss(output, device) if name == "training_step" else output

    def _replay(
        self, step: Step, run: Callable[..., Any], args: Any, kwargs: Any, to_device: Callable[[Any], Any]
    ) -> Any:
        assert self._loader is not None
        trainer = self._trainer
        batch = to_device(self._loader.latest)
        if args:
            args = (batch, *args[1:])
        else:
            kwargs = {**kwargs, next(iter(kwargs)): batch}
        with without_traces(trainer), self._entered(step):
            output = run(*args, **kwargs)
        self._mirror(step, "training_step", None)
        return emptied(output)

    def _mirror(self, step: Step, name: str, output: Any) -> StepRecord:
        speaks = step.rank == step.first
        record: StepRecord = comm.broadcast_object(
            record_step(self._trainer, name, output) if speaks else None, self._group, step.first
        )
        if record.problem is not None:
            raise RuntimeError(record.problem)
        if step.joined:
            with self._entered(step):  # logging may reduce, which here nobody else does
                take_over(self._trainer, record)
        return record

    @contextmanager
    def _entered(self, step: Step) -> Iterator[None]:
        """Be inside the user's step: modules that communicate use the group of the ranks that are in it."""
        self._inside = step
        changed: list[tuple[Any, Any]] = []
        if step.tail:
            for module in self._trainer.lightning_module.modules():
                if hasattr(module, "process_group"):  # SyncBatchNorm, torchmetrics
                    changed.append((module, module.process_group))
                    module.process_group = self.group_for(step, module.process_group)
        try:
            yield
        finally:
            self._inside = None
            for module, group in changed:
                module.process_group = group

    def factor(self) -> float:
        """Return by what to scale the loss, so that the mean over ranks becomes the wanted mean."""
        step = self._now[True]
        if step is None or step.joined:
            return 1.0
        return step.loss_factor(self.settings.divisor)

    # ------------------------------------------------------------------ collectives

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
        """Return the group to use in a step in the tail where ``wanted`` was asked for.

        Raises:
            RuntimeError: ``wanted`` is not all ranks, and some of its ranks have run out.
        """
        if step.joined:
            return self._groups.solo
        if wanted is None or len(comm.global_ranks(wanted)) == len(step.active):
            return self._groups[step.ranks]
        if set(comm.global_ranks(wanted)) <= set(step.ranks):
            return wanted
        raise RuntimeError(
            f"A process group with ranks {comm.global_ranks(wanted)} is used in a step in which {describe(step)}. Use "
            "`self.trainer.strategy.active_group()`."
        )

    # ------------------------------------------------------------------ end

    @property
    def pending(self) -> bool:
        """Whether this rank has begun a collective that others may never join."""
        return self._agreement.pending

    def close(self) -> None:
        """Free the groups; after an error those that can be, when other ranks may be stuck."""
        groups = (self._agreement.group, self._group)
        if not self.failed:
            for group in groups:
                comm.destroy_group(group)
            self._groups.close()
        elif not self.broken:
            comm.free_after_error(groups, self._agreement.pending)
            self._groups.close(failed=True)


def _as_loss(output: Any, device: torch.device) -> Any:
    """Return a joined rank's output of ``training_step``, with zero for a loss if the active rank had none."""
    if isinstance(output, Tensor) or (isinstance(output, dict) and isinstance(output.get("loss"), Tensor)):
        return output
    return torch.zeros((), device=device)
