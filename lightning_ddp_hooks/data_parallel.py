"""The engine for plain PyTorch: a wrapper with the constructor and methods of torch's DistributedDataParallel."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from typing import Any, Literal

import torch
from torch import nn

from lightning_ddp_hooks import _compat, comm
from lightning_ddp_hooks.config import Settings
from lightning_ddp_hooks.conflicts import raise_on_conflict
from lightning_ddp_hooks.health.process_watch import watch_run
from lightning_ddp_hooks.health.report import LIKELY_CAUSE
from lightning_ddp_hooks.hooks.registry import HookLike, resolve_hook
from lightning_ddp_hooks.join.context import Join, Joinable, JoinHook
from lightning_ddp_hooks.join.data import map_tensors
from lightning_ddp_hooks.join.data_parallel import (
    BACKWARD,
    BUFFERS,
    FORWARD,
    KINDS,
    DataParallelJoinHook,
    HeldGradients,
)
from lightning_ddp_hooks.reducer.config import DEFAULT_CAP_MB, ReducerConfig
from lightning_ddp_hooks.reducer.reducer import Reducer
from lightning_ddp_hooks.run import TrainingRun
from lightning_ddp_hooks.torch_arguments import as_logging_data, check_torch_only, device_named, group_from
from lightning_ddp_hooks.weak import weakly

_SETTINGS = frozenset(entry.name for entry in fields(ReducerConfig))


class DistributedDataParallel(nn.Module, Joinable):
    """Trains a module on several ranks: each rank runs its own batch, gradients become the mean over the ranks.

    Construction is collective: it compares the model over the ranks and sends rank 0's parameters and buffers to all.
    The gradients are reduced during ``loss.backward()``, which returns when they are in ``.grad``. Every rank must run
    a backward in each step; a rank that leaves one out is only noticed under a Trainer (`DDPHooksStrategy`).

    Takes the arguments of torch's DistributedDataParallel where that is possible; the rest raise and say what to do.
    `DataParallel` is another name of this class.

    Args:
        module: the module to train, on one device.
        device_ids: a list with the module's device, to which inputs are moved then; a process group is taken for
            ``process_group``.
        output_device: the module's device.
        dim: 0.
        process_group: the ranks; None for all.
        comm_hook: what is done with each full bucket of gradients: a short name, a `CommHook`, or a pair
            ``(state, hook)`` by torch's contract; None for plain all-reduce.
        bucket_cap_mb: size at which a bucket is closed, in MiB; ``"auto"`` picks it by the link as measured.
        first_bucket_mb: the same for the first bucket; None for 1 MiB, or for `bucket_cap_mb` if that is less.
        gradient_as_bucket_view: let ``.grad`` be a slice of the bucket: no second copy of the gradients.
        find_unused_parameters: allow ranks to leave out any parameters in any backward.
        static_graph: learn in the first backward which parameters are used, and rely on it.
        broadcast_buffers: send rank 0's buffers to all ranks at construction and before forwards, evaluations too.
        reducer_backend: ``"auto"``, ``"native"`` or ``"python"``.
        failure_timeout: seconds, or None for no failure reports. A rank that waits in a backward for one that has
            failed, died or been silent for so long ends with an error naming it.
        stall_timeout: seconds that a rank may do something else while all others wait for its gradients, before all
            end and tell the line of its code; by default 20 minutes, or ``failure_timeout`` if that is longer.
        init_sync: send rank 0's parameters and buffers to all at construction; without it the caller has made them
            equal.
        device_mesh: the ranks, as a mesh of one dimension.
        forward_sync_buffers: whether buffers are sent before forwards; in any case they are at construction.
        check_reduction: no effect, as in torch: a reduction that is missing is always noticed.
        batched_grad_copy: no effect: copies are always batched.
        skip_all_reduce_unused_params: no effect: with ``find_unused_parameters=True`` a bucket that no rank used is
            never sent.
        bucket_cap_mb_list: None; see ``first_bucket_mb``.
        delay_all_reduce_named_params: None.
        param_to_hook_all_reduce: None.
        mixed_precision: None; use ``torch.autocast``.

    Raises:
        RuntimeError: no process group is initialized, or the ranks' models or settings differ.
        TypeError: an argument of the wrong type.
        ValueError: an argument out of range.

    Example:
        >>> torch.distributed.init_process_group("gloo")
        >>> model = DataParallel(torch.nn.Linear(10, 1))
        >>> model(torch.randn(4, 10)).square().mean().backward()  # .grad now holds the mean over all ranks

    The design follows Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020,
    https://arxiv.org/abs/2006.15704.
    """

    join_kinds = KINDS

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device | str] | comm.ProcessGroup | None = None,
        output_device: int | torch.device | str | None = None,
        dim: int = 0,
        *,
        process_group: comm.ProcessGroup | None = None,
        comm_hook: HookLike | None = None,
        bucket_cap_mb: float | Literal["auto"] = 25,
        first_bucket_mb: float | None = None,
        gradient_as_bucket_view: bool = True,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        broadcast_buffers: bool = True,
        reducer_backend: Literal["auto", "native", "python"] = "auto",
        failure_timeout: float | None = 30.0,
        stall_timeout: float | None = None,
        init_sync: bool = True,
        device_mesh: Any = None,
        forward_sync_buffers: bool | None = None,
        check_reduction: bool = False,
        batched_grad_copy: bool = False,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
    ) -> None:
        given = locals()
        check_torch_only(given)
        if isinstance(device_ids, comm.ProcessGroup):
            device_ids, process_group = None, device_ids
        if not isinstance(module, nn.Module):
            raise TypeError(f"Expected a torch.nn.Module, got {type(module).__name__}.")
        self._moves_to = device_named(module, device_ids, output_device)
        process_group = group_from(process_group, device_mesh)
        if given["bucket_cap_mb"] is None:
            given["bucket_cap_mb"] = DEFAULT_CAP_MB
        given["broadcast_buffers"] = broadcast_buffers or forward_sync_buffers is not None
        super().__init__()
        settings = Settings.from_arguments("DistributedDataParallel", given, timeout=None)
        raise_on_conflict(settings.in_fit())
        self.module = module
        self.dim = dim
        self.device_ids = None if self._moves_to is None else [self._moves_to.index]
        self.output_device = None if self._moves_to is None else self._moves_to.index
        self._sends_buffers = forward_sync_buffers is not False
        self._start(settings, process_group, init_sync=init_sync)

    def _start(self, settings: Settings, group: comm.ProcessGroup | None, *, init_sync: bool) -> None:
        # Without a clock of the user's, hooks see the number of synchronized backwards.
        self._run = TrainingRun(self.module, settings, process_group=group, step=None, init_sync=init_sync)
        self._by_world_size = True
        self._held: HeldGradients | None = None
        self.reducer.buffers.each_keeps_its_own = not self._sends_buffers
        # Whoever lets go of the wrapper lets go of its hooks, buckets and groups, and may wrap the module anew.
        self._closing = weakref.finalize(self, self._run.close)
        self._closing.atexit = False
        timeouts = settings.failure_timeout, settings.stall_timeout
        cause = f"{LIKELY_CAUSE} `with model.join():` handles them."
        watch_run(self._run, self.reducer.control_group, *timeouts, warn=warnings.warn, cause=cause)

    @property
    def reducer(self) -> Reducer:
        """The gradient reducer."""
        return self._run.reducer

    def set_step(self, step: int) -> None:
        """Set the training step that hooks see; without it they see the number of synchronized backwards.

        Raises:
            TypeError: not an int.
            ValueError: a negative number.
        """
        if isinstance(step, bool) or not isinstance(step, int):
            raise TypeError(f"Expected an int for `step`, got {step!r}.")
        if step < 0:
            raise ValueError(f"Expected `step` to be 0 or more, got {step}.")
        self._run.step = step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; with gradients enabled, prepare for the backward."""
        if self._run.closed:
            raise RuntimeError("The wrapper has been detached: call its `.module`.")
        self._run.before_forward(self._announce_forward())
        if (device := self._moves_to) is not None:
            args, kwargs = map_tensors(lambda tensor: tensor.to(device), (args, kwargs))
        with self._run.graphs_by_bucket():
            output = _compat.compilable(self.module)(*args, **kwargs)
        self._run.after_forward(output)
        return output

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Replace plain all-reduce by ``hook(state, bucket) -> Future[Tensor] | Tensor``, called for each full bucket.

        With a state of None, ``hook`` may also be a short name or a `CommHook`.

        Raises:
            RuntimeError: a hook is registered already, or a backward has run.
            TypeError: the hook cannot be called.
            ValueError: an unknown name.
        """
        if (declared := resolve_hook((state, hook))) is not None:
            self._run.install_hook(declared)

    def comm_hook_state_dict(self) -> dict[str, Any]:
        """Return the step and the state of the hook (such as its error memory), to save beside model and optimizer.

        Call it on all ranks; it is the same on all of them, and loads with ``weights_only=True``.
        """
        return self._run.state_dict()

    def load_comm_hook_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `comm_hook_state_dict` returned, at any number of ranks; call it on all ranks.

        Raises:
            ValueError: the state is another hook's, or damaged.
        """
        self._run.load_state_dict(state)

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients without communication; the first backward of a later forward reduces them all."""
        return self._run.no_sync()

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
        *,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Join:
        """Return a context in which ranks may run out of data at different times; enter it on all ranks.

        A rank that leaves the loop early shadows the others: in each of their synchronized backwards it sends zeros
        (once, what it accumulated under `no_sync`) through the registered hook. In the end it takes over parameters and
        buffers of a rank that ran out last. What its optimizer holds, such as momentum, stays as it was.

        Args:
            divide_by_initial_world_size: divide sums of gradients by the number of all ranks, so that each sample
                weighs as much as before; False divides by the number of ranks that still have data.
            enable: False costs nothing, if all ranks are known to have as much data.
            throw_on_early_termination: raise on all ranks in the first forward after one has run out.
            scaler: GradScaler of the loop, whose scale ranks that ran out early take over in the end; None finds it if
                the process has only one.

        Example:
            >>> with model.join(divide_by_initial_world_size=False):
            ...     for batch in loader:
            ...         loss(model(batch)).backward()
            ...         optimizer.step()
        """
        options = {"divide_by_initial_world_size": divide_by_initial_world_size, "scaler": scaler}
        return Join([self], enable, throw_on_early_termination, **options)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return what this rank does once it has run out of data; for `Join`, with the arguments of `join`."""
        self._by_world_size = bool(kwargs.get("divide_by_initial_world_size", True))
        self.reducer.finalize_pending_backward()
        self._held = HeldGradients(self.reducer)
        self.reducer.on_backward_begin = weakly(self._announce_backward)
        self.reducer.on_backward_end = weakly(self._note_backward)
        return DataParallelJoinHook(
            self.reducer,
            self._held,
            divide_by_initial_world_size=self._by_world_size,
            scaler=kwargs.get("scaler"),
        )

    def _announce_backward(self) -> None:
        if self._join is not None and self._held is not None:
            event = Join.notify(self, BACKWARD, detail=self._held.look())
            if event is not None and not self._by_world_size:
                self.reducer.set_divisor(len(event.active))

    def _note_backward(self) -> None:
        if self._join is not None and self._held is not None:
            self._held.note()

    def _announce_forward(self) -> int:
        """Tell joined ranks of this forward; return the rank whose buffers it begins with."""
        if self._join is None or self._held is None:
            return 0
        self.reducer.finalize_pending_backward(before_forward=True)
        self._held.look()
        if self.reducer.buffers.refresh_due:
            event = Join.notify(self, BUFFERS)
            assert event is not None
            return event.active[0]
        if self._join.throws and torch.is_grad_enabled():
            Join.notify(self, FORWARD)
        return 0

    @property
    def join_device(self) -> torch.device:
        """The device of the first parameter."""
        return next(self.module.parameters()).device

    @property
    def join_process_group(self) -> comm.ProcessGroup:
        """The ranks that train together."""
        return self.reducer.parent_group

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied: process groups and hooks cannot be, and making new ones takes all ranks."""
        name = type(self).__name__
        raise TypeError(f"{name} cannot be copied or pickled: copy or save its `.module`, and wrap the copy.")

    def stats(self) -> dict[str, object]:
        """Return facts about buckets and communication; see `Reducer.stats`."""
        return self.reducer.stats()

    def detach(self) -> nn.Module:
        """Remove all hooks, free buckets and groups, and return the module."""
        self._closing()
        return self.module

    # ------------------------------------------------------------------ names of torch's that other packages use

    def __getattr__(self, name: str) -> Any:
        """Answer for torch's attributes that are settings here."""
        if name in _SETTINGS and "_run" in self.__dict__:
            return getattr(self._run.settings, name)
        return super().__getattr__(name)

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return self.join_device

    @property
    def process_group(self) -> comm.ProcessGroup:
        """The ranks that train together."""
        return self.join_process_group

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the backwards of coming forwards reduce gradients; `no_sync` sets it for a while."""
        return self._run.sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._run.sync = value

    @property
    def require_forward_param_sync(self) -> bool:
        """Whether the coming forward begins with a broadcast of buffers, if there are any."""
        return self.reducer.buffers.due

    @require_forward_param_sync.setter
    def require_forward_param_sync(self, value: bool) -> None:
        self.reducer.buffers.due = value

    def _set_static_graph(self) -> None:
        """Set ``static_graph=True`` before the first backward; collective."""
        run = self._run
        if run.settings.static_graph:
            return
        if run.reducer.synced_backwards:
            raise RuntimeError("`_set_static_graph()` comes before the first backward; pass `static_graph=True`.")
        settings = replace(run.settings, static_graph=True, find_unused_parameters=False, comm_hook=run.hook.declared)
        group = run.reducer.parent_group
        self._closing()
        self._start(settings, group, init_sync=False)

    def _get_ddp_logging_data(self) -> dict[str, str | int]:
        """Return `stats` in the form of torch's logging data."""
        return as_logging_data(self.stats(), self.module)

    def _sync_params_and_buffers(self, authoritative_rank: int = 0) -> None:
        """Give all ranks the parameters and buffers of one, such as the one that loaded a checkpoint; collective."""
        self.reducer.send_model(authoritative_rank)

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: nn.Module, names: Sequence[str]) -> None:
        """Have parameters and buffers of these names left alone; before the module is wrapped."""
        _compat.ignore_names(module, names)


DataParallel = DistributedDataParallel
