"""The reducer's two engines as a parameter of tests: `from backends import backend_fixture  # noqa: F401`."""

from functools import cache

import pytest

from lightning_ddp_hooks.reducer.native import build


@cache
def why_no_native() -> str | None:
    """Build the native engine, once; return why that cannot be done here, or None."""
    try:
        build.build()
        build.load()
    except (RuntimeError, ImportError) as error:
        return str(error)
    return None


def require(backend: str) -> None:
    """Skip the test if the engine cannot be had."""
    if backend == "native" and (reason := why_no_native()) is not None:
        pytest.skip(reason)


# For tests that take long: both engines, and 1 to 3 ranks, but not all pairs. Such a test calls `require` first.
ENGINES_AND_RANKS = [
    ("python", 2),
    pytest.param("native", 1, marks=pytest.mark.timeout(900)),
    pytest.param("native", 3, marks=pytest.mark.timeout(900)),
]


# The first test that needs it waits for the compiler.
@pytest.fixture(name="backend", params=["python", pytest.param("native", marks=pytest.mark.timeout(900))])
def backend_fixture(request: pytest.FixtureRequest) -> str:
    """Name of the engine; the test runs once for each."""
    require(request.param)
    return str(request.param)
