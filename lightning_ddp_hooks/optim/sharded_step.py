"""One step of one optimizer, shared by the ranks or not, all at once or in parts.

    begin -> early(bucket 0) ... early(bucket n)  ->  rest          in parts, while gradients come
    rest                                                            all at once: two phases, step then exchange

`rest` steps whatever has a gradient and was not stepped early: sparse gradients, parameters that lay in no bucket or
have no owner yet. So the sum of both is a whole step whatever happened before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.averaging.replicas import optimizer_params
from lightning_ddp_hooks.optim.partial_step import PartialStepper
from lightning_ddp_hooks.optim.separability import check_separable
from lightning_ddp_hooks.optim.sharding import ShardAssignment
from lightning_ddp_hooks.reducer.queue import carry_out

StateDict = dict[str, Any]
"""State of an optimizer in plain form: ``{"state": {position of a parameter: {...}}, "param_groups": [...]}``."""


class ShardedStep:
    """An optimizer of which each rank steps the parameters that it owns, and sends them to the others.

    Args:
        optimizer: The same one on all ranks.
        shards: Owners of the parameters; other optimizers may have the same.
        group: Ranks that share it, on which `rest` exchanges parameters; None if each rank steps all of them.
        bundles: Returns parameters that are better owned by one rank, such as those of a bucket.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        shards: ShardAssignment,
        group: comm.ProcessGroup | None,
        bundles: Callable[[], Sequence[Sequence[Tensor]]] = tuple,
    ) -> None:
        self.optimizer = optimizer
        self.begun = False  # a step in parts, which has not ended
        self.version = 0  # changes with each step
        self.bundles = bundles
        self._group = group
        self._sharded = group is not None
        self.shards = shards
        self._stepper = PartialStepper(optimizer)
        check_separable(optimizer, self._stepper, sharded=self._sharded)
        self._done: set[Tensor] = set()
        self._undo: list[Callable[[], None]] | None = None
        self._unclaimed: StateDict | None = None

    def begin(self, *, tentative: bool = False) -> None:
        """Begin a step in parts; a tentative one can be rolled back, since it may turn out that no rank had a loss."""
        self._stepper.notice_groups()
        self.begun = True
        self.version += 1
        self._done.clear()
        self._undo = [] if tentative else None

    def assign(self, params: Sequence[Tensor], *, apart: bool) -> None:
        """Give an owner to those parameters of a bucket that have none, maybe different ones; alike on all ranks."""
        own = [param for param in params if self._stepper.has(param)]
        self._assign([[param] for param in own] if apart else self._fit([own]))

    def assign_all(self) -> None:
        """Give an owner to each parameter that has none."""
        self._stepper.notice_groups()
        params = list(optimizer_params(self.optimizer))
        if not all(map(self.shards.has, params)):
            together = [[param for param in bundle if self._stepper.has(param)] for bundle in self.bundles()]
            self._assign([*self._fit(together), *([param] for param in params)])

    def early(self, params: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Step those parameters of a bucket that this rank owns, with reduced gradients.

        Returns those that some rank has stepped: all but what is not the optimizer's, or has no owner yet.
        """
        stepped = [param for param in params if self._stepper.has(param) and self.shards.has(param)]
        self._done.update(stepped)
        if self._undo is not None:
            self._undo += [_restorer(self.optimizer, param) for param in stepped]
        pairs = zip(params, gradients, strict=True)
        own = [(p, gradient) for p, gradient in pairs if self._stepper.has(p) and self.shards.is_own(p)]
        before = [param.grad for param, _ in own]
        for param, gradient in own:
            param.grad = gradient
        try:
            self._stepper.run([param for param, _ in own], last=False)
        finally:
            for (param, _), gradient_before in zip(own, before, strict=True):
                param.grad = gradient_before
        return stepped

    def rollback(self) -> None:
        """Undo a tentative step: no rank had a loss."""
        for restore in self._undo or ():
            restore()
        self._end()

    def left(self) -> list[Tensor]:
        """Return the parameters that have a gradient and were not stepped early."""
        return [p for p in optimizer_params(self.optimizer) if p.grad is not None and p not in self._done]

    @torch.no_grad()
    def rest(self, arguments: Mapping[str, Any] | None = None) -> None:
        """Step what has a gradient and was not stepped early, with keyword arguments of ``step``; the end of a step."""
        left = self.left()
        self.assign_all()
        self.version += 1
        self._stepper.run(filter(self.shards.is_own, left), last=True, arguments=arguments)
        if self._group is not None:
            carry_out(self.shards.send(left, key=-1), self._group)
        self._end()

    def _end(self) -> None:
        self.begun = False
        self._done.clear()
        self._undo = None

    def _assign(self, bundles: Sequence[Sequence[Tensor]]) -> None:
        fresh = self.shards.assign(bundles)
        for param in fresh:
            if not self.shards.is_own(param):  # some optimizers make their state when they are made
                self.optimizer.state.pop(param, None)
        if self._unclaimed is not None and fresh:  # it was loaded before its parameters had owners
            now, unclaimed = self.optimizer.state_dict(), self._unclaimed
            found = self._part_of(unclaimed, self.shards.is_own)
            self.optimizer.load_state_dict({**now, "state": {**found, **now["state"]}})
            self._keep_unclaimed(unclaimed)

    def _fit(self, bundles: Sequence[Sequence[Tensor]]) -> list[Sequence[Tensor]]:
        """Take those bundles apart that are larger than a rank's share of the whole."""
        share = sum(param.numel() for param in optimizer_params(self.optimizer)) / self.shards.world_size
        fitting: list[Sequence[Tensor]] = []
        for bundle in bundles:
            fits = sum(param.numel() for param in bundle) <= share
            fitting += [bundle] if fits else [[param] for param in bundle]
        return fitting

    def close(self) -> None:
        """Let go of the group and of memory for sending; `state_dict` and `load_state_dict` work on."""
        self._group = None
        self.shards.workspace.clear()

    def state_dict(self, control_group: comm.ProcessGroup, to: int = 0) -> StateDict:
        """Return the state in plain form, whole on the host of rank ``to`` and empty elsewhere; collective.

        Owners send their state one after the other, and the first rank that of parameters without owner.
        """
        plain, here = self.optimizer.state_dict(), comm.rank(control_group)
        if not self._sharded:
            return plain
        own = self._part_of(plain, lambda p: self.shards.is_own(p) if self.shards.has(p) else here == 0)
        if here != to:  # what belongs to no parameter is the same everywhere
            own = {key: value for key, value in own.items() if isinstance(key, int)}
        whole: dict[Any, Any] = {}
        for rank in range(comm.world_size(control_group)):
            part = _on_host(own) if rank == here else None
            if rank != to:
                part = comm.broadcast_object(part, control_group, rank)
            if here == to:
                whole.update(part or {})
        keys = sorted(whole, key=lambda key: (not isinstance(key, int), key if isinstance(key, int) else str(key)))
        state = {key: whole[key] for key in keys}
        if self._unclaimed is not None and here == to:
            state = {**self._unclaimed["state"], **state}
        return {**plain, "state": state}

    def load_state_dict(self, plain: Mapping[str, Any]) -> None:
        """Take up a whole state in plain form; of it only this rank's part reaches the device.

        State of parameters that have no owner yet is kept as it is given until they have one.
        """
        if not self._sharded:
            self.optimizer.load_state_dict(dict(plain))
        else:
            own = self._part_of(plain, self.shards.is_own)
            self.optimizer.load_state_dict({**plain, "state": own})
            self._keep_unclaimed(plain)
        self._stepper.notice_groups()

    def _keep_unclaimed(self, plain: Mapping[str, Any]) -> None:
        left = self._part_of(plain, lambda param: not self.shards.has(param))
        self._unclaimed = {**plain, "state": left} if any(isinstance(key, int) for key in left) else None

    def _part_of(self, plain: Mapping[str, Any], wanted: Callable[[Tensor], bool]) -> dict[Any, Any]:
        """Return the state of the wanted parameters, and what belongs to no parameter, by their keys in plain form."""
        params = list(optimizer_params(self.optimizer))
        return {
            key: value
            for key, value in plain["state"].items()
            if not isinstance(key, int) or (key < len(params) and wanted(params[key]))
        }


def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone() if value.is_cpu else value.detach().cpu()
    if isinstance(value, dict):
        return {key: _on_host(entry) for key, entry in value.items()}
    return type(value)(map(_on_host, value)) if isinstance(value, (list, tuple)) else value


def _restorer(optimizer: Optimizer, param: Tensor) -> Callable[[], None]:
    """Return what brings a parameter and its state back to what they are now."""
    value = param.detach().clone()
    state = copy.deepcopy(optimizer.state[param]) if param in optimizer.state else None

    def restore() -> None:
        param.detach().copy_(value)
        if state is None:
            optimizer.state.pop(param, None)
        else:
            optimizer.state[param] = state

    return restore
