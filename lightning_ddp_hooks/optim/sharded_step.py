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
from lightning_ddp_hooks.optim.cost import cost_of_update
from lightning_ddp_hooks.optim.exchange import ShardExchange
from lightning_ddp_hooks.optim.partial_step import PartialStepper
from lightning_ddp_hooks.optim.pieces import Piece, cut_state, join_states, may_be_cut, stand_in
from lightning_ddp_hooks.optim.separability import check_separable
from lightning_ddp_hooks.optim.sharding import ShardAssignment
from lightning_ddp_hooks.reducer.queue import carry_out

StateDict = dict[str, Any]
"""State of an optimizer in plain form: ``{"state": {position of a parameter: {...}}, "param_groups": [...]}``."""


class ShardedStep:
    """An optimizer of which each rank steps the pieces of parameters that it owns, and sends them to the others.

    Args:
        optimizer: The same one on all ranks.
        shards: Owners of the parameters; other optimizers may have the same.
        group: Ranks that share it, on which `rest` exchanges parameters; None if each rank steps all of them.
        buckets: Returns the parameters of each bucket. Of those, all that may be are cut, so that each rank owns one
            range of the bucket; all other parameters get one owner each.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        shards: ShardAssignment,
        group: comm.ProcessGroup | None,
        buckets: Callable[[], Sequence[Sequence[Tensor]]] = tuple,
    ) -> None:
        self.optimizer = optimizer
        self.begun = False  # a step in parts, which has not ended
        self.version = 0  # changes with each step
        self.buckets = buckets
        self._group = group
        self._sharded = group is not None
        self.shards = shards
        self.exchange = ShardExchange(shards)
        self._stepper = PartialStepper(optimizer)
        check_separable(optimizer, self._stepper, sharded=self._sharded)
        self._stepper.notice_groups()
        shards.join(param for param in optimizer_params(optimizer) if not self._may_be_cut(param))
        self._done: set[Tensor] = set()
        self._used_up: set[Tensor] = set()  # of which `.grad` is not the mean over the ranks
        self._undo: list[Callable[[], None]] | None = None
        self._unclaimed: StateDict | None = None

    def begin(self, *, tentative: bool = False) -> None:
        """Begin a step in parts; a tentative one can be rolled back, since it may turn out that no rank had a loss."""
        self._stepper.notice_groups()
        self.begun = True
        self.version += 1
        self._done.clear()
        self._undo = [] if tentative else None

    def assign(self, bucket: Sequence[Tensor]) -> None:
        """Give owners to those parameters of a bucket that have none; alike on all ranks."""
        self._assign([param for param in bucket if self._stepper.has(param)], [bucket])

    def assign_all(self) -> None:
        """Give owners to each parameter that has none."""
        self._stepper.notice_groups()
        params = list(optimizer_params(self.optimizer))
        if not all(map(self.shards.has, params)):
            self._assign(params, self.buckets())

    def owns_all(self, params: Sequence[Tensor]) -> bool:
        """Tell whether each of the parameters is the optimizer's and has owners, so that only they need gradients."""
        return self.shards.world_size > 1 and all(self._stepper.has(p) and self.shards.has(p) for p in params)

    def early(self, params: Sequence[Tensor], gradients: Sequence[Tensor], *, uses_up: bool = False) -> list[Tensor]:
        """Step what this rank owns of a bucket's parameters, with reduced gradients.

        With ``uses_up`` only owners have those, and the end of the step sets ``.grad`` to None. Returns those that some
        rank has stepped: all but what is not the optimizer's, or has no owner yet.
        """
        stepped = [param for param in params if self._stepper.has(param) and self.shards.has(param)]
        self.shards.require_order(stepped)
        self._done.update(stepped)
        self._used_up.update(stepped if uses_up else ())
        if self._undo is not None:
            self._undo += [_restorer(self.optimizer, param) for param in stepped]
        pairs = [(p, g) for p, g in zip(params, gradients, strict=True) if self._stepper.has(p) and self.shards.own(p)]
        before = [param.grad for param, _ in pairs]
        for param, gradient in pairs:
            param.grad = gradient
        try:
            self._run([param for param, _ in pairs], last=False)
        finally:
            for (param, _), gradient_before in zip(pairs, before, strict=True):
                param.grad = gradient_before
        return stepped

    def _run(self, params: Sequence[Tensor], *, last: bool, arguments: Mapping[str, Any] | None = None) -> None:
        """Step what this rank owns of the parameters, with what is in ``.grad``."""
        own = [(param, self.shards.own(param)) for param in params]
        stand_ins = {param: stand_in(param, piece) for param, piece in own if piece and not _is_whole(piece, param)}
        self._stepper.run([param for param, piece in own if piece], last=last, arguments=arguments, stand_ins=stand_ins)

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
        self.shards.require_order(left)
        self._run(left, last=True, arguments=arguments)
        if self._group is not None:
            carry_out(self.exchange.send(left), self._group)
        self._end()

    def _end(self) -> None:
        self.begun = False
        self._done.clear()
        self._undo = None
        for param in self._used_up:
            param.grad = None
        self._used_up.clear()

    def _assign(self, params: Sequence[Tensor], buckets: Sequence[Sequence[Tensor]]) -> None:
        def cost(param: Tensor) -> int:
            return cost_of_update(self.optimizer, self._stepper.group(param), param)

        fresh = self.shards.assign(params, [list(filter(self._may_be_cut, bucket)) for bucket in buckets], cost)
        for param in fresh if self._sharded else ():  # some optimizers make their state when they are made
            piece = self.shards.own(param)
            if piece is None:
                self.optimizer.state.pop(param, None)
            elif param in self.optimizer.state and not _is_whole(piece, param):
                self.optimizer.state[param] = cut_state(self.optimizer.state[param], param, piece)
        if self._unclaimed is not None and fresh:  # it was loaded before its parameters had owners
            now, unclaimed = self.optimizer.state_dict(), self._unclaimed
            self.optimizer.load_state_dict({**now, "state": {**self._own_part(unclaimed), **now["state"]}})
            self._keep_unclaimed(unclaimed)

    def _may_be_cut(self, param: Tensor) -> bool:
        return self._stepper.has(param) and self._stepper.is_by_element(param) and may_be_cut(param)

    def close(self) -> None:
        """Let go of the group and of memory for sending; `state_dict` and `load_state_dict` work on."""
        self._group = None
        self.exchange.clear()

    def state_dict(self, control_group: comm.ProcessGroup, to: int = 0) -> StateDict:
        """Return the state in plain form, whole on the host of rank ``to`` and empty elsewhere; collective.

        Owners send their state one after the other, and the first rank that of parameters without owner.
        """
        plain, here = self.optimizer.state_dict(), comm.rank(control_group)
        if not self._sharded:
            return plain
        own = self._part_of(plain, lambda p: self.shards.own(p) is not None if self.shards.has(p) else here == 0)
        if here != to:  # what belongs to no parameter is the same everywhere
            own = {key: value for key, value in own.items() if isinstance(key, int)}
        parts: dict[Any, list[tuple[int, Any]]] = {}
        for rank in range(comm.world_size(control_group)):
            part = _on_host(own) if rank == here else None
            if rank != to:
                part = comm.broadcast_object(part, control_group, rank)
            for key, value in (part or {}).items() if here == to else ():
                parts.setdefault(key, []).append((rank, value))
        keys = sorted(parts, key=lambda key: (not isinstance(key, int), key if isinstance(key, int) else str(key)))
        params = list(optimizer_params(self.optimizer))
        state = {key: self._joined(parts[key], params[key] if isinstance(key, int) else None) for key in keys}
        if self._unclaimed is not None and here == to:
            state = {**self._unclaimed["state"], **state}
        return {**plain, "state": state}

    def _joined(self, parts: Sequence[tuple[int, Any]], param: Tensor | None) -> Any:
        if param is None or not self.shards.has(param) or len(self.shards.pieces(param)) == 1:
            return parts[0][1]
        pieces = {piece.owner: piece for piece in self.shards.pieces(param)}
        return join_states([(pieces[rank], state) for rank, state in parts], param)

    def load_state_dict(self, plain: Mapping[str, Any]) -> None:
        """Take up a whole state in plain form; of it only this rank's part reaches the device.

        State of parameters that have no owner yet is kept as it is given until they have one.
        """
        if not self._sharded:
            self.optimizer.load_state_dict(dict(plain))
        else:
            self.optimizer.load_state_dict({**plain, "state": self._own_part(plain)})
            self._keep_unclaimed(plain)
        self._stepper.notice_groups()

    def _keep_unclaimed(self, plain: Mapping[str, Any]) -> None:
        left = self._part_of(plain, lambda param: not self.shards.has(param))
        self._unclaimed = {**plain, "state": left} if any(isinstance(key, int) for key in left) else None

    def _own_part(self, plain: Mapping[str, Any]) -> dict[Any, Any]:
        """Return of a state in plain form what this rank owns."""
        params = list(optimizer_params(self.optimizer))
        part = self._part_of(plain, lambda param: self.shards.own(param) is not None)
        for key, state in part.items():
            piece = self.shards.own(params[key]) if isinstance(key, int) else None
            if piece is not None and not _is_whole(piece, params[key]):
                part[key] = cut_state(state, params[key], piece)
        return part

    def _part_of(self, plain: Mapping[str, Any], wanted: Callable[[Tensor], bool]) -> dict[Any, Any]:
        """Return the state of the wanted parameters, and what belongs to no parameter, by their keys in plain form."""
        params = list(optimizer_params(self.optimizer))
        return {
            key: value
            for key, value in plain["state"].items()
            if not isinstance(key, int) or (key < len(params) and wanted(params[key]))
        }


def _is_whole(piece: Piece, param: Tensor) -> bool:
    return piece.stop - piece.start == param.numel()


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
