"""A simulated asynchronous accelerator, to prove without a GPU how the package orders its streams.

`load` makes ``torch.device("sim")`` known: streams are threads, memory is the host's and is reused in the order of
streams, each operator runs later than the host, and some later still, at random from a seed. That changes the whole
process, which has an accelerator then, so it is done in ranks alone: `join_world`, which makes their groups too.

    def _rank() -> list[float]:
        device = sim.join_world(seed=3)
        ...

    def test_it() -> None:
        run_ranks(_rank)

What it has in common with CUDA: `.item()`, `.cpu()`, blocking copies and shapes that depend on values make the host
wait; memory that is let go of while another stream uses it is overwritten, unless `record_stream` was called; a
collective begins when the stream it was issued on has come to it, and ``work.wait()`` lets a stream wait.

Environment: SIM_SEED, SIM_DELAYED (the fraction of tasks that are delayed), SIM_LONGEST_MS; TEST_DEVICE=cuda runs what
can be run of the tests on a GPU instead (on_cuda.py).
"""

import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

ON_CUDA = os.environ.get("TEST_DEVICE") == "cuda"

_NAME = "ldh_sim"
_HERE = Path(__file__).resolve().parent
_FLAGS = ["-O1", "-g0"]  # compiling takes longer than all the tests run


# ---------------------------------------------------------------------- building


def library_path() -> Path:
    """Return where the library for this torch and these sources is, or would be."""
    digest = hashlib.sha256(f"{torch.__version__} {torch.version.git_version} {sys.version} {_FLAGS}".encode())
    for path in sorted([*_HERE.glob("*.cpp"), *_HERE.glob("*.h")]):
        digest.update(path.read_bytes())
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache")
    return root / "lightning_ddp_hooks" / f"sim-{digest.hexdigest()[:16]}" / f"{_NAME}.so"


def build() -> None:
    """Compile the library unless it is there; of several processes one does.

    Not for ranks: when one is killed its compiler goes on, and the next rank starts another.
    """
    target = library_path()
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile_to(target)


def _compile_to(target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        program = f"import sys; sys.path.insert(0, {str(_HERE.parent)!r}); import sim; sim._compile({directory!r})"
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        if not (built := Path(directory) / target.name).exists():
            raise RuntimeError(f"The simulated device cannot be compiled:\n{ran.stdout}\n{ran.stderr}")
        built.replace(target)  # whoever finds the file finds all of it


def _compile(directory: str) -> None:
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    from torch.utils import cpp_extension

    cpp_extension.load(
        _NAME,
        [str(path) for path in sorted(_HERE.glob("*.cpp"))],
        extra_cflags=_FLAGS,
        build_directory=directory,
        with_cuda=False,
        is_python_module=False,  # do not load it here
    )


# ---------------------------------------------------------------------- the device


@cache
def load() -> Any:
    """Make the device known to this process; return the compiled module."""
    torch.utils.rename_privateuse1_backend("sim")
    spec = importlib.util.spec_from_file_location(_NAME, library_path())
    assert spec is not None
    assert spec.loader is not None
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    torch._register_device_module("sim", _device_module(native))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend("simccl", _communicator, devices=["sim"])
    native.configure(
        int(os.environ.get("SIM_SEED", "0")),
        float(os.environ.get("SIM_DELAYED", "0.1")),
        float(os.environ.get("SIM_LONGEST_MS", "2")),
    )
    return native


def _device_module(native: Any) -> ModuleType:
    """What torch looks for in ``torch.sim``."""
    module = ModuleType("torch.sim")
    module.__dict__.update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda device: None,
        device=lambda device: nullcontext(),
        synchronize=lambda device=None: native.synchronize(),
        manual_seed=native.seed_all,
        manual_seed_all=native.seed_all,
        get_rng_state=lambda device=None: native.rng_state(),
        set_rng_state=lambda state, device=None: native.set_rng_state(state),
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        _is_in_bad_fork=lambda: False,
        _lazy_init=lambda: None,
    )
    return module


def _communicator(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return load().Communicator(dist.ProcessGroupGloo(dist.PrefixStore("simccl", store), rank, size, timeout))


def join_world(*, timeout: float = 30, **delays: Any) -> torch.device:
    """Load the device and make the ranks' default group anew, with both backends: call this first in a rank.

    Args:
        timeout: of collectives, in seconds.
        **delays: what `configure` takes.
    """
    load()
    if delays:
        configure(**delays)
    store, rank, size = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group(
        "cpu:gloo,sim:simccl",
        store=dist.PrefixStore("sim", store),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )
    return torch.device("sim", 0)


# ---------------------------------------------------------------------- what tests set


def configure(seed: int = 0, delayed: float = 0.1, longest_ms: float = 2.0) -> None:
    """Delay a fraction of all tasks by up to so many milliseconds, chosen from a seed for each stream."""
    load().configure(seed, delayed, longest_ms)


def sleep(ms: float, stream: torch.Stream | None = None) -> None:
    """Queue a task that takes so long, like ``torch.cuda._sleep``."""
    load().sleep(stream or torch.accelerator.current_stream(), ms)


def slow_down(stream: torch.Stream, ms: float) -> None:
    """Have every further task of a stream begin that much later; 0 ends it."""
    load().slow_down(stream, ms)


def slow_down_collectives(ms: float) -> None:
    """Have every further collective take so much longer; 0 ends it."""
    load().slow_down_collectives(ms)


def host_waits() -> int:
    """Return how often the host has waited for something that was not done yet."""
    return int(load().host_waits())


@contextmanager
def no_host_waits() -> Iterator[None]:
    """Make it an error, with a stack that shows where, to wait for the device."""
    load().forbid_host_waits(True)
    try:
        yield
    finally:
        load().forbid_host_waits(False)


if ON_CUDA:
    from sim.on_cuda import join_world, no_host_waits, sleep, slow_down, slow_down_collectives  # noqa: F401
