"""The only user of private torch and Lightning names: each is wrapped once, with the reason it is needed."""

from __future__ import annotations

import importlib.abc
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from importlib.machinery import ModuleSpec
from types import FrameType, MethodType, ModuleType
from typing import Any, Literal

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore, GradBucket, PrefixStore, ProcessGroup, Store, TCPStore
from torch.autograd import grad_mode, profiler
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.profiler import record_function

# ``torch.distributed.GradBucket`` is this class, but type checkers find it only where it is declared.
TorchGradBucket = GradBucket


def queue_end_of_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward that is being executed ends, before ``backward()`` returns.

    There is no public way to learn that a backward has ended.

    Raises:
        RuntimeError: outside a backward (torch's own message).
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def current_backward_id() -> int:
    """Return the id of the backward that runs on this thread, or -1 outside one.

    A re-entrant checkpoint runs a backward inside a backward; the ids tell them apart.
    """
    return int(torch._C._current_graph_task_id())


def preserve_versions(tensors: Sequence[Tensor]) -> AbstractContextManager[object]:
    """Let in-place writes to ``tensors`` go unnoticed by autograd's version check.

    Buffers are broadcast between two forwards of one graph; their saved values are not needed by the backward.
    """
    if _PRESERVES_SEVERAL:
        return grad_mode._unsafe_preserve_version_counter(tuple(tensors))
    stack = ExitStack()
    for tensor in tensors:
        stack.enter_context(grad_mode._unsafe_preserve_version_counter(tensor))
    return stack


# Older torch takes one tensor at a time, under this name.
_PRESERVES_SEVERAL = "tensor" not in inspect.signature(grad_mode._unsafe_preserve_version_counter.__init__).parameters


def span(name: str) -> AbstractContextManager[object]:
    """Give what runs in this context a name in profiles.

    ``record_function`` takes several microseconds even while nobody profiles, and says nowhere public that nobody does.
    """
    return record_function(name) if profiler._is_profiler_enabled else _NO_SPAN


_NO_SPAN: AbstractContextManager[object] = nullcontext()


class OnStream:
    """Makes a stream of any accelerator the current one.

    torch 2.6 has no ``with stream:``, and later a stream can be entered only once at a time.
    """

    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._index = _current_device_index()
        self._before = torch.accelerator.current_stream(self._stream.device)
        torch.accelerator.set_stream(self._stream)

    def __exit__(self, *error: object) -> None:
        torch.accelerator.set_stream(self._before)  # makes its device the current one, too
        if self._index != self._before.device_index:
            _set_device_index(self._index)


# torch 2.6 calls an index "idx".
_accelerator: Any = torch.accelerator
_current_device_index = getattr(_accelerator, "current_device_index", None) or _accelerator.current_device_idx
_set_device_index = getattr(_accelerator, "set_device_index", None) or _accelerator.set_device_idx


def buffer_tables(module: torch.nn.Module) -> list[tuple[str, dict[str, Tensor | None]]]:
    """Return the name and the live table of buffers of each submodule.

    To walk the tables takes a tenth of the time of ``named_buffers``, which walks the tree of modules.
    """
    return [(name, submodule._buffers) for name, submodule in module.named_modules()]


def foreach_copy_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target in one call."""
    torch._foreach_copy_(list(targets), list(sources))


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return all elements, one tensor behind the other, in one call."""
    return torch._utils._flatten_dense_tensors(list(tensors))  # type: ignore[no-any-return]


def unflatten(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Undo `flatten` in one call: return views in the shapes of ``like``."""
    return list(torch._utils._unflatten_dense_tensors(flat, list(like)))


def foreach_mul_(tensors: Sequence[Tensor], factor: float) -> None:
    """Scale each tensor in place in one call."""
    torch._foreach_mul_(list(tensors), factor)


def foreach_abs_sum(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the sum of absolute values of each tensor, in ``dtype``, in one call."""
    return list(torch._foreach_norm(list(tensors), 1, dtype=dtype))


def is_uninitialized(parameter: Tensor) -> bool:
    """Tell whether a parameter belongs to a lazy module that has not seen its first input."""
    return isinstance(parameter, (UninitializedParameter, UninitializedBuffer))


def ignored_names(module: torch.nn.Module) -> frozenset[str]:
    """Return the parameters and buffers that the module asks data parallelism to leave alone.

    ``_ddp_params_and_buffers_to_ignore`` is how torch lets a module say so.
    """
    return frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def backward_is_nested() -> bool:
    """Tell whether the backward that is just ending runs inside another one (re-entrant checkpointing).

    The engine does not say so, but the Python stack does: an enclosing backward shows as the call of a Function's
    ``backward`` below the call of the engine.
    """
    frame: FrameType | None = sys._getframe(1)
    inside_engine = False
    while frame is not None:
        name = frame.f_code.co_name
        if name == "_engine_run_backward":
            inside_engine = True
        elif inside_engine and name == "apply" and frame.f_code.co_filename == _FUNCTION_FILE:
            return True
        frame = frame.f_back
    return False


_FUNCTION_FILE = torch.autograd.function.__file__


def samples_in(batch: object) -> int:
    """Return the number of samples of a batch, as Lightning finds it for its logs."""
    from lightning.pytorch.utilities.data import extract_batch_size

    return int(extract_batch_size(batch))  # type: ignore[arg-type]


def found_inf_flags(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return where a GradScaler has noted, while unscaling, that gradients are not finite; one flag for each device.

    Empty if it has not unscaled, since the optimizer does so itself (fused optimizers).
    """
    return list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())


def loss_scale(scaler: torch.amp.GradScaler) -> Tensor | float:
    """Return the scale of a GradScaler without waiting for the device: a tensor once the scaler has been used."""
    scale = scaler._get_scale_async()
    return float(scaler.get_scale()) if scale is None else scale


def averages_by_itself(strategy: object) -> bool:
    """Tell whether Lightning's `DDPStrategy` has been told to average models itself."""
    return getattr(strategy, "_model_averaging_period", None) is not None


def combined_loader_in_use(trainer: Any) -> Any:
    """Return the `CombinedLoader` of the loop that is running, or None."""
    if trainer.training:
        loop = trainer.fit_loop
    elif trainer.testing:
        loop = trainer.test_loop
    else:
        loop = trainer.fit_loop.epoch_loop.val_loop if trainer.state.fn == "fit" else trainer.validate_loop
    return loop._combined_loader


def combined_mode(combined: Any) -> str:
    """Return the mode of a `CombinedLoader`."""
    return combined._mode  # type: ignore[no-any-return]


def before_batch_transfer(module: Any, batch: Any) -> Any:
    """Run the user's ``on_before_batch_transfer`` as the training loop does."""
    return module._on_before_batch_transfer(batch, dataloader_idx=0)


def logged_results(trainer: Any) -> Any:
    """Return the collection of what ``self.log`` has been given in the loop that is running, or None."""
    return trainer._results


def all_logged_results(trainer: Any) -> list[Any]:
    """Return the collections of all loops that can log."""
    epoch_loop = trainer.fit_loop.epoch_loop
    loops = (epoch_loop, epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop)
    return [loop._results for loop in loops]


def use_base_checkpoint_io(io: Any, make: Callable[[], Any]) -> None:
    """Give a plugin that wraps another one, and was given none, what ``make`` returns."""
    from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO

    if isinstance(io, _WrappingCheckpointIO) and not io._base_checkpoint_io_configured:
        io.checkpoint_io = make()


def current_hook(module: Any) -> str | None:
    """Return the name of the hook or step that Lightning is calling now, as ``self.log`` knows it."""
    return module._current_fx_name  # type: ignore[no-any-return]


def logged_forward_cache(result: Any) -> Any:
    """Return the value of this step that Lightning keeps for a logged entry, to show it."""
    return result._forward_cache


def set_logged_forward_cache(result: Any, value: Any) -> None:
    """Replace the value of this step of a logged entry."""
    result._forward_cache = value


def list_states(metric: Any) -> dict[str, list[Any]]:
    """Return the states of a torchmetrics metric that are lists, by name."""
    return {name: value for name in metric._defaults if isinstance(value := getattr(metric, name), list)}


def metric_states(metric: Any) -> dict[str, tuple[Any, bool]]:
    """Return the states of a torchmetrics metric by name, and whether those of ranks are put one behind the other."""
    from torchmetrics.utilities.data import dim_zero_cat

    return {name: (getattr(metric, name), reduce is dim_zero_cat) for name, reduce in metric._reductions.items()}


@contextmanager
def before_metric_gathers(metric: Any, call: Callable[[str, Any], None]) -> Iterator[None]:
    """Call ``call(path, metric)`` before a metric, or one within it, gathers its states over all ranks.

    Whether it does is known only then: it may have a cached value, a function of its own that gathers or says that it
    need not, or consist of others that decide for themselves.

    Args:
        metric: of torchmetrics; calls under this context are followed.
        call: gets the path within ``metric``, empty for itself, and the metric that gathers.
    """
    from torchmetrics import Metric
    from torchmetrics.utilities.distributed import gather_all_tensors

    def gather(self: Any, path: str, dist_sync_fn: Any = gather_all_tensors, process_group: Any = None) -> None:
        over_all = dist_sync_fn is gather_all_tensors and (process_group or self.process_group) is None
        if over_all and self._reductions and followed:
            call(path, self)
        type(self)._sync_dist(self, dist_sync_fn, process_group=process_group)

    followed = [(p, m) for p, m in metric.named_modules() if isinstance(m, Metric) and "_sync_dist" not in vars(m)]
    for path, inner in followed:
        vars(inner)["_sync_dist"] = partial(gather, inner, path)
    try:
        yield
    finally:
        for _, inner in followed:
            del vars(inner)["_sync_dist"]
        followed.clear()  # a copy that was made meanwhile is not followed any more


def follow_logging(results: Any, entry: Callable[[str, str, Any], AbstractContextManager[None]]) -> Callable[[], None]:
    """Enter ``entry(place, name, metric)`` for each value that is logged, and for each that is computed for an epoch.

    Args:
        results: the collection of a loop.
        entry: called with the hook that logged it, its key, and the metric that is about to be computed, or None.

    Returns:
        What undoes it.
    """
    log, get_cache = results.log, results._get_cache

    def log_in_entry(fx: str, name: str, *args: Any, **kwargs: Any) -> None:
        with entry(fx, name, None):
            log(fx, name, *args, **kwargs)

    def get_cache_in_entry(result_metric: Any, on_step: bool) -> Any:
        if on_step or result_metric._computed is not None or not result_metric.meta.on_epoch:
            return get_cache(result_metric, on_step)
        metric = None if result_metric.is_tensor else result_metric.value
        with entry(result_metric.meta.fx, result_metric.meta.name, metric):
            return get_cache(result_metric, on_step)

    results.log, results._get_cache = log_in_entry, get_cache_in_entry

    def undo() -> None:
        del results.log, results._get_cache

    return undo


def snapshot_metric(metric: Any) -> Callable[[], None]:
    """Note the state of a torchmetrics metric; the function that is returned brings it back."""
    states = metric._copy_state_dict()
    count, computed = metric._update_count, metric._computed

    def restore() -> None:
        for name, value in states.items():
            setattr(metric, name, value)
        metric._update_count, metric._computed = count, computed

    return restore


def refuse_in_standalone_package(
    name: str, package: Literal["pytorch_lightning", "lightning_fabric"] = "pytorch_lightning"
) -> None:
    """Have ``pytorch_lightning``'s Trainer say which import to change when it is given our strategy's name.

    ``pytorch_lightning`` has classes of its own, which do not mix with ``lightning.pytorch``'s. It may be imported
    after us, so its import is watched. The same holds for ``lightning_fabric`` and ``lightning.fabric``.
    """
    if package in sys.modules:
        _register_refusal(name, package)
    elif not any(isinstance(f, _StandalonePackageFinder) and f.package == package for f in sys.meta_path):
        sys.meta_path.insert(0, _StandalonePackageFinder(package, lambda: _register_refusal(name, package)))


_STANDALONE = {
    "pytorch_lightning": "use `import lightning.pytorch as pl` (or `from lightning.pytorch import Trainer`) instead of "
    "`import pytorch_lightning as pl`, also for your LightningModule and callbacks.",
    "lightning_fabric": "use `from lightning.fabric import Fabric` instead of `from lightning_fabric import Fabric`.",
}


def _register_refusal(name: str, package: str) -> None:
    def refuse(**_: object) -> None:
        raise ValueError(f"strategy={name!r} belongs to the package `lightning`: {_STANDALONE[package]}")

    strategies = importlib.import_module(f"{package}.strategies")
    registry: Any = getattr(strategies, "StrategyRegistry", None) or strategies.STRATEGY_REGISTRY
    for suffix in ("", "_spawn", "_fork", "_notebook", "_find_unused_parameters_true"):
        registry.register(name + suffix, refuse, override=True)


class _StandalonePackageFinder(importlib.abc.MetaPathFinder):
    """Calls back once a package has been imported."""

    def __init__(self, package: str, callback: Callable[[], None]) -> None:
        self.package = package
        self._callback = callback

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.package:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_call_back(module: ModuleType) -> None:
                execute(module)
                self._callback()

            spec.loader.exec_module = execute_and_call_back  # type: ignore[method-assign]
        return spec


def group_timeout(group: ProcessGroup) -> timedelta | None:
    """Return how long a collective of the group may take, or None if its backend does not say."""
    for device in ("cpu", "cuda"):
        try:
            options = group._get_backend(torch.device(device)).options
        except (RuntimeError, AttributeError):  # no backend for this device, or one without options
            continue
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return None


def backend_for(group: ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend that moves tensors on ``device``; a group may have one for each kind of device."""
    return str(group._get_backend(device).name()).lower()


def default_store() -> Store:
    """Return the store through which the ranks of the default process group have met."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def new_group_of_members(ranks: Sequence[int], name: str, backend: str, timeout: timedelta) -> ProcessGroup:
    """Make a group; a call of its members alone.

    ``torch.distributed.new_group`` can do that too (``use_local_synchronization``), but names the group by how many
    others the process has, or has made, and torch 2.14 counts it for the names of later groups of all ranks. Ranks
    that have made different groups then wait for each other under different names.

    Args:
        ranks: the members, rising.
        name: the same on all members, and not used before in this world.
        backend: name of the backend.
        timeout: how long a collective may take.
    """
    from torch.distributed import distributed_c10d as c10d

    make: Any = c10d._new_process_group_helper  # whose types differ between versions
    own = ranks.index(c10d.get_rank())
    group: ProcessGroup
    group, _ = make(len(ranks), own, list(ranks), c10d.Backend(backend), default_store(), name, timeout=timeout)
    c10d._world.pg_group_ranks[group] = {global_rank: index for index, global_rank in enumerate(ranks)}
    return group


def second_connection(store: Store, prefix: str, timeout: timedelta) -> Store:
    """Return a store that has those keys of ``store`` that begin with a prefix, and a connection of its own.

    That stores can be cloned is not in torch's documentation, and older torch cannot: it dials the address once more.

    Raises:
        NotImplementedError: a store that cannot be connected to a second time.
    """
    if hasattr(store, "clone"):
        clone: Store = store.clone()
    else:
        base: Any = getattr(store, "_underlying_non_prefix_store", store)
        if isinstance(base, TCPStore):
            clone = TCPStore(base.host, base.port, is_master=False, timeout=timeout, wait_for_workers=False)
        elif isinstance(base, FileStore):
            clone = FileStore(base.path)  # type: ignore[attr-defined]
        else:
            raise NotImplementedError(f"{type(base).__name__} cannot be cloned")
    clone.set_timeout(timeout)
    return PrefixStore(prefix, clone)


def store_host(store: Store) -> str:
    """Return the address of a TCPStore, below any prefixes; the kind of another store."""
    base: Any = getattr(store, "_underlying_non_prefix_store", store)
    return f"{base.host}:{base.port}" if isinstance(base, TCPStore) else type(base).__name__


def process_groups() -> list[ProcessGroup]:
    """Return all process groups that this process has made and not destroyed."""
    from torch.distributed.distributed_c10d import _world

    return list(_world.pg_map)


# A guess by age, since torch does not say so.
FREES_GROUPS_UNDER_THE_LOCK = not hasattr(ProcessGroup, "abort")


def collectives_begun(group: ProcessGroup) -> int:
    """Return how many collectives a group has begun; 0 if its backend does not count."""
    try:
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    except (RuntimeError, AttributeError):
        return 0


def overlaps_itself(tensor: Tensor) -> bool:
    """Tell whether several elements of the tensor share memory, as in an expanded one."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


# Set on fused optimizers until they have looked once at what they were given; it does not change an update.
FUSED_CHECK_FLAG = "_need_device_dtype_check_for_fused"


def unhooked_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Return the ``step`` of an optimizer's class without the wrapper that fires step hooks."""
    step: Callable[..., Any] = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]


def may_replace_step(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether ``step`` is that of the class, or wrapped only by a scheduler of learning rates."""
    own = vars(optimizer).get("step")
    return own is None or hasattr(own, "_wrapped_by_lr_sched")


def replace_step(optimizer: torch.optim.Optimizer, step: Callable[..., Any]) -> Callable[[], None]:
    """Put ``step(optimizer, closure)`` in the place of an optimizer's, with its step hooks; return what undoes it.

    A scheduler of learning rates warns unless the ``step`` it finds is one that tells of having been called.
    """

    def marked(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        self._opt_called = True  # type: ignore[attr-defined]
        return step(self, *args, **kwargs)

    hooked: Any = torch.optim.Optimizer.profile_hook_step(marked)
    hooked._wrapped_by_lr_sched = True
    before = vars(optimizer).get("step")
    optimizer.step = MethodType(hooked, optimizer)  # type: ignore[method-assign]

    def undo() -> None:
        if before is None:
            vars(optimizer).pop("step", None)
        else:
            optimizer.step = before  # type: ignore[method-assign]

    return undo


def logging_step(trainer: Any) -> int:
    """Return the number that Lightning's loggers give to the training step that is being ended."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


@contextmanager
def simulated_world(world_size: int) -> Iterator[None]:
    """Be rank 0 of a world whose collectives are done at once and move nothing: what is computed around them stays.

    For measurements. torch keeps this backend among its testing tools.

    Raises:
        RuntimeError: there is a process group already.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("A process group is initialized already: simulate a world in a process of its own.")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
