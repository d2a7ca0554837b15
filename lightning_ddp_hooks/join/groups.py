"""Process groups of the ranks that still have data."""

from __future__ import annotations

from lightning_ddp_hooks import comm


class ActiveGroups:
    """Makes a group for each set of active ranks that comes up, and keeps it: each set is made once.

    There are at most W - 1 such sets in an epoch, and with fixed shards they are the same in all epochs.
    """

    def __init__(self) -> None:
        self._groups: dict[tuple[int, ...], comm.ProcessGroup] = {}
        self._solo: comm.ProcessGroup | None = None

    def prepare(self, ranks: tuple[int, ...]) -> None:
        """Have the group of some ranks; collective over all ranks of the world, joined ones too."""
        if ranks not in self._groups:
            self._groups[ranks] = comm.new_subgroup(ranks)

    def __getitem__(self, ranks: tuple[int, ...]) -> comm.ProcessGroup:
        return self._groups[ranks]

    def close(self, *, failed: bool = False) -> None:
        """Free the groups; after an error those that can be."""
        if failed:
            comm.free_after_error(group for ranks, group in self._groups.items() if comm.rank() in ranks)
        else:
            for group in self._groups.values():
                comm.destroy_group(group)
        if self._solo is not None:
            comm.destroy_group(self._solo)
        self._groups.clear()
        self._solo = None

    @property
    def solo(self) -> comm.ProcessGroup:
        """A group of this rank alone, for modules that a joined rank runs without the others."""
        if self._solo is None:
            self._solo = comm.solo_group()
        return self._solo
