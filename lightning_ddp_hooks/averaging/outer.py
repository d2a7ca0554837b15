"""Outer parameters: the copy of the model, the same on all ranks, that replicas start from after each averaging.

SlowMo and DiLoCo train it by rules of their own; its gradient is the mean of what replicas have moved away from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from lightning_ddp_hooks.averaging.averager import AveragingContext
from lightning_ddp_hooks.averaging.flat import comm_dtype


class OuterModel:
    """Copies of parameters, by position; a parameter gets one once the ranks agree on its value.

    float16 and bfloat16 parameters have float32 copies, since outer steps are small. Without a ``device`` of their own
    copies live where the parameters do.
    """

    def __init__(self, context: AveragingContext, device: str | None = None) -> None:
        self._names, self._params = context.names, context.params
        self._device = device
        self.values: dict[int, nn.Parameter] = {}

    @torch.no_grad()
    def begin(self, indices: Iterable[int]) -> None:
        """Copy parameters, which must be the same on all ranks now."""
        for index in indices:
            self._set(index, self._params[index])

    @torch.no_grad()
    def write(self, index: int, keep: float = 0.0) -> None:
        """Write a copy into its parameter, of whose own value the share ``keep`` is kept."""
        param, value = self._params[index], self.values[index].detach()
        if keep == 0.0:
            param.copy_(value)
        else:
            param.copy_(torch.lerp(value.to(param.device), param.to(value.dtype), keep))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the copies by name, on the CPU."""
        return {self._names[i]: value.detach().to("cpu", copy=True) for i, value in sorted(self.values.items())}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state_dict` returned; raise ValueError for an unknown name or another shape."""
        positions = {name: index for index, name in enumerate(self._names)}
        self.values.clear()
        for name, value in state.items():
            if name not in positions:
                raise ValueError(f"The checkpoint holds an outer parameter {name!r} that the model does not have.")
            expected = self._params[positions[name]].shape
            if value.shape != expected:
                raise ValueError(
                    f"Expected shape {list(expected)} for outer parameter {name!r}, found {list(value.shape)}."
                )
            self._set(positions[name], value)

    def _set(self, index: int, value: Tensor) -> None:
        param = self._params[index]
        dtype = param.dtype if param.is_complex() else comm_dtype(param.dtype)
        # Strides are kept, so that a step over parameter and copy runs through memory once.
        copy = torch.empty_like(param, dtype=dtype, device=self._device or param.device).copy_(value.detach())
        self.values[index] = nn.Parameter(copy)
