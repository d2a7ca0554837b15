"""One step of one optimizer, shared by the ranks or not, all at once or in parts.

    begin -> early(bucket 0) ... early(bucket n)  ->  rest          in parts, while gradients come
    rest                                                            all at once: two phases, step then exchange

`rest` steps whatever has a gradient and was not stepped early: sparse gradients, parameters that lay in no bucket or
have no owner yet. So the sum of both is a whole step whatever happened before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.optim.exchange import ParameterExchange, ParametersInFlight
from lightning_ddp_hooks.optim.owners import Owners
from lightning_ddp_hooks.optim.probe import check_fit
from lightning_ddp_hooks.optim.state import StateDict, gathered_state, part_of
from lightning_ddp_hooks.optim.subset import SubsetStep

Bundles = Callable[[], Sequence[Sequence[Tensor]]]


class ShardedStep:
    """An optimizer of which each rank steps the parameters that it owns, and sends them to the others.

    Args:
        optimizer: the ranks have the same one.
        owners: who owns what; with `Owners.everybody` each rank steps all parameters and nothing is sent.
        exchange: sends parameters; None if nothing is to be sent.
        bundles: returns parameters that are better owned by one rank, such as those of a bucket.

    Attributes:
        begun: whether a step in parts has begun and not ended.
        version: changes with each step.

    Raises:
        ValueError: the optimizer cannot be stepped in parts; names it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        owners: Owners,
        exchange: ParameterExchange | None,
        bundles: Bundles = tuple,
    ) -> None:
        self.optimizer = optimizer
        self.owners = owners
        self.begun = False
        self.version = 0
        self.bundles = bundles
        self._exchange = exchange
        self._subset = SubsetStep(optimizer)
        check_fit(optimizer, self._subset, sharded=exchange is not None)
        self._done: set[Tensor] = set()
        self._undo: list[_Before] | None = None
        self._unclaimed: StateDict | None = None

    def params(self) -> Iterator[Tensor]:
        """Return the optimizer's parameters in their order."""
        for group in self.optimizer.param_groups:
            yield from group["params"]

    # ------------------------------------------------------------------ a step in parts

    def begin(self, *, tentative: bool = False) -> None:
        """Begin a step in parts.

        Args:
            tentative: keep what is needed to take it back, since it may turn out that no rank had a loss.
        """
        self._subset.notice_groups()
        self.begun = True
        self.version += 1
        self._done.clear()
        self._undo = [] if tentative else None

    def claim(self, params: Sequence[Tensor], *, apart: bool) -> None:
        """Give an owner to those parameters of a bucket that have none; the same call on all ranks.

        Args:
            params: of the bucket.
            apart: whether they may have different ones.
        """
        own = [param for param in params if self._subset.has(param)]
        self._assign([[param] for param in own] if apart else self._fit([own]))

    def claim_all(self) -> None:
        """Give an owner to each parameter that has none."""
        self._subset.notice_groups()
        self._assign(None)

    def early(self, params: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Step some parameters now, those that this rank owns.

        Args:
            params: of a bucket; those that the optimizer does not have, or that nobody owns yet, are passed over.
            gradients: reduced.

        Returns:
            The parameters that were stepped, by this rank or by another.
        """
        stepped, own = [], []
        for param, gradient in zip(params, gradients, strict=True):
            if self._subset.has(param) and self.owners.knows(param):
                stepped.append(param)
                if self.owners.owns(param):
                    own.append((param, gradient))
        self._done.update(stepped)
        if self._undo is not None:
            self._undo += [_Before(self.optimizer, param) for param in stepped]
        before = [param.grad for param, _ in own]
        for param, gradient in own:
            param.grad = gradient
        try:
            self._subset.run([param for param, _ in own], last=False)
        finally:
            for (param, _), gradient_before in zip(own, before, strict=True):
                param.grad = gradient_before
        return stepped

    def send(self, params: Sequence[Tensor], key: int) -> ParametersInFlight | None:
        """Begin to send parameters from their owners to all; None if nothing is to be sent."""
        if self._exchange is None or self._exchange.world_size == 1 or not params:
            return None
        return self._exchange.start(params, self.owners.of, key)

    def rollback(self) -> None:
        """Undo a tentative step: no rank had a loss."""
        for before in self._undo or ():
            before.restore()
        self._undo = None
        self.begun = False
        self._done.clear()

    # ------------------------------------------------------------------ the rest, or all at once

    def left(self) -> list[Tensor]:
        """Return the parameters that have a gradient and were not stepped early."""
        return [param for param in self.params() if param.grad is not None and param not in self._done]

    @torch.no_grad()
    def rest(self, arguments: Mapping[str, Any] | None = None) -> None:
        """Step what has a gradient and was not stepped early; the end of a step.

        Args:
            arguments: for the optimizer's ``step``.
        """
        left = self.left()
        self.claim_all()
        self.version += 1
        own = [param for param in left if self.owners.owns(param)]
        self._subset.run(own, last=True, arguments=arguments)
        sent = self.send(left, key=-1)
        if sent is not None:
            sent.wait()
        self.begun = False
        self._done.clear()
        self._undo = None

    def _assign(self, bundles: Sequence[Sequence[Tensor]] | None) -> None:
        """Give owners to parameters that have none: of some bundles, or (None) to all."""
        if self._exchange is None or (bundles is None and all(map(self.owners.knows, self.params()))):
            return
        if bundles is None:
            together = [[param for param in bundle if self._subset.has(param)] for bundle in self.bundles()]
            bundles = [*self._fit(together), *([param] for param in self.params())]
        fresh = self.owners.assign(bundles)
        for param in fresh:
            if not self.owners.owns(param):  # some optimizers make their state when they are made
                self.optimizer.state.pop(param, None)
        if self._unclaimed is not None and fresh:
            self._take_up(self._unclaimed)

    def _fit(self, bundles: Sequence[Sequence[Tensor]]) -> list[Sequence[Tensor]]:
        """Take those bundles apart that are larger than a rank's share of the whole."""
        share = sum(param.numel() for param in self.params()) / self.owners.world_size
        fitting: list[Sequence[Tensor]] = []
        for bundle in bundles:
            too_large = sum(param.numel() for param in bundle) > share
            fitting += [[param] for param in bundle] if too_large else [bundle]
        return fitting

    # ------------------------------------------------------------------ state

    def state_dict(self, control_group: comm.ProcessGroup, to: int = 0) -> StateDict:
        """Return the state in the plain form, whole on rank ``to``; collective, see `gathered_state`."""
        if self._exchange is None:
            return self.optimizer.state_dict()
        first = comm.rank(control_group) == 0
        whole = gathered_state(
            self.optimizer,
            lambda param: self.owners.owns(param) if self.owners.knows(param) else first,
            control_group,
            to,
        )
        if self._unclaimed is not None and comm.rank(control_group) == to:
            whole["state"] = {**self._unclaimed["state"], **whole["state"]}
        return whole

    def load_state_dict(self, plain: Mapping[str, Any]) -> None:
        """Take up a whole state in plain form, and keep this rank's part; the rest never reaches the device.

        State of parameters that have no owner yet is kept as it is given until they have one.
        """
        if self._exchange is None:
            self.optimizer.load_state_dict(dict(plain))
        else:
            own = part_of(plain, self.optimizer, self._is_own)
            self.optimizer.load_state_dict({**plain, "state": own})
            left = part_of(plain, self.optimizer, lambda param: not self.owners.knows(param))
            self._unclaimed = {**plain, "state": left} if left else None
        self._subset.notice_groups()

    def _take_up(self, unclaimed: StateDict) -> None:
        """Load what was loaded before its parameters had owners."""
        now = self.optimizer.state_dict()
        found = part_of(unclaimed, self.optimizer, self._is_own)
        self.optimizer.load_state_dict({**now, "state": {**found, **now["state"]}})
        left = part_of(unclaimed, self.optimizer, lambda param: not self.owners.knows(param))
        self._unclaimed = {**unclaimed, "state": left} if any(isinstance(key, int) for key in left) else None

    def _is_own(self, param: Tensor) -> bool:
        return self.owners.knows(param) and self.owners.owns(param)


class _Before:
    """A parameter and its state before a step that may be taken back."""

    def __init__(self, optimizer: Optimizer, param: Tensor) -> None:
        self._optimizer = optimizer
        self._param = param
        self._value = param.detach().clone()
        self._state = copy.deepcopy(optimizer.state[param]) if param in optimizer.state else None

    def restore(self) -> None:
        self._param.detach().copy_(self._value)
        if self._state is None:
            self._optimizer.state.pop(self._param, None)
        else:
            self._optimizer.state[self._param] = self._state
