"""Who of several ranks steps what: a greedy partition by size. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def partition(sizes: Sequence[int], loads: Sequence[int]) -> list[int]:
    """Hand each item to a rank so that the ranks carry about the same: the largest first, each to the least loaded.

    The heaviest rank carries at most 4/3 of what it would in the best partition (Graham, "Bounds on multiprocessing
    timing anomalies", 1969). Equal items are taken in their order, and of equally loaded ranks the lowest, so that all
    ranks come to the same.

    Args:
        sizes: of the items, in elements.
        loads: what each rank carries already.

    Returns:
        For each item, its rank.

    Example:
        >>> partition([5, 3, 2], loads=[0, 0])
        [0, 1, 1]
    """
    carried = list(loads)
    ranks = [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        rank = min(range(len(carried)), key=carried.__getitem__)
        ranks[item] = rank
        carried[rank] += sizes[item]
    return ranks
