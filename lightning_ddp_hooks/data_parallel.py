"""The engine for plain PyTorch: a wrapper with the constructor and methods of torch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.hooks.install import install_hook
from lightning_ddp_hooks.hooks.registry import HookLike, resolve_hook
from lightning_ddp_hooks.reducer.config import ReducerConfig
from lightning_ddp_hooks.reducer.reducer import Reducer


class DataParallel(nn.Module):
    """Trains a module on several ranks: each rank runs its own batch, gradients become the mean over the ranks.

    Construction is collective: it compares the model over the ranks and sends rank 0's parameters and buffers to all.
    The gradients are reduced during ``loss.backward()``, which returns when they are in ``.grad``.

    Every rank must run a backward through the wrapper's output in each step; a rank that leaves one out is only noticed
    under a Trainer, where the strategy sees the step (`DDPHooksStrategy`).

    Args:
        module: the module to train, on one device.
        process_group: the ranks; None for all.
        comm_hook: what is done with each full bucket of gradients: a short name, a `CommHook`, or a pair
            ``(state, hook)`` by torch's contract; None for the plain mean.
        bucket_cap_mb: size at which a bucket is closed, in MiB; ``"auto"`` picks it by the link as measured.
        first_bucket_mb: the same for the first bucket, in MiB.
        gradient_as_bucket_view: let ``.grad`` be a slice of the bucket: no second copy of the gradients.
        find_unused_parameters: allow ranks to leave out any parameters in any backward.
        static_graph: learn in the first backward which parameters are used, and rely on it.
        broadcast_buffers: send rank 0's buffers to all ranks at construction and before forwards.
        reducer_backend: ``"auto"``, ``"native"`` or ``"python"``.

    Raises:
        RuntimeError: no process group is initialised, or the ranks' models or settings differ.
        TypeError: an argument of the wrong type.
        ValueError: an argument out of range.

    Example:
        >>> torch.distributed.init_process_group("gloo")
        >>> model = DataParallel(torch.nn.Linear(10, 1))
        >>> model(torch.randn(4, 10)).square().mean().backward()  # .grad now holds the mean over all ranks

    The design follows Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020,
    https://arxiv.org/abs/2006.15704.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: comm.ProcessGroup | None = None,
        *,
        comm_hook: HookLike | None = None,
        bucket_cap_mb: float | Literal["auto"] = 25,
        first_bucket_mb: float = 1,
        gradient_as_bucket_view: bool = True,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        broadcast_buffers: bool = True,
        reducer_backend: Literal["auto", "native", "python"] = "auto",
    ) -> None:
        super().__init__()
        config = ReducerConfig(
            bucket_cap_mb=bucket_cap_mb,
            first_bucket_mb=first_bucket_mb,
            gradient_as_bucket_view=gradient_as_bucket_view,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            broadcast_buffers=broadcast_buffers,
            reducer_backend=reducer_backend,
        )
        declared = resolve_hook(comm_hook)
        self.reducer = Reducer(module, config, process_group=process_group)
        self.module = module
        self._sync = True
        self._step: int | None = None
        if declared is not None:
            install_hook(self.reducer, declared, self._clock)

    def _clock(self) -> int:
        return self.reducer.passes if self._step is None else self._step

    def set_step(self, step: int) -> None:
        """Set the training step that hooks see; without it they see the number of synchronised backwards."""
        self._step = step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; with gradients enabled, prepare for the backward."""
        self.reducer.before_forward()
        output = self.module(*args, **kwargs)
        if torch.is_grad_enabled():
            # As in torch, the forward decides whether its backward is synchronised.
            self.reducer.sync = self._sync
            if self._sync:
                self.reducer.watch_backward_of([t for t in _tensors(output) if t.requires_grad])
        return output

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Replace the plain mean by ``hook(state, bucket) -> Future[Tensor] | Tensor``.

        Args:
            state: handed to each call untouched.
            hook: called once for each full bucket, in order, on the backward path; see `GradBucket`.

        Raises:
            RuntimeError: a hook is registered already, or a backward has run.
            TypeError: the hook cannot be called.
        """
        declared = resolve_hook((state, hook))
        assert declared is not None
        install_hook(self.reducer, declared, self._clock)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication; the first backward of a later forward reduces them all."""
        before = self._sync
        self._sync = False
        try:
            yield
        finally:
            self._sync = before

    def stats(self) -> dict[str, object]:
        """Return facts about buckets and communication; see `Reducer.stats`."""
        return self.reducer.stats()

    def detach(self) -> nn.Module:
        """Remove all hooks, free buckets and groups, and return the module."""
        self.reducer.detach()
        return self.module


def _tensors(value: object) -> Iterator[Tensor]:
    """Find the tensors in a module's output."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for entry in fields(value):
            yield from _tensors(getattr(value, entry.name))
