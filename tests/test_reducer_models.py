"""Every odd model trains as the single-process reference says: views and copies, two and three ranks, both engines."""

import functools
import traceback
from typing import Any

import pytest
import torch
from backends import require
from odd_models import CASES, reference, train
from ranks import run_ranks

pytestmark = pytest.mark.ranks
STEPS = 6

Outcome = list[torch.Tensor] | str


def _train_all(settings: dict[str, Any]) -> dict[str, Outcome]:
    """Train all cases in one world, since starting it costs more than training; an error is that case's outcome."""
    outcomes: dict[str, Outcome] = {}
    for name, case in CASES.items():
        try:
            outcomes[name] = train(case, STEPS, **settings)[0]
        except Exception:
            outcomes[name] = traceback.format_exc()
    return outcomes


@functools.cache
def _outcomes(backend: str, world_size: int, views: bool) -> list[dict[str, Outcome]]:
    settings = {"gradient_as_bucket_view": views, "reducer_backend": backend}
    return run_ranks(_train_all, settings, world_size=world_size, timeout=100)


# Views and copies take turns over engines and ranks.
@pytest.mark.timeout(900)  # the first that needs the native engine waits for the compiler
@pytest.mark.parametrize(
    ("backend", "world_size", "views"),
    [("python", 2, True), ("python", 3, False), ("native", 2, False), ("native", 3, True)],
    ids=["python-2-views", "python-3-copies", "native-2-copies", "native-3-views"],
)
@pytest.mark.parametrize("name", CASES)
def test_ranks_train_as_the_reference(backend: str, name: str, world_size: int, views: bool) -> None:
    require(backend)
    wanted = reference(CASES[name], STEPS, world_size)
    for rank, outcomes in enumerate(_outcomes(backend, world_size, views)):
        params = outcomes[name]
        assert not isinstance(params, str), f"rank {rank}: {params}"
        for found, expected in zip(params, wanted, strict=True):
            torch.testing.assert_close(found, expected, rtol=CASES[name].tolerance, atol=CASES[name].tolerance / 20)
