"""Compiles what the tests of this folder run on, before the time of a rank runs."""

import pytest
import sim

from lightning_ddp_hooks.reducer.native import build


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    sim.build()
    build.build()
