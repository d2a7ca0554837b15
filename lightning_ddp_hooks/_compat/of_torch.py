"""Private names of torch: autograd, streams, optimizers, operations on lists of tensors."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import CodeType, FrameType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd import grad_mode, profiler
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.profiler import record_function


def queue_end_of_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward that is being executed ends, before ``backward()`` returns.

    There is no public way to learn that a backward has ended. Compiled autograd does not tell at all.
    """
    if getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "in_compiled_autograd_region", False):
        raise RuntimeError(NO_COMPILED_AUTOGRAD)
    torch.autograd.Variable._execution_engine.queue_callback(callback)


NO_COMPILED_AUTOGRAD = (
    "Compiled autograd cannot reduce gradients over ranks, since it does not say when a backward ends: leave "
    "`torch._dynamo.config.compiled_autograd` False. `torch.compile` needs no compiled autograd."
)


def is_capturing(device: torch.device) -> bool:
    """Tell whether the current stream of an accelerator is captured into a graph; False where there are no graphs."""
    ask = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return ask is not None and bool(ask())


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


def memory_and_version(tensor: Tensor | None) -> tuple[int, int] | None:
    """Return where a dense tensor lies and how often it was written, by which a change shows; None for others."""
    return None if tensor is None or tensor.layout is not torch.strided else (tensor.data_ptr(), tensor._version)


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


def ignore_names(module: torch.nn.Module, names: Sequence[str]) -> None:
    """Have data parallelism leave the parameters and buffers of these names alone."""
    module._ddp_params_and_buffers_to_ignore = list(names)  # type: ignore[assignment]


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


def found_inf_flags(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return where a GradScaler has noted, while unscaling, that gradients are not finite; one flag for each device.

    Empty if it has not unscaled, since the optimizer does so itself (fused optimizers).
    """
    return list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())


def grad_scalers() -> list[torch.amp.GradScaler]:
    """Return the GradScalers of this process that are enabled; nothing ties one to a model or an optimizer."""
    scaler_class = torch.amp.GradScaler
    found: list[Any] = [item for item in gc.get_objects() if issubclass(type(item), scaler_class)]
    return [scaler for scaler in found if scaler.is_enabled()]


def watch_scaler(
    scaler: torch.amp.GradScaler, before_update: Callable[[list[Tensor]], None], may_lack: Callable[[], bool]
) -> Callable[[], None]:
    """Have ``before_update(flags)`` called before a GradScaler updates its scale by these flags; return what undoes it.

    Where an optimizer ``may_lack`` all gradients, nothing infinite is found in them; torch fails by an assertion there.
    """
    inner_update, inner_unscale = scaler.update, scaler.unscale_
    attached = True

    def update(new_scale: float | Tensor | None = None) -> None:
        if attached and new_scale is None and scaler.is_enabled():
            states = scaler._per_optimizer_states.values()
            before_update([flag for state in states for flag in state["found_inf_per_device"].values()])
        inner_update(new_scale)

    def unscale_(optimizer: torch.optim.Optimizer) -> None:
        inner_unscale(optimizer)
        if attached and scaler.is_enabled() and may_lack():
            found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            if not found:
                devices = (param.device for group in optimizer.param_groups for param in group["params"])
                device = next(devices, torch.device("cpu"))
                found[device] = torch.zeros((), dtype=torch.float32, device=device)

    undo_both = [_replaced(scaler, "update", update), _replaced(scaler, "unscale_", unscale_)]

    def undo() -> None:
        nonlocal attached
        attached = False
        for undo_one in undo_both:
            undo_one()

    return undo


def _replaced(owner: Any, name: str, method: Callable[..., Any]) -> Callable[[], None]:
    """Put a method on an object; return what takes it away, unless another one has been put on top."""
    before = vars(owner).get(name)
    setattr(owner, name, method)

    def undo() -> None:
        if vars(owner).get(name) is not method:
            return
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    return undo


def loss_scale(scaler: torch.amp.GradScaler) -> Tensor | float:
    """Return the scale of a GradScaler without waiting for the device: a tensor once the scaler has been used."""
    scale = scaler._get_scale_async()
    return float(scaler.get_scale()) if scale is None else scale


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


def prepare_for_compiler(package: str) -> None:
    """Have Dynamo trace none of a package's functions, as it does with torch's DDP; what they call is compiled."""
    import torch._dynamo  # takes a while; the constructor of the first optimizer does it, too

    if torch._dynamo.config.compiled_autograd:
        raise RuntimeError(NO_COMPILED_AUTOGRAD)
    if package not in _untraced:
        torch._dynamo.trace_rules.add(package)
        _untraced.add(package)


_untraced: set[str] = set()


def compilable(module: torch.nn.Module) -> Callable[..., Any]:
    """Return what calls a module; where the caller is compiled, in a frame of its own, in which compilation begins.

    Dynamo begins in no function of torch: without it the forward of a ``Sequential`` would not be compiled.
    """
    return module if _compiler() is None else _in_a_frame(module)


# What compiles the functions that are called now, or None: a frame for nothing takes long. Not each torch tells.
_compiler: Callable[[], object] = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: True)


def _in_a_frame(module: torch.nn.Module) -> Any:
    import torch._dynamo

    return torch._dynamo.external_utils.wrap_inline(module.__call__)


def forget_other_graphs(module: torch.nn.Module, nbytes: int) -> None:
    """Forget all compiled graphs, if some of a module's were not split at ``nbytes``: they will be compiled anew.

    Dynamo does not ask whether a graph was compiled under `SplitGraphs`.
    """
    if any(_split_at.get(code) != nbytes for code in _compiled_code(module)):
        torch.compiler.reset()


def note_graphs(module: torch.nn.Module, nbytes: int) -> None:
    """Note that a module's compiled graphs are split at ``nbytes``, for `forget_other_graphs`."""
    _split_at.update(dict.fromkeys(_compiled_code(module), nbytes))


_split_at: WeakKeyDictionary[CodeType, int] = WeakKeyDictionary()


def _compiled_code(module: torch.nn.Module) -> list[CodeType]:
    """Return what the functions in which a module's compilation begins have been compiled to."""
    functions = [getattr(kind, name, None) for kind in set(map(type, module.modules())) for name in _COMPILED]
    codes = [inspect.unwrap(function).__code__ for function in functions if inspect.isfunction(function)]
    entries = torch._dynamo.eval_frame._debug_get_cache_entry_list
    return [entry.code for code in (*codes, _in_a_frame(module).__code__) for entry in entries(code)]


_COMPILED = ("forward", "training_step")


class SplitGraphs:
    """Has graphs that are compiled in this context split where their parameters fill a bucket of ``nbytes()``.

    The gradients of a compiled graph come together, when its backward ends. ``optimize_ddp=False`` in Dynamo's
    configuration turns the splitting off. As torch has it, the last graph holds 1 MiB, and no graph may be smaller.
    """

    def __init__(self, nbytes: Callable[[], int]) -> None:
        self._nbytes = nbytes
        self._outer: list[Any] = []

    @property
    def bucket_bytes_cap(self) -> int:
        """What Dynamo asks of the DistributedDataParallel that runs its forward."""
        return max(self._nbytes(), _FIRST_GRAPH_BYTES)

    def __enter__(self) -> None:
        self._outer.append(_ddp._active_ddp_module)
        _ddp._active_ddp_module = self

    def __exit__(self, *error: object) -> None:
        _ddp._active_ddp_module = self._outer.pop()


_ddp: Any = torch.nn.parallel.DistributedDataParallel
_FIRST_GRAPH_BYTES = 1 << 20
