"""The verb of a strategy that reduces what is logged with ``sync_dist=True``: the ranks must log the same.

Like its neighbours a class between Lightning's `DDPStrategy` and ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_ddp_hooks import _compat, comm
from lightning_ddp_hooks.health.logged import LoggedValues
from lightning_ddp_hooks.lightning.uneven.collectives import op_name
from lightning_ddp_hooks.strategy.optimizer import OptimizerStrategy

if TYPE_CHECKING:
    import lightning.pytorch as pl


class LogsStrategy(OptimizerStrategy):
    """A `DDPStrategy` under which ranks that log different values get an error, not a wrong average."""

    _step: int = 0
    _logged: LoggedValues | None = None
    _unfollow: tuple[Callable[[], None], ...] = ()

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        if comm.world_size() > 1:
            self._logged = LoggedValues(self.root_device, lambda: self._step)
            self._unfollow = tuple(
                _compat.follow_logging(results, self._logging) for results in _compat.all_logged_results(trainer)
            )

    @contextmanager
    def _logging(self, place: str, name: str, metric: Metric | None) -> Iterator[None]:
        assert self._logged is not None
        with self._logged.entry(place, name), ExitStack() as stack:
            if metric is not None:
                stack.enter_context(_compat.before_metric_gathers(metric, self._logged.agree_on_metric))
            yield

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        logged = self._logged
        in_tail = self._uneven is not None and self._uneven.tail is not None
        # What is logged has one element; a metric that is being computed may reduce more by itself.
        one = isinstance(tensor, Tensor) and tensor.numel() == 1
        if logged is None or not logged.open or in_tail or not one:
            return super().reduce(tensor, group, reduce_op)
        return logged.reduce(tensor, op_name(reduce_op), group)

    @override
    def teardown(self) -> None:
        for undo in self._unfollow:
            undo()
        self._unfollow = ()
        logged, self._logged = self._logged, None
        if logged is not None:
            logged.close(failed=self._failed)
        super().teardown()
