"""How ranks meet, also those of a run that is started again; and the checkpoint that such a one goes on from."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_ddp_hooks import _compat, comm
from lightning_ddp_hooks.checkpoint import STATE_KEY
from lightning_ddp_hooks.lightning.checkpoint_io import is_whole, local_path
from lightning_ddp_hooks.reducer import shm_backend

_NO_FOLDER = (
    '`resume="auto"` goes on from the newest checkpoint in the folder of a `ModelCheckpoint`, which has to be the same '
    "at each start, but without `dirpath` each start writes to a new one: set `ModelCheckpoint(dirpath=...)` to a "
    "folder of this run's own."
)


def join_world(strategy: Any, set_up: Callable[[], None]) -> None:
    """Have Lightning set up the ranks' environment and default group; collective."""

    def meet() -> None:
        _meet_again(strategy, strategy.settings.timeout)
        set_up()

    named = strategy.settings.process_group_backend is not None or strategy.root_device.type != "cpu"
    shm_backend.make_world(meet, named=named)


def _meet_again(strategy: Any, timeout: timedelta | None) -> None:
    """Make the default group of a run that torchrun has started again; otherwise Lightning makes it.

    The attempts of a run share torchrun's store, where torch takes an earlier attempt's addresses for those of this
    one: gloo then fails to connect, or waits. So each attempt after the first has names of its own there.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or comm.is_initialized():
        return
    strategy.accelerator.setup_device(strategy.root_device)
    device = None if strategy.root_device.type == "cpu" else strategy.root_device
    comm.join_attempt(f"attempt-{attempt}", _compat.process_group_backend(strategy), timeout, device)


class AutoResume:
    """Has a fit begin at the newest whole checkpoint, unless it is told where to begin."""

    def __init__(self) -> None:
        self._selected = False

    def watch(self, launcher: Any) -> None:
        """Select a checkpoint before a launcher runs a fit."""
        _compat.call_before_launch(launcher, self._select)

    def fit_begins(self, trainer: Any) -> None:
        """Have what follows the fit, such as ``trainer.test()``, use the model as it is then."""
        if self._selected:
            trainer.ckpt_path, self._selected = None, False

    def _select(self, trainer: Any, ckpt_path: object) -> None:
        """Let a Trainer that has not trained yet go on from the newest whole checkpoint."""
        if trainer.state.fn != "fit" or ckpt_path is not None or trainer.global_step:
            return
        for path in _newest_first(_folders(trainer)):
            if (reason := _why_not(path)) is None:
                rank_zero_info(f'`resume="auto"`: going on from {path!r}.')
                trainer.ckpt_path, self._selected = path, True
                return
            rank_zero_warn(f'`resume="auto"`: {path!r} is left out: {reason}.')
        rank_zero_info('`resume="auto"`: there is no checkpoint yet; the run begins.')


def _folders(trainer: Any) -> list[str]:
    folders = [
        c.dirpath for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint) and c.dirpath is not None
    ]
    if not folders:
        raise ValueError(_NO_FOLDER)
    return [str(folder) for folder in folders]


def _newest_first(folders: list[str]) -> Iterator[str]:
    found = set()
    for folder in folders:
        files, root = url_to_fs(folder)
        for name in files.find(root) if files.exists(root) else ():
            if name.endswith(ModelCheckpoint.FILE_EXTENSION):
                found.add((files.modified(name), name if local_path(folder) else files.unstrip_protocol(name)))
    return (path for _, path in sorted(found, reverse=True))


def _why_not(path: str) -> str | None:
    """Return why a run cannot go on from a file; None if it can, or if the file does not say."""
    local = local_path(path)
    if local is None:
        return None
    if not is_whole(local):
        return "it is damaged"
    try:
        content = torch.load(local, map_location="cpu", mmap=True, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError):  # with objects of the user's
        return None
    if "optimizer_states" not in content:
        return "it holds weights alone"
    missing = content.get(STATE_KEY, {}).get("missing")
    return f"it was written after an error, without {', '.join(missing)}" if missing else None
