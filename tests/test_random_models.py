"""Random models train as the single-process reference says; `benchmarks/soak_reducer.py` is the long form."""

import traceback

import pytest
import torch
from backends import backend_fixture  # noqa: F401
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from odd_models import reference, train
from random_models import STEPS, Spec, case, specs
from ranks import run_ranks

pytestmark = pytest.mark.ranks


def train_all(batch: list[Spec], backend: str) -> list[list[torch.Tensor] | str]:
    """Train each model on this rank; an error is that model's outcome."""
    outcomes: list[list[torch.Tensor] | str] = []
    for spec in batch:
        try:
            outcomes.append(train(case(spec), STEPS, reducer_backend=backend)[0])
        except Exception:
            outcomes.append(traceback.format_exc())
    return outcomes


def check_batch(batch: list[Spec], world_size: int, backend: str) -> None:
    """Compare a batch of models, trained in one world, with the reference."""
    outcomes = run_ranks(train_all, batch, backend, world_size=world_size, timeout=100)
    for position, spec in enumerate(batch):
        wanted = reference(case(spec), STEPS, world_size)
        for rank, mine in enumerate(outcomes):
            found = mine[position]
            assert not isinstance(found, str), f"rank {rank}, {spec}:\n{found}"
            for a, b in zip(found, wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12, msg=lambda text, s=spec: f"{s}\n{text}")


# A failing batch names the model that failed; to shrink it would start hundreds of worlds.
@settings(
    max_examples=3,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(batch=st.lists(specs, min_size=12, max_size=12), world_size=st.integers(2, 3))
def test_random_models_train_as_the_reference(backend: str, batch: list[Spec], world_size: int) -> None:
    check_batch(batch, world_size, backend)
