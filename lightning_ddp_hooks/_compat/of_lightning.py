"""Private names of Lightning and torchmetrics."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Literal


def samples_in(batch: object) -> int:
    """Return the number of samples of a batch, as Lightning finds it for its logs."""
    from lightning.pytorch.utilities.data import extract_batch_size

    return int(extract_batch_size(batch))  # type: ignore[arg-type]


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
    """Enter ``entry(hook, key, metric)`` around each value that is logged, or computed for an epoch (else no metric).

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
    when_imported(package, lambda: _register_refusal(name, package))


def when_imported(package: str, callback: Callable[[], None]) -> None:
    """Call back once a package has been imported: now, or when somebody does so."""
    if package in sys.modules:
        callback()
    elif not any(isinstance(f, _PackageFinder) and f.package == package for f in sys.meta_path):
        sys.meta_path.insert(0, _PackageFinder(package, callback))


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


class _PackageFinder(importlib.abc.MetaPathFinder):
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


def logging_step(trainer: Any) -> int:
    """Return the number that Lightning's loggers give to the training step that is being ended."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)
