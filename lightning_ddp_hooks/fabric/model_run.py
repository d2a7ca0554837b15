"""One model that Fabric has set up: its reducer, hook, averager and optimizers, and the clock that they share.

    model(...)         forward_begins -> the user's forward -> forward_ended      decides: reduce, or accumulate
    backward           the reducer works by itself
    clip, step         finish_backward                                            a rank without a loss joins here
    optimizer.step()   stepping: the update, then the clock, then averages             if it is due

[Note: when a step ends] The clock counts training steps. With one optimizer each ``optimizer.step()`` is one. With
several a step ends when each has stepped once; one that steps again before the others have begins the next step, so
that the clock goes on whatever the user's loop does.

[Note: weights that are loaded] Averagers such as DiLoCo keep a global model, to which weights that a user loads in
mid-run would be pulled back. So an averager begins anew with the next step if weights came without a state of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.fabric.utilities import rank_zero_info, rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_ddp_hooks.averaging.driver import Averaging
from lightning_ddp_hooks.averaging.gradients import replicas_should_be_identical
from lightning_ddp_hooks.checkpoint import STATE_KEY, read_training_state, restore_hook, training_state
from lightning_ddp_hooks.fabric.settings import Settings
from lightning_ddp_hooks.health.heartbeat import Progress
from lightning_ddp_hooks.health.nonfinite import NonfiniteGuard
from lightning_ddp_hooks.health.replicas import check_replicas
from lightning_ddp_hooks.hooks.contract import BoundHook, CommHook
from lightning_ddp_hooks.hooks.install import install_hook
from lightning_ddp_hooks.optim.driver import OptimizerDriver
from lightning_ddp_hooks.reducer.agreement import UnusedPolicy
from lightning_ddp_hooks.reducer.autograd_hooks import roots_in
from lightning_ddp_hooks.reducer.reducer import Reducer
from lightning_ddp_hooks.strategy.sent import SentOnce

_CLOSED = (
    "This model's parameters belong to a model that was set up later: use what that `fabric.setup(...)` returned; "
    "models that share parameters have to be set up as one module that holds both."
)


class ModelRun:
    """Trains one model on several ranks. Construction is collective.

    Args:
        module: the user's.
        settings: of the strategy.
        optimizers: that were set up together with the module.
        scaled: whether a GradScaler scales the loss.

    Attributes:
        module: the user's.
        reducer: reduces the gradients.
        driver: steps the optimizers, with ``optimizer_in_hook``.
        hook: what reduces the gradients; None for the mean.
        sent: who says what a step sends; None where nobody does.
        step: the training step that comes next; see [Note: when a step ends].
    """

    def __init__(
        self, module: nn.Module, settings: Settings, optimizers: Sequence[Optimizer] = (), *, scaled: bool = False
    ) -> None:
        self.module = module
        self.step = 0
        self.hook: CommHook | None = None
        self._settings = settings
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        # Parts of a module that have optimizers of their own are trained in turn.
        in_parts = len(optimizers) > 1 and not settings.config.find_unused_parameters
        self.reducer = Reducer(
            module,
            settings.config,
            policy=UnusedPolicy.ALIKE if in_parts else None,
            timeout=settings.timeout,
            agree_on=settings.to_agree_on(),
        )
        self.reducer.on_backward_begin = self._backward_begins
        self.sent: SentOnce | None = None
        self.closed = False
        self._sync = True
        self._awaits_backward = False
        self._passes_before = 0
        self._stepped: set[int] = set()
        self._stepping = False
        self._loss_scale = 1.0
        self._warned = False
        self._bound_hook: BoundHook | None = None
        self._averaging: Averaging | None = None
        self._weights_loaded = False
        # A GradScaler makes gradients infinite on purpose, and skips such steps.
        detects = settings.detect_nonfinite and not scaled
        self._nonfinite = NonfiniteGuard(self.reducer.control_group) if detects else None
        self.reducer.nonfinite = self._nonfinite
        self._early = ExitStack()
        self.driver = self._make_driver(optimizers)
        if settings.hook is not None:
            self.install(settings.hook)
        elif self.driver is not None and (behind := self.driver.hook(None)) is not None:
            install_hook(self.reducer, behind, lambda: self.step)
        if self.driver is not None:
            self.driver.attach(optimizers)
        if settings.averager is not None:
            self._start_averaging()
            self._loading = module.register_load_state_dict_post_hook(self._note_loading)

    def _make_driver(self, optimizers: Sequence[Optimizer]) -> OptimizerDriver | None:
        if self._settings.optimizer_in_hook is None or not optimizers:
            return None
        driver = OptimizerDriver(self._settings.optimizer_in_hook, self.reducer)
        # Each backward that reduces gradients is one that leads to a step.
        self._early.enter_context(driver.stepping())
        self._early.enter_context(driver.overlapping())
        return driver

    def install(self, hook: CommHook) -> None:
        """Have a hook reduce the gradients; collective.

        Raises:
            RuntimeError: a hook is registered already, or a backward has run.
        """
        behind = hook if self.driver is None else self.driver.hook(hook) or hook
        self._bound_hook = install_hook(self.reducer, behind, lambda: self.step)
        self.hook = hook
        if self._averaging is not None:
            self._averaging.follow(hook)
            self._prepare_step()

    # ------------------------------------------------------------------ optimizers

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that train the model, in the order in which they were set up."""
        alive = [reference() for reference in self._optimizers]
        return [optimizer for optimizer in alive if optimizer is not None]

    @property
    def subgroups(self) -> int | None:
        """How many subgroups the hook has, if it is one that has some."""
        return getattr(self._bound_hook, "subgroups", None)

    def has(self, optimizer: Optimizer) -> bool:
        """Tell whether an optimizer trains the model."""
        return any(own is optimizer for own in self.optimizers)

    def shares(self, optimizer: Optimizer) -> bool:
        """Tell whether an optimizer has parameters of the model."""
        own = {id(param) for param in self.module.parameters()}
        return any(id(param) in own for group in optimizer.param_groups for param in group["params"])

    def adopt(self, optimizer: Optimizer) -> None:
        """Count an optimizer among those that train the model, if it has parameters of it."""
        if not self.has(optimizer) and self.shares(optimizer):
            self._optimizers.append(weakref.ref(optimizer))

    # ------------------------------------------------------------------ forward and backward

    def forward_begins(self) -> None:
        """Prepare for the user's forward; collective where buffers are refreshed."""
        if self.closed:
            raise RuntimeError(_CLOSED)
        if self._weights_loaded and torch.is_grad_enabled():
            self._restart_averaging()
        self.reducer.before_forward()

    def forward_ended(self, output: object) -> None:
        """Take what the user's forward returned; with gradients enabled, it decides what its backward does."""
        if not torch.is_grad_enabled():
            return
        reducer = self.reducer
        reducer.sync = self._sync and (self._averaging is None or self._averaging.syncs_gradients())
        if reducer.sync:
            self._awaits_backward = True
            reducer.watch_backward_of(roots_in(output))
        if reducer.synced_backwards and not self._warned and not self.optimizers:
            self._warn_of_a_clock_that_stands()

    def _warn_of_a_clock_that_stands(self) -> None:
        self._warned = True
        settings = self._settings
        waiting = {"comm_hook": self.hook, "averager": settings.averager}
        names = [f"`{name}`" for name, value in waiting.items() if value is not None]
        if settings.check_replicas_every_n_steps:
            names.append("`check_replicas_every_n_steps`")
        if names:
            rank_zero_warn(
                f"No optimizer of this model was set up, so that no training step is ever counted, which "
                f"{' and '.join(names)} may wait for: use `fabric.setup(model, optimizer)` or "
                "`fabric.setup_optimizers(optimizer)`."
            )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication; the first backward of a later forward reduces them all."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def _backward_begins(self) -> None:
        if self.driver is not None and self.driver.begun:
            raise RuntimeError(
                "A second backward before `optimizer.step()`: `optimizer_in_hook` has stepped while the gradients of "
                "the first one came. Accumulate under `fabric.no_backward_sync(model)`, or use "
                "`OptimizerInHook(shard=True, overlap=False)`."
            )

    def finish_backward(self) -> bool:
        """Have the gradients of this step in ``.grad``; before they are used, on all ranks.

        A rank that ran no backward since the last step, while others may have, does its part here with zeros.

        Returns:
            False if no rank ran one.

        Raises:
            RuntimeError: on all ranks, if a gradient is not finite and the user wants to know.
        """
        reducer = self.reducer
        reducer.finalize_pending_backward()
        joins = self._awaits_backward and reducer.synced_backwards == self._passes_before
        self._awaits_backward = False
        if joins:
            reducer.sync = True
            with reducer.backward_window():
                pass
        if self._nonfinite is not None:
            if reducer.synced_backwards == self._passes_before:  # the gradients are used as they are
                named = zip(reversed(reducer.names), reversed(reducer.params), strict=True)
                self._nonfinite.look_at_all((name, param.grad) for name, param in named)
            self._nonfinite.check(self.step)
        return not (joins and reducer.skip_step)

    # ------------------------------------------------------------------ the clock

    @contextmanager
    def stepping(self, optimizer: Optimizer) -> Iterator[None]:
        """Surround the step of an optimizer; on all ranks, and collective where something is due."""
        self._stepping = True
        try:
            if id(optimizer) in self._stepped:
                self._step_is_over()
            yield
            self._passes_before = self.reducer.synced_backwards
            self._awaits_backward = False
            self._stepped.add(id(optimizer))
            if all(id(own) in self._stepped for own in self.optimizers):
                self._step_is_over()
        finally:
            self._stepping = False

    def skip(self) -> None:
        """Take back what was stepped early: no rank had a loss."""
        if self.driver is not None:
            self.driver.rollback()

    def _step_is_over(self) -> None:
        self._stepped.clear()
        self.step += 1
        if self._averaging is not None:
            if not self._averaging.syncs_gradients():
                self.reducer.forget_use()
            self._averaging.after_step()
            self._prepare_step()
        every = self._settings.check_replicas_every_n_steps
        if every and self.step % every == 0:
            self._check_replicas(f"by the end of step {self.step - 1}")
        if self.sent is not None and (text := self.sent.step_ended(self.step)) is not None:
            rank_zero_info(text)

    def follow_loss_scale(self, scale: float) -> None:
        """Have the hook's memory follow the scale of the loss, which is that of the gradients."""
        if self._bound_hook is not None and scale != self._loss_scale:
            self._bound_hook.rescale(scale / self._loss_scale)
            self._loss_scale = scale

    def where(self) -> tuple[Progress, bool]:
        """Tell how far it has come, and whether it is where it may wait for the other ranks. From any thread."""
        passes, launched, buckets = self.reducer.progress()
        place = self.reducer.aborted_at or (passes, launched, buckets, self.reducer.waits_for())
        return Progress(self.step, *place), bool(buckets) or self._stepping

    # ------------------------------------------------------------------ averaging

    def _start_averaging(self) -> None:
        assert self._settings.averager is not None
        self._averaging = Averaging(
            self._settings.averager,
            self.module,
            lambda: self.optimizers,
            hook=self.hook,
            save_replicas=self._settings.save_replicas,
        )
        self._averaging.bound.step = self.step
        self._weights_loaded = False
        self._prepare_step()

    def _restart_averaging(self) -> None:
        """Begin with the weights as they are now, equal on all ranks; collective."""
        assert self._averaging is not None
        self._averaging.close()
        self._start_averaging()

    def _note_loading(self, *_: object) -> None:
        self._weights_loaded = True

    def _prepare_step(self) -> None:
        if self._averaging is not None:
            self.reducer.buffers.each_keeps_its_own = not self._averaging.broadcasts_buffers()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Have the averaged model in the module under this context; collective."""
        if self._averaging is None:
            yield
            return
        self._averaging.before_eval()
        try:
            yield
        finally:
            self._averaging.after_eval()

    def finish_averaging(self) -> None:
        """Give all ranks the averaged model for good; collective."""
        if self._averaging is not None:
            self._averaging.finish()

    # ------------------------------------------------------------------ checks

    def _check_replicas(self, when: str) -> None:
        asked_for = bool(self._settings.check_replicas_every_n_steps)
        reducer = self.reducer
        if reducer.world_size == 1 or not replicas_should_be_identical(
            self.step, self.hook, self._averaging, asked_for=asked_for
        ):
            return
        named = [(n, p) for n, p in zip(reducer.names, reducer.params, strict=True) if p.requires_grad]
        check_replicas([n for n, _ in named], [p for _, p in named], reducer.control_group, when)

    def check_before_checkpoint(self) -> None:
        """Compare the parameters of all ranks before they are saved; collective."""
        if self._settings.check_replicas_every_n_steps != 0:
            self._check_replicas(f"before the checkpoint of step {self.step}")

    # ------------------------------------------------------------------ checkpoints

    @property
    def keeps_state(self) -> bool:
        """Whether there is more to a checkpoint than the states of module and optimizers, and the clock."""
        return self.hook is not None or self._averaging is not None

    def model_state(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the module's ``state_dict`` with the averaged model in it; collective with an averager."""
        return state_dict if self._averaging is None else self._averaging.model_state(state_dict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state, whole and averaged on the first rank; collective."""
        if self._averaging is not None:
            return self._averaging.optimizer_state(optimizer)
        return optimizer.state_dict() if self.driver is None else self.driver.state_dict(optimizer)

    def state(self) -> dict[str, Any]:
        """Return what is needed to go on, beside the states of module and optimizers; collective.

        It consists of tensors, str, int, float, bool, None, list and dict only.
        """
        state = training_state(self.step, self._bound_hook, loss_scale=self._loss_scale, collective=True)
        state["stepped"] = [number for number, own in enumerate(self.optimizers) if id(own) in self._stepped]
        state["averaging"] = None if self._averaging is None else self._averaging.state_dict()
        return state

    def load_state(self, state: object) -> None:
        """Go on from what `state` returned, once module and optimizers have been loaded.

        Raises:
            ValueError: the state is damaged, or another hook's or averager's.
        """
        read = read_training_state({STATE_KEY: state})
        assert read is not None
        self.step = read["step"]
        self._loss_scale = float(read.get("loss_scale", 1.0))
        optimizers = self.optimizers
        self._stepped = {id(optimizers[n]) for n in read.get("stepped", ()) if n < len(optimizers)}
        self._passes_before = self.reducer.synced_backwards
        self._awaits_backward = False
        if warning := restore_hook(read, self._bound_hook):
            rank_zero_warn(warning)
        averaging: Mapping[str, Any] | None = read.get("averaging")
        if self._averaging is not None and averaging is not None:
            self._averaging.load_state_dict(averaging)
            self._weights_loaded = False
            self._prepare_step()
        elif averaging is not None:
            rank_zero_warn("The checkpoint holds the state of an averager, but this run has none.")

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Let go of the module: another run takes over its parameters."""
        if self.closed:
            return
        self.closed = True
        self._early.close()
        if self._averaging is not None:
            self._averaging.close()
            self._loading.remove()
        if self.driver is not None:
            self.driver.close()
        self.reducer.detach()
