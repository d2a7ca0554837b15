"""One model in training on several ranks: its reducer, hook, averager, optimizers, clock and checks, and their state.

    before_forward -> the user's forward -> after_forward            decides: reduce, or accumulate
    with backward():, or a backward of the user's own                the reducer works by itself
    finish_backward                                                  a rank without a loss joins here
    with stepping(): optimizer.step()                                the update
    step_ended                                                       the clock; averages and checks that are due

`DDPHooksStrategy`, `FabricDDPHooksStrategy` and `DataParallel` translate their verbs into these.

[Note: weights that are loaded] Averagers such as DiLoCo keep a global model, to which weights that a user loads in
mid-run would be pulled back. So an averager begins anew with the next step if weights came without a state of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_ddp_hooks import _compat, comm
from lightning_ddp_hooks.averaging.driver import Averaging
from lightning_ddp_hooks.averaging.loss_scale import SharedScale, scaler_text
from lightning_ddp_hooks.checkpoint import STATE_KEY, read_training_state, training_state
from lightning_ddp_hooks.config import Settings, replicas_differ_from
from lightning_ddp_hooks.health.checks import NonfiniteGuard, check_replicas
from lightning_ddp_hooks.health.heartbeat import Progress
from lightning_ddp_hooks.hooks.contract import CommHook
from lightning_ddp_hooks.hooks.function_hook import TorchHook
from lightning_ddp_hooks.optim.driver import OptimizerDriver
from lightning_ddp_hooks.optim.sharding import diverging_part
from lightning_ddp_hooks.optimizer_clock import OptimizerClock
from lightning_ddp_hooks.reducer.agreement import UnusedPolicy
from lightning_ddp_hooks.reducer.autograd_hooks import roots_in
from lightning_ddp_hooks.reducer.reducer import Reducer
from lightning_ddp_hooks.reducer.weights import SampleWeights
from lightning_ddp_hooks.run_hook import RunHook
from lightning_ddp_hooks.weak import weakly


class SkipStepError(Exception):
    """Leaves an optimizer's step before its update: no rank had a loss."""


class TrainingRun:
    """Trains one model on several ranks. Construction is collective; all calls are made on all ranks alike.

    Attributes:
        sync: Whether the backwards of coming forwards reduce gradients.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: Settings,
        *,
        optimizers: Callable[[], Sequence[Optimizer]] = tuple,
        clock: OptimizerClock | None = None,  # of a loop of the user's own; without it `step_ended` is called
        process_group: comm.ProcessGroup | None = None,
        scaler: Any = None,
        in_parts: bool = False,  # parts of the module are trained in turn: all ranks alike may miss gradients
        ends_steps: bool = False,  # `Reducer.end_step` is called after each training step
        weighs_samples: bool = False,  # `weights` weigh the losses of ranks by their samples
        agree_on: Mapping[str, object] | None = None,  # further settings that are the same on all ranks, by name
        restored: Mapping[str, Any] | None = None,  # as `read_training_state` returns it
        init_sync: bool = True,  # rank 0's parameters and buffers are sent to all ranks
        step: int | None = 0,  # the first; None counts synchronized backwards until a step is set
        warn: Callable[[str], object] = warnings.warn,
    ) -> None:
        self.module = module
        self.settings = settings
        self.driver: OptimizerDriver | None = None
        self.windowed_backwards = 0  # synchronized backwards that have run under `backward`
        self.failed = self._broken = False  # after an error: nothing collective is done any more
        self.closed = False  # another run, or none, has the module's parameters now
        self.optimizers = optimizers if clock is None else clock.optimizers
        self._clock = clock
        self._warn = warn
        self._step = step if restored is None else int(restored["step"])
        self.sync = True
        self._stepping = self._awaits_backward = self._warned = False
        self._backwards_at_step = 0
        self._backwards_before = 0  # those of the run that this one goes on from, where they are the steps
        self._weights_loaded = False
        self._at_close = ExitStack()
        self.reducer = Reducer(
            module,
            settings.reducer_config(),
            process_group=process_group,
            policy=UnusedPolicy.ALIKE if in_parts and not settings.find_unused_parameters else None,
            skip_missing_loss=settings.skip_missing_loss,
            ends_steps=ends_steps,
            timeout=settings.timeout,
            agree_on={**settings.to_agree_on(), "precision's scaler": scaler_text(scaler), **(agree_on or {})},
            init_sync=init_sync,
        )
        reducer = self.reducer
        self._graphs = _compat.SplitGraphs(lambda: reducer.bucket_bytes)
        self.reducer.on_backward_begin = weakly(self._begin_backward)
        self.reducer.expects = False  # until a forward or a step
        watches = settings.detect_nonfinite and scaler is None
        self._nonfinite = self.reducer.nonfinite = NonfiniteGuard(self.reducer.control_group) if watches else None
        self.weights = SampleWeights(self.reducer.control_group) if weighs_samples else None
        self.averaging: Averaging | None = None
        if settings.optimizer_in_hook is not None and (clock is None or clock.optimizers()):
            self.driver = OptimizerDriver(settings.optimizer_in_hook, self.reducer)
            if clock is not None:  # in the user's own loop each backward that reduces gradients leads to a step
                self._at_close.enter_context(self.driver.stepping())
                self._at_close.enter_context(self.driver.overlapping())
        self.hook = RunHook(self.reducer, self.driver, scaler, restored, weakly(self._coming_step), warn)
        self._scale: SharedScale | None = None
        if scaler is not None:
            self._scale = SharedScale(scaler, self.reducer.parent_group)
            self._scale.watch(weakly(self._gradients_differ))
            self._restore_scale(restored)
        try:
            if settings.hook is not None:
                self.hook.install(settings.hook)
            if settings.averager is not None:
                self._start_averaging()
                self._at_close.callback(module.register_load_state_dict_post_hook(self._note_loading).remove)
        except BaseException:  # the module is free for another run
            self.fail(broken=False)
            self.close()
            raise

    def install_hook(self, hook: CommHook) -> None:
        """Have a hook reduce the gradients, before the first backward; collective."""
        self.hook.install(hook)
        if self.averaging is not None:
            self.averaging.follow(hook)
            self._follow_schedule()

    def attach_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Take over the optimizers' steps, with ``optimizer_in_hook``; collective."""
        if self.driver is not None:
            self.driver.attach(optimizers)

    def _start_averaging(self) -> None:
        """Begin to average with the weights as they are now, equal on all ranks; collective."""
        settings = self.settings
        assert settings.averager is not None
        self.averaging = Averaging(
            settings.averager,
            self.module,
            self.optimizers,
            hook=self.hook.declared,
            before_eval=settings.average_before_eval,
            save_replicas=settings.save_replicas,
        )
        self.averaging.bound.step = self.step
        self._follow_schedule()

    def _note_loading(self, *_: object) -> None:
        self._weights_loaded = True

    def _follow_schedule(self) -> None:
        """Have the coming step exchange gradients and buffers or not, as the averager's schedule says."""
        if self.averaging is not None:
            self.reducer.sync = self.averaging.syncs_gradients()
            self.reducer.buffers.each_keeps_its_own = not self.averaging.broadcasts_buffers()
            self.reducer.skip_step = False  # nobody says so while gradients are not exchanged
            if not self.reducer.sync:
                self.reducer.release_buckets()

    def before_forward(self, buffers_from: int = 0) -> None:
        """Prepare for the user's forward; collective where buffers are refreshed, from those of a rank."""
        if self.averaging is not None and self._weights_loaded and torch.is_grad_enabled():
            self._weights_loaded = False  # see [Note: weights that are loaded]
            self.averaging.close()
            self._start_averaging()
        self.reducer.before_forward(buffers_from)

    def graphs_by_bucket(self) -> AbstractContextManager[None]:
        """Surround the user's forward: graphs that are compiled in it for training are split where buckets end."""
        if self.reducer.world_size == 1 or not torch.is_grad_enabled():
            return nullcontext()
        return self._graphs

    def after_forward(self, output: object) -> None:
        """Take what the user's forward returned; with gradients enabled, it decides what its backward does."""
        if not torch.is_grad_enabled():
            return
        reducer = self.reducer
        reducer.sync = self.sync and not self.trains_alone
        if reducer.sync:
            reducer.buffers.changed()
            self._awaits_backward = True
            reducer.expect_backward_of(roots_in(output))
        if self._clock is not None and reducer.synced_backwards and not self._warned and not self.optimizers():
            self._warned = True
            if text := self._clock.warning(self.settings, self.hook.declared):
                self._warn(text)

    @property
    def trains_alone(self) -> bool:
        """Whether gradients are not exchanged in this step: the averager has taken over."""
        return self.averaging is not None and not self.averaging.syncs_gradients()

    def _gradients_differ(self) -> bool:
        """Whether ranks step by different gradients in this step, as far as hook and averager say."""
        hook = self.hook.declared
        return self.trains_alone or (
            diverging_part(hook) is not None and self.step >= (replicas_differ_from(hook) or 0)
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication; the first backward of a later forward reduces them all."""
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before

    @contextmanager
    def backward(self, *, joined: bool = False) -> Iterator[None]:
        """Surround one backward, or a rank's part in it without data; it ends with gradients reduced and checked."""
        reducer, before = self.reducer, self.reducer.synced_backwards
        overlapping = nullcontext() if self.driver is None else self.driver.overlapping()
        with overlapping, reducer.shadowing(joined), reducer.backward_window():
            yield
        ran = reducer.synced_backwards - before
        self.windowed_backwards += ran
        if ran or self.trains_alone:
            self.check_gradients(unreduced=self.trains_alone)

    def _begin_backward(self) -> None:
        self.hook.follow_loss_scale()
        if self._clock is not None and self.driver is not None and self.driver.begun:
            raise RuntimeError(
                "A second backward before `optimizer.step()`: `optimizer_in_hook` has stepped while the gradients of "
                "the first one came. Accumulate under `fabric.no_backward_sync(model)`, or use "
                "`OptimizerInHook(shard=True, overlap=False)`."
            )

    def finish_backward(self) -> bool:
        """Have the gradients of this step in ``.grad``, before they are used; for backwards of the user's own.

        A rank that ran no backward since the last step, while others may have, does its part here with zeros. Returns
        False if no rank ran one.
        """
        reducer = self.reducer
        reducer.finalize_pending_backward()
        joins = self._awaits_backward and reducer.synced_backwards == self._backwards_at_step
        self._awaits_backward = False
        if joins:
            reducer.sync = True
            with reducer.backward_window():
                pass
        self.check_gradients(unreduced=reducer.synced_backwards == self._backwards_at_step)
        return not (joins and reducer.skip_step)

    @property
    def step(self) -> int:
        """The training step that comes next."""
        return self._backwards_before + self.reducer.synced_backwards if self._step is None else self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step

    def _coming_step(self) -> int:
        return self.step

    @contextmanager
    def stepping(self, optimizer: Optimizer | None = None) -> Iterator[None]:
        """Surround the step of an optimizer, which a clock counts; collective where a training step ends with it."""
        self._stepping = True
        stepping = nullcontext() if self.driver is None or self._clock is not None else self.driver.stepping()
        try:
            with stepping:
                if self._clock is not None and optimizer is not None and self._clock.has_stepped(optimizer):
                    self.step_ended()
                yield
            self._backwards_at_step = self.reducer.synced_backwards
            self._awaits_backward = False
            if self._clock is not None and optimizer is not None and self._clock.count(optimizer):
                self.step_ended()
        finally:
            self._stepping = False

    def step_ended(self) -> None:
        """Count a training step, and do what is due after it; collective."""
        if self._clock is not None:
            self._clock.restart()
        self.step += 1
        if self.trains_alone:
            self.reducer.forget_use()
        if self.averaging is not None:
            self.averaging.after_step()
            self._follow_schedule()
        every = self.settings.check_replicas_every_n_steps
        if every and self.step % every == 0:
            self._compare_replicas(f"by the end of step {self.step - 1}")

    def progress(self) -> Progress:
        """Tell how far it has come; from any thread."""
        place = self.reducer.aborted_at or (*self.reducer.progress(), self.reducer.waits_for())
        return Progress(self.step, *place)

    @property
    def may_wait(self) -> bool:
        """Whether it is where it may wait for the other ranks: in a backward or a step."""
        return bool(self.reducer.progress()[2]) or self._stepping

    def before_eval(self) -> None:
        """Settle what is pending, send buffers, and put the averaged model into the module; collective."""
        self.reducer.settle_status()
        if self.reducer.buffers.refresh_due:
            self.reducer.buffers.refresh()
        if self.averaging is not None:
            self.averaging.before_eval()

    def after_eval(self) -> None:
        """Put this rank's own model back."""
        if self.averaging is not None:
            self.averaging.after_eval()

    def before_checkpoint(self) -> None:
        """Settle what is pending, and compare the parameters of all ranks before they are saved; collective."""
        self.reducer.settle_status()
        if self.settings.check_replicas_every_n_steps != 0:
            self._compare_replicas(f"before the checkpoint of step {self.step}")

    def finish(self) -> None:
        """Settle what is pending, and give all ranks the averaged model for good; collective."""
        self.reducer.settle_status()
        if self.averaging is not None:
            self.averaging.finish()

    def _compare_replicas(self, when: str) -> None:
        """Compare the parameters of all ranks, where they are meant to be the same; collective."""
        if self.averaging is not None and not self.averaging.broadcasts_buffers():
            return
        hook, reducer = self.hook.declared, self.reducer
        # Whoever asks for the check under a function of their own knows what it gives the ranks.
        asked_for = bool(self.settings.check_replicas_every_n_steps) and isinstance(hook, TorchHook)
        first = replicas_differ_from(hook)
        if reducer.world_size > 1 and (asked_for or first is None or self.step <= first):
            named = [(n, p) for n, p in zip(reducer.names, reducer.params, strict=True) if p.requires_grad]
            check_replicas([n for n, _ in named], [p for _, p in named], reducer.control_group, when)

    def look_at_gradients(self) -> None:
        """Look at gradients as they are, before they are used without being reduced; `check_gradients` follows."""
        if self._nonfinite is not None:
            named = zip(reversed(self.reducer.names), reversed(self.reducer.params), strict=True)
            self._nonfinite.look_at_all((name, param.grad) for name, param in named)

    def check_gradients(self, *, unreduced: bool = False) -> None:
        """Raise on all ranks if a gradient was not finite, and the user wants to know; collective."""
        if self._nonfinite is not None:
            if unreduced:
                self.look_at_gradients()
            self._nonfinite.check(self.step)

    @property
    def sharded(self) -> bool:
        """Whether each rank holds only a part of the optimizers' state."""
        return self.driver is not None and self.driver.settings.shard

    def model_state(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the module's ``state_dict`` with the averaged model in it; collective with an averager."""
        return state_dict if self.averaging is None else self.averaging.model_state(state_dict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state, whole and averaged on the first rank; collective, also once closed."""
        if self.averaging is not None:
            return self.averaging.optimizer_state(optimizer)
        return optimizer.state_dict() if self.driver is None else self.driver.state_dict(optimizer)

    def state_dict(self, *, collective: bool = True, with_replicas: bool = True) -> dict[str, Any]:
        """Return what is needed to go on, beside the states of module and optimizers; collective.

        Without ``collective``, after an error, what needs other ranks is left out, and named under ``"missing"``.
        """
        state = training_state(self.step, self.hook.bound, loss_scale=self.hook.loss_scale, collective=collective)
        state["averaging"] = None
        if self.averaging is not None and collective:
            state["averaging"] = self.averaging.state_dict(with_replicas=with_replicas)
        elif self.averaging is not None:
            state["missing"].append("the averaged model and the averager's state")
        if self._scale is not None and collective:
            state["overflows"] = self._scale.state()
        if self.sharded and not collective:
            state["missing"].append("the other ranks' parts of the optimizer state")
        if self._clock is not None:
            state["stepped"] = self._clock.stepped()
        return state

    def load_state_dict(self, state: object) -> None:
        """Go on from what `state_dict` returned, once module and optimizers have been loaded."""
        read = read_training_state({STATE_KEY: state})
        assert read is not None
        self.restore(read)
        if self._clock is not None:
            self._clock.restart(read.get("stepped", ()))
        self._backwards_at_step = self.reducer.synced_backwards
        self._awaits_backward = False
        self.load_averaging(read.get("averaging"))

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with clock and hook's state of a checkpoint, as `read_training_state` returns them."""
        if self._step is None:
            self._backwards_before = int(state["step"]) - self.reducer.synced_backwards
        else:
            self.step = int(state["step"])
        self.hook.restore(state)
        self._restore_scale(state)
        if self.averaging is not None:
            self.averaging.bound.step = self.step
            self._follow_schedule()

    def _restore_scale(self, state: Mapping[str, Any] | None) -> None:
        if self._scale is not None and state is not None:
            self._scale.restore(state.get("overflows"))

    def load_averaging(self, state: Mapping[str, Any] | None) -> None:
        """Go on with the averager's state of a checkpoint, once module and optimizers have been loaded."""
        if state is not None and self.averaging is not None:
            self.averaging.load_state_dict(state)
            self._weights_loaded = False
            self._follow_schedule()
        elif state is not None:
            self._warn("The checkpoint holds the state of an averager, but this run has none.")

    def fail(self, *, broken: bool) -> None:
        """Take note that this rank ends with an error; ``broken`` if nobody knows what groups still wait for."""
        self.failed, self._broken = True, broken
        self.reducer.failed = True
        self.reducer.aborted_work |= self.weights is not None and self.weights.pending

    def close(self) -> None:
        """Let go of the module, and free groups; `optimizer_state` works on."""
        if self.closed:
            return
        self.closed = True
        self._at_close.close()
        if self._scale is not None and not self._broken:
            self._scale.close(failed=self.failed)
        if self.averaging is not None and not self._broken:
            self.averaging.close(failed=self.failed)
        if self.driver is not None:
            self.driver.close()
        self.reducer.detach()
        self.reducer.on_backward_begin = None
        self.averaging = self.weights = self.hook.bound = None


@contextmanager
def skippable_step(runs: Sequence[TrainingRun]) -> Iterator[None]:
    """Leave the step under this context at a `SkipStepError`, and take back what was stepped early."""
    try:
        yield
    except SkipStepError:
        for run in runs:
            if run.driver is not None:
                run.driver.rollback()
