"""Order of the tests, and guards: a test may leave nothing behind that changes the next one."""

import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

os.environ["DDP_HOOKS_BUILD"] = "never"  # in the background; `backends.require` builds the native library

# The same draws in each run; what draws new ones for hours lives in benchmarks/soak_*.py.
settings.register_profile("suite", derandomize=True, database=None)
settings.load_profile("suite")

# Cheapest first, so that a broken build says so within seconds. Tests without one of these marks are pure.
_COST = {"ranks": 1, "trainer": 2, "gpu": 3, "examples": 4}

# Variables that pytest, Lightning's import and seeding, and torch's compiler set for the whole process, harmlessly.
_MAY_CHANGE = {
    *("PYTEST_CURRENT_TEST", "PYTORCH_NVML_BASED_CUDA_CHECK", "PL_GLOBAL_SEED", "PL_SEED_WORKERS"),
    "TORCHINDUCTOR_CACHE_DIR",
}

# Threads that outlive the call that starts them by design: tqdm's clock, torch.compile's pool, and the threads of
# C++ libraries that only passed through Python once.
_MAY_STAY = ("TMonitor", "_DummyThread", "InductorSubproc")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Run the whole suite in two processes: its tests wait for each other's processes half of the time."""
    return 2 if config.args_source is pytest.Config.ArgsSource.TESTPATHS else 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        assert " at 0x" not in item.nodeid, f"{item.nodeid} has another name in each process: give it `ids`"
        dry = os.environ.get("GPU_CHECK_DRY") == "1"  # see tests/gpu/on_gpu.py
        if item.get_closest_marker("gpu") and not (torch.cuda.is_available() or dry):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    items.sort(key=_cost)  # stable: the order within a class stays


def _cost(item: pytest.Item) -> int:
    return max((cost for mark, cost in _COST.items() if item.get_closest_marker(mark)), default=0)


@pytest.fixture(autouse=True)
def _same_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_leaked_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)} - _MAY_CHANGE
    os.environ.clear()
    os.environ.update(before)
    assert not changed, f"the test changed environment variables: {sorted(changed)}; use monkeypatch.setenv"


@pytest.fixture(autouse=True)
def _no_leaked_process_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the test left the default process group initialized")


@pytest.fixture(autouse=True)
def _no_leaked_threads() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 2  # a thread that has been told to stop may need a moment
    while (leaked := _running_threads() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not leaked, f"the test left threads running: {sorted(thread.name for thread in leaked)}"


def _running_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not _may_stay(thread)}


def _may_stay(thread: threading.Thread) -> bool:
    return type(thread).__name__ in _MAY_STAY or thread.name.startswith(_MAY_STAY)
