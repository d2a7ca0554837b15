"""What a training run looks at so that ranks do not go on with something wrong: gradients and replicas."""

from __future__ import annotations

from lightning_ddp_hooks.config import Settings, replicas_differ_from
from lightning_ddp_hooks.health.checks import NonfiniteGuard, check_replicas
from lightning_ddp_hooks.hooks.contract import CommHook
from lightning_ddp_hooks.hooks.function_hook import TorchHook
from lightning_ddp_hooks.reducer.reducer import Reducer


class RunChecks:
    """The checks that the settings of a run ask for; all calls are made on all ranks alike."""

    def __init__(self, settings: Settings, reducer: Reducer, *, scaled: bool) -> None:
        self._every = settings.check_replicas_every_n_steps
        self._reducer = reducer
        watches = settings.detect_nonfinite and not scaled
        self._nonfinite = NonfiniteGuard(reducer.control_group) if watches else None
        reducer.nonfinite = self._nonfinite

    def check_gradients(self, step: int, *, unreduced: bool) -> None:
        """Raise on all ranks if a gradient was not finite; collective.

        Args:
            step: The training step, for the message.
            unreduced: Whether gradients are used as they are, so that no bucket was looked at.
        """
        if self._nonfinite is None:
            return
        if unreduced:
            self.look_at_unreduced_gradients()
        self._nonfinite.check(step)

    def look_at_unreduced_gradients(self) -> None:
        """Look at all gradients as they are."""
        if self._nonfinite is not None:
            named = zip(reversed(self._reducer.names), reversed(self._reducer.params), strict=True)
            self._nonfinite.look_at_all((name, param.grad) for name, param in named)

    def after_step(self, step: int, hook: CommHook | None, *, averaged: bool) -> None:
        """Compare the parameters of all ranks every so many steps, where they are meant to be the same; collective."""
        if self._every and step % self._every == 0 and not averaged:
            self._compare(step, hook, f"by the end of step {step - 1}")

    def before_checkpoint(self, step: int, hook: CommHook | None, *, averaged: bool) -> None:
        """Compare the parameters of all ranks likewise before they are saved, unless that is not wanted; collective."""
        if self._every != 0 and not averaged:
            self._compare(step, hook, f"before the checkpoint of step {step}")

    def _compare(self, step: int, hook: CommHook | None, when: str) -> None:
        # Whoever asks for the check under a function of their own knows what it gives the ranks.
        asked_for = bool(self._every) and isinstance(hook, TorchHook)
        first, reducer = replicas_differ_from(hook), self._reducer
        if reducer.world_size > 1 and (asked_for or first is None or step <= first):
            named = [(n, p) for n, p in zip(reducer.names, reducer.params, strict=True) if p.requires_grad]
            check_replicas([n for n, _ in named], [p for _, p in named], reducer.control_group, when)
