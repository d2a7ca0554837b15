"""Any of our hooks on torch's own DDP: all its requests are carried out inside one call, by torch's contract."""

# No postponed annotations: torch's DDP looks at those of the functions when it is given one.
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.hooks.allreduce import AllReduce, TensorFuture, divisor_of, done
from lightning_ddp_hooks.hooks.contract import BindContext, BoundHook, CommHook
from lightning_ddp_hooks.hooks.registry import HookLike, resolve_hook
from lightning_ddp_hooks.reducer.bucket import GradBucket
from lightning_ddp_hooks.reducer.queue import CollectiveQueue


class TorchDDPState:
    """The state that `run_on_torch_ddp` takes: a hook, its ranks, and the number of steps so far.

    Args:
        hook: A short name, a `CommHook`, a pair ``(state, hook)``, or None for the mean.
        process_group: Ranks to reduce over; None for all.
        module: Module that is trained (not the wrapper), by whose parameters' names state is kept; without it by
            numbers, in the order in which torch hands the parameters out.

    Attributes:
        hook: Declaration.
        bound: Hook at work; None before the first bucket.
        steps: Number of backwards so far, which is the hook's clock.

    Example:
        >>> state = TorchDDPState(PowerSGD(rank=2, start_iter=0), module=model)
        >>> torch.nn.parallel.DistributedDataParallel(model).register_comm_hook(state, run_on_torch_ddp)
    """

    def __init__(
        self, hook: HookLike | None, process_group: comm.ProcessGroup | None = None, *, module: nn.Module | None = None
    ) -> None:
        self.hook: CommHook = resolve_hook(hook) or AllReduce()
        self.process_group = process_group
        self.bound: BoundHook | None = None
        self.steps = 0
        self._queue: CollectiveQueue | None = None
        # Parameters by identity, since torch's buckets do not name them; the value holds the parameter, and so the id.
        named = () if module is None else module.named_parameters()
        self._names: dict[int, tuple[str, Tensor]] = {id(param): (name, param) for name, param in named}
        self._loaded: Mapping[str, Any] | None = None

    def _bind(self, params: Sequence[Tensor]) -> CollectiveQueue:
        """Bind the hook; collective, at the first bucket."""
        group = comm.resolve_group(self.process_group)
        # At once, and so in torch's order of buckets: nothing else moves a bucket on after its call.
        queue = self._queue = CollectiveQueue(group, at_once=True)
        context = BindContext(
            control_group=comm.new_group(group, cpu=True),
            names=self.names_of(params),
            params=params,
            step=lambda: self.steps,
            subgroup=queue.subgroup,
        )
        self.bound = queue.hook = self.hook.bind(context)
        if self._loaded is not None:
            self.bound.load_state_dict(self._loaded)
        return queue

    def reduce(self, bucket: GradBucket) -> Tensor:
        """Run the hook on a bucket from beginning to end; return the reduced values."""
        queue = self._queue or self._bind(bucket.parameters())
        if queue.hook.takes_divided:
            with torch.no_grad():
                bucket.buffer().mul_(1.0 / bucket.divisor)
        result = queue.launch(bucket).wait()
        queue.forget()
        return result

    def names_of(self, params: Iterable[Tensor]) -> tuple[str, ...]:
        """Return the parameters' names, or numbers given in order of appearance."""
        return tuple(self._names.setdefault(id(param), (f"parameter {len(self._names)}", param))[0] for param in params)

    def step_ended(self) -> None:
        """Count a backward; called after its last bucket."""
        self.steps += 1

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle holds: this rank's part of the state, and nothing of the process that it lives in."""
        if any(not name.startswith("parameter ") for name, _ in self._names.values()):
            raise TypeError("A state that knows its module cannot be pickled: use `state_dict()`.")
        if self.process_group is not None:
            warnings.warn("A process group cannot be pickled: the copy will use the default one.", stacklevel=2)
        loaded = self._loaded if self.bound is None else self.bound.own_state_dict()
        fresh = {"process_group": None, "bound": None, "_queue": None, "_names": {}, "_loaded": loaded}
        return {**vars(self), **fresh}

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to go on, fit for ``torch.load(..., weights_only=True)``; collective."""
        return {"steps": self.steps, "hook": self.bound.state_dict() if self.bound is not None else {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, maybe with another number of ranks."""
        self.steps = int(state["steps"])
        self._loaded = state["hook"]
        if self.bound is not None:
            self.bound.load_state_dict(state["hook"])


class _BucketOfTorch(GradBucket):
    """torch's bucket with the names and the divisor that our hooks look at."""

    __slots__ = ("_inner", "_params")

    def __init__(self, inner: Any, names: tuple[str, ...], params: list[Tensor], divisor: float) -> None:
        super().__init__(inner, inner.index(), inner.is_last(), names, divisor)
        self._inner = inner
        self._params = params

    def buffer(self) -> Tensor:
        buffer: Tensor = self._inner.buffer() if self._replaced is None else self._replaced
        return buffer

    def gradients(self) -> list[Tensor]:
        if self._replaced is None:
            return list(self._inner.gradients())
        parts = torch.split(self._replaced.view(-1), [param.numel() for param in self._params])
        return [part.view(param.shape) for part, param in zip(parts, self._params, strict=True)]

    def parameters(self) -> list[Tensor]:
        return list(self._params)

    def set_buffer(self, tensor: Tensor) -> None:
        self._replaced = tensor


def run_on_torch_ddp(state: TorchDDPState, bucket: comm.TorchGradBucket) -> TensorFuture:
    """Reduce a bucket of torch's DDP with the hook in ``state``, from beginning to end; see `TorchDDPState`.

    On the CPU the call returns when the bucket is reduced, so nothing overlaps; on a device the collectives are only
    queued. Our own reducer, given the declaration, overlaps phases and buckets.
    """
    params = list(bucket.parameters())
    names = getattr(bucket, "names", None) or state.names_of(params)
    divisor = divisor_of(bucket, comm.resolve_group(state.process_group))
    result = state.reduce(_BucketOfTorch(bucket, names, params, divisor))
    if bucket.is_last():
        state.step_ended()
    return done(result)
