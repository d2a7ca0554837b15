"""Find out on which rank a gradient is infinite or not a number, before a sum makes it so on all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from lightning_ddp_hooks import comm


class NonfiniteGradients:
    """Looks at each gradient of this rank as the backward produces it.

    Costs one pass over each gradient, and in each `check` one wait for the device and one small collective.

    Args:
        group: a CPU group.
    """

    def __init__(self, group: comm.ProcessGroup) -> None:
        self._group = group
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._seen: list[tuple[str, Tensor]] = []

    def watch(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """FailureDetector those parameters that require a gradient, instead of those that were watched before.

        Hooks run in the order in which they were set: to see what the user's hooks make of a gradient, call this last.
        """
        self._unhook()
        self._handles = [param.register_hook(self._looking_at(name)) for name, param in named if param.requires_grad]

    def _looking_at(self, name: str) -> Callable[[Tensor], None]:
        def look(gradient: Tensor) -> None:
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            # A sum is several times as fast as `isfinite` of each value. Half precision is summed in float32, so that
            # only sums beyond 1e38 of values that are finite would mislead.
            wide = torch.float32 if values.dtype in (torch.float16, torch.bfloat16) else values.dtype
            self._seen.append((name, torch.isfinite(values.sum(dtype=wide))))

        return look

    def check(self, step: int) -> None:
        """Tell all ranks what was seen since the last check; a collective call.

        Raises:
            RuntimeError: on every rank, if a gradient of any rank was not finite; names those ranks, and for each the
                first parameter in the order of its backward.
        """
        found = self._found()
        if not int(comm.reduce_in_place(torch.tensor([len(found)]), "sum", self._group)):
            return
        lines = []
        for rank, names in enumerate(comm.all_gather_object([*found[:1], str(len(found))], self._group)):
            if len(names) > 1:
                others = int(names[1]) - 1
                more = f" (and of {others} more parameters)" if others else ""
                lines.append(f"rank {rank}: the gradient of {names[0]!r}{more}")
        raise RuntimeError(
            f"Gradients that are infinite or not a number in step {step}, before any exchange: {'; '.join(lines)}. "
            "Gradients come from the loss down: the parameter named is the first one that the backward reached."
        )

    def _found(self) -> list[str]:
        seen, self._seen = self._seen, []
        if not seen:
            return []
        flags = torch.stack([flag.to(seen[0][1].device) for _, flag in seen]).tolist()
        return list(dict.fromkeys(name for (name, _), finite in zip(seen, flags, strict=True) if not finite))

    def close(self) -> None:
        """Look no more."""
        self._unhook()
        self._seen.clear()

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
