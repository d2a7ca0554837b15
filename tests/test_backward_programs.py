"""Random programs of forwards and backwards give the bits of stock DDP; long form: `benchmarks/soak_backwards.py`."""

from collections.abc import Sequence

import pytest
from backends import require
from backward_programs import Program, differences, programs
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import strategies as st
from ranks import run_ranks

pytestmark = pytest.mark.ranks


def check(batch: Sequence[Program], subjects: Sequence[str], world_size: int = 2) -> None:
    """Run programs in one world, and compare."""
    texts = run_ranks(differences, batch, subjects, world_size=world_size, timeout=100)
    wrong = [text for of_rank in texts for text in of_rank]
    assert not wrong, "\n\n".join(wrong[:3])


@pytest.mark.timeout(900)  # the native engine may have to be built first
@settings(
    max_examples=2,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
    verbosity=Verbosity.quiet,  # what fails is named by itself, not with its whole batch
)
@given(batch=st.lists(programs(), min_size=15, max_size=15))
def test_random_programs_give_the_gradients_of_stock_ddp(batch: list[Program]) -> None:
    require("native")
    check(batch, ["python", "native"])
