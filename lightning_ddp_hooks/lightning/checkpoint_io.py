"""Checkpoint files that are whole or not there, and that all ranks go on from the same one or none does.

[Note: why not Lightning's own] It writes a file in the system's folder for temporary files and then moves it. Where
that folder is on another file system, as it often is, the move is a copy into the final name: a rank that is killed
meanwhile, or a disk that fills up, leaves half a file there, and the checkpoint that was there before is lost. On the
way back torch does not compare the checksums that it has written: a bit that has changed goes into training unnoticed.
"""

from __future__ import annotations

import errno
import hashlib
import os
import pickle
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.io import TorchCheckpointIO
from typing_extensions import override

from lightning_ddp_hooks import _compat, comm

_CHUNK = 1 << 24


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's `TorchCheckpointIO` for local files, but no reader ever finds half a checkpoint.

    The file is written under a temporary name in the folder where it is to be, brought to the disk, and renamed. If
    that fails, what was there stays as it was, and the temporary file is removed. (A process that is killed can leave
    one, named ``.<digits>.tmp``; the next checkpoint of that name replaces it.) Before a file is read its checksums are
    compared, which takes 0.35 seconds per GB. Remote paths are handled as Lightning does.

    Example:
        >>> Trainer(strategy="ddp", plugins=[AtomicCheckpointIO()])  # with "ddp_hooks" it is the default
    """

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint."""
        local = local_path(path)
        if storage_options is not None or local is None:
            super().save_checkpoint(checkpoint, str(path), storage_options)
            return
        try:
            local.parent.mkdir(parents=True, exist_ok=True)
            _write(checkpoint, local)
        except (OSError, RuntimeError) as error:
            if (cause := _cause(error)) is None:
                raise
            before = "the one that was there before is untouched" if local.exists() else "no part of it is left"
            text = (
                f"The checkpoint could not be written ({cause.strerror or cause}); {before}, and all others are as "
                "they were. Make room, or see to the folder, and go on from the last one"
            )
            raise OSError(cause.errno, text, str(local)) from error

    @override
    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Callable[..., Any] | None = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint."""
        local = local_path(path)
        if local is not None and local.is_dir():
            text = "Expected a checkpoint file, found a folder, as strategies that shard the model write them"
            raise IsADirectoryError(errno.EISDIR, text, str(local))
        if local is not None and (damaged := _damaged_part(local)):
            raise RuntimeError(_unreadable(path, f"the checksum of its part {damaged!r} does not fit"))
        # Older Lightning does not know the argument, and does not give it either.
        options = {} if weights_only is None else {"weights_only": weights_only}
        try:
            return super().load_checkpoint(str(path), map_location, **options)
        except pickle.UnpicklingError as error:
            raise type(error)(f"Could not read the checkpoint {str(path)!r}: {error}") from error
        except Exception as error:  # torch raises whatever it stumbles over, also OSErrors
            if isinstance(error, FileNotFoundError) or (isinstance(error, OSError) and error.filename is not None):
                raise
            text = str(error).partition("\n")[0]
            raise RuntimeError(_unreadable(path, f"{type(error).__name__}: {text}")) from error


def _get_checkpoint_io(strategy: Any) -> CheckpointIO:
    """What reads and writes checkpoints."""
    if strategy._checkpoint_io is None:
        strategy._checkpoint_io = AtomicCheckpointIO()
    _compat.use_base_checkpoint_io(strategy._checkpoint_io, AtomicCheckpointIO)
    io: CheckpointIO = strategy._checkpoint_io
    return io


checkpoint_io_property = property(_get_checkpoint_io, lambda strategy, io: setattr(strategy, "_checkpoint_io", io))
"""The property of both strategies; made when it is first asked for, since Lightning takes a set one for the user's."""


def agree_on_checkpoint(path: str | None, progress: str | None, error: Exception | None = None) -> None:
    """Make sure that all ranks go on from the same checkpoint, or all from none; collective.

    Each tells which one it has read, or could not for an ``error``, and how far the run was that wrote it. Raises on a
    rank without error if another one has one, or if they differ.
    """
    if not comm.is_initialized() or comm.world_size() == 1:
        return
    world = comm.resolve_group(None)
    own_group = None if comm.is_cpu_group(world) else comm.new_group(world, cpu=True)
    text = None if error is None else f"{type(error).__name__}: {error}"
    found = comm.all_gather_object((path, progress, text), own_group or world)
    if own_group is not None:
        comm.destroy_group(own_group)
    if error is not None:
        return
    for rank, (name, _, text) in enumerate(found):
        if text is not None:
            raise RuntimeError(f"Rank {rank} could not read the checkpoint {name!r}. Its error: {text}")
    if len({progress for _, progress, _ in found}) > 1:
        texts = ["none" if name is None else f"{name!r} ({progress})" for name, progress, _ in found]
        lines = [f"rank {rank}: {text}" for rank, text in enumerate(texts)]
        raise RuntimeError(
            f"The ranks would not go on from the same checkpoint: {'; '.join(lines)}. Rank 0 writes checkpoints: if "
            "hosts do not share the folder, copy the file to the same place on each before resuming."
        )


def _unreadable(path: str | os.PathLike[str], why: str) -> str:
    return f"Could not read the checkpoint {str(path)!r}: it is damaged, or not a checkpoint ({why})."


def is_whole(path: Path) -> bool:
    """Tell whether a local file is a checkpoint of which no part is missing or has changed."""
    return zipfile.is_zipfile(path) and _damaged_part(path) is None


def local_path(path: str | os.PathLike[str]) -> Path | None:
    """Return where a path is on this machine's file systems; None if it is elsewhere."""
    file_system, stripped = url_to_fs(str(path))
    return Path(stripped) if isinstance(file_system, LocalFileSystem) else None


def _write(checkpoint: dict[str, Any], path: Path) -> None:
    # Named by the final name, so that what a killed process left goes when the run has resumed; but not like it, since
    # what looks like a checkpoint is taken for one.
    temporary = path.with_name(f".{hashlib.sha256(path.name.encode()).hexdigest()[:16]}.tmp")
    temporary.unlink(missing_ok=True)
    file = os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666), "wb")
    try:
        with file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
            if not os.path.samestat(os.fstat(file.fileno()), temporary.stat()):
                raise FileExistsError(errno.EEXIST, "another process writes it at the same time")
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    with suppress(OSError):  # not all systems can bring a folder's entries to the disk
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _cause(error: BaseException | None) -> OSError | None:
    """Find the system's error behind what torch makes of it."""
    while error is not None:
        if isinstance(error, OSError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _damaged_part(path: Path) -> str | None:
    """Return the first part of a file whose checksum does not fit; None also for what holds no checksums."""
    if not (path.is_file() and zipfile.is_zipfile(path)):
        return None
    damaged, whole = [], 0
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            try:
                with archive.open(info) as part:
                    while part.read(_CHUNK):
                        pass
                whole += 1
            except Exception:  # a header that has changed can mean anything
                damaged.append(info.filename)
    # torch can be told to leave checksums out, and then none fits.
    return damaged[0] if damaged and whole else None
