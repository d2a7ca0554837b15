"""What recorded backwards show of a model: in which order gradients come, together with which others, how often.

Pure: it is fed all ranks' reports, and so comes to the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from lightning_ddp_hooks.reducer.agreement import RankReport

# Where parameters may be left out, so many backwards are waited for one that uses them all; with a static graph for one
# in which all ranks have a loss.
MAX_RECORDINGS = 16


class BucketOrderRecorder:
    """Gathers reports until the buckets can be laid out in the order of the backward.

    Attributes:
        order: Parameters in the order in which they became ready; those that only later ranks or backwards used last.
        expected: How often each parameter's gradient comes in one backward.
        dropped: Parameters that a static graph does not use.
        done: Whether enough has been seen.
    """

    def __init__(self, count: int, *, static_graph: bool, may_miss: bool) -> None:
        self._count = count
        self._static_graph = static_graph
        self._may_miss = may_miss
        self._recordings = 0
        self._all_came = False  # gradients of all ranks, in the last one
        self._used_in: dict[int, frozenset[int]] = {}
        self.order: list[int] = []
        self.expected = [1] * count
        self.dropped: frozenset[int] = frozenset()
        self.done = False

    def add(self, reports: Sequence[RankReport]) -> None:
        """Take the first rank's order, and behind it what only other ranks used."""
        self._all_came = all(any(report.fired) for report in reports)
        for report in reports:
            for index in report.order:
                if index not in self._used_in:
                    self._used_in[index] = frozenset()
                    self.order.append(index)
                self._used_in[index] |= {self._recordings}
        # What came twice on one rank may come twice here in another backward.
        counts = [report.fired for report in reports if report.fired]
        self.expected = [max(column) for column in zip(self.expected, *counts, strict=True)]

    def conclude(self, own_fired: Sequence[int]) -> bool:
        """End a recorded backward; return whether enough has been seen."""
        if self._count and not self.order:
            return False  # no rank has had a loss yet
        self._recordings += 1
        never = self._never_used()
        if self._static_graph:
            if not self._all_came and self._recordings < MAX_RECORDINGS:
                return False
            self.dropped = frozenset(never)
            of_others = [0 if index in self.dropped else count for index, count in enumerate(self.expected)]
            self.expected = list(own_fired) if any(own_fired) else of_others
        elif never and not (self._may_miss and self._recordings >= MAX_RECORDINGS):
            return False
        self.done = True
        return True

    def layout_order(self, outside: Sequence[int]) -> list[int]:
        """Return all parameters that are to have a place in a bucket, first ready first."""
        left_out = {*outside, *self.dropped}
        return [index for index in [*self.order, *self._never_used()] if index not in left_out]

    def keys(self, keys: Sequence[Hashable]) -> list[Hashable]:
        """Refine keys so that only parameters used in the same backwards share a bucket: it is sent whole or not."""
        if not self._may_miss:
            return list(keys)
        return [(key, self._used_in.get(index, frozenset())) for index, key in enumerate(keys)]

    def sometimes_unused(self) -> frozenset[int]:
        """Return the parameters that were not used in every recorded backward."""
        if not self._may_miss:
            return frozenset()
        everywhere = frozenset(range(self._recordings))
        return frozenset(i for i in range(self._count) if self._used_in.get(i, frozenset()) != everywhere)

    def _never_used(self) -> list[int]:
        return [index for index in range(self._count) if index not in self._used_in]
