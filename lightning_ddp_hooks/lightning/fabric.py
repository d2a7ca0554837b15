"""The strategy for Fabric: turns its verbs into those of each model's `TrainingRun`; no algorithm lives here."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.averaging.averager import ModelAverager
from lightning_ddp_hooks.config import FitSettings, Settings, StartMethod
from lightning_ddp_hooks.conflicts import TWO_PHASES, raise_on_conflict
from lightning_ddp_hooks.health.heartbeat import Progress
from lightning_ddp_hooks.hooks.contract import CommHook
from lightning_ddp_hooks.hooks.registry import HookLike, resolve_hook
from lightning_ddp_hooks.lightning.checkpoint_io import agree_on_checkpoint, checkpoint_io_property
from lightning_ddp_hooks.lightning.fabric_parts import FABRIC_KEY, HookedModule, PartialOptimizer, restore, take_states
from lightning_ddp_hooks.lightning.failure_watch import stop_watching_process, watch_process
from lightning_ddp_hooks.lightning.names import PASSED_ON, register_names
from lightning_ddp_hooks.lightning.restarts import join_world
from lightning_ddp_hooks.lightning.summary import announce
from lightning_ddp_hooks.optim.in_hook import OptimizerInHook
from lightning_ddp_hooks.optimizer_clock import OptimizerClock
from lightning_ddp_hooks.reducer.shm_backend import group_of_neighbors
from lightning_ddp_hooks.run import SkipStepError, TrainingRun, skippable_step

if TYPE_CHECKING:
    import torch
    from lightning.fabric.accelerators.accelerator import Accelerator
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, Precision


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
        save_replicas: save each rank's own model and optimizer state in checkpoints, to resume exactly in mid-period;
            ``"auto"`` does where that takes at most about 2 GiB for all ranks, which rank 0 gathers and writes.
        optimizer_in_hook: steps the optimizer while gradients are reduced, or shards its state over the ranks, or both;
            needs ``fabric.setup(model, optimizer)``.
        bucket_cap_mb: size at which a bucket is closed, in MiB; ``"auto"`` picks it by the link as measured.
        first_bucket_mb: the same for the first bucket; None for 1 MiB, or for `bucket_cap_mb` if that is less.
        gradient_as_bucket_view: let ``.grad`` be a slice of the bucket: no second copy of the gradients.
        find_unused_parameters: allow ranks to leave out any parameters in any backward.
        static_graph: learn in the first backward which parameters are used, and rely on it.
        broadcast_buffers: send rank 0's buffers to all ranks at setup and before forwards, also of an evaluation.
        reducer_backend: ``"auto"``, ``"native"`` or ``"python"``.
        process_group_backend: such as ``"gloo"`` or ``"nccl"``, by default by device; ``"shm"`` lets CPU ranks of one
            host talk through memory.
        timeout: of collectives.
        failure_timeout: seconds, or None for no failure reports. From the first setup on, a rank that waits in a
            backward or a step for one that has failed, died or been silent for so long ends with an error naming it.
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

    checkpoint_io = checkpoint_io_property

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
        save_replicas: bool | Literal["auto"] = "auto",
        optimizer_in_hook: OptimizerInHook | None = None,
        bucket_cap_mb: float | Literal["auto"] = 25,
        first_bucket_mb: float | None = None,
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
        given = dict(locals())
        self.settings = Settings.from_arguments("FabricDDPHooksStrategy", given)
        raise_on_conflict(self.settings.in_fit())
        super().__init__(precision=precision, **{name: given[name] for name in PASSED_ON})
        self._backward_sync_control = _SyncControl()  # type: ignore[assignment]
        # Held weakly: a model that the user lets go of goes.
        self._modules: list[weakref.ref[HookedModule]] = []
        self._lone_optimizers: list[weakref.ref[Optimizer]] = []
        self._saving = False

    def step(self, model: nn.Module | None = None) -> int:
        """Return the training step that comes next: how many have ended; of which model, if several were set up."""
        return self._run_of(model).step

    def stats(self, model: nn.Module | None = None) -> dict[str, object]:
        """Return facts about buckets and communication; see `Reducer.stats`."""
        return self._run_of(model).reducer.stats()

    def register_comm_hook(self, state: object, hook: Callable[..., Any], model: nn.Module | None = None) -> None:
        """Replace the mean by ``hook(state, bucket) -> Future[Tensor] | Tensor``; on all ranks.

        It is for one ``model``, before its first backward, or, before any is set up, for all.

        Raises:
            RuntimeError: a hook is registered already, or it is too late.
        """
        declared = resolve_hook((state, hook))
        assert declared is not None
        raise_on_conflict(self._settings_with(declared))
        if model is not None:
            self._run_of(model).install_hook(declared)
            return
        if self.settings.hook is not None:
            raise RuntimeError("A communication hook is already registered; it can be registered only once.")
        if self._live_modules:
            raise RuntimeError(
                "Models have been set up already: say which one the hook is for, as in "
                "`register_comm_hook(state, hook, model)`."
            )
        self.settings = replace(self.settings, comm_hook=declared)

    @contextmanager
    def averaged_model(self, model: nn.Module | None = None) -> Iterator[None]:
        """Have the averaged (with DiLoCo: the global) model in place under this context, to evaluate it; on all ranks.

        Without an averager nothing happens. The model is to be named if several were set up.
        """
        run = self._run_of(model)
        run.before_eval()
        try:
            yield
        finally:
            run.after_eval()

    def finish_averaging(self, model: nn.Module | None = None) -> None:
        """End training: with an averager every rank gets the averaged model for good; on all ranks."""
        self._run_of(model).finish()

    @override
    def setup_environment(self) -> None:
        join_world(self, super().setup_environment)

    @override
    def setup_module(self, module: nn.Module) -> HookedModule:  # type: ignore[override]
        """Build a reducer for the module; collective."""
        if any(p.requires_grad for p in module.parameters()):
            self._refuse_separate_setup("fabric.setup_module(model)")
        wrapped = self._set_up(module, [])
        for optimizer in _alive(self._lone_optimizers):
            wrapped.clock.adopt(optimizer)
        return wrapped

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        self._refuse_separate_setup("fabric.setup_optimizers(optimizer)")
        self._lone_optimizers = [weakref.ref(one) for one in (*_alive(self._lone_optimizers), optimizer)]
        for module in self._live_modules:
            module.clock.adopt(optimizer)
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
            if not wrapped.clock.shares(optimizer):
                rank_zero_warn(
                    f"{type(optimizer).__name__} was set up together with {type(module).__name__} and has none of its "
                    "parameters, so that it does not train it: make it with the `parameters()` of just this model."
                )
            for model in self._live_modules:  # it may have the parameters of several
                model.clock.adopt(optimizer)
        return (wrapped, optimizers, *scheduler)

    def _refuse_separate_setup(self, call: str) -> None:
        if self.settings.optimizer_in_hook is not None:
            raise ValueError(
                "`optimizer_in_hook` steps the optimizer while the model's gradients come, and has to know both: use "
                f"`model, optimizer = fabric.setup(model, optimizer)`, not `{call}`."
            )

    def _set_up(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> HookedModule:
        settings = self._settings_with(self.settings.hook)
        raise_on_conflict(settings)
        params = {id(param) for param in module.parameters()}
        for run in self._runs:
            if run.module is module or any(id(param) in params for param in run.module.parameters()):
                run.close()
        first = not self._live_modules
        clock = OptimizerClock(module, optimizers)
        # Parts of a module that have optimizers of their own are trained in turn.
        parts = len(optimizers) > 1
        run = TrainingRun(
            module,
            self.settings,
            clock=clock,
            process_group=group_of_neighbors(self.settings.timeout),
            scaler=self._scaler,
            in_parts=parts,
            warn=rank_zero_warn,
        )
        run.hook.begin()
        if optimizers:
            run.attach_optimizers(optimizers)
        wrapped = HookedModule(module, run, clock, self.root_device)
        self._modules = [*map(weakref.ref, self._live_modules), weakref.ref(wrapped)]
        if first and self.settings.failure_timeout is not None and run.reducer.world_size > 1:
            self._start_watch(run.reducer.control_group, self.settings.failure_timeout)
        announce(run, settings, steps=math.inf)  # how many steps the user's loop has is not known
        return wrapped

    def _settings_with(self, hook: CommHook | None) -> FitSettings:
        return replace(self.settings, comm_hook=hook).in_fit(scaler=self._scaler is not None)

    @property
    def _live_modules(self) -> list[HookedModule]:
        return [module for module in _alive(self._modules) if not module.run.closed]

    @property
    def _runs(self) -> list[TrainingRun]:
        return [module.run for module in self._live_modules]

    def _run_of(self, model: nn.Module | None) -> TrainingRun:
        modules = self._live_modules
        if model is None and len(modules) != 1:
            many = f"{len(modules)} models have" if modules else "no model has"
            raise RuntimeError(f"Expected one model, but {many} been set up{': name one' if modules else ''}.")
        if model is None:
            return modules[0].run
        original = getattr(model, "module", model)
        for module in modules:
            if module is model or module.module is model or module.module is original:
                return module.run
        raise RuntimeError("Expected a model that `fabric.setup(...)` returned, got one that was not set up.")

    def _start_watch(self, group: comm.ProcessGroup, timeout: float) -> None:
        own = weakref.ref(self)

        def where() -> tuple[Progress, bool]:
            strategy = own()
            places = [] if strategy is None else [(run.progress(), run.may_wait) for run in strategy._runs]
            # The model that is being trained now, or else the one that has come furthest.
            return max(places, key=lambda place: (place[1], place[0].step), default=(Progress(0), False))

        watch_process(group, timeout, where, lambda: getattr(own(), "launcher", None))

    @property
    def _scaler(self) -> Any:
        return getattr(self.precision, "scaler", None)

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step an optimizer; on all ranks. This is the clock of the models that it trains."""
        runs = [module.run for module in self._live_modules if module.clock.has(optimizer)]
        closure = kwargs.get("closure")
        with ExitStack() as stack:
            for run in runs:
                stack.enter_context(run.stepping(optimizer))

            def finish(result: Any = None) -> Any:
                found = [run.finish_backward() for run in runs]  # all of them: other ranks wait for each
                if runs and not any(found):
                    raise SkipStepError
                return result

            output = None
            with skippable_step(runs):
                if closure is None:
                    finish()
                else:
                    kwargs["closure"] = lambda: finish(closure())
                output = super().optimizer_step(optimizer, **kwargs)
            for run in self._runs:
                run.hook.note_loss_scale()
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
        if self.settings.optimizer_in_hook is not None and self.settings.optimizer_in_hook.overlap:
            raise ValueError(
                "`fabric.clip_gradients` needs all gradients before the step, but `optimizer_in_hook` steps while they "
                f"come: {TWO_PHASES}"
            )
        for model in self._live_modules:
            if model is module or model.clock.has(optimizer):
                model.run.finish_backward()

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
        for module in self._live_modules:
            if module.clock.has(optimizer) and (self._saving or module.run.driver is not None):
                return module.run.optimizer_state(optimizer)
        return super().get_optimizer_state(optimizer)

    @override
    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint; on all ranks."""
        found = self._models_in(state)
        for run in found.values():
            run.before_checkpoint()
        if found:
            state = {**state, FABRIC_KEY: {key: run.state_dict() for key, run in found.items()}}
        self._saving = True
        try:
            super().save_checkpoint(path, state, *args, **kwargs)
        finally:
            self._saving = False

    @override
    def load_checkpoint(  # type: ignore[override]
        self, path: Any, state: Any = None, strict: bool = True, **kwargs: Any
    ) -> dict[str, Any]:
        """Load a checkpoint into objects; on all ranks if ``state`` is a dict."""
        if not isinstance(state, dict) or not state:
            parts = self._loaded_in_parts(state)
            if not isinstance(parts, PartialOptimizer):
                return super().load_checkpoint(path, state, strict, **kwargs)
            parts.load_state_dict(super().load_checkpoint(path, None, strict, **kwargs))
            return {}
        given = {key: self._loaded_in_parts(value) for key, value in state.items()}
        try:
            remainder = super().load_checkpoint(path, given, strict, **kwargs)
            runs = self._models_in(state)
            states = take_states(remainder, str(path)) if runs else {}
        except Exception as error:
            agree_on_checkpoint(str(path), None, error)
            raise
        steps = [f"{key!r} at training step {read.get('step')}" for key, read in states.items()]
        agree_on_checkpoint(str(path), ", ".join(steps) or "no progress")
        state.update({key: value for key, value in given.items() if not isinstance(value, PartialOptimizer)})
        for key, run in runs.items():
            restore(run, key, states.get(key), str(path))
        return remainder

    def _models_in(self, state: Mapping[str, Any]) -> dict[str, TrainingRun]:
        """Find the models that are saved or loaded together with an optimizer of theirs; others are weights alone."""
        optimizers = [value for value in state.values() if isinstance(value, Optimizer)]
        models = {key: value for key, value in state.items() if isinstance(value, HookedModule)}
        return {key: model.run for key, model in models.items() if any(map(model.clock.has, optimizers))}

    def _loaded_in_parts(self, value: Any) -> Any:
        for module in self._live_modules if isinstance(value, Optimizer) else ():
            if module.run.driver is not None and module.clock.has(value):
                return PartialOptimizer(value, module.run.driver)
        return value

    @override
    def teardown(self) -> None:
        stop_watching_process()
        for run in self._runs:
            run.close()
        super().teardown()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register ``ddp_hooks``, its launchers, and its forms that find unused parameters."""
        register_names(cls, strategy_registry)


class _SyncControl:
    """What ``fabric.no_backward_sync`` asks."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        if not isinstance(module, HookedModule):
            raise TypeError(
                f"Expected a model that `fabric.setup(...)` returned for `fabric.no_backward_sync`, got "
                f"{type(module).__name__}."
            )
        return module.run.no_sync() if enabled else nullcontext()


def _alive(references: Sequence[weakref.ref[Any]]) -> list[Any]:
    found = [reference() for reference in references]
    return [one for one in found if one is not None]
