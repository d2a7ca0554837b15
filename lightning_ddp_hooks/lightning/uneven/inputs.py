"""What a step means on this rank under `UnevenInputs`; without the callback each call passes straight through.

    process_dataloader -> wrap             a loader that goes on until all ranks have run out
    batch_to_device    -> batch_to_device  the step that belongs to the batch now at hand
    *_step             -> run_step         the user's step, nothing, or a replay; then logs are mirrored
    backward           -> factor, joined
    collectives        -> place            where a collective is called from, and so which ranks take part

Training and evaluation have a queue each, since validations run in the middle of an epoch whose loader has read ahead.
Where a collective is called from decides who takes part in it in the tail:
  * in the user's step: active ranks use their own group; joined ranks, if they replay a step, communicate nothing;
  * in batch hooks and callbacks: all ranks come by, so all take part, and joined ones bring the neutral element;
  * anywhere else (epoch ends, checkpoints): nothing is special, all ranks have something to say.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from threading import Event
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torchmetrics import Metric

from lightning_ddp_hooks import _compat, comm
from lightning_ddp_hooks.health.metric_states import gather_states
from lightning_ddp_hooks.join.agreement import DIVISORS, Divisor, Step, StepAgreement, active_text
from lightning_ddp_hooks.join.data import emptied, remove_padding
from lightning_ddp_hooks.join.loader import Announcement, JoinLoader, LoaderContext, StatefulJoinLoader
from lightning_ddp_hooks.join.samples import sample_counter
from lightning_ddp_hooks.lightning.logged_values import LoggingCheck
from lightning_ddp_hooks.lightning.uneven.collectives import gathered, neutral, op_name, reduced
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


class Inputs:
    """The inputs of a run: as many batches on all ranks, or not; begun and closed on all ranks alike."""

    def __init__(self) -> None:
        self.settings: UnevenSettings | None = None  # of the callback, if there is one
        self.logging: LoggingCheck | None = None
        self._undo_gathering: Callable[[], None] | None = None
        self._inside: Step | None = None

    def start(self, settings: UnevenSettings, trainer: pl.Trainer) -> None:
        """Begin a run with uneven inputs; collective."""
        self._trainer = trainer
        self._failed = Event()  # no collective is possible any more
        self._broken = False  # nor is it known what groups still wait for
        world = comm.resolve_group(None)
        self._agreement = StepAgreement(comm.new_group(world, cpu=True))
        self._group = comm.new_group(world, cpu=True)
        # Of each set of active ranks that comes up: at most W - 1 in an epoch, and for fixed shards in all.
        self._groups: dict[tuple[int, ...], comm.ProcessGroup] = {}
        self._solo: comm.ProcessGroup | None = None
        self._queues: dict[bool, deque[Announcement]] = {True: deque(), False: deque()}
        self._now: dict[bool, Step | None] = {True: None, False: None}
        self._loader: JoinLoader | None = None
        self.settings = settings
        self._gather_metrics()

    def check_logging(self, trainer: pl.Trainer, device: torch.device, step: Callable[[], int]) -> None:
        """Compare from now on what ranks log; collective."""
        self.logging = LoggingCheck(trainer, device, step)
        self._gather_metrics()

    def _gather_metrics(self) -> None:
        if self._undo_gathering is None:
            self._undo_gathering = _compat.gather_metrics_by(self._gather)

    def _gather(self, metric: Metric, group: comm.ProcessGroup | None) -> None:
        if self.logging is not None and group is None:
            self.logging.agree_on_metric(metric)
        gather_states(metric, group)

    @property
    def uneven(self) -> bool:
        """Whether the callback is there."""
        return self.settings is not None

    def facts(self) -> dict[str, Any]:
        """Return what the callback adds to the settings; see `FitSettings`."""
        return {} if self.settings is None else asdict(self.settings)

    def text(self) -> str | None:
        """Describe the callback's settings; None without it."""
        return ", ".join(f"{name}={value!r}" for name, value in self.facts().items()) or None

    @property
    def _training(self) -> bool:
        return bool(self._trainer.training)

    @property
    def step(self) -> Step | None:
        """The step that belongs to the batch now at hand, in training or in evaluation."""
        return None if self.settings is None else self._now[self._training]

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
        settings = self.settings
        if settings is None or self._trainer.predicting:
            return loader
        trainer, training = self._trainer, self._training
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
        count = sample_counter(module, '`UnevenInputs(divisor="samples")`')
        context = LoaderContext(
            agreement=self._agreement,
            group=self._group,
            announce=self._queues[training].append,
            samples=count if training and settings.divisor == "samples" else None,
            stop_at_shortest=training and settings.policy == "stop",
            keep_batches=lambda: training and not module.automatic_optimization,
            limit=limit if isinstance(limit, int) and not isinstance(limit, bool) else None,
            failed=self._failed.is_set,
        )
        if not training or settings.policy == "join":  # with other policies the user may want loaders to be even
            remove_padding(loader)
        stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        return (StatefulJoinLoader if stateful else JoinLoader)(loader, context)

    def batch_to_device(self, batch: Any, device: torch.device, to_device: Callable[[], Any]) -> Any:
        """Turn to the step of a batch, and move it to the device, as ``to_device`` does if this rank has data."""
        step = None if self.settings is None else self._begin_batch(self.settings)
        if step is None or not step.joined:
            return to_device()
        return move_data_to_device(batch, device)  # an emptied one, without the user's transfer hooks

    def _begin_batch(self, settings: UnevenSettings) -> Step | None:
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
        if training and settings.policy == "error":
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
        if self.settings is None or (step := self._now[True]) is None or step.joined:
            return 1.0
        return step.loss_factor(self.settings.divisor)

    def held(self) -> int:
        """Return how much the step at hand weighs among those of an accumulation window."""
        step = None if self.settings is None else self._now[True]
        return 1 if self.settings is None or step is None else step.held(self.settings.divisor)

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

    def reduce(self, default: Callable[..., Any], tensor: Any, group: Any, reduce_op: Any) -> Any:
        """Return the reduction over the ranks that have something to say; see `Strategy.reduce`."""
        tail = self.tail
        if self.logging is not None and tail is None and self.logging.takes(tensor):
            return self.logging.reduce(tensor, group, reduce_op)
        if not isinstance(tensor, Tensor):
            return default(tensor, group, reduce_op)
        op = op_name(reduce_op)
        if op == "mean" and not tensor.is_floating_point():
            # Lightning cuts off the mean of integers, and divides the mean of an epoch by such a one.
            tensor = tensor.to(torch.get_default_dtype())
        if self.settings is None:
            return default(tensor, group, reduce_op)
        if tail is not None and self.place() == "step":
            active = self.group_for(tail, group)
            return reduced(tensor, op, active, comm.world_size(active))
        whole = comm.resolve_group(group)
        count = comm.world_size(whole)
        if tail is not None and count == len(tail.active) and self.place() == "batch hook":
            count = len(tail.ranks)
            tensor = neutral(tensor, op) if tail.joined else tensor
        return reduced(tensor, op, whole, count)

    def decide(self, default: Callable[..., bool], decision: bool, all_of_them: bool, device: torch.device) -> bool:
        """Return what all or any of the ranks decide, whether they have data or not; in a step, the active ones."""
        if self.settings is None:
            return default(decision, all_of_them)
        group = comm.resolve_group(self.active_group())
        votes = int(reduced(torch.tensor(int(decision), device=device), "sum", group, 1))
        return votes == comm.world_size(group) if all_of_them else votes > 0

    def all_gather(self, default: Callable[..., Tensor], tensor: Tensor, group: Any, sync_grads: bool) -> Tensor:
        """Return the tensors of the ranks that run the step, stacked; see `Strategy.all_gather`."""
        if self.settings is None:
            return default(tensor, group=group, sync_grads=sync_grads)
        tail = self.tail if self.place() == "step" else None
        if tail is not None and tail.joined:  # a replay, whose values are thrown away: only the shape matters
            return torch.stack([tensor] * len(tail.ranks))
        whole = comm.resolve_group(group) if tail is None else self.group_for(tail, group)
        return gathered(tensor, whole, sync_grads=sync_grads)

    def barrier(self, default: Callable[[], None]) -> None:
        """Wait for the ranks that run the step."""
        if (active := self.active_group()) is None:
            default()
        else:
            comm.barrier(active)

    def broadcast(self, default: Callable[..., Any], obj: Any, src: int) -> Any:
        """Return the object of a rank, or in a step that it does not run, of the first one that does."""
        active = self.active_group()
        if active is None:
            return default(obj, src)
        ranks = comm.global_ranks(active)
        return comm.broadcast_object(obj, active, ranks.index(src) if src in ranks else 0)

    def fail(self, *, broken: bool) -> None:
        """Take note that this rank ends with an error; ``broken`` if groups may wait for anything."""
        if self.settings is not None:
            self._failed.set()
            self._broken = broken

    def close(self, *, failed: bool) -> None:
        """End the run, and free the groups; after an error those that can be, when other ranks may be stuck."""
        if self._undo_gathering is not None:
            self._undo_gathering()
            self._undo_gathering = None
        if self.logging is not None:
            self.logging.close(failed=failed)
        if self.settings is not None:
            groups = [self._agreement.group, self._group]
            if not self._failed.is_set():
                for group in (*groups, *self._groups.values()):
                    comm.destroy_group(group)
            elif not self._broken:
                comm.free_after_error(groups, self._agreement.pending)
                comm.free_after_error(group for ranks, group in self._groups.items() if comm.rank() in ranks)
            if self._solo is not None and not self._broken:
                comm.destroy_group(self._solo)
            # Whoever keeps the Trainer does not keep threads and sockets.
            del self._agreement, self._group, self._groups, self._solo, self._loader
        self.logging = self.settings = None
