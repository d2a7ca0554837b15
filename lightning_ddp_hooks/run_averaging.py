"""The averager of a training run, and what it means for the reducer; without one each call passes straight through.

[Note: weights that are loaded] Averagers such as DiLoCo keep a global model, to which weights that a user loads in
mid-run would be pulled back. So an averager begins anew with the next step if weights came without a state of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_ddp_hooks.averaging.driver import Averaging
from lightning_ddp_hooks.config import Settings
from lightning_ddp_hooks.hooks.contract import CommHook
from lightning_ddp_hooks.reducer.reducer import Reducer


class RunAveraging:
    """Averages the model of a run as its settings say; construction is collective with an averager.

    Args:
        settings: What the user has set.
        module: The model.
        optimizers: Returns the optimizers that train it.
        reducer: Reduces its gradients.
        hook: What the gradients are reduced with, as declared.
        step: Returns the training step that comes next.
    """

    def __init__(
        self,
        settings: Settings,
        module: nn.Module,
        optimizers: Callable[[], Sequence[Optimizer]],
        reducer: Reducer,
        hook: CommHook | None,
        step: Callable[[], int],
    ) -> None:
        self._settings = settings
        self._module = module
        self._optimizers = optimizers
        self._reducer = reducer
        self._hook = hook
        self._step = step
        self._averaging: Averaging | None = None
        self._weights_loaded = False
        self._start()
        self._loading = None
        if self._averaging is not None:
            self._loading = module.register_load_state_dict_post_hook(self._note_loading)

    def _start(self) -> None:
        """Begin with the weights as they are now, equal on all ranks, and with the run's step; collective."""
        self._weights_loaded = False
        settings = self._settings
        if settings.averager is not None:
            self._averaging = Averaging(
                settings.averager,
                self._module,
                self._optimizers,
                hook=self._hook,
                before_eval=settings.average_before_eval,
                save_replicas=settings.save_replicas,
            )
            self.follow_clock()

    def _note_loading(self, *_: object) -> None:
        self._weights_loaded = True

    def _prepare_step(self) -> None:
        """Have the coming step exchange gradients and buffers or not, as the averager's schedule says."""
        if self._averaging is not None:
            self._reducer.sync = self._averaging.syncs_gradients()
            self._reducer.buffers.each_keeps_its_own = not self._averaging.broadcasts_buffers()
            self._reducer.skip_step = False  # nobody says so while gradients are not exchanged

    @property
    def active(self) -> bool:
        """Whether there is an averager."""
        return self._averaging is not None

    @property
    def trains_alone(self) -> bool:
        """Whether gradients are not exchanged in this step: the averager has taken over."""
        return self._averaging is not None and not self._averaging.syncs_gradients()

    @property
    def replicas_identical(self) -> bool:
        """Whether all ranks have the same parameters as far as the averager is concerned."""
        return self._averaging is None or self._averaging.broadcasts_buffers()

    def follow_clock(self) -> None:
        """Have the averager's schedule go on at the run's step."""
        if self._averaging is not None:
            self._averaging.bound.step = self._step()
            self._prepare_step()

    def follow_hook(self, hook: CommHook) -> None:
        """Take account of a hook that was registered after the start."""
        self._hook = hook
        if self._averaging is not None:
            self._averaging.follow(hook)
            self._prepare_step()

    def before_forward(self) -> None:
        """Begin anew if the user has loaded weights; collective. See [Note: weights that are loaded]."""
        if self._weights_loaded and self._averaging is not None and torch.is_grad_enabled():
            self._averaging.close()
            self._start()

    def step_ended(self) -> None:
        """Count a training step, and average if it is due; collective."""
        if self._averaging is not None:
            if self.trains_alone:
                self._reducer.forget_use()
            self._averaging.after_step()
            self._prepare_step()

    def before_eval(self) -> None:
        """Put the averaged model into the module; collective."""
        if self._averaging is not None:
            self._averaging.before_eval()

    def after_eval(self) -> None:
        """Put this rank's own model back."""
        if self._averaging is not None:
            self._averaging.after_eval()

    def finish(self) -> None:
        """Give all ranks the averaged model for good; collective."""
        if self._averaging is not None:
            self._averaging.finish()

    def model_state(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the module's ``state_dict`` with the averaged model in it; collective."""
        return state_dict if self._averaging is None else self._averaging.model_state(state_dict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's ``state_dict``, averaged once ranks have trained for themselves; collective."""
        return optimizer.state_dict() if self._averaging is None else self._averaging.optimizer_state(optimizer)

    def state_dict(self, *, with_replicas: bool = True) -> dict[str, Any] | None:
        """Return the averager's state, with the replicas or without; collective."""
        return None if self._averaging is None else self._averaging.state_dict(with_replicas=with_replicas)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a state, once module and optimizers have been loaded.

        Raises:
            ValueError: The state is damaged, or another averager's.
        """
        assert self._averaging is not None
        self._averaging.load_state_dict(state)
        self._weights_loaded = False
        self._prepare_step()

    def close(self, *, failed: bool, broken: bool) -> None:
        """Free the groups; after an error only what can be freed without the other ranks."""
        if self._loading is not None:
            self._loading.remove()
        if self._averaging is not None and not broken:
            self._averaging.close(failed=failed)
        self._averaging = None
