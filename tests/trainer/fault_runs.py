"""What the fault tests and the long fault run share: a fit with checkpoints, harm to it, and its resumption.

A fit takes two epochs of five steps and writes a checkpoint after every second step. Each rank has batches of its own,
from a loader that resumes.
"""

import ctypes
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from faults import note_fault, signal_self
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from trainer_runs import EXACT, Net, State, make_module, make_trainer, rank, state_of
from uneven_runs import Position, Shard

from lightning_ddp_hooks import DDPHooksStrategy
from lightning_ddp_hooks.averaging import DiLoCo, PeriodicModelAverager
from lightning_ddp_hooks.callbacks import UnevenInputs
from lightning_ddp_hooks.hooks import PowerSGD
from lightning_ddp_hooks.optim import OptimizerInHook

TIMEOUT = 1.5
"""Seconds of silence after which a rank is given up: a step of these fits takes milliseconds."""
PATIENCE = 8.0
"""Seconds that a collective may take."""
DELAY = 2.0

# ---------------------------------------------------------------------- settings


@dataclass(frozen=True)
class Setting:
    """How a fit is run.

    Attributes:
        strategy: arguments of the strategy.
        uneven: give ranks shards of different lengths.
        exact: whether a resumed run equals one that was never harmed to the last bit; else to float64's rounding.
    """

    strategy: Mapping[str, Any] = field(default_factory=dict)
    uneven: bool = False
    exact: bool = True


SETTINGS: dict[str, Setting] = {
    "plain": Setting(),
    # Error memory is saved as the mean over the ranks, which changes what each of them sends, but not the sum.
    "powersgd": Setting({"comm_hook": PowerSGD(rank=1, start_iter=2, min_compression_rate=1.1)}, exact=False),
    "averager": Setting({"averager": PeriodicModelAverager(period=4, warmup_steps=1)}),
    "diloco": Setting({"averager": DiLoCo(period=4, warmup_steps=1)}),
    "sharded": Setting({"optimizer_in_hook": OptimizerInHook(shard=True)}),
    "uneven": Setting(uneven=True),
}

# ---------------------------------------------------------------------- harm


@dataclass(frozen=True)
class Fault:
    """Harm to one rank.

    Attributes:
        place: where in the fit, one of `PLACES`.
        harm: what is done, one of `HARMS`.
        victim: the rank; in "write" it is always rank 0, which alone writes.
    """

    place: str
    harm: str
    victim: int = 1

    @property
    def rank(self) -> int:
        """The rank that is harmed."""
        return 0 if self.place == "write" else self.victim


PLACES = {
    **dict.fromkeys(("loader", "forward", "backward", "hook", "average", "step", "batch end"), (5, 4)),
    "validation": (7, 6),
    "save": (6, 4),
    "write": (6, 4),
}
"""Where a fault can happen: at which step, and the step of the checkpoint that must be whole then."""


class Injector(Callback):
    """Calls ``strike(place)`` wherever a fault can happen."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.done = False

    def strike(self, place: str, step: int) -> None:
        fault = self.fault
        if not self.done and place == fault.place and rank() == fault.rank and step == PLACES[place][0]:
            self.done = True
            HARMS[fault.harm]()

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Put the harm where no callback comes, once all is set up."""
        if trainer.global_step != PLACES[self.fault.place][0]:
            return
        if self.fault.place == "hook":
            self._before(trainer.strategy.reducer.queue.hook, "reduce", trainer)
        if self.fault.place == "average":
            self._before(trainer.strategy.run.averaging.bound, "_average", trainer)
        if self.fault.place == "step":
            self._before(trainer.optimizers[0], "step", trainer)

    def _before(self, owner: Any, name: str, trainer: Any) -> None:
        call = getattr(owner, name)

        def struck(*args: Any, **kwargs: Any) -> Any:
            self.strike(self.fault.place, trainer.global_step)
            return call(*args, **kwargs)

        setattr(owner, name, struck)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.strike("batch end", trainer.global_step - 1)

    def on_validation_start(self, trainer: Any, *_: Any) -> None:
        self.strike("validation", trainer.global_step)

    def on_save_checkpoint(self, trainer: Any, *_: Any) -> None:
        self.strike("save", trainer.global_step)


def _raise(error: Exception) -> None:
    note_fault()
    raise error


def _sleep(seconds: float) -> None:
    note_fault()
    time.sleep(seconds)


def _exit(code: int) -> None:
    note_fault()
    os._exit(code)


def _system_exit() -> None:
    note_fault()
    raise SystemExit(3)


def _signal_and_go_on(number: signal.Signals) -> None:
    """Send a signal for which Python code is called, some time later."""
    note_fault()
    os.kill(os.getpid(), number)
    time.sleep(0.01)


def _cut() -> None:
    """Break all network connections of this process, as a cable that is pulled does, but at once."""
    note_fault()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                copy = socket.socket(fileno=os.dup(int(name)))
                with copy:
                    listens = copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                    if copy.family in (socket.AF_INET, socket.AF_INET6) and not listens:
                        copy.shutdown(socket.SHUT_RDWR)


def _extra_collective() -> None:
    note_fault()
    torch.distributed.all_reduce(torch.ones(1))


def _allocate() -> None:
    note_fault()
    torch.empty(1 << 60)


HARMS: dict[str, Callable[[], None]] = {
    "kill": partial(signal_self, signal.SIGKILL),
    "segfault": partial(signal_self, signal.SIGSEGV),
    "abort": partial(signal_self, signal.SIGABRT),
    "stop": partial(signal_self, signal.SIGSTOP),
    "SIGTERM": partial(_signal_and_go_on, signal.SIGTERM),
    "SIGINT": partial(_signal_and_go_on, signal.SIGINT),
    "exit": partial(_exit, 3),
    "sys.exit": _system_exit,
    "raise": partial(_raise, ValueError("a bad sample")),
    "out of memory": _allocate,
    "delay": partial(_sleep, DELAY),
    "hang": partial(_sleep, 3600),
    "hang with the lock": lambda: (note_fault(), ctypes.PyDLL(None).sleep(3600))[1],
    "cut": _cut,
    "collective of its own": _extra_collective,
    "disk full": lambda: None,  # see `_writing`
}

# ---------------------------------------------------------------------- the fit


class FaultyPosition(Position):
    """A loader that can be harmed."""

    injector: Injector | None = None

    def __init__(self, shard: Any, steps_before: Callable[[], int]) -> None:
        super().__init__(shard)
        self.steps_before = steps_before

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            if self.injector is not None:
                self.injector.strike("loader", self.steps_before())
            yield batch


class FaultNet(Net):
    """Five batches an epoch on each rank; with uneven shards some ranks have fewer."""

    optimizer = staticmethod(partial(torch.optim.Adam, lr=0.02))
    uneven = False
    injector: Injector | None = None

    def train_dataloader(self) -> Any:
        count = (5, 4, 5, 2)[rank()] if self.uneven else 5
        loader = FaultyPosition(Shard(rank(), count), lambda: self.trainer.global_step)
        loader.injector = self.injector
        return loader

    def val_dataloader(self) -> Any:
        return Shard(rank() + 10, 2)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if (injector := self.injector) is not None:
            step = self.trainer.global_step
            injector.strike("forward", step)
            if injector.fault.place == "backward" and loss.requires_grad:
                # The gradient of this parameter comes late, when later layers' may be on their way.
                self.net[2].weight.register_hook(lambda _: injector.strike("backward", step))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def strategy_of(setting: Setting, **more: Any) -> DDPHooksStrategy:
    """Make the strategy of a setting, with small buckets and little patience."""
    settings = {
        "failure_timeout": TIMEOUT,
        "timeout": timedelta(seconds=PATIENCE),
        "bucket_cap_mb": 0.001,
        "first_bucket_mb": 0.001,
    }
    return DDPHooksStrategy(**{**settings, **setting.strategy, **more})


def fit(name: str, folder: str | None, fault: Fault | None = None, resume: str | None = None, **more: Any) -> State:
    """Fit in a setting, to the end if nothing happens.

    Args:
        name: of the setting.
        folder: where checkpoints go; None for none.
        fault: what is to happen.
        resume: a checkpoint to go on from.
        **more: arguments of the strategy.

    Returns:
        The final state.
    """
    setting = SETTINGS[name]
    module = make_module(FaultNet).double()  # else Lightning rounds the weights of a checkpoint to float32
    module.uneven = setting.uneven
    callbacks: list[Callback] = [UnevenInputs()] if setting.uneven else []
    if fault is not None:
        module.injector = Injector(fault)
        callbacks.append(module.injector)
    if folder is not None:
        callbacks.append(ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1))
    trainer = make_trainer(
        strategy_of(setting, **more),
        **{
            **EXACT,
            "callbacks": callbacks,
            "enable_checkpointing": folder is not None,
            "max_epochs": 2,
            "val_check_interval": 2,
            "limit_val_batches": 2 if fault is not None and fault.place == "validation" else 0,
        },
    )
    with _writing(module.injector):
        trainer.fit(module, ckpt_path=resume)
    return state_of(module)


@contextmanager
def _writing(injector: Injector | None) -> Iterator[None]:
    """Have a fault in "write" happen when some of the file is written."""
    if injector is None or injector.fault.place != "write":
        yield
        return
    save = torch.save

    def save_in_part(checkpoint: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(checkpoint, dict) and checkpoint.get("global_step") == PLACES["write"][0] and not injector.done:
            file = _Harmed(file, partial(injector.strike, "write", PLACES["write"][0]))
            if injector.fault.harm == "disk full" and rank() == 0:
                injector.done = True
                note_fault()
                _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
                resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))  # the signal is ignored: writes fail
        save(checkpoint, file, *args, **kwargs)

    torch.save = save_in_part
    try:
        yield
    finally:
        torch.save = save


class _Harmed:
    """A file that calls ``strike`` once some bytes are written and on the disk."""

    def __init__(self, file: Any, strike: Callable[[], None]) -> None:
        self.file, self.strike, self.written = file, strike, 0

    def write(self, data: Any) -> Any:
        done = self.file.write(data)
        self.written += len(data)
        if self.written > 3000:
            self.file.flush()
            self.strike()
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


# ---------------------------------------------------------------------- resumption


def newest(folder: Path) -> tuple[int, Path]:
    """Return the last checkpoint by its step, which must be whole; and see to it that nothing else is there."""
    found = {}
    for path in folder.iterdir():
        if path.name.startswith("."):  # of a process that was killed while it wrote
            assert path.suffix == ".tmp", path
            continue
        torch.load(path)  # each one that has a name is whole
        found[int(path.stem.partition("=")[2])] = path
    return max(found), found[max(found)]


def compare(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, exact: bool) -> None:
    """Compare final states."""
    assert found.keys() == expected.keys()
    rtol, atol = (0.0, 0.0) if exact else (1e-9, 1e-11)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=rtol, atol=atol)


def fit_each_setting(names: list[str]) -> dict[str, State]:
    """Fit unharmed in each setting; for `run_ranks`."""
    return {name: fit(name, None) for name in names}


def resume_each(cases: list[tuple[str, str]]) -> list[State]:
    """Go on from each ``(setting, checkpoint)`` to the end; for `run_ranks`."""
    return [fit(name, None, resume=path) for name, path in cases]
