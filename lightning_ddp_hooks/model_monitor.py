"""Shows what communication costs a training loop of the user's own: plain PyTorch, or Fabric."""

from __future__ import annotations

import socket
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_ddp_hooks import _compat, comm, traffic
from lightning_ddp_hooks.describe import declared
from lightning_ddp_hooks.monitor.clock import clock_for
from lightning_ddp_hooks.monitor.exchange import StepExchange
from lightning_ddp_hooks.monitor.output import write_output
from lightning_ddp_hooks.monitor.record import RunRecord
from lightning_ddp_hooks.monitor.recorder import Recorder
from lightning_ddp_hooks.run import TrainingRun
from lightning_ddp_hooks.traffic import ByteCounter

_TRACED = 100  # steps of each rank in the trace
_COMPARED_EVERY = 20  # steps


class ModelMonitor:
    """Measures what communication costs each training step of a loop of your own, and writes a report.

    It takes the place of the callback `CommMonitor` where there is no Trainer: rank 0 writes ``report.html``,
    ``trace.json`` (the last 100 steps of all ranks) and ``summary.json``. A step begins with a forward for training and
    ends with the step of an optimizer that has parameters of the model. Make it, and close it, on all ranks.

    Args:
        model: The `DistributedDataParallel` wrapper, or what ``fabric.setup(...)`` returned for a model.
        dirpath: Where to write.
        keep_steps: How many steps the report shows.

    Raises:
        TypeError: Another model, or an argument of the wrong type.
        ValueError: ``keep_steps`` below 1.
        RuntimeError: The model is monitored already.

    Example:
        >>> with ModelMonitor(model):
        ...     for batch in loader:
        ...         loss(model(batch)).backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
    """

    def __init__(self, model: nn.Module, dirpath: str | Path = "comm_monitor", *, keep_steps: int = 1000) -> None:
        if not isinstance(dirpath, (str, Path)):
            raise TypeError(f"Expected a path for `dirpath`, got {dirpath!r}.")
        if isinstance(keep_steps, bool) or not isinstance(keep_steps, int):
            raise TypeError(f"Expected a whole number for `keep_steps`, got {keep_steps!r}.")
        if keep_steps < 1:
            raise ValueError(f"Expected `keep_steps` of at least 1, got {keep_steps}.")
        hooked, self._run = _run_of(model)
        reducer = self._reducer = self._run.reducer
        if reducer.observer is not None:
            raise RuntimeError("The model is monitored already.")
        self._directory = Path(dirpath)
        facts: dict[str, Any] = reducer.stats()
        backend, device = facts["comm_backend"], reducer.params[0].device
        said = declared(self._run.hook.declared, self._run.settings.averager, None)
        counter, has_hook = ByteCounter(), said["hook"] is not None
        self._recorder = Recorder(clock_for(device, queues_waits=backend != "gloo"), counter, has_hook=has_hook)
        texts = {
            "model": type(self._run.module).__name__,
            "hook": said["hook"] or "plain all-reduce",
            "averager": said["averager"],
            "ranks": f"{reducer.world_size} ({backend})",
            "device": getattr(torch.get_device_module(device), "get_device_name", str)(device),
            "reducer": facts["backend"],
            "torch": torch.__version__,
        }
        self.record = RunRecord(
            world_size=reducer.world_size,
            rank=comm.rank(reducer.parent_group),
            keep_steps=keep_steps,
            facts={name: text for name, text in texts.items() if text is not None},
            has_hook=has_hook,
            bucket_cap_bytes=facts["bucket_cap_bytes"],
            hosts=comm.all_gather_object(socket.gethostname(), reducer.control_group),
            sees_ends=device.type == "cpu" or backend != "gloo",
        )
        self._group = comm.new_group(reducer.parent_group, cpu=True) if reducer.world_size > 1 else None
        self._exchange = None if self._group is None else StepExchange(self._group)
        self._params = {id(param) for param in self._run.module.parameters()}
        self._steps = self._synced_at_begin = 0
        self._open = True
        self._hooks = [
            hooked.register_forward_pre_hook(self._before_forward),
            register_optimizer_step_post_hook(self._after_step),
        ]
        traffic.count_bytes(counter)
        reducer.observer = self._recorder

    def _before_forward(self, module: nn.Module, args: object) -> None:
        if not torch.is_grad_enabled() or not module.training:
            return
        if self._recorder.in_step and self._reducer.synced_backwards > self._synced_at_begin:
            self._end_step()  # the loop has stepped without an optimizer
        if not self._recorder.in_step:
            self._synced_at_begin = self._reducer.synced_backwards
            self._recorder.begin_step(self._steps)

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        if self._recorder.in_step and any(id(p) in self._params for g in optimizer.param_groups for p in g["params"]):
            self._end_step()

    def _end_step(self) -> None:
        alone = self._run.trains_alone
        steps = self._recorder.end_step(sum(param.nbytes for param in self._reducer.params) if alone else 0)
        self._add(steps)
        self._steps += 1
        if self._exchange is not None and self._steps % _COMPARED_EVERY == 0:
            self._exchange.begin()
            self.record.compared.extend(self._exchange.take())

    def _add(self, steps: Any) -> None:
        self.record.add(steps)
        if self._exchange is not None:
            self._exchange.add(steps)

    def close(self, *, failed: bool = False) -> None:
        """Stop measuring, and write the report; on all ranks, unless this one has ``failed``."""
        if not self._open:
            return
        self._open = False
        for hook in self._hooks:
            hook.remove()
        traffic.count_bytes(None)
        self._reducer.observer = None
        self._add(self._recorder.settle(wait=not failed))
        record, facts = self.record, self._reducer.stats()
        record.outside_bytes = self._recorder.outside_bytes
        record.bucket_cap_bytes = int(str(facts["bucket_cap_bytes"]))  # "auto" has chosen by now
        groups = [] if self._group is None else [self._group]
        if failed:
            comm.free_after_error(groups, self._exchange is not None and self._exchange.is_under_way)
        else:
            if self._exchange is not None:
                self._exchange.begin()
                record.compared.extend(self._exchange.take(wait=True))
            record.traced = comm.gather_object(list(record.steps)[-_TRACED:], self._reducer.control_group) or ()
            for group in groups:
                comm.destroy_group(group)
        if record.rank == 0:
            write_output(self._directory, record)

    def __enter__(self) -> ModelMonitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.record.note = f"The run ended with {type(error).__name__}: this is what rank {self.record.rank} had "
            self.record.note += "recorded by then."
        self.close(failed=error is not None)


def _run_of(model: nn.Module) -> tuple[nn.Module, TrainingRun]:
    """Return the module whose forward begins a step, and its run."""
    for module in (model, _compat.inside_fabrics(model)):
        run = getattr(module, "run", None) or getattr(module, "_run", None)
        if isinstance(module, nn.Module) and isinstance(run, TrainingRun):
            if run.closed:
                raise ValueError("The model has been detached, or set up anew: name the one that is trained now.")
            return module, run
    raise TypeError(
        f"Expected a DistributedDataParallel of this package or a model that `fabric.setup(...)` returned, got "
        f"{type(model).__name__}."
    )
