"""Compiles what the tests of this folder run on, before the time of a rank runs; chooses those that run on CUDA."""

from pathlib import Path

import pytest
import sim
from sim.on_cuda import why_not

from lightning_ddp_hooks.reducer.native import build


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    if not sim.ON_CUDA:
        sim.build()
    build.build()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items if sim.ON_CUDA else []:
        if item.path.parent == Path(__file__).parent and (reason := why_not(item.path.name, item.name)) is not None:
            item.add_marker(pytest.mark.skip(reason))
