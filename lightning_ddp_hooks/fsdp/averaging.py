"""A model averager over the replicas of a sharded model: each rank averages its shards with those of its peers.

    replica 0   rank 0 [ shard 0 ]   rank 1 [ shard 1 ]
                       |                    |             averaged: elementwise, so shard by shard
    replica 1   rank 2 [ shard 0 ]   rank 3 [ shard 1 ]

Averagers know nothing of shards: they are given this rank's as if they were the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ddp_hooks import comm
from lightning_ddp_hooks._compat.of_fsdp import ShardedParam, local_tensor
from lightning_ddp_hooks.averaging.averager import AveragingContext, ModelAverager
from lightning_ddp_hooks.averaging.replicas import average_optimizer_state


class LocalShards:
    """This rank's shards as parameters of their own, which share the memory of the sharded ones."""

    def __init__(self, params: Sequence[ShardedParam]) -> None:
        self._sharded = params
        self.names = [param.name for param in params]
        self.params = [nn.Parameter(param.local(), requires_grad=param.param.requires_grad) for param in params]

    def refresh(self) -> None:
        """Follow the model: FSDP2, and who loads or moves it, may give a shard other memory."""
        for shard, own in zip(self._sharded, self.params, strict=True):
            local = shard.local()
            if local.data_ptr() != own.data_ptr() or local.shape != own.shape:
                own.data = local
            own.requires_grad_(shard.param.requires_grad)

    def own_of(self) -> dict[int, nn.Parameter]:
        """Return the shard that stands for each parameter, by the parameter's id."""
        return {id(shard.param): own for shard, own in zip(self._sharded, self.params, strict=True)}


class _LocalOptimizer:
    """An optimizer of sharded parameters, as one of their shards: what averagers look at."""

    def __init__(self, optimizer: Optimizer, shards: LocalShards) -> None:
        own = shards.own_of()
        self.param_groups = [
            {**group, "params": [own.get(id(param), param) for param in group["params"]]}
            for group in optimizer.param_groups
        ]
        self.state = {
            own.get(id(param), param): {key: local_tensor(value) for key, value in entries.items()}
            for param, entries in optimizer.state.items()
        }


class ShardAveraging:
    """An averager at work on the shards of a model, which are equal on all replicas at first."""

    def __init__(
        self,
        averager: ModelAverager,
        module: nn.Module,
        params: Sequence[ShardedParam],
        replicas: comm.ProcessGroup,
        control_group: comm.ProcessGroup,
        optimizers: Callable[[], Sequence[Optimizer]],
    ) -> None:
        self.shards = LocalShards(params)
        self._control_group = control_group
        self._optimizers = optimizers
        self._averaged = False  # whether the averaged model is in the place of the replica's own
        context = AveragingContext(
            group=replicas,
            control_group=control_group,
            names=self.shards.names,
            params=self.shards.params,
            buffers=lambda: [buffer for buffer in module.buffers() if type(buffer) is Tensor],
            optimizers=self._local_optimizers,
        )
        self.bound = averager.bind(context)

    def _local_optimizers(self) -> list[Optimizer]:
        return [cast("Optimizer", _LocalOptimizer(optimizer, self.shards)) for optimizer in self._optimizers()]

    @property
    def syncs_gradients(self) -> bool:
        """Whether the gradients of the coming step are averaged over the replicas."""
        return self.bound.syncs_gradients(self.bound.step)

    def after_step(self) -> None:
        """Count a training step, and average if it is due; collective."""
        if self._averaged:
            raise RuntimeError("A training step ended while the averaged model is in place: leave `averaged()` first.")
        self.shards.refresh()
        self.bound.average_parameters()

    @contextmanager
    def averaged(self, *, optimizers: bool = False) -> Iterator[None]:
        """Put the averaged model (with DiLoCo: the global one) in place for a while; collective.

        With ``optimizers`` the same is done to the state of the inner optimizers.
        """
        self.shards.refresh()
        live = [] if self._averaged or self.bound.replicas_equal else self.bound.model_tensors()
        has_trained_alone = self.bound.step > self.bound.settings.warmup_steps
        locals_ = self._local_optimizers() if optimizers and has_trained_alone else []
        entries = [entry for local in locals_ for entry in local.state.values()]
        states = [value for entry in entries for value in entry.values() if isinstance(value, Tensor)]
        own = [(tensor, tensor.detach().clone()) for tensor in (*live, *states)]
        before, self._averaged = self._averaged, True
        try:
            with torch.no_grad():
                if live:
                    self.bound.average_into(live)
                for local in locals_:
                    average_optimizer_state(local, self.bound.group, self._control_group)
            yield
        finally:
            self._averaged = before
            with torch.no_grad():
                for tensor, value in own:
                    tensor.copy_(value)

    def finish(self) -> None:
        """Give all replicas the averaged model for good; collective."""
        self.shards.refresh()
        self.bound.finish()

    def state_dict(self) -> dict[str, Any]:
        """Return what the averager needs to go on from the averaged model; collective."""
        return self.bound.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, whose averaged model has been loaded on all replicas."""
        self.shards.refresh()
        self.bound.load_state_dict(state)
        self.bound.replicas_equal = True

    def close(self) -> None:
        """Free the groups."""
        self.bound.close()
