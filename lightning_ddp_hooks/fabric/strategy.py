"""The Fabric strategy: turns Fabric's verbs into calls of each model's `ModelRun`; no algorithm lives here."""

from __future__ import annotations

import logging
import math
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ddp_hooks import _compat, comm
from lightning_ddp_hooks.arguments import START_METHODS, require_backend_name, require_choice
from lightning_ddp_hooks.averaging.averager import ModelAverager
from lightning_ddp_hooks.fabric import watch
from lightning_ddp_hooks.fabric.checkpoint import LoadedInParts, add_states, take_states
from lightning_ddp_hooks.fabric.model_run import ModelRun
from lightning_ddp_hooks.fabric.module import HookedModule
from lightning_ddp_hooks.fabric.settings import Settings
from lightning_ddp_hooks.health.heartbeat import Progress
from lightning_ddp_hooks.hooks.registry import HookLike, resolve_hook
from lightning_ddp_hooks.optim.in_hook import OptimizerInHook
from lightning_ddp_hooks.reducer.config import ReducerConfig
from lightning_ddp_hooks.strategy.checkpoint_io import AtomicCheckpointIO
from lightning_ddp_hooks.strategy.combinations import idle, refuse
from lightning_ddp_hooks.strategy.loading import agree_on_checkpoint
from lightning_ddp_hooks.strategy.sent import SentOnce
from lightning_ddp_hooks.strategy.summary import declared, summary_text, without_effect

if TYPE_CHECKING:
    from lightning.fabric.accelerators.accelerator import Accelerator
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, Precision

log = logging.getLogger(__name__)

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


class FabricDDPHooksStrategy(DDPStrategy):
    """Data-parallel training under Lightning Fabric, with communication hooks; takes the place of ``strategy="ddp"``.

    It is a `DDPStrategy` to Fabric (samplers, launchers, clusters, precision), but gradients go through this package's
    own reducer. Each ``fabric.setup(model, optimizer)`` makes one: models are compared over the ranks, rank 0's weights
    go to all. ``optimizer.step()`` is the clock: a training step of a model is one step of its optimizer (of each of
    them, if it has several). Hooks, averagers and checks see the step of their own model.

    Args:
        accelerator: set by Fabric.
        parallel_devices: set by Fabric.
        cluster_environment: how processes find each other; by default detected (torchrun, SLURM, ...).
        checkpoint_io: how checkpoints are written; by default in files that are whole or not there.
        precision: set by Fabric from its ``precision``.
        comm_hook: what is done with each full bucket of gradients: a short name, a `CommHook`, or a pair
            ``(state, hook)`` by torch's contract; None for the mean over ranks. Works on every backend, also on CPU.
        averager: averages the model every few steps instead of gradients at every step; see
            `lightning_ddp_hooks.averaging`. Evaluate under `averaged_model`, and call `finish_averaging` at the end.
        save_replicas: save each rank's own model and optimizer state in checkpoints, to resume exactly in mid-period.
        optimizer_in_hook: steps the optimizer while gradients are being reduced, or shares its state among the ranks,
            or both; see `lightning_ddp_hooks.optim.OptimizerInHook`. Needs ``fabric.setup(model, optimizer)``.
        bucket_cap_mb: size at which a bucket is closed, in MiB; ``"auto"`` picks it by the link as measured.
        first_bucket_mb: the same for the first bucket, in MiB.
        gradient_as_bucket_view: let ``.grad`` be a slice of the bucket: no second copy of the gradients.
        find_unused_parameters: allow ranks to leave out any parameters in any backward.
        static_graph: learn in the first backward which parameters are used, and rely on it.
        broadcast_buffers: send rank 0's buffers to all ranks at setup and before forwards.
        reducer_backend: ``"auto"``, ``"native"`` or ``"python"``.
        process_group_backend: such as ``"gloo"`` or ``"nccl"``; by default by device.
        timeout: of collectives.
        failure_timeout: seconds, or None for no failure reports. From the first setup to the end of the process each
            rank tells the others through the store that it is alive; a rank that waits in a backward or a step for one
            that has failed, died or been silent for so long ends with an error that names it.
        check_replicas_every_n_steps: compare the parameters of all ranks every so many steps; None does so only before
            each checkpoint, 0 never. Where ranks are meant to differ nothing is compared.
        detect_nonfinite: raise on all ranks when a gradient is infinite or not a number, before it is clipped or the
            optimizer steps, naming rank and parameter. Has no effect under a GradScaler.
        start_method: how processes are started: ``"popen"``, ``"spawn"``, ``"fork"`` or ``"forkserver"``.

    Raises:
        TypeError: an argument of the wrong type, or an unknown one.
        ValueError: an argument out of range, or arguments that contradict each other.

    Example:
        >>> fabric = Fabric(devices=2, strategy=FabricDDPHooksStrategy(comm_hook="powersgd"))
        >>> fabric.launch()
        >>> model, optimizer = fabric.setup(model, optimizer)
    """

    _checkpoint_io: CheckpointIO | None

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        *,
        comm_hook: HookLike | None = None,
        averager: ModelAverager | None = None,
        save_replicas: bool = True,
        optimizer_in_hook: OptimizerInHook | None = None,
        bucket_cap_mb: float | Literal["auto"] = 25,
        first_bucket_mb: float = 1,
        gradient_as_bucket_view: bool = True,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        broadcast_buffers: bool = True,
        reducer_backend: Literal["auto", "native", "python"] = "auto",
        process_group_backend: str | None = None,
        timeout: timedelta | None = comm.DEFAULT_TIMEOUT,
        failure_timeout: float | None = 30.0,
        check_replicas_every_n_steps: int | None = None,
        detect_nonfinite: bool = False,
        start_method: StartMethod = "popen",
    ) -> None:
        require_choice("start_method", start_method, START_METHODS)
        require_backend_name(process_group_backend, comm.backend_names())
        self._settings = Settings(
            config=ReducerConfig(
                bucket_cap_mb=bucket_cap_mb,
                first_bucket_mb=first_bucket_mb,
                gradient_as_bucket_view=gradient_as_bucket_view,
                find_unused_parameters=find_unused_parameters,
                static_graph=static_graph,
                broadcast_buffers=broadcast_buffers,
                reducer_backend=reducer_backend,
            ),
            hook=resolve_hook(comm_hook),
            averager=averager,
            save_replicas=save_replicas,
            optimizer_in_hook=optimizer_in_hook,
            timeout=timeout,
            failure_timeout=failure_timeout,
            check_replicas_every_n_steps=check_replicas_every_n_steps,
            detect_nonfinite=detect_nonfinite,
        )
        refuse(self._settings.run(self._settings.hook))
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self._backward_sync_control = _SyncControl()  # type: ignore[assignment]
        # Held weakly: a model that the user lets go of goes.
        self._modules: list[weakref.ref[HookedModule]] = []
        self._lone_optimizers: list[weakref.ref[Optimizer]] = []
        self._saving = False

    @override
    def __repr__(self) -> str:
        # All that the Fabric of `lightning_fabric` says to a strategy of `lightning` is that it does not know this.
        hint = " for `from lightning.fabric import Fabric`, not `from lightning_fabric import Fabric`"
        return f"<{type(self).__name__}{hint if 'lightning_fabric' in sys.modules else ''}>"

    # ------------------------------------------------------------------ what users call

    def step(self, model: nn.Module | None = None) -> int:
        """Return the training step that comes next: how many have ended.

        Args:
            model: which one, if several were set up.
        """
        return self._run_of(model).step

    def stats(self, model: nn.Module | None = None) -> dict[str, object]:
        """Return facts about buckets and communication; see `Reducer.stats`."""
        return self._run_of(model).reducer.stats()

    def register_comm_hook(self, state: object, hook: Callable[..., Any], model: nn.Module | None = None) -> None:
        """Replace the mean by ``hook(state, bucket) -> Future[Tensor] | Tensor``; on all ranks.

        Args:
            state: handed to each call untouched.
            hook: called once for each full bucket, in order, on the backward path; see `GradBucket`.
            model: the model, before its first backward; None, before any model is set up, for all models.

        Raises:
            RuntimeError: a hook is registered already, or it is too late.
        """
        declared = resolve_hook((state, hook))
        assert declared is not None
        refuse(self._settings.run(declared, scaler=self._scaler is not None))
        if model is not None:
            self._run_of(model).install(declared)
            return
        if self._settings.hook is not None:
            raise RuntimeError("A communication hook is already registered; it can be registered only once.")
        if self._live_modules:
            raise RuntimeError(
                "Models have been set up already: say which one the hook is for, as in "
                "`register_comm_hook(state, hook, model)`."
            )
        self._settings = self._settings.with_hook(declared)

    @contextmanager
    def averaged_model(self, model: nn.Module | None = None) -> Iterator[None]:
        """Have the averaged (with DiLoCo: the global) model in place under this context, to evaluate it; on all ranks.

        Without an averager nothing happens.

        Args:
            model: which one, if several were set up.
        """
        with self._run_of(model).averaged():
            yield

    def finish_averaging(self, model: nn.Module | None = None) -> None:
        """End training: every rank gets the averaged model for good; on all ranks. Nothing happens without an averager.

        Args:
            model: which one, if several were set up.
        """
        self._run_of(model).finish_averaging()

    # ------------------------------------------------------------------ setup

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """What reads and writes checkpoints."""
        if self._checkpoint_io is None:
            self._checkpoint_io = AtomicCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @override
    def setup_module(self, module: nn.Module) -> HookedModule:  # type: ignore[override]
        """Build a reducer for the module; collective."""
        if self._settings.optimizer_in_hook is not None and any(p.requires_grad for p in module.parameters()):
            raise ValueError(
                "`optimizer_in_hook` steps the optimizer while the model's gradients come, and has to know both: use "
                "`model, optimizer = fabric.setup(model, optimizer)`, not `fabric.setup_module(model)`."
            )
        wrapped = self._set_up(module, [])
        for optimizer in _alive(self._lone_optimizers):
            wrapped.run.adopt(optimizer)
        return wrapped

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        if self._settings.optimizer_in_hook is not None:
            raise ValueError(
                "`optimizer_in_hook` steps the optimizer while the model's gradients come, and has to know both: use "
                "`model, optimizer = fabric.setup(model, optimizer)`, not `fabric.setup_optimizers(optimizer)`."
            )
        self._lone_optimizers = [weakref.ref(one) for one in (*_alive(self._lone_optimizers), optimizer)]
        for run in self._runs:
            run.adopt(optimizer)
        return optimizer

    @override
    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], *scheduler: Any
    ) -> tuple[Any, ...]:
        """Build a reducer for the module, and take over its optimizers; collective."""
        if not optimizers:
            return (self.setup_module(module), optimizers, *scheduler)
        wrapped = self._set_up(module, optimizers)
        for optimizer in optimizers:
            if not wrapped.run.shares(optimizer):
                rank_zero_warn(
                    f"{type(optimizer).__name__} was set up together with {type(module).__name__} and has none of its "
                    "parameters, so that it does not train it: make it with the `parameters()` of just this model."
                )
        for run in self._runs:
            for optimizer in optimizers:  # one may have the parameters of several models
                run.adopt(optimizer)
        return (wrapped, optimizers, *scheduler)

    def _set_up(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> HookedModule:
        refuse(self._settings.run(self._settings.hook, scaler=self._scaler is not None))
        params = {id(param) for param in module.parameters()}
        for run in self._runs:
            if run.module is module or any(id(param) in params for param in run.module.parameters()):
                run.close()
        first = not self._live_modules
        run = ModelRun(module, self._settings, optimizers, scaled=self._scaler is not None)
        run.follow_loss_scale(self._loss_scale())
        wrapped = HookedModule(module, run, self.root_device)
        self._modules = [*map(weakref.ref, self._live_modules), weakref.ref(wrapped)]
        if first:
            self._start_watch(run)
        self._say_what_is_done(run)
        return wrapped

    def _say_what_is_done(self, run: ModelRun) -> None:
        settings = self._settings
        texts = declared(run.hook, settings.averager, settings.optimizer_in_hook)
        rank_zero_info(summary_text(run.reducer.stats(), texts))
        if self.global_rank == 0:
            run.sent = SentOnce(run.hook, run.reducer)
            found = self._settings.run(run.hook, scaler=self._scaler is not None)
            # How many steps the user's loop has is not known.
            useless = without_effect(run.hook, settings.averager, math.inf, run.subgroups)
            for text in (*useless, *idle(found)):
                log.warning(text)

    @property
    def _live_modules(self) -> list[HookedModule]:
        return [module for module in _alive(self._modules) if not module.run.closed]

    @property
    def _runs(self) -> list[ModelRun]:
        return [module.run for module in self._live_modules]

    def _run_of(self, model: nn.Module | None) -> ModelRun:
        modules = self._live_modules
        if model is None:
            if len(modules) != 1:
                many = "no model has" if not modules else f"{len(modules)} models have"
                raise RuntimeError(f"Expected one model, but {many} been set up{': name one' if modules else ''}.")
            return modules[0].run
        original = getattr(model, "module", model)
        for module in modules:
            if module is model or module.module is model or module.module is original:
                return module.run
        raise RuntimeError("Expected a model that `fabric.setup(...)` returned, got one that was not set up.")

    # ------------------------------------------------------------------ the watch

    def _start_watch(self, run: ModelRun) -> None:
        reducer, timeout = run.reducer, self._settings.failure_timeout
        if timeout is None or reducer.world_size == 1:
            return
        own = weakref.ref(self)

        def where() -> tuple[Progress, bool]:
            strategy = own()
            places = [] if strategy is None else [run.where() for run in strategy._runs]
            # The model that is being trained now, or else the one that has come furthest.
            return max(places, key=lambda place: (place[1], place[0].step), default=(Progress(0), False))

        problem = watch.start(reducer.control_group, timeout, where, partial(_exit_process, own))
        if problem is not None:
            rank_zero_warn(problem)

    # ------------------------------------------------------------------ training

    @property
    def _scaler(self) -> Any:
        return getattr(self.precision, "scaler", None)

    def _loss_scale(self) -> float:
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step an optimizer; on all ranks. This is the clock of the models that it trains."""
        runs = [run for run in self._runs if run.has(optimizer)]
        closure = kwargs.get("closure")
        with ExitStack() as stack:
            for run in runs:
                stack.enter_context(run.stepping(optimizer))

            def finish(result: Any = None) -> Any:
                found = [run.finish_backward() for run in runs]  # all of them: other ranks wait for each
                if runs and not any(found):
                    raise _SkipStepError
                return result

            try:
                if closure is None:
                    finish()
                else:
                    kwargs["closure"] = lambda: finish(closure())
                output = super().optimizer_step(optimizer, **kwargs)
            except _SkipStepError:
                output = None
                for run in runs:
                    run.skip()
            if self._scaler is not None:
                for run in self._runs:
                    run.follow_loss_scale(self._loss_scale())
        return output

    @override
    def clip_gradients_norm(self, module: nn.Module, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Tensor:
        self._prepare_to_clip(module, optimizer)
        return super().clip_gradients_norm(module, optimizer, *args, **kwargs)

    @override
    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        self._prepare_to_clip(module, optimizer)
        super().clip_gradients_value(module, optimizer, *args, **kwargs)

    def _prepare_to_clip(self, module: nn.Module, optimizer: Optimizer) -> None:
        if self._settings.optimizer_in_hook is not None and self._settings.optimizer_in_hook.overlap:
            raise ValueError(
                "`fabric.clip_gradients` needs all gradients before the step, but `optimizer_in_hook` steps while they "
                "come: use `OptimizerInHook(shard=True, overlap=False)`, which steps when all gradients are there, or "
                "leave `optimizer_in_hook` out."
            )
        own = module.run if isinstance(module, HookedModule) else None
        for run in self._runs:
            if run is own or run.has(optimizer):
                run.finish_backward()

    # ------------------------------------------------------------------ checkpoints

    @override
    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        if not isinstance(module, HookedModule):
            return super().get_module_state_dict(module)
        state = super().get_module_state_dict(module.module)
        return module.run.model_state(state) if self._saving else state

    @override
    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        module = module.module if isinstance(module, HookedModule) else module
        super().load_module_state_dict(module, state_dict, strict=strict)

    @override
    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Return an optimizer's state; of a sharded one on all ranks, and whole on the first."""
        for run in self._runs:
            if run.has(optimizer) and (self._saving or run.driver is not None):
                return run.optimizer_state(optimizer)
        return super().get_optimizer_state(optimizer)

    @override
    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint; on all ranks."""
        found = self._models_in(state)
        for run in found.values():
            run.check_before_checkpoint()
        self._saving = True
        try:
            super().save_checkpoint(path, add_states(state, found), *args, **kwargs)
        finally:
            self._saving = False

    @override
    def load_checkpoint(  # type: ignore[override]
        self, path: Any, state: Any = None, strict: bool = True, **kwargs: Any
    ) -> dict[str, Any]:
        """Load a checkpoint into objects; on all ranks if ``state`` is a dict."""
        if not isinstance(state, dict) or not state:
            parts = self._loaded_in_parts(state)
            if not isinstance(parts, LoadedInParts):
                return super().load_checkpoint(path, state, strict, **kwargs)
            parts.load_state_dict(super().load_checkpoint(path, None, strict, **kwargs))
            return {}
        given = {key: self._loaded_in_parts(value) for key, value in state.items()}
        try:
            remainder = super().load_checkpoint(path, given, strict, **kwargs)
            states = take_states(remainder, self._models_in(state), str(path))
        except Exception as error:
            agree_on_checkpoint(str(path), None, error)
            raise
        agree_on_checkpoint(str(path), states.progress)
        for key, value in given.items():
            if not isinstance(value, LoadedInParts):
                state[key] = value
        for warning in states.apply():
            rank_zero_warn(warning)
        return remainder

    def _models_in(self, state: Mapping[str, Any]) -> dict[str, ModelRun]:
        """Find the models that are saved or loaded together with an optimizer of theirs; others are weights alone."""
        optimizers = [value for value in state.values() if isinstance(value, Optimizer)]
        models = {key: value.run for key, value in state.items() if isinstance(value, HookedModule)}
        return {key: run for key, run in models.items() if any(map(run.has, optimizers))}

    def _loaded_in_parts(self, value: Any) -> Any:
        for run in self._runs if isinstance(value, Optimizer) else ():
            if run.driver is not None and run.has(value):
                return LoadedInParts(value, run.driver)
        return value

    # ------------------------------------------------------------------ the end, names

    @override
    def teardown(self) -> None:
        watch.stop()
        for run in self._runs:
            run.close()
        super().teardown()

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


class _SyncControl:
    """What ``fabric.no_backward_sync`` asks."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        if not isinstance(module, HookedModule):
            raise TypeError(
                f"Expected a model that `fabric.setup(...)` returned for `fabric.no_backward_sync`, got "
                f"{type(module).__name__}."
            )
        return module.run.no_sync() if enabled else nullcontext()


class _SkipStepError(Exception):
    """Leaves an optimizer's step before its update: no rank had a loss."""


def _alive(references: Sequence[weakref.ref[Any]]) -> list[Any]:
    found = [reference() for reference in references]
    return [one for one in found if one is not None]


def _exit_process(strategy: weakref.ref[FabricDDPHooksStrategy], code: int) -> None:
    """End this process and those that it has started: one that was stopped would stay for ever."""
    owner = strategy()
    watch.kill_children(getattr(owner.launcher if owner is not None else None, "procs", None))
    os._exit(code)


def register() -> None:
    """Make the strategy known to Fabric by name."""
    FabricDDPHooksStrategy.register_strategies(STRATEGY_REGISTRY)
    _compat.refuse_in_standalone_package("ddp_hooks", package="lightning_fabric")
