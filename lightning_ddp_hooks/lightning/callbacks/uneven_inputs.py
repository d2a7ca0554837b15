"""Uneven inputs under a Trainer: what the user declares; the strategy's `Inputs` do it."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_ddp_hooks.join.agreement import Divisor
from lightning_ddp_hooks.lightning.strategy import DDPHooksStrategy
from lightning_ddp_hooks.lightning.uneven.inputs import Policy, UnevenSettings


class UnevenInputs(Callback):
    """Lets ranks have dataloaders of different lengths: none hangs, and no sample is dropped or repeated.

    With ``"join"``, a rank that has run out of batches stays in the Trainer's loop with emptied batches until all ranks
    have run out: steps, learning rates, callbacks, validations and checkpoints are the same on all ranks. It adds
    nothing to gradients, logs or metrics; its ``training_step`` is not called (in manual optimization it is, with its
    last real batch, to do the same updates). Samplers are not padded any more. Validation and test are exact in the
    same way, whatever the policy for training is.

    The cost: one small collective per step, which runs while the step before it does; none while lengths are certain.

    Args:
        policy: what happens in training once a rank has run out: ``"join"``; ``"stop"`` ends the epoch for all, with
            its usual hooks; ``"error"`` raises on all ranks before the first uneven step.
        divisor: what gradients become the mean over: ``"active"`` ranks; all ``"samples"`` of the step (right for
            losses that are means over samples, when batches differ in size; a method ``count_samples(batch)`` of the
            LightningModule says how many there are, if a batch does not); or the ``"world"``: all ranks, as if the
            joined ones had a gradient of zero.

    Raises:
        ValueError: another policy or divisor; at setup another strategy, a second such callback, or a setting of the
            strategy that does not go with it, such as another ``gradient_weighting``.

    Example:
        >>> Trainer(strategy="ddp_hooks", callbacks=[UnevenInputs()])
    """

    def __init__(self, policy: Policy = "join", divisor: Divisor = "active") -> None:
        UnevenSettings(policy, divisor)  # raises if they are wrong
        self.policy: Policy = policy
        self.divisor: Divisor = divisor

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if sum(isinstance(callback, UnevenInputs) for callback in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise ValueError("Expected one UnevenInputs callback, got several.")
        strategy = trainer.strategy
        if isinstance(strategy, DDPHooksStrategy):
            strategy.use_uneven_inputs(UnevenSettings(self.policy, self.divisor), trainer)
        elif trainer.world_size > 1:
            raise ValueError(f"UnevenInputs needs strategy='ddp_hooks', got {type(strategy).__name__}.")
