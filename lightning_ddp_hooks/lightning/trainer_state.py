"""What a training run needs to go on, into and out of a Trainer's checkpoint.

load     before groups exist: read, and agreed on by all ranks; set-up applies it
save     at any time; after a fit, whose groups are gone, what was gathered at its end; after an error, what is left
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer

from lightning_ddp_hooks.averaging.driver import STATE_KEY as AVERAGING_KEY
from lightning_ddp_hooks.checkpoint import (
    STATE_KEY,
    progress_in,
    read_training_state,
    require_trainer_checkpoint,
    training_state,
)
from lightning_ddp_hooks.lightning.checkpoint_io import agree_on_checkpoint
from lightning_ddp_hooks.optim.driver import OptimizerDriver
from lightning_ddp_hooks.run import TrainingRun


class TrainerState:
    """The states that a strategy has read and those that it is going to write."""

    def __init__(self) -> None:
        self.restored: Mapping[str, Any] | None = None
        self.agreed = False
        self.driver: OptimizerDriver | None = None
        self._restored_averaging: Mapping[str, Any] | None = None
        self._final: dict[str, Any] | None = None

    def agree(self, path: str | None = None, progress: str | None = None, error: Exception | None = None) -> None:
        """Go on from what was read, if all ranks do; collective the first time in a run, later for this rank alone."""
        if not self.agreed:
            self.agreed = True
            agree_on_checkpoint(path, progress, error)
        if error is not None:
            raise error

    def load(self, path: str, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Read a checkpoint, and keep what is ours; collective as `agree` is."""
        checkpoint: dict[str, Any] = {}
        failure: Exception | None = None
        try:
            checkpoint = read()
            require_trainer_checkpoint(checkpoint, path)
            self._restored_averaging = checkpoint.get(AVERAGING_KEY)
            self.restored = read_training_state(checkpoint, path)
        except Exception as error:
            failure = error
        self.agree(path, progress_in(checkpoint), failure)
        return checkpoint

    def load_optimizers(self, run: TrainingRun, states: list[Any]) -> None:
        """Have each rank take its parts of sharded optimizers' states, and then the averager go on."""
        try:
            for optimizer, state in zip(run.optimizers(), states, strict=False) if run.sharded else ():
                assert run.driver is not None
                run.driver.load_state_dict(optimizer, state)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(
                f"The checkpoint's entry 'optimizer_states' is damaged: {type(error).__name__}: {error}."
            ) from error
        state, self._restored_averaging = self._restored_averaging, None
        run.load_averaging(state)

    def optimizer_state(self, run: TrainingRun | None, optimizer: Optimizer) -> dict[str, Any] | None:
        """Return an optimizer's state, averaged or whole, on the first rank; None if it is the same on all."""
        if run is not None and run.averaging is not None:
            return run.optimizer_state(optimizer)
        if self.driver is None or not self.driver.settings.shard:
            return None
        return self.driver.state_dict(optimizer)

    def add_to(self, checkpoint: dict[str, Any], run: TrainingRun | None, *, collective: bool) -> None:
        """Put the state into a checkpoint; collective, unless ranks may be anywhere after an error."""
        state = self._final
        if state is None:
            state = training_state(0, None, collective=False) if run is None else run.state_dict(collective=collective)
        state = dict(state)
        if (averaging := state.pop("averaging", None)) is not None:
            checkpoint[AVERAGING_KEY] = averaging
        checkpoint[STATE_KEY] = state

    def begin(self, run: TrainingRun) -> None:
        """Begin a fit."""
        self._final, self.driver = None, run.driver

    def end(self, run: TrainingRun) -> None:
        """Keep the state at the end of a fit, for a checkpoint that is saved when there are no groups any more."""
        self._final = run.state_dict(with_replicas=False)

    def close(self, run: TrainingRun | None) -> None:
        """End a fit, maybe after an error; what was read was for this one."""
        if run is not None:
            self._final = self._final or run.state_dict(collective=False)
            run.close()
        self.restored = self._restored_averaging = None
