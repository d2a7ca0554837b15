"""What a strategy does so that checkpoint files are whole, and all ranks go on from the same one or none does.

A checkpoint that one rank cannot read, or that its host has another version of, would leave the others waiting, or
train on from different states. Like its neighbours a class between Lightning's `DDPStrategy` and ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch.strategies import DDPStrategy
from typing_extensions import override

from lightning_ddp_hooks import _compat, comm
from lightning_ddp_hooks.strategy.checkpoint_io import AtomicCheckpointIO

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.fabric.plugins import CheckpointIO


class LoadingStrategy(DDPStrategy):
    """A `DDPStrategy` under which ranks agree on the checkpoint that they go on from."""

    _checkpoint_io: CheckpointIO | None
    _agreed_on_checkpoint: bool = False

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """What reads and writes checkpoints."""
        if self._checkpoint_io is None:
            self._checkpoint_io = AtomicCheckpointIO()
        _compat.use_base_checkpoint_io(self._checkpoint_io, AtomicCheckpointIO)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._agreed_on_checkpoint = False

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self._agree_on_checkpoint()  # a rank that read none, while others may have
        super().setup(trainer)

    def _agree_on_checkpoint(
        self, path: str | None = None, progress: str | None = None, error: Exception | None = None
    ) -> None:
        """Go on from what was read, if all ranks do; collective the first time in a run, later for this rank alone."""
        if not self._agreed_on_checkpoint:
            self._agreed_on_checkpoint = True
            agree_on_checkpoint(path, progress, error)
        if error is not None:
            raise error


def agree_on_checkpoint(path: str | None, progress: str | None, error: Exception | None = None) -> None:
    """Make sure that all ranks go on from the same place; a collective call of all ranks of the world.

    Args:
        path: the checkpoint that this rank has read or failed to read; None if it was to read none.
        progress: how far the run was that wrote it.
        error: why this rank could not read it.

    Raises:
        RuntimeError: on each rank that has no error itself, if another one could not read its checkpoint, or if ranks
            have read different ones.
    """
    if not comm.is_initialized() or comm.world_size() == 1:
        return
    world = comm.resolve_group(None)
    own_group = None if comm.backend_name(world) == "gloo" else comm.new_group(world, cpu=True)
    text = None if error is None else f"{type(error).__name__}: {error}"
    found: list[tuple[str | None, str | None, str | None]]
    found = comm.all_gather_object((path, progress, text), own_group or world)
    if own_group is not None:
        comm.destroy_group(own_group)
    if error is not None:
        return
    for rank, (name, _, text) in enumerate(found):
        if text is not None:
            raise RuntimeError(f"Rank {rank} could not read the checkpoint {name!r}. Its error: {text}")
    if len({progress for _, progress, _ in found}) > 1:
        lines = [
            f"rank {rank}: {'none' if name is None else f'{name!r} ({progress})'}"
            for rank, (name, progress, _) in enumerate(found)
        ]
        raise RuntimeError(
            f"The ranks would not go on from the same checkpoint: {'; '.join(lines)}. Rank 0 writes checkpoints: if "
            "hosts do not share the folder, copy the file to the same place on each before resuming."
        )
