"""What compression did not send, kept until the next step: one residual for each parameter, by its name.

[Note: error feedback] A hook that sends less than the gradient keeps the rest and adds it to the next gradient, so that
nothing is lost, only sent later (Seide et al., "1-bit stochastic gradient descent", 2014; Karimireddy et al., "Error
feedback fixes SignSGD", 2019, https://arxiv.org/abs/1901.09847).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.hooks.state import mean_over_ranks
from lightning_ddp_hooks.reducer.bucket import GradBucket


class ErrorMemory:
    """One residual per parameter, handed out bucket by bucket as one flat tensor.

    Within a step a hook asks for the residual of its bucket and writes the new one into the same tensor:

        >>> residual = memory.of(bucket)               # (numel,), zeros at first; same order as bucket.buffer()
        >>> total = bucket.buffer() + residual
        >>> residual.copy_(total - what_was_sent)      # in place: the tensor is the memory

    The residuals are found by the names of parameters. When buckets are rebuilt, or parameters are frozen, each
    residual moves to the bucket in which its parameter lies now; asking is one look-up otherwise. Values are in the
    units of the bucket's gradients, that is, not divided by the number of ranks. float16 and bfloat16 gradients have
    float32 residuals.

    A complex parameter takes two real elements for each of its own, as in the bucket.
    """

    def __init__(self) -> None:
        # bucket index -> (names of the bucket, its flat residual): the way of an ordinary step
        self._flats: dict[int, tuple[tuple[str, ...], Tensor]] = {}
        # name -> where its residual is: a slice of a flat, or (loaded, not asked for yet) a tensor of its own
        self._homes: dict[str, Tensor] = {}

    def of(self, bucket: GradBucket) -> Tensor:
        """Return the residual of the bucket, shape ``(numel,)``; what is written into it is kept."""
        known = self._flats.get(bucket.index())
        if known is not None and (known[0] is bucket.names or known[0] == bucket.names):
            return known[1]
        return self._move_in(bucket)

    def _move_in(self, bucket: GradBucket) -> Tensor:
        buffer = bucket.buffer()
        flat = torch.zeros(buffer.numel(), dtype=residual_dtype(buffer.dtype), device=buffer.device)
        offset = 0
        for name, param in zip(bucket.names, bucket.parameters(), strict=True):
            numel = param.numel() * (2 if param.is_complex() else 1)
            home = flat[offset : offset + numel]
            offset += numel
            before = self._homes.get(name)
            if before is not None:
                _require_numel(name, numel, before)
                home.copy_(before)
            self._homes[name] = home
        # A bucket of an earlier layout, whose parameters have moved, must not be taken for the memory again.
        moved = set(bucket.names)
        self._flats = {index: known for index, known in self._flats.items() if moved.isdisjoint(known[0])}
        self._flats[bucket.index()] = (bucket.names, flat)
        return flat

    def aside(self, bucket: GradBucket) -> AbstractContextManager[None]:
        """Keep the residuals of parameters that no rank has used as they are, whatever is written meanwhile.

        What is reduced for them is thrown away, so that nothing of their residuals counts as sent.
        """
        if not bucket.unused:
            return _NOTHING_ASIDE
        self.of(bucket)
        return set_aside([self._homes[name] for name in bucket.names if name in bucket.unused])

    def rescale(self, factor: float) -> None:
        """Multiply all residuals."""
        for home in self._homes.values():
            home.mul_(factor)

    def clear(self) -> None:
        """Forget all residuals and free their memory."""
        self._flats.clear()
        self._homes.clear()

    def residuals(self) -> dict[str, Tensor]:
        """Return this rank's residual for each parameter that has one, flat, not copied."""
        return dict(self._homes)

    def state_dict(self, control_group: comm.ProcessGroup) -> dict[str, Any]:
        """Return the mean over the ranks of each residual, by name, flat, on the CPU; collective.

        Args:
            control_group: a CPU group over all ranks.
        """
        return mean_over_ranks(self._homes, control_group)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up residuals that `state_dict` returned; what is not in ``state`` begins at zero.

        Raises:
            ValueError: a residual has another size than its parameter.
        """
        for name, home in self._homes.items():
            if name in state:
                _require_numel(name, home.numel(), state[name])
                home.copy_(state[name].view(-1))
            else:
                home.zero_()
        for name, residual in state.items():
            if name not in self._homes:
                self._homes[name] = residual.detach().clone().view(-1)


_NOTHING_ASIDE = nullcontext()


@contextmanager
def set_aside(residuals: Sequence[Tensor]) -> Iterator[None]:
    """Put zeros in the place of residuals, and the residuals back at the end."""
    kept = [residual.clone() for residual in residuals]
    for residual in residuals:
        residual.zero_()
    try:
        yield
    finally:
        for residual, before in zip(residuals, kept, strict=True):
            residual.copy_(before)


def residual_dtype(gradient: torch.dtype) -> torch.dtype:
    """Return the dtype in which a gradient's residual is kept: at least float32, since small values add up in it."""
    return gradient if gradient.itemsize >= 4 else torch.float32


def _require_numel(name: str, expected: int, found: Tensor) -> None:
    if found.numel() != expected:
        raise ValueError(
            f"Expected a residual of {expected} elements for parameter {name!r}, found {found.numel()} in the "
            "checkpoint."
        )
