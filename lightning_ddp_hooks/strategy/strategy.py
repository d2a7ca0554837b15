"""The Lightning strategy: turns the Trainer's verbs into calls of the reducer; no algorithm lives here."""

from __future__ import annotations

import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ddp_hooks import _compat, comm
from lightning_ddp_hooks.arguments import (
    START_METHODS,
    require_backend_name,
    require_choice,
    require_failure_timeout,
    require_flag,
    require_timeout,
)
from lightning_ddp_hooks.averaging.averager import ModelAverager
from lightning_ddp_hooks.checkpoint import (
    STATE_KEY,
    progress_in,
    read_training_state,
    restore_hook,
    training_state,
)
from lightning_ddp_hooks.hooks.contract import BoundHook, CommHook, declaration_text
from lightning_ddp_hooks.hooks.install import install_hook
from lightning_ddp_hooks.hooks.registry import HookLike, resolve_hook
from lightning_ddp_hooks.optim.in_hook import OptimizerInHook
from lightning_ddp_hooks.reducer.agreement import UnusedPolicy
from lightning_ddp_hooks.reducer.config import ReducerConfig
from lightning_ddp_hooks.reducer.reducer import Reducer
from lightning_ddp_hooks.reducer.weights import SampleWeights
from lightning_ddp_hooks.strategy.combinations import Run, idle, refuse
from lightning_ddp_hooks.strategy.health import HealthStrategy
from lightning_ddp_hooks.strategy.lightning_names import averager_by_lightnings_names, hook_by_lightnings_names
from lightning_ddp_hooks.strategy.optimizer import between_backward_and_step
from lightning_ddp_hooks.strategy.sent import SentOnce
from lightning_ddp_hooks.strategy.summary import declared, summary_text, without_effect

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.plugins.precision import Precision

    from lightning_ddp_hooks.lightning.uneven.run import UnevenSettings

log = logging.getLogger(__name__)

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


class DDPHooksStrategy(HealthStrategy):
    """Data-parallel training with communication hooks; takes the place of ``strategy="ddp"``.

    It is a `DDPStrategy` to the Trainer (samplers, launchers, clusters, precision, checkpoints), but gradients go
    through this package's own reducer, and ``trainer.model`` is the LightningModule itself.

    Args:
        accelerator: set by the Trainer.
        parallel_devices: set by the Trainer.
        cluster_environment: how processes find each other; by default detected (torchrun, SLURM, ...).
        checkpoint_io: how checkpoints are written; by default in files that are whole or not there, see
            `lightning_ddp_hooks.strategy.checkpoint_io.AtomicCheckpointIO`.
        precision_plugin: set by the Trainer from its ``precision``.
        comm_hook: what is done with each full bucket of gradients: a short name, a `CommHook`, or a pair
            ``(state, hook)`` by torch's contract; None for the mean over ranks. Works on every backend, also on CPU.
            Short names are allreduce, batched_powersgd, bf16, fp16, fp8, int8, noop, onebit, post_local_sgd, powersgd,
            quantize_per_channel, quantize_per_tensor, topk.
        averager: averages the model every few steps instead of gradients at every step; see
            `lightning_ddp_hooks.averaging`.
        average_before_eval: put the averaged model in place for validation.
        save_replicas: save each rank's own model and optimizer state in checkpoints, to resume exactly in mid-period.
        optimizer_in_hook: steps the optimizer while gradients are being reduced, or shares its state among the ranks,
            or both; see `lightning_ddp_hooks.optim.OptimizerInHook`.
        bucket_cap_mb: size at which a bucket is closed, in MiB; ``"auto"`` picks it by the link as measured.
        first_bucket_mb: the same for the first bucket, in MiB.
        gradient_as_bucket_view: let ``.grad`` be a slice of the bucket: no second copy of the gradients.
        find_unused_parameters: allow ranks to leave out any parameters in any backward.
        static_graph: learn in the first backward which parameters are used, and rely on it.
        broadcast_buffers: send rank 0's buffers to all ranks at setup and before training steps.
        gradient_weighting: ``"ranks"`` weighs each rank alike; ``"samples"`` weighs each sample alike when ranks hold
            micro-batches of different sizes.
        skip_missing_loss: when ``training_step`` returns None (or a loss without gradient) on some rank: it takes part
            with ``"zeros"``, or ``"all"`` ranks skip the step. On all ranks alike the step is always skipped.
        reducer_backend: ``"auto"``, ``"native"`` or ``"python"``.
        process_group_backend: such as ``"gloo"`` or ``"nccl"``; by default by device.
        timeout: of collectives; on a command line hours:minutes:seconds, as in ``0:30:00``.
        failure_timeout: seconds, or None for no failure reports. While fitting, each rank tells the others through the
            store that it is alive. When a rank fails, dies or is stopped, the others end with an error that names it,
            its own error if it could still tell, and where they stood. A rank that cannot say that it failed is given
            up when it has been silent for so long while the others wait for it; one whose connections broke, earlier.
            A process whose main thread then is stuck in a collective of gloo writes the error to stderr and exits.
            Nothing of this is on the way of gradients.
        check_replicas_every_n_steps: compare the parameters of all ranks every so many steps; None does so only before
            each checkpoint, 0 never. Where ranks are meant to differ (an averager after its warm-up, the hooks Noop and
            PostLocalSGD) nothing is compared; under a hook that is a function, only if a number is given here.
        detect_nonfinite: raise on all ranks when a gradient is infinite or not a number, before the step, naming rank
            and parameter. Has no effect under a GradScaler, which deals with such gradients itself.
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

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        *,
        comm_hook: HookLike | None = None,
        averager: ModelAverager | None = None,
        average_before_eval: bool = True,
        save_replicas: bool = True,
        optimizer_in_hook: OptimizerInHook | None = None,
        bucket_cap_mb: float | Literal["auto"] = 25,
        first_bucket_mb: float = 1,
        gradient_as_bucket_view: bool = True,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        broadcast_buffers: bool = True,
        gradient_weighting: Literal["ranks", "samples"] = "ranks",
        skip_missing_loss: Literal["zeros", "all"] = "zeros",
        reducer_backend: Literal["auto", "native", "python"] = "auto",
        process_group_backend: str | None = None,
        timeout: timedelta | None = comm.DEFAULT_TIMEOUT,
        failure_timeout: float | None = 30.0,
        check_replicas_every_n_steps: int | None = None,
        detect_nonfinite: bool = False,
        start_method: StartMethod = "popen",
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_state: object | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        model_averaging_period: int | None = None,
    ) -> None:
        self._config = ReducerConfig(
            bucket_cap_mb=bucket_cap_mb,
            first_bucket_mb=first_bucket_mb,
            gradient_as_bucket_view=gradient_as_bucket_view,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            broadcast_buffers=broadcast_buffers,
            reducer_backend=reducer_backend,
        )
        require_choice("gradient_weighting", gradient_weighting, ("ranks", "samples"))
        require_choice("skip_missing_loss", skip_missing_loss, ("zeros", "all"))
        require_flag("average_before_eval", average_before_eval)
        require_flag("save_replicas", save_replicas)
        require_choice("start_method", start_method, START_METHODS)
        require_timeout(timeout)
        require_failure_timeout(failure_timeout)
        self._failure_timeout = failure_timeout
        require_backend_name(process_group_backend, comm.backend_names())
        hook = hook_by_lightnings_names(comm_hook, ddp_comm_state, ddp_comm_hook, ddp_comm_wrapper)
        self._hook = resolve_hook(hook)
        self._gradient_weighting = gradient_weighting
        self._skip_missing_loss = skip_missing_loss
        self._averager_flags = {"average_before_eval": average_before_eval, "save_replicas": save_replicas}
        averager = averager_by_lightnings_names(averager, model_averaging_period, ddp_comm_state)
        if averager is not None:
            self.use_averager(averager, average_before_eval=average_before_eval, save_replicas=save_replicas)
        if optimizer_in_hook is not None:
            self._use_optimizer_in_hook(optimizer_in_hook)
        self._use_checks(check_replicas_every_n_steps, detect_nonfinite)
        refuse(self._run())
        self._failed = False
        self._final_state: dict[str, Any] | None = None
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self._reducer: Reducer | None = None
        self._weights: SampleWeights | None = None
        self._bound_hook: BoundHook | None = None
        self._restored: dict[str, Any] | None = None
        self._step = 0
        self._loss_scale = 1.0
        self._passes_in_backward = 0
        self._accumulating = False
        self._missing_loss: Tensor | None = None
        self._sent: SentOnce | None = None

    # ------------------------------------------------------------------ what users call

    @property
    def reducer(self) -> Reducer:
        """The gradient reducer; exists while fitting.

        Raises:
            RuntimeError: the Trainer is not fitting.
        """
        if self._reducer is None:
            raise RuntimeError("The reducer exists only while the Trainer is fitting.")
        return self._reducer

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Replace the mean by ``hook(state, bucket) -> Future[Tensor] | Tensor``.

        May be called before fitting, for all fits to come; or in a hook of the LightningModule or a callback before the
        first backward (such as ``on_fit_start``), for that fit.

        Raises:
            RuntimeError: a hook is registered already, or a backward has run.
        """
        declared = resolve_hook((state, hook))
        assert declared is not None
        if self._hook is not None:
            raise RuntimeError("A communication hook is already registered; it can be registered only once.")
        refuse(self._run(hook=declared))
        if self._reducer is not None:  # the hook is this fit's alone: the next one calls the same `on_fit_start`
            self._install_hook(declared)
        else:
            self._hook = declared

    @override
    def use_averager(
        self, averager: ModelAverager, *, average_before_eval: bool = True, save_replicas: bool = True
    ) -> None:
        if isinstance(averager, ModelAverager):
            refuse(self._run(averager=averager))
        super().use_averager(averager, average_before_eval=average_before_eval, save_replicas=save_replicas)

    @override
    def use_uneven_inputs(self, settings: UnevenSettings, trainer: pl.Trainer) -> None:
        refuse(self._run(policy=settings.policy, divisor=settings.divisor))
        super().use_uneven_inputs(settings, trainer)

    def _run(self, **found: Any) -> Run:
        """Return what is set, as far as it is known here, and what the caller has found out."""
        known: dict[str, Any] = {
            "hook": self._hook if self._fit_hook is None else self._fit_hook,
            "averager": self._averager,
            "optimizer_in_hook": self._optimizer_in_hook,
            "gradient_weighting": self._gradient_weighting,
            "skip_missing_loss": self._skip_missing_loss,
            "find_unused_parameters": self._config.find_unused_parameters,
            "static_graph": self._config.static_graph,
            "detect_nonfinite": self._detects_nonfinite,
            "check_replicas_every_n_steps": self._check_replicas_every,
            **self._averager_flags,
        }
        if self._uneven is not None:
            known |= {"policy": self._uneven.settings.policy, "divisor": self._uneven.settings.divisor}
        return Run(**{**known, **found})

    def _run_of_fit(self, module: pl.LightningModule) -> Run:
        """Return the same with what the Trainer and the module say."""
        trainer = module.trainer
        return self._run(
            manual=not module.automatic_optimization,
            gradient_clip_val=trainer.gradient_clip_val,
            accumulate_grad_batches=trainer.accumulate_grad_batches,
            scaler=getattr(self.precision_plugin, "scaler", None) is not None,
            late=between_backward_and_step(module),
        )

    def stats(self) -> dict[str, object]:
        """Return facts about buckets and communication; see `Reducer.stats`."""
        return self.reducer.stats()

    def describe(self) -> dict[str, str | None]:
        """Return what this fit has as ``hook``, ``averager`` and ``optimizer`` in the hook, in short words."""
        hook = self._hook if self._fit_hook is None else self._fit_hook
        return declared(hook, self._averager, self._optimizer_in_hook)

    @override
    def __repr__(self) -> str:
        # All that the Trainer of `pytorch_lightning` says to a strategy of `lightning` is that it does not know this.
        hint = " for `import lightning.pytorch as pl`, not `import pytorch_lightning as pl`"
        return f"<{type(self).__name__}{hint if 'pytorch_lightning' in sys.modules else ''}>"

    # ------------------------------------------------------------------ setup and teardown

    @override
    def configure_ddp(self) -> None:
        """Build the reducer; the model stays as it is."""
        module = self.lightning_module
        assert module is not None
        policy = None
        refuse(self._run_of_fit(module))
        if not module.automatic_optimization and not self._config.find_unused_parameters:
            policy = UnusedPolicy.ALIKE
        self._reducer = Reducer(
            module,
            self._config,
            policy=policy,
            skip_missing_loss=self._skip_missing_loss,
            ends_steps=not module.automatic_optimization,
            timeout=self._timeout,
            agree_on={
                "comm_hook": declaration_text(self._hook),
                "averager": declaration_text(self._averager),
                "optimizer_in_hook": repr(self._optimizer_in_hook),
                **self._health_settings(),
                **self._settings_of_fit(module),
            },
        )
        self._start_nonfinite(self._reducer)
        self._start_optimizers(self._reducer, module)
        # Without a checkpoint a fit begins with new optimizers, hooks and averagers, and so does their clock.
        self._step = 0 if self._restored is None else self._restored["step"]
        self._loss_scale = 1.0 if self._restored is None else self._restored.get("loss_scale", 1.0)
        if self._hook is not None:
            self._install_hook(self._hook)
        if self._gradient_weighting == "samples" and self._uneven is None:
            self._weights = SampleWeights(self._reducer.control_group)
        self._failed = self._broken = False
        self._final_state = None
        self._start_averaging(module)
        log.debug("reducer: %s", self._reducer.stats())

    def _uneven_text(self) -> str | None:
        settings = None if self._uneven is None else self._uneven.settings
        return None if settings is None else f"policy={settings.policy!r}, divisor={settings.divisor!r}"

    def _settings_of_fit(self, module: pl.LightningModule) -> dict[str, object]:
        """Return what must be the same on all ranks beside what the reducer and the watch are given, by name."""
        trainer = module.trainer
        return {
            "gradient_weighting": self._gradient_weighting,
            "skip_missing_loss": self._skip_missing_loss,
            **(self._averager_flags if self._averager is not None else {}),
            "UnevenInputs": self._uneven_text(),
            "callbacks of lightning_ddp_hooks": ", ".join(_own_callbacks(trainer)) or None,
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "gradient_clip_val": trainer.gradient_clip_val,
            "gradient_clip_algorithm": None if trainer.gradient_clip_val is None else trainer.gradient_clip_algorithm,
            "precision": self.precision_plugin.precision,
            "max_steps": trainer.max_steps,
            "max_epochs": trainer.max_epochs,
        }

    def _install_hook(self, hook: CommHook) -> None:
        assert self._reducer is not None
        self._fit_hook = hook
        self._follow_hook(hook)
        if self._optimizers_driver is not None:
            hook = self._optimizers_driver.hook(hook) or hook
        self._bound_hook = install_hook(self._reducer, hook, lambda: self._step)
        self._restore_hook()

    def _step_behind_the_mean(self) -> None:
        """Have the optimizer stepped in the hook although no hook of the user's reduces the gradients."""
        driver = self._optimizers_driver
        if driver is not None and not driver.has_hook and (hook := driver.hook(None)) is not None:
            install_hook(self.reducer, hook, lambda: self._step)

    def _restore_hook(self) -> None:
        if self._restored is not None and (warning := restore_hook(self._restored, self._bound_hook)):
            rank_zero_warn(warning)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if self._bound_hook is None:  # none was registered by now, so that its state goes unused
            self._restore_hook()
            self._step_behind_the_mean()
        self._follow_loss_scale()
        self._say_what_is_done()

    def _say_what_is_done(self) -> None:
        hook = self._hook if self._fit_hook is None else self._fit_hook
        texts = self.describe()
        inputs = self._uneven_text()
        texts["inputs"] = None if inputs is None else f"uneven, {inputs}"
        rank_zero_info(summary_text(self.reducer.stats(), texts))
        self._sent = SentOnce(hook, self.reducer) if self.global_rank == 0 else None
        module = self.lightning_module
        assert module is not None
        known = module.automatic_optimization  # else a step of the Trainer is not one of ours
        steps = float(module.trainer.estimated_stepping_batches) if known else math.inf
        if self.global_rank == 0:
            found = without_effect(hook, self._averager, steps, getattr(self._bound_hook, "subgroups", None))
            for text in (*found, *idle(self._run_of_fit(module))):
                log.warning(text)

    def _follow_loss_scale(self) -> None:
        """Have the hook's memory follow the scale of the loss, which is that of the gradients; waits for the device."""
        if self._bound_hook is None:
            return
        scaler = getattr(self.precision_plugin, "scaler", None)
        scale = 1.0 if scaler is None else float(scaler.get_scale())
        if scale != self._loss_scale:
            self._bound_hook.rescale(scale / self._loss_scale)
            self._loss_scale = scale

    # ------------------------------------------------------------------ checkpoints

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        self._check_replicas_before_checkpoint()
        if "optimizer_states" in checkpoint:  # else only the weights are wanted
            checkpoint[STATE_KEY] = self._final_state or self._training_state(collective=self._may_communicate)
            checkpoint[STATE_KEY]["missing"] += self._add_averaging_state(checkpoint)
            checkpoint[STATE_KEY]["missing"] += self._missing_optimizer_state()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        # The Trainer waits for all ranks after a save; after an error they may never come.
        if self._may_communicate or args != ("Trainer.save_checkpoint",):
            super().barrier(*args, **kwargs)

    def _training_state(self, *, collective: bool) -> dict[str, Any]:
        return training_state(self._step, self._bound_hook, loss_scale=self._loss_scale, collective=collective)

    @override
    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint: dict[str, Any] = {}
        failure: Exception | None = None
        try:
            checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
            # Groups do not exist yet: what was read is applied in setup.
            self._restored = read_training_state(checkpoint, str(checkpoint_path))
        except Exception as error:
            failure = error
        self._agree_on_checkpoint(str(checkpoint_path), progress_in(checkpoint), failure)
        if self._reducer is not None and self._restored is not None:  # while fitting: a tuner puts back where it began
            self._step = self._restored["step"]
            self._loss_scale = self._restored.get("loss_scale", 1.0)
            self._restore_hook()
        return checkpoint

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        # For a checkpoint that is saved once the fit is over, when there are no groups any more.
        self._final_state = self._training_state(collective=True)

    # ------------------------------------------------------------------ the end

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._failed = True
        # After an error of the connection, or in the middle of anything, nobody knows what groups still wait for.
        self._broken = comm.is_collective_error(exception) or not isinstance(exception, Exception)
        if self._reducer is not None:
            self._reducer.failed = True
            self._reducer.aborted_work |= self._weights is not None and self._weights.pending
        if self._uneven is not None:
            self._uneven.failed, self._uneven.broken = True, self._broken

    @override
    def teardown(self) -> None:
        self._stop_watch()
        self._stop_nonfinite()
        self._stop_averaging()
        self._stop_optimizers()
        self._sent = None
        if self._reducer is not None:
            self._reducer.detach()
            self._reducer = None
        self._weights = self._bound_hook = self._restored = self._fit_hook = None
        self._missing_loss = None
        super().teardown()

    # ------------------------------------------------------------------ training

    def _step_ended(self) -> None:
        self._step += 1
        self._average_after_step()
        self._check_replicas_after_step()
        if self._sent is not None and (text := self._sent.step_ended(self._step)) is not None:
            rank_zero_info(text)

    @override
    def _training_step_ran(self) -> None:
        module = self.lightning_module
        assert module is not None
        if not module.automatic_optimization:
            self.reducer.end_step()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        assert module is not None
        reducer, tail = self.reducer, None if self._uneven is None else self._uneven.tail
        if tail is not None and not self._accumulating:
            reducer.sync = True  # with an averager too: a rank without data follows those that have some
        reducer.before_forward()
        self._watch_gradients()
        if self._weights is not None:
            self._weights.post(_compat.samples_in(args[0] if args else kwargs))
        passes, self._passes_in_backward = reducer.synced_backwards, 0
        output = super().training_step(*args, **kwargs)
        if tail is not None:
            reducer.buffers.refresh(tail.first)
        if not module.automatic_optimization:
            if reducer.synced_backwards - passes > self._passes_in_backward or self._trains_alone:
                self._check_gradients()
            self._step_ended()
            weighs = self._weights is not None or self._uneven is not None
            if weighs and reducer.synced_backwards - passes != self._passes_in_backward:
                cause = '`gradient_weighting="samples"` scales' if self._uneven is None else "UnevenInputs scales"
                raise RuntimeError(
                    f"{cause} the loss in `manual_backward`; with `loss.backward()` it would have no effect. Call "
                    "`self.manual_backward(loss)` instead."
                )
        elif output is None:
            # Lightning refuses None on several ranks; a constant stands for it until the ranks have agreed.
            output = self._missing_loss = torch.zeros((), device=self.root_device, requires_grad=True)
        return output

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        reducer, module = self._reducer, self.lightning_module
        if reducer is None or module is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        missing = self._missing_loss is not None
        self._missing_loss = None
        joined = self._uneven is not None and self._uneven.joined
        constant = not (missing or joined or closure_loss.requires_grad)
        if constant:
            warnings.warn(
                f"The loss of rank {self.global_rank} does not depend on any parameter that requires a gradient; the "
                "rank takes part in the step without gradients.",
                stacklevel=2,
            )
        weights = self._weights or self._uneven
        if weights is not None and (factor := weights.factor()) != 1.0:
            closure_loss = closure_loss * factor
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        self._watch_gradients()
        passes = reducer.synced_backwards
        with self._overlapping(), reducer.shadowing(joined), reducer.backward_window():
            if not (missing or constant or joined):
                self.precision_plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        self._passes_in_backward += reducer.synced_backwards - passes
        if reducer.synced_backwards > passes or self._trains_alone:
            self._check_gradients()
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any | None = None, **kwargs: Any
    ) -> Any:
        module, reducer = self.lightning_module, self.reducer
        assert module is not None
        reducer.finalize_pending_backward()
        if not module.automatic_optimization:
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
            self._follow_loss_scale()
            return output

        def closure_that_may_skip() -> Any:
            result = closure()
            if reducer.skip_step:
                raise _SkipStepError
            return result

        try:
            with self._stepping():
                output = super().optimizer_step(optimizer, closure_that_may_skip, model, **kwargs)
        except _SkipStepError:
            output = None
            self._roll_back_step()
        self._follow_loss_scale()
        self._step_ended()
        return output

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        if self._reducer is None:
            yield
            return
        self._accumulating = True
        try:
            with self._reducer.no_sync():
                yield
        finally:
            self._accumulating = False

    # ------------------------------------------------------------------ names

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register ``ddp_hooks``, its launchers, and its forms that find unused parameters."""
        launchers: Mapping[str, StartMethod] = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
        for suffix, start_method in launchers.items():
            for unused_suffix, settings in (
                ("", {}),
                ("_find_unused_parameters_true", {"find_unused_parameters": True}),
                ("_find_unused_parameters_false", {"find_unused_parameters": False}),
            ):
                strategy_registry.register(
                    f"ddp_hooks{suffix}{unused_suffix}",
                    cls,
                    description=f"Data parallel with communication hooks, started by {start_method}",
                    override=True,
                    start_method=start_method,
                    **settings,
                )


def _own_callbacks(trainer: pl.Trainer) -> list[str]:
    """Return the names of this package's callbacks that the Trainer has: they communicate."""
    own = f"{__name__.partition('.')[0]}."
    classes = [
        next((base for base in type(callback).__mro__ if base.__module__.startswith(own)), None)
        for callback in trainer.callbacks  # type: ignore[attr-defined]
    ]
    return sorted(found.__name__ for found in classes if found is not None)


class _SkipStepError(Exception):
    """Leaves an optimizer's step between its closure and its update."""


def register() -> None:
    """Make the strategy known to Lightning's Trainer by name."""
    DDPHooksStrategy.register_strategies(StrategyRegistry)
    _compat.refuse_in_standalone_package("ddp_hooks")
