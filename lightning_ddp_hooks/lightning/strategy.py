"""The strategy for the Trainer: turns its verbs into those of a `TrainingRun`; no algorithm lives here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ddp_hooks import _compat, comm
from lightning_ddp_hooks.averaging.averager import ModelAverager
from lightning_ddp_hooks.averaging.names import AveragerLike
from lightning_ddp_hooks.config import FitSettings, Settings, StartMethod
from lightning_ddp_hooks.conflicts import raise_on_conflict
from lightning_ddp_hooks.health.heartbeat import Progress
from lightning_ddp_hooks.hooks.registry import HookLike, resolve_hook
from lightning_ddp_hooks.lightning.checkpoint_io import checkpoint_io_property
from lightning_ddp_hooks.lightning.failure_watch import TrainerWatch
from lightning_ddp_hooks.lightning.fit_facts import facts_of_fit, steps_of_fit, to_agree_on_in_fit, warn_if_too_late
from lightning_ddp_hooks.lightning.names import (
    PASSED_ON,
    averager_by_lightnings_names,
    hook_by_lightnings_names,
    register_names,
)
from lightning_ddp_hooks.lightning.restarts import AutoResume, join_world
from lightning_ddp_hooks.lightning.summary import announce, warn_beside_bar
from lightning_ddp_hooks.lightning.trainer_state import TrainerState
from lightning_ddp_hooks.lightning.trainer_steps import TrainerSteps
from lightning_ddp_hooks.lightning.uneven.inputs import Inputs
from lightning_ddp_hooks.optim.in_hook import OptimizerInHook
from lightning_ddp_hooks.reducer.reducer import Reducer
from lightning_ddp_hooks.reducer.shm_backend import group_of_neighbors
from lightning_ddp_hooks.run import TrainingRun

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.plugins.precision import Precision

    from lightning_ddp_hooks.lightning.uneven.inputs import UnevenSettings


class DDPHooksStrategy(DDPStrategy):
    """Data-parallel training with communication hooks; takes the place of ``strategy="ddp"``.

    It is a `DDPStrategy` to the Trainer (samplers, launchers, clusters, precision, checkpoints), but gradients go
    through this package's own reducer, and ``trainer.model`` is the LightningModule itself.

    Args:
        accelerator: set by the Trainer.
        parallel_devices: set by the Trainer.
        cluster_environment: how processes find each other; by default detected (torchrun, SLURM, ...).
        checkpoint_io: how checkpoints are written; by default in files that are whole or not there.
        precision_plugin: set by the Trainer from its ``precision``.
        comm_hook: what is done with each full bucket of gradients: a short name, a `CommHook`, or a pair
            ``(state, hook)`` by torch's contract; None for the mean over ranks. Works on every backend, also on CPU.
            Short names are allreduce, batched_powersgd, bf16, fp16, fp8, hierarchical, int8, noop, onebit,
            post_local_sgd, powersgd, quantize_per_channel, quantize_per_tensor, topk.
        averager: averages the model every few steps, not gradients at each: a short name (diloco, hierarchical,
            local_sgd, slowmo), or a `ModelAverager`.
        average_before_eval: put the averaged model in place for validation.
        save_replicas: save each rank's own model and optimizer state in checkpoints, to resume exactly in mid-period;
            ``"auto"`` does where that takes at most about 2 GiB for all ranks, which rank 0 gathers and writes.
        optimizer_in_hook: steps the optimizer while gradients are reduced, or shards its state over the ranks, or both.
        bucket_cap_mb: size at which a bucket is closed, in MiB; ``"auto"`` picks it by the link as measured.
        first_bucket_mb: the same for the first bucket; None for 1 MiB, or for `bucket_cap_mb` if that is less.
        gradient_as_bucket_view: let ``.grad`` be a slice of the bucket: no second copy of the gradients.
        find_unused_parameters: allow ranks to leave out any parameters in any backward.
        static_graph: learn in the first backward which parameters are used, and rely on it.
        broadcast_buffers: send rank 0's buffers to all ranks at setup, before training steps and before validation.
        gradient_weighting: ``"ranks"`` weighs each rank alike; ``"samples"`` weighs each sample alike when ranks hold
            micro-batches of different sizes, in all micro-batches of an accumulation window.
        accumulation: ``"exact"`` takes the mean over the micro-batches that an accumulation window holds, also of a
            short one at the end of an epoch; Lightning divides by their usual number. Part of weighting by samples.
        skip_missing_loss: when ``training_step`` returns None (or a loss without gradient) on some rank: it takes part
            with ``"zeros"``, or ``"all"`` ranks skip the step. On all ranks alike the step is always skipped.
        reducer_backend: ``"auto"``, ``"native"`` or ``"python"``.
        process_group_backend: such as ``"gloo"`` or ``"nccl"``, by default by device; ``"shm"`` lets CPU ranks of one
            host talk through memory.
        timeout: of collectives; on a command line hours:minutes:seconds, as in ``0:30:00``.
        failure_timeout: seconds, or None for no failure reports. When a rank fails, dies, or is silent for so long
            while others wait for it, they end with an error that names it, its own error if it could still tell, and
            where they stood; a process that is stuck in a collective of gloo exits.
        stall_timeout: seconds that a rank may do something else while all others wait for its gradients, before all
            end and tell the line of its code; by default ten minutes, or ``failure_timeout`` if that is longer.
        check_replicas_every_n_steps: compare the parameters of all ranks every so many steps; None does so only before
            each checkpoint, 0 never. Where ranks are meant to differ (an averager after its warm-up, the hooks Noop and
            PostLocalSGD) nothing is compared; under a hook that is a function, only if a number is given here.
        detect_nonfinite: raise on all ranks when a gradient is infinite or not a number, before the step, naming rank
            and parameter. Has no effect under a GradScaler.
        check_logged_values: raise on all ranks when they log different keys with ``sync_dist=True``, or metrics with
            states that do not go together.
        resume: ``"auto"`` begins a fit without ``ckpt_path`` at the newest whole checkpoint in the folder of its
            ``ModelCheckpoint(dirpath=...)``, so that a job that is started again goes on.
        start_method: how processes are started: ``"popen"``, ``"spawn"``, ``"fork"`` or ``"forkserver"``.
        ddp_comm_hook: Lightning's name; use ``comm_hook``.
        ddp_comm_state: Lightning's name; use ``comm_hook=(state, hook)``.
        ddp_comm_wrapper: Lightning's name; wrap the hook yourself.
        model_averaging_period: Lightning's name; use ``averager=PeriodicModelAverager(period=...)``.

    Raises:
        TypeError: an argument of the wrong type, or an unknown one.
        ValueError: an argument out of range, or arguments that contradict each other.

    Example:
        >>> Trainer(strategy="ddp_hooks")
        >>> Trainer(strategy=DDPHooksStrategy(bucket_cap_mb=4, find_unused_parameters=True))
    """

    checkpoint_io = checkpoint_io_property

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        *,
        comm_hook: HookLike | None = None,
        averager: AveragerLike | None = None,
        average_before_eval: bool = True,
        save_replicas: bool | Literal["auto"] = "auto",
        optimizer_in_hook: OptimizerInHook | None = None,
        bucket_cap_mb: float | Literal["auto"] = 25,
        first_bucket_mb: float | None = None,
        gradient_as_bucket_view: bool = True,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        broadcast_buffers: bool = True,
        gradient_weighting: Literal["ranks", "samples"] = "ranks",
        accumulation: Literal["lightning", "exact"] = "lightning",
        skip_missing_loss: Literal["zeros", "all"] = "zeros",
        reducer_backend: Literal["auto", "native", "python"] = "auto",
        process_group_backend: str | None = None,
        timeout: timedelta | None = comm.DEFAULT_TIMEOUT,
        failure_timeout: float | None = 30.0,
        stall_timeout: float | None = None,
        check_replicas_every_n_steps: int | None = None,
        detect_nonfinite: bool = False,
        check_logged_values: bool = False,
        resume: Literal["auto"] | None = None,
        start_method: StartMethod = "popen",
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_state: object | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        model_averaging_period: int | None = None,
    ) -> None:
        given = dict(locals())
        given["comm_hook"] = hook_by_lightnings_names(comm_hook, ddp_comm_state, ddp_comm_hook, ddp_comm_wrapper)
        given["averager"] = averager_by_lightnings_names(averager, model_averaging_period, ddp_comm_state)
        self.settings = Settings.from_arguments("DDPHooksStrategy", given)
        raise_on_conflict(self.settings.in_fit())
        super().__init__(precision_plugin=precision_plugin, **{name: given[name] for name in PASSED_ON})
        self._steps: TrainerSteps | None = None
        self._run: TrainingRun | None = None
        self._inputs = Inputs()
        self._watch = TrainerWatch()
        self._failed = False
        self._state = TrainerState()
        self._resume = AutoResume()

    @property
    def run(self) -> TrainingRun:
        """The training run; exists while fitting, as the reducer does."""
        if self._run is None:
            raise RuntimeError("The reducer exists only while the Trainer is fitting.")
        return self._run

    @property
    def reducer(self) -> Reducer:
        """The gradient reducer; exists while fitting, else it raises a RuntimeError."""
        return self.run.reducer

    def stats(self) -> dict[str, object]:
        """Return facts about buckets and communication; see `Reducer.stats`."""
        return self.reducer.stats()

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Replace the mean by ``hook(state, bucket) -> Future[Tensor] | Tensor``.

        May be called before fitting, for all fits to come; or in a hook of the LightningModule or a callback before the
        first backward (such as ``on_fit_start``), for that fit.

        Raises:
            RuntimeError: a hook is registered already, or a backward has run.
        """
        if (declared := resolve_hook((state, hook))) is None:  # by name: what is done without one
            return
        if self.settings.hook is not None:
            raise RuntimeError("A communication hook is already registered; it can be registered only once.")
        raise_on_conflict(self._settings_now(comm_hook=declared))
        if self._run is None:
            self.settings = replace(self.settings, comm_hook=declared)
        else:  # the hook is this fit's alone: the next one calls the same `on_fit_start`
            self._run.install_hook(declared)

    def active_group(self) -> comm.ProcessGroup | None:
        """Return the ranks that run the current step, for collectives of your own in a ``*_step``; None means all.

        In manual optimization a rank that has run out of data replays its last batch, in a group of its own.
        """
        return self._inputs.active_group()

    def use_averager(self, averager: ModelAverager, **flags: Any) -> None:
        """Average the model, as if that and its flags were given to the constructor; before the strategy is set up."""
        if self.settings.averager is not None:
            raise ValueError("Set `averager` of the strategy or the callback ModelAveraging, not both.")
        settings = replace(self.settings, averager=averager, **flags)
        settings.check()
        raise_on_conflict(settings.in_fit(**self._inputs.facts()))
        self.settings = settings

    def use_uneven_inputs(self, settings: UnevenSettings, trainer: pl.Trainer) -> None:
        """Take part in a run with uneven inputs; called at setup, on all ranks."""
        raise_on_conflict(self._settings_now(policy=settings.policy, divisor=settings.divisor))
        self._inputs.start(settings, trainer)

    def _settings_now(self, comm_hook: HookLike | None = None, **facts: Any) -> FitSettings:
        """Return what is set, as far as it is known here, and what the caller has found out."""
        hook = comm_hook or (self.settings.hook if self._run is None else self._run.hook.declared)
        return replace(self.settings, comm_hook=hook).in_fit(**{**self._inputs.facts(), **facts})

    @property
    def _may_communicate(self) -> bool:
        """Whether all ranks are where this one is; not while an exception is handled, nor in one that only launches."""
        module = self.lightning_module
        return not self._failed and comm.is_initialized() and (module is None or not module.trainer.interrupted)

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self.settings.resume == "auto":
            self._resume.watch(self.launcher)

    @override
    def setup_environment(self) -> None:
        join_world(self, super().setup_environment)
        self._resume.fit_begins(self.lightning_module and self.lightning_module.trainer)
        self._failed = self._state.agreed = False
        if self.settings.failure_timeout is not None:
            self._watch.start(self.settings, self._progress, self._inputs, lambda: self.launcher)

    def _progress(self) -> tuple[Progress, str]:
        place = Progress(0) if self._run is None else self._run.progress()
        return place, "" if self._inputs.logging is None else self._inputs.logging.waits_for

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self._state.agree()  # a rank that read none, while others may have
        super().setup(trainer)
        if self.settings.check_logged_values and comm.world_size() > 1:
            self._inputs.check_logging(trainer, self.root_device, lambda: getattr(self._run, "step", 0))
        self._watch.set_up()

    @override
    def configure_ddp(self) -> None:
        """Build the training run; the model stays as it is."""
        module = self.lightning_module
        assert module is not None
        manual, settings = not module.automatic_optimization, self._settings_now(**facts_of_fit(module))
        raise_on_conflict(settings)
        if settings.steps_early:
            warn_if_too_late(module)
        # Without a checkpoint a fit begins with new optimizers, hooks and averagers, and so does their clock.
        self._run = TrainingRun(
            module,
            self.settings,
            optimizers=lambda: self.optimizers,
            process_group=group_of_neighbors(self.settings.timeout),
            scaler=getattr(self.precision_plugin, "scaler", None),
            in_parts=manual,
            ends_steps=manual,
            weighs_samples=self.settings.gradient_weighting == "samples" and not self._inputs.uneven,
            agree_on={"UnevenInputs": self._inputs.text(), **to_agree_on_in_fit(module.trainer)},
            restored=self._state.restored,
            warn=warn_beside_bar,
        )
        self._state.begin(self._run)
        self._steps = TrainerSteps(self._run, self._inputs, settings, device=self.root_device)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self.run.attach_optimizers(self.optimizers)

    def _set_optimizers(self, optimizers: list[Optimizer]) -> None:
        DDPStrategy.optimizers.fset(self, optimizers)  # type: ignore[attr-defined]
        if self._run is not None and self._run.driver is not None and self._run.driver.attached:
            self._run.driver.attach(optimizers)  # others take over in mid-fit

    optimizers = property(DDPStrategy.optimizers.fget, _set_optimizers)  # type: ignore[attr-defined]

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        module = self.lightning_module
        assert module is not None
        self.run.hook.begin()
        settings = self._settings_now(**facts_of_fit(module))
        announce(self.run, settings, steps=steps_of_fit(module), inputs=self._inputs.text())

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        return self._inputs.wrap(super().process_dataloader(dataloader))

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        to_device = partial(super().batch_to_device, batch, device, dataloader_idx)
        return self._inputs.batch_to_device(batch, device or self.root_device, to_device)

    def _as_if_read(self, batch: Any) -> Any:
        # What the training loop does to a batch that it has just read.
        batch = _compat.before_batch_transfer(self.lightning_module, self.precision_plugin.convert_input(batch))
        return super().batch_to_device(batch)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._inputs.run_step("validation_step", super().validation_step, args, kwargs, self._as_if_read)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._inputs.run_step("test_step", super().test_step, args, kwargs, self._as_if_read)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._steps is not None
        self._steps.begin(args[0] if args else kwargs)
        step = partial(self._steps.user_step, _compat.compiled_in_place(self, super().training_step))
        return self._steps.end(self._inputs.run_step("training_step", step, args, kwargs, self._as_if_read))

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        steps, module, precision = self._steps, self.lightning_module, self.precision_plugin
        if steps is None or module is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        closure_loss = steps.weighted(closure_loss)
        self.pre_backward(closure_loss)
        closure_loss = precision.pre_backward(closure_loss, module)
        with steps.backward(closure_loss) as runs:
            if runs:
                precision.backward(closure_loss, module, optimizer, *args, **kwargs)
        closure_loss = precision.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any | None = None, **kwargs: Any
    ) -> Any:
        assert self._steps is not None
        step = super().optimizer_step
        return self._steps.optimizer_step(lambda closure: step(optimizer, closure, model, **kwargs), closure)

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with nullcontext() if self._steps is None else self._steps.accumulating():
            yield

    @override
    def on_validation_start(self) -> None:
        if self._run is not None:
            self._run.before_eval()

    @override
    def on_validation_end(self) -> None:
        if self._run is not None:
            self._run.after_eval()

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        return self._inputs.reduce(super().reduce, tensor, group, reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return self._inputs.decide(super().reduce_boolean_decision, decision, all, self.root_device)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        return self._inputs.all_gather(super().all_gather, tensor, group, sync_grads)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        # The Trainer waits for all ranks after a save; after an error they may never come.
        if args != ("Trainer.save_checkpoint",) or self._may_communicate:
            self._inputs.barrier(partial(super().barrier, *args, **kwargs))

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self._inputs.broadcast(super().broadcast, obj, src)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        state = super().lightning_module_state_dict()
        return state if self._run is None or not self._may_communicate else self._run.model_state(state)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        plain = getattr(optimizer, "_optimizer", optimizer)
        state = self._state.optimizer_state(self._run, plain) if self._may_communicate else None
        return super().optimizer_state(optimizer) if state is None else state

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if self._run is not None and self._may_communicate:
            self._run.before_checkpoint()
        if "optimizer_states" in checkpoint:  # else only the weights are wanted
            self._state.add_to(checkpoint, self._run, collective=self._may_communicate)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        read = partial(super().load_checkpoint, checkpoint_path, *args, **kwargs)
        checkpoint = self._state.load(str(checkpoint_path), read)
        if self._run is not None and self._state.restored is not None:  # a tuner puts back where it began
            self._run.restore(self._state.restored)
        return checkpoint

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._run is None or not self._run.sharded:
            super().load_optimizer_state_dict(checkpoint)
        if self._run is not None:
            self._state.load_optimizers(self._run, checkpoint["optimizer_states"])

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self.run.finish()
        self._state.end(self.run)

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._watch.explain(exception)
        self._failed = True
        # After an error of the connection, or in the middle of anything, nobody knows what groups still wait for.
        broken = comm.is_collective_error(exception) or not isinstance(exception, Exception)
        if self._run is not None:
            self._run.fail(broken=broken)
        self._inputs.fail(broken=broken)

    @override
    def teardown(self) -> None:
        self._watch.stop()
        self._state.close(self._run)
        if self._steps is not None:
            self._steps.close()
        self._run = self._steps = None
        self._inputs.close(failed=self._failed)
        super().teardown()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register ``ddp_hooks``, its launchers, and its forms that find unused parameters."""
        register_names(cls, strategy_registry)
