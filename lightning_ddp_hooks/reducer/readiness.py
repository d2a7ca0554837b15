"""Which gradients of a backward have come, and which buckets are complete: pure counting, no tensors."""

from __future__ import annotations

from collections.abc import Sequence

_NEVER_FULL = 1 << 60


class Readiness:
    """Counts down gradients and buckets.

    Args:
        count: Number of parameters.

    Attributes:
        used: One byte for each parameter: 1 if it got a gradient since `forget_use`.
        left: How often the gradient of each parameter is still to come in this backward.
        pending: How many parameters of each bucket are not ready; the last entry stands for those without a bucket.
        bucket_of: Bucket of each parameter.
    """

    def __init__(self, count: int) -> None:
        self.used = bytearray(count)
        self.left = [0] * count
        self.pending: list[int] = []
        self.bucket_of = [0] * count
        self._expected = [0] * count
        self._pending_at_start: list[int] = []

    def set_layout(self, buckets: Sequence[Sequence[int]], expected: Sequence[int]) -> None:
        """Take new buckets.

        Args:
            buckets: Parameters of each bucket.
            expected: How often the gradient of each parameter comes in one backward.
        """
        self._expected = list(expected)
        self.left = [0] * len(self._expected)
        self.bucket_of = [len(buckets)] * len(self._expected)  # without a bucket
        for position, indices in enumerate(buckets):
            for index in indices:
                self.bucket_of[index] = position
        self._pending_at_start = [sum(expected[index] > 0 for index in indices) for indices in buckets]
        self._pending_at_start.append(_NEVER_FULL)
        self.pending = list(self._pending_at_start)

    def start(self) -> None:
        """Begin a backward."""
        self.left[:] = self._expected
        self.pending[:] = self._pending_at_start

    def is_expected(self, index: int) -> bool:
        """Tell whether a parameter is to get a gradient at all."""
        return self._expected[index] > 0

    def unready(self) -> list[int]:
        """Return the parameters whose gradient has not come, or not as often as expected."""
        return [index for index, left in enumerate(self.left) if left > 0]

    def fired(self) -> list[int]:
        """Return how often each parameter's gradient has come."""
        return [expected - left for expected, left in zip(self._expected, self.left, strict=True)]

    def forget_use(self) -> None:
        """Begin a new accumulation window."""
        self.used[:] = bytes(len(self.used))
