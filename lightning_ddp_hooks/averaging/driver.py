"""Drives an averager through a training run; what a strategy or a callback calls, and when.

    setup             Averaging(...)                         collective, once parameters are equal on all ranks
    restore           load_state_dict(...)                   once the optimizers exist
    each step         syncs_gradients() -> bool              before the forward
                      after_step()                           after the optimizers
    validation        before_eval() ... after_eval()
    checkpoint        model_state(...), optimizer_state(...), state_dict()
    end               finish(), close()

All calls are made on all ranks alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.averaging.averager import ModelAverager, plain_context
from lightning_ddp_hooks.averaging.gradients import hook_follows_schedule
from lightning_ddp_hooks.averaging.replicas import averaged_state_dict, gather_replicas, restore_replica
from lightning_ddp_hooks.hooks.contract import CommHook
from lightning_ddp_hooks.hooks.state import require_sound, whole_number

STATE_KEY = "lightning_ddp_hooks.averaging"
"""Where `Averaging.state_dict` lies in a Trainer checkpoint, whether a strategy or a callback wrote it."""

MOST_REPLICAS = 2 << 30
"""Bytes of all ranks' replicas up to which a checkpoint holds them by default: they lie in one file of rank 0's."""


class Averaging:
    """An averager in a training run, whose module is equal on all ranks at first.

    ``hook`` averages gradients, and must go with the averager. ``before_eval``: whether to evaluate the averaged model.
    ``save_replicas``: whether checkpoints hold each rank's own model and optimizer state; ``"auto"``: if that is small.
    """

    def __init__(
        self,
        averager: ModelAverager,
        module: nn.Module,
        optimizers: Callable[[], Sequence[Optimizer]],
        group: comm.ProcessGroup | None = None,
        *,
        hook: CommHook | None = None,
        before_eval: bool = True,
        save_replicas: bool | Literal["auto"] = "auto",
    ) -> None:
        if not isinstance(averager, ModelAverager):
            raise TypeError(f"Expected a ModelAverager, got {type(averager).__name__}.")
        self._module = module
        self._optimizers = optimizers
        self._before_eval = before_eval
        self._hook_follows_schedule = hook_follows_schedule(averager, hook)
        named = dict(module.named_parameters())
        context = plain_context(
            list(named), list(named.values()), lambda: list(module.buffers()), optimizers, process_group=group
        )
        self.control_group = context.control_group
        self.bound = averager.bind(context)
        # With what Adam keeps; the optimizers have no state yet.
        own = 3 * sum(p.nbytes for p in module.parameters() if p.requires_grad)
        self.replicas_nbytes = context.world_size * (own + sum(buffer.nbytes for buffer in module.buffers()))
        self.saves_replicas = self.replicas_nbytes <= MOST_REPLICAS if save_replicas == "auto" else save_replicas
        # While the averaged model is in place: the replica's own values, by id, beside the tensors that they belong to.
        self._own: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def is_local(self) -> bool:
        """Whether ranks have trained for themselves; before, there is nothing to average, swap or save."""
        return self.bound.step > self.bound.settings.warmup_steps

    def syncs_gradients(self) -> bool:
        """Tell whether the gradients of the coming step go through the reducer, or stay as each rank has them."""
        return self._hook_follows_schedule or self.broadcasts_buffers()

    def follow(self, hook: CommHook) -> None:
        """Take account of a hook that was registered after the start."""
        self._hook_follows_schedule = hook_follows_schedule(self.bound.settings, hook)

    def broadcasts_buffers(self) -> bool:
        """Tell whether buffers may be taken from rank 0 before the coming step; later they are each replica's own."""
        return self.bound.syncs_gradients(self.bound.step)

    def after_step(self) -> None:
        """Count a training step, and average if it is due; once for each step, also one that a GradScaler skipped."""
        assert not self._own, "after_eval() comes before the next step"
        self.bound.average_parameters()

    @torch.no_grad()
    def before_eval(self) -> None:
        """Put the averaged (with DiLoCo: the global) model into the module; collective."""
        if self._before_eval and not self._own and not self.bound.replicas_equal:
            live = self.bound.model_tensors()
            self._own = {id(tensor): (tensor, tensor.detach().clone()) for tensor in live}
            self.bound.average_into(live)

    @torch.no_grad()
    def after_eval(self) -> None:
        """Put the replica back, bit by bit."""
        for live, own in self._own.values():
            live.copy_(own)
        self._own.clear()

    @torch.no_grad()
    def model_state(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return a module's ``state_dict``, whose values share memory with it, with the averaged model in it."""
        if self.bound.replicas_equal or self._own:  # the module holds the averaged model
            return dict(state_dict)
        live = self.bound.model_tensors()
        means = [torch.empty_like(tensor) for tensor in live]
        self.bound.average_into(means)
        # Found by place in memory: a module may name its entries as it likes, and tied weights have several names.
        by_place = {_place(tensor): mean.detach() for tensor, mean in zip(live, means, strict=True) if tensor.numel()}
        return {
            key: by_place.get(_place(value), value) if isinstance(value, Tensor) else value
            for key, value in state_dict.items()
        }

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an inner optimizer's ``state_dict``, averaged once ranks have trained for themselves."""
        if not self.is_local:
            return optimizer.state_dict()
        return averaged_state_dict(optimizer, self.bound.group, self.control_group)

    def state_dict(self, *, with_replicas: bool = True) -> dict[str, Any]:
        """Return the averager's state and, on rank 0, the replicas, for the checkpoint that rank 0 writes."""
        replicas = None
        if with_replicas and self.saves_replicas and self.is_local:
            # What has never been trainable is the same everywhere, and lies in the model's own state.
            names, params = self.bound.context.names, self.bound.context.params
            replicas = gather_replicas(
                {names[index]: params[index] for index in self.bound.trainable_indices()},
                dict(self._module.named_buffers()),
                self._optimizers(),
                self.control_group,
                own_value=lambda tensor: self._own.get(id(tensor), (tensor, tensor))[1],
            )
        own, equal = self.bound.state_dict(), self.bound.replicas_equal
        return {"averager": own, "replicas_equal": equal, "replicas": replicas}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, whose model and optimizer state have been loaded already.

        At the same number of ranks each rank goes on as it was. At another one, or without replicas, all start from the
        averaged model. A state that is damaged, or another averager's, raises ValueError.
        """
        require_sound(state, STATE_KEY)
        bound, module, replicas = self.bound, self._module, state.get("replicas")
        try:
            bound.load_state_dict(state["averager"])
            bound.replicas_equal = True
            if replicas is not None and whole_number(replicas["world_size"]) == comm.world_size(bound.group):
                replica = replicas["ranks"][comm.rank(bound.group)]
                params, buffers = dict(module.named_parameters()), dict(module.named_buffers())
                restore_replica(replica, params, buffers, self._optimizers())
                bound.replicas_equal = bool(state["replicas_equal"])
        except (KeyError, IndexError, TypeError, AttributeError, RuntimeError) as error:
            raise ValueError(
                f"The checkpoint's entry {STATE_KEY!r} is damaged: {type(error).__name__}: {error}."
            ) from error

    def finish(self) -> None:
        """End training: every rank gets the averaged model for good."""
        self.after_eval()
        self.bound.finish()

    def close(self, *, failed: bool = False) -> None:
        """Free the groups; after an error, when other ranks may be stuck, only what can be freed without them."""
        self.bound.close(failed=failed)
        if failed:
            comm.free_after_error([self.control_group])
        else:
            comm.destroy_group(self.control_group)


def _place(tensor: Tensor) -> tuple[object, ...]:
    return (tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride())
