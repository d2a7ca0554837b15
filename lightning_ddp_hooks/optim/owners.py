"""Which rank steps which parameter, and so holds its optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from lightning_ddp_hooks.optim.partition import partition


class Owners:
    """The owner of each parameter; once given, it stays, since the optimizer state lies there.

    Args:
        world_size: number of ranks that share the parameters; 1 if each rank steps them all.
        rank: this one.
    """

    def __init__(self, world_size: int, rank: int) -> None:
        self.world_size = world_size
        self.rank = rank
        self.loads = [0] * world_size
        self._of: dict[Tensor, int] = {}

    @classmethod
    def everybody(cls) -> Owners:
        """Each rank steps all parameters."""
        return cls(1, 0)

    def knows(self, param: Tensor) -> bool:
        """Tell whether the parameter has an owner."""
        return self.world_size == 1 or param in self._of

    def of(self, param: Tensor) -> int:
        """Return the rank that owns the parameter."""
        return 0 if self.world_size == 1 else self._of[param]

    def owns(self, param: Tensor) -> bool:
        """Tell whether this rank steps the parameter."""
        return self.of(param) == self.rank

    def assign(self, bundles: Iterable[Sequence[Tensor]]) -> list[Tensor]:
        """Give an owner to each parameter that has none; the same call on all ranks.

        Args:
            bundles: parameters that are to stay together, such as those of one bucket.

        Returns:
            The parameters that were given one.
        """
        if self.world_size == 1:
            return []
        fresh: list[list[Tensor]] = []
        seen: set[Tensor] = set()
        for bundle in bundles:
            new = [param for param in bundle if param not in self._of and param not in seen]
            seen.update(new)
            if new:
                fresh.append(new)
        sizes = [sum(param.numel() for param in bundle) for bundle in fresh]
        for bundle, size, rank in zip(fresh, sizes, partition(sizes, self.loads), strict=True):
            self.loads[rank] += size
            self._of.update(dict.fromkeys(bundle, rank))
        return [param for bundle in fresh for param in bundle]
