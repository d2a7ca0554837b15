"""Private names of Lightning and torchmetrics."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any


@contextmanager
def beside_progress_bar() -> Iterator[None]:
    """Have what is logged, or warned of, under this context stand above a progress bar that is open, not within it."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    # Under rich's bar `sys.stderr` writes above it, but log handlers keep the stream that they have begun with.
    loggers = [logging.getLogger(name) for name in (None, "lightning", "lightning.pytorch", "lightning.fabric")]
    handlers = {handler for logger in loggers for handler in logger.handlers if type(handler) is logging.StreamHandler}
    streams = {handler: handler.stream for handler in handlers if handler.stream is sys.__stderr__}
    for handler in streams:
        handler.setStream(sys.stderr)
    try:
        with tqdm.external_write_mode(file=sys.stderr):
            yield
    finally:
        for handler, stream in streams.items():
            handler.setStream(stream)


def inside_fabrics(model: object) -> object:
    """Return what Fabric's own wrapper, the outermost, is around; None if it is none."""
    return getattr(model, "_forward_module", None)


def averages_by_itself(strategy: object) -> bool:
    """Tell whether Lightning's `DDPStrategy` has been told to average models itself."""
    return getattr(strategy, "_model_averaging_period", None) is not None


def compiled_in_place(strategy: Any, step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a strategy's training step; under ``module.compile()``, which compiles calls of the module, as its call.

    So it is under torch's DDP, which the strategy would call in the place of the module.
    """
    module = strategy.lightning_module
    if module._compiled_call_impl is None:
        return step

    def call(*args: Any, **kwargs: Any) -> Any:
        with strategy.precision_plugin.train_step_context():
            return strategy._forward_redirection(module, module, "training_step", *args, **kwargs)

    return call


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


def process_group_backend(strategy: Any) -> str:
    """Return the name of the backend that a strategy makes the default group with."""
    return strategy._get_process_group_backend()  # type: ignore[no-any-return]


def call_before_launch(launcher: Any, action: Callable[[Any, Any], None]) -> None:
    """Call ``action(trainer, ckpt_path)`` before a launcher runs a Trainer; the launcher can still be pickled."""
    launcher.launch = partial(_launch, type(launcher).launch, launcher, action)


def _launch(
    launch: Callable[..., Any], launcher: Any, action: Callable[..., None], function: Any, *args: Any, **kwargs: Any
) -> Any:
    if (trainer := kwargs.get("trainer")) is not None:
        given = inspect.signature(function).bind(*args, **{k: v for k, v in kwargs.items() if k != "trainer"})
        action(trainer, given.arguments.get("ckpt_path"))
    return launch(launcher, function, *args, **kwargs)


def current_hook(module: Any) -> str | None:
    """Return the name of the hook or step that Lightning is calling now, as ``self.log`` knows it."""
    return module._current_fx_name  # type: ignore[no-any-return]


def logged_forward_cache(result: Any) -> Any:
    """Return the value of this step that Lightning keeps for a logged entry, to show it."""
    return result._forward_cache


def set_logged_forward_cache(result: Any, value: Any) -> None:
    """Replace the value of this step of a logged entry."""
    result._forward_cache = value


def metric_states(metric: Any) -> dict[str, tuple[Any, Callable[..., Any] | None]]:
    """Return the states of a torchmetrics metric by name, and what reduces those of all ranks."""
    return {name: (getattr(metric, name), reduce) for name, reduce in metric._reductions.items()}


def concatenates(reduce: object) -> bool:
    """Tell whether a metric's reduction puts the states of ranks one behind the other."""
    from torchmetrics.utilities.data import dim_zero_cat

    return reduce is dim_zero_cat


def forget_computed(metric: Any) -> None:
    """Have a metric compute its value anew, since others have been updated."""
    metric._computed = None


_gathering: list[Callable[[Any, Any], None]] = []
_undo_gathering: list[Callable[[], None]] = []


def gather_metrics_by(gather: Callable[[Any, Any], None]) -> Callable[[], None]:
    """Call ``gather(metric, group)`` where torchmetrics would gather a metric's states by its own function.

    It has no such hook: `Metric.dist_sync_fn` is called for each entry that this rank has, and so cannot even tell the
    others that it has fewer.

    Returns:
        What undoes it; the latest one that is not undone is called.
    """
    from torchmetrics import Metric
    from torchmetrics.detection import _mean_ap, mean_ap
    from torchmetrics.utilities.distributed import gather_all_tensors

    original = Metric._sync_dist
    masks = [mean_ap.MeanAveragePrecision, _mean_ap.MeanAveragePrecision]

    def sync_dist(self: Any, dist_sync_fn: Any = gather_all_tensors, process_group: Any = None) -> None:
        if dist_sync_fn is gather_all_tensors:
            _gathering[-1](self, process_group or self.process_group)
        else:  # of the user's own
            original(self, dist_sync_fn, process_group)

    def undo() -> None:
        _gathering.remove(gather)
        if not _gathering:
            for restore in _undo_gathering:
                restore()
            _undo_gathering.clear()

    if not _gathering:
        replaced: list[tuple[type, str, Any]] = [(Metric, "_sync_dist", sync_dist)]
        # They gather their masks, which are no tensors, after the other states; here they come with them.
        replaced += [(owner, "_gather_tuple_list", staticmethod(lambda masks, _=None: masks)) for owner in masks]
        for owner, name, function in replaced:
            _undo_gathering.append(partial(setattr, owner, name, vars(owner)[name]))
            setattr(owner, name, function)
    _gathering.append(gather)
    return undo


def follow_logging(results: Any, entry: Callable[[str, str], AbstractContextManager[None]]) -> Callable[[], None]:
    """Enter ``entry(hook, key)`` around each value that is logged, or computed for an epoch.

    Returns:
        What undoes it.
    """
    log, get_cache = results.log, results._get_cache

    def log_in_entry(fx: str, name: str, *args: Any, **kwargs: Any) -> None:
        with entry(fx, name):
            log(fx, name, *args, **kwargs)

    def get_cache_in_entry(result_metric: Any, on_step: bool) -> Any:
        if on_step or result_metric._computed is not None or not result_metric.meta.on_epoch:
            return get_cache(result_metric, on_step)
        with entry(result_metric.meta.fx, result_metric.meta.name):
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


def logging_step(trainer: Any) -> int:
    """Return the number that Lightning's loggers give to the training step that is being ended."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)
