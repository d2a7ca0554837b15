"""Hooks and averagers for a model that FSDP2 has sharded, and what they need in a training loop.

apply(model, ...)         once the model is sharded and on its device; collective
  backward                gradients are reduced by the hook, over the replicas or within the reduce-scatter
  optimizer.step()        ends a training step: averages and checks that are due
averaged()                around an evaluation
state_dict, load_from     a distributed checkpoint
finish, close             the end of training
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_ddp_hooks import comm
from lightning_ddp_hooks._compat import of_fsdp
from lightning_ddp_hooks.averaging.averager import ModelAverager
from lightning_ddp_hooks.fsdp.averaging import LocalShards, ShardAveraging
from lightning_ddp_hooks.fsdp.replicas import ReplicaReduction
from lightning_ddp_hooks.fsdp.scatter import reduce_scatter_by
from lightning_ddp_hooks.fsdp.settings import FSDPSettings
from lightning_ddp_hooks.fsdp.state import read_state, sharded_state
from lightning_ddp_hooks.health.checks import check_replicas
from lightning_ddp_hooks.hooks.contract import BoundHook
from lightning_ddp_hooks.hooks.registry import HookLike
from lightning_ddp_hooks.optimizer_clock import OptimizerClock
from lightning_ddp_hooks.reducer.module_sync import check_same_on_all_ranks

_in_use: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class FSDPHooks:
    """Hook and averager at work on a sharded model; `apply` makes it.

    Attributes:
        model: The model.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: FSDPSettings,
        optimizers: Sequence[Optimizer],
        replicas: comm.ProcessGroup | None,
    ) -> None:
        groups = self._groups = _checked_groups(model)
        self.model = model
        self._step = 0
        self._settings = settings
        self._params = [param for group in groups for param in group.params]
        self._shard_group = groups[0].shard_group
        self._replicas = _replicas_of(groups, replicas)
        settings.check_model(has_replicas=self._replicas is not None, offloads=any(group.offloads for group in groups))
        in_group = next(filter(None, (of_fsdp.shared_beside_shards(group.params) for group in groups)), None)
        settings.check_tensor_parallel(in_group=in_group, in_model=of_fsdp.shared_beside_shards(self._params))
        self._shards = LocalShards(self._params)
        self._clock = OptimizerClock(model, [getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers])
        self._handles: list[Any] = []
        self._reduction: ReplicaReduction | None = None
        self._averaging: ShardAveraging | None = None
        self._control_group: comm.ProcessGroup | None = None
        hook = settings.hook
        if self._replicas is None:
            self._agree(comm.resolve_group(self._shard_group))
            if hook is not None:
                scatter = reduce_scatter_by(hook, comm.rank(self._shard_group), self._coming_step)
                for group in groups:
                    group.take_reduce_scatter(scatter)
        else:
            self._control_group = comm.new_group(self._replicas, cpu=True)
            self._agree(self._replicas)
            self._send_shards()
            if settings.averager is not None:
                self._averaging = ShardAveraging(
                    settings.averager,
                    model,
                    self._params,
                    self._replicas,
                    self._control_group,
                    self._optimizers,
                )
            if hook is not None or settings.averager is not None or groups[0].replicate_group is None:
                self._reduction = ReplicaReduction(
                    groups, self._replicas, self._control_group, hook, self._coming_step, self._reduces
                )
        for optimizer in self._clock.optimizers():
            self._handles.append(optimizer.register_step_post_hook(self._note_step))
        _in_use.add(model)

    def _agree(self, group: comm.ProcessGroup) -> None:
        """Raise on all ranks if their settings differ."""
        control = comm.new_group(group, cpu=True) if self._control_group is None else self._control_group
        check_same_on_all_ranks([], self._settings.to_agree_on(), control)
        if control is not self._control_group:
            comm.destroy_group(control)

    @torch.no_grad()
    def _send_shards(self) -> None:
        """Give all replicas the parameters of the first one."""
        assert self._replicas is not None
        works = [comm.broadcast(own.detach(), self._replicas) for own in self._shards.params if own.numel()]
        for work in works:
            work.wait()

    @property
    def step(self) -> int:
        """The training step that comes next."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step
        if self._averaging is not None:
            self._averaging.bound.step = step

    def _coming_step(self) -> int:
        return self._step

    def _reduces(self) -> bool:
        return self._averaging is None or self._averaging.syncs_gradients

    def _optimizers(self) -> Sequence[Optimizer]:
        return self._clock.optimizers()

    def _note_step(self, optimizer: Optimizer, *_: object) -> None:
        if self._clock.has_stepped(optimizer):  # others have not, and begin the next training step with it
            self.step_ended()
            self._clock.count(optimizer)
        elif self._clock.count(optimizer):
            self.step_ended()

    @property
    def hook(self) -> BoundHook | None:
        """The communication hook between replicas, at work; None for the mean, or in plain FSDP."""
        return None if self._reduction is None else self._reduction.hook

    @property
    def keeps_state(self) -> bool:
        """Whether a checkpoint of model and optimizers alone lacks something."""
        return self._averaging is not None or (self.hook is not None and self.hook.keeps_state)

    def step_ended(self) -> None:
        """Count a training step, and do what is due after it; collective over the replicas.

        The steps of ``optimizers`` do this by themselves. Without them call it on all ranks after each training step.
        """
        self._clock.restart()
        self._step += 1
        if self._averaging is not None:
            self._averaging.after_step()
        every = self._settings.check_replicas_every_n_steps
        if every and self.step % every == 0:
            self.check_replicas(f"by the end of step {self.step - 1}")

    def check_replicas(self, when: str = "") -> None:
        """Raise on all replicas if their parameters differ where they should not; collective over the replicas."""
        if self._control_group is not None and self._reduces():
            self._shards.refresh()
            check_replicas(self._shards.names, self._shards.params, self._control_group, when or f"at step {self.step}")

    @contextmanager
    def averaged(self, *, optimizers: bool = False) -> Iterator[None]:
        """Put the averaged model (with DiLoCo: the global one) in place, for an evaluation or a checkpoint; collective.

        Args:
            optimizers: Average the state of the optimizers too, for a checkpoint.
        """
        with nullcontext() if self._averaging is None else self._averaging.averaged(optimizers=optimizers):
            yield

    def finish(self) -> None:
        """Give all replicas the averaged model for good, at the end of training; collective."""
        if self._averaging is not None:
            self._averaging.finish()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of clock, hook and averager, an entry for ``torch.distributed.checkpoint.save``; collective.

        With an averager, save it together with model and optimizer under ``averaged(optimizers=True)``: a run that goes
        on starts all replicas from the averaged model.
        """
        state: dict[str, Any] = {"format": 1, "step": self.step, "hook": None, "averager": None}
        if self.hook is not None:
            state["hook"] = self.hook.state_dict()
        if self._averaging is not None:
            state["averager"] = self._averaging.state_dict()
        return sharded_state(state, self._params)

    def load_from(self, path: str | os.PathLike[str], entry: str) -> None:
        """Go on from the entry of a distributed checkpoint that `state_dict` was saved as; collective.

        It may have been written on another mesh: what belongs to single elements of parameters (residuals, momentum,
        outer parameters) is sharded anew, factors of PowerSGD begin anew. Load the model and the optimizers first.

        Raises:
            ValueError: No such entry, or state of another hook or averager.
        """
        state = read_state(os.fspath(path), entry, self._params)
        self.step = int(state["step"])
        if self.hook is not None and state["hook"] is not None:
            self.hook.load_state_dict(state["hook"])
        if self._averaging is not None and state["averager"] is not None:
            self._averaging.load_state_dict(state["averager"])

    def stats(self) -> dict[str, Any]:
        """Return the step, the numbers of ranks, and what the hook says of itself."""
        size = 1 if self._replicas is None else comm.world_size(self._replicas)
        stats = {} if self.hook is None else self.hook.stats()
        return {"step": self.step, "replicas": size, "shards": comm.world_size(self._shard_group), "hook": stats}

    def close(self) -> None:
        """Leave the model to FSDP2 again, and free groups."""
        for group in self._groups:
            group.give_back()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._averaging is not None:
            self._averaging.close()
        if self._reduction is not None:
            self._reduction.close()
        if self._control_group is not None:
            comm.destroy_group(self._control_group)
        self._averaging = self._reduction = self._control_group = None
        _in_use.discard(self.model)


def apply(
    model: nn.Module,
    *,
    comm_hook: HookLike | None = None,
    averager: ModelAverager | None = None,
    optimizers: Optimizer | Sequence[Optimizer] = (),
    replicas: comm.ProcessGroup | Any = None,
    check_replicas_every_n_steps: int | None = None,
) -> FSDPHooks:
    """Have a communication hook or a model averager work on a model that ``fully_shard`` has sharded; collective.

    On a mesh of two dimensions (replicas x shards, usually hosts x devices of a host) FSDP2's all-reduce over replicas
    is replaced. On one of a single dimension ``replicas`` adds them; without it the hook takes the place of the
    reduce-scatter, which only `Cast` and `BlockQuantize` without error feedback can do.

    Args:
        model: Model whose parts are sharded and lie on their device, with weights in them. All replicas begin with
            those of the first one.
        comm_hook: Short name or `CommHook` for the gradients; None for the mean.
        averager: Averages the model over the replicas every few steps, not gradients at each.
        optimizers: Optimizers of the model, whose steps end training steps. Without them call
            `FSDPHooks.step_ended` after each.
        replicas: Mesh of one dimension, or process group, over the ranks that hold the same shards, if the model was
            sharded on a mesh without them.
        check_replicas_every_n_steps: Compare the parameters of replicas so often; None for never.

    Returns:
        What is at work, with its state.

    Raises:
        TypeError: A setting of the wrong type.
        ValueError: A model that is not sharded, or a setting that does not fit it.
        RuntimeError: Something is at work on the model already, or torch is too old.

    Example:
        >>> mesh = init_device_mesh("cuda", (hosts, 8), mesh_dim_names=("replicate", "shard"))
        >>> for block in model.blocks:
        ...     fully_shard(block, mesh=mesh)
        >>> fully_shard(model, mesh=mesh)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> hooks = ldh.fsdp.apply(model, comm_hook="int8", optimizers=optimizer)
    """
    settings = FSDPSettings(
        comm_hook=comm_hook, averager=averager, check_replicas_every_n_steps=check_replicas_every_n_steps
    )
    given = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    group = replicas.get_group() if hasattr(replicas, "get_group") else replicas
    return FSDPHooks(model, settings, given, None if group is None else comm.resolve_group(group))


def has_replicas(model: nn.Module) -> bool:
    """Tell whether a model was sharded on a mesh with replicas."""
    return any(group.replicate_group is not None for group in of_fsdp.param_groups(model))


def _checked_groups(model: nn.Module) -> list[of_fsdp.ParamGroup]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"Expected a torch.nn.Module, got {type(model).__name__}.")
    if of_fsdp.is_fsdp1(model):
        raise ValueError(
            "The model is wrapped in FullyShardedDataParallel, which has no place for hooks: shard it by FSDP2's "
            "`torch.distributed.fsdp.fully_shard`."
        )
    groups = of_fsdp.param_groups(model)
    if not groups:
        raise ValueError("No part of the model is sharded: call `torch.distributed.fsdp.fully_shard` on it first.")
    if model in _in_use or any(group.has_own_reduction for group in groups):
        raise RuntimeError(
            "A hook or a collective is at work on this model already: `apply` is called once, and without "
            "`set_all_reduce_hook` or `set_custom_reduce_scatter`. `FSDPHooks.close()` lets go of a model."
        )
    if any(group.shard_group is None for group in groups):
        raise ValueError(
            "A part of the model is replicated and not sharded (`replicate`): use `ldh.DataParallel` for a model that "
            "fits on a device."
        )
    sharded = {id(param.param) for group in groups for param in group.params}
    outside = [name for name, param in model.named_parameters() if param.requires_grad and id(param) not in sharded]
    if outside:
        raise ValueError(
            f"Nobody reduces the gradient of {outside[0]!r} ({len(outside)} parameters of no sharded module): call "
            "`fully_shard` on the whole model too, after its parts, or freeze them."
        )
    if any(param.param.is_meta for group in groups for param in group.params):
        raise ValueError("Some parameters are on the meta device: call `model.to_empty(...)` and load weights first.")
    return groups


def _replicas_of(groups: Sequence[of_fsdp.ParamGroup], replicas: comm.ProcessGroup | None) -> comm.ProcessGroup | None:
    """Return the ranks that hold the same shards; raise unless all groups have the same ones."""
    meshes = {
        tuple(None if part is None else tuple(comm.global_ranks(part)) for part in (g.shard_group, g.replicate_group))
        for g in groups
    }
    if len(meshes) > 1:
        raise ValueError(
            f"Parts of the model are sharded on different meshes ({len(meshes)} of them, such as those of experts): "
            "hooks and averagers need the same mesh for all."
        )
    own = groups[0].replicate_group
    if own is not None and replicas is not None:
        raise ValueError("The model's mesh has replicas of its own: leave out `replicas`.")
    shards = groups[0].shard_group
    if replicas is not None and shards is not None:
        shared = set(comm.global_ranks(replicas)) & set(comm.global_ranks(shards))
        if len(shared) != 1:
            raise ValueError(
                f"Expected `replicas` to hold ranks of other shard groups, got {comm.global_ranks(replicas)}, which "
                f"shares {sorted(shared)} with this rank's shards."
            )
    found = own if own is not None else replicas
    return None if found is None or comm.world_size(found) == 1 else found
