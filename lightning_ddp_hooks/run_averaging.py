"""The averager of a training run, and what its schedule means for the reducer.

[Note: weights that are loaded] Averagers such as DiLoCo keep a global model, to which weights that a user loads in
mid-run would be pulled back. So an averager begins anew with the next step if weights came without a state of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_ddp_hooks.averaging.driver import Averaging
from lightning_ddp_hooks.config import Settings
from lightning_ddp_hooks.hooks.contract import CommHook
from lightning_ddp_hooks.reducer.reducer import Reducer


class RunAveraging:
    """Averages the model of a run as its settings say; construction is collective."""

    def __init__(
        self,
        settings: Settings,
        module: nn.Module,
        optimizers: Callable[[], Sequence[Optimizer]],
        reducer: Reducer,
        hook: CommHook | None,
        step: Callable[[], int],
    ) -> None:
        assert settings.averager is not None
        flags: dict[str, Any] = {"before_eval": settings.average_before_eval, "save_replicas": settings.save_replicas}
        self._start = partial(Averaging, settings.averager, module, optimizers, **flags)
        self._reducer = reducer
        self._hook = hook
        self._step = step
        self._weights_loaded = False
        self.driver = self._start(hook=hook)
        self.follow_clock()
        self._loading = module.register_load_state_dict_post_hook(self._note_loading)

    def _note_loading(self, *_: object) -> None:
        self._weights_loaded = True

    def _prepare_step(self) -> None:
        """Have the coming step exchange gradients and buffers or not, as the averager's schedule says."""
        self._reducer.sync = self.driver.syncs_gradients()
        self._reducer.buffers.each_keeps_its_own = not self.driver.broadcasts_buffers()
        self._reducer.skip_step = False  # nobody says so while gradients are not exchanged

    def follow_clock(self) -> None:
        """Have the averager's schedule go on at the run's step."""
        self.driver.bound.step = self._step()
        self._prepare_step()

    def follow_hook(self, hook: CommHook) -> None:
        """Take account of a hook that was registered after the start."""
        self._hook = hook
        self.driver.follow(hook)
        self._prepare_step()

    def before_forward(self) -> None:
        """Begin anew if the user has loaded weights; collective. See [Note: weights that are loaded]."""
        if self._weights_loaded and torch.is_grad_enabled():
            self._weights_loaded = False
            self.driver.close()
            self.driver = self._start(hook=self._hook)
            self.follow_clock()

    def step_ended(self) -> None:
        """Count a training step, and average if it is due; collective."""
        if not self.driver.syncs_gradients():
            self._reducer.forget_use()
        self.driver.after_step()
        self._prepare_step()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a state, once module and optimizers have been loaded."""
        self.driver.load_state_dict(state)
        self._weights_loaded = False
        self._prepare_step()

    def close(self, *, failed: bool, broken: bool) -> None:
        """Free the groups; after an error only what can be freed without the other ranks, or if broken nothing."""
        self._loading.remove()
        if not broken:
            self.driver.close(failed=failed)
