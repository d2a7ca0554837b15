"""Random programs of forwards and backwards give the bits of stock DDP; long form: `benchmarks/soak_backwards.py`."""

from collections.abc import Sequence

import pytest
from backends import require
from backward_drawing import programs
from backward_programs import Op, Program, differences
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import strategies as st
from ranks import run_ranks

pytestmark = pytest.mark.ranks


def check(batch: Sequence[Program], subjects: Sequence[str], world_size: int = 2) -> None:
    """Run programs in one world, and compare."""
    texts = run_ranks(differences, batch, subjects, world_size=world_size, timeout=100)
    wrong = [text for of_rank in texts for text in of_rank]
    assert not wrong, "\n\n".join(wrong[:3])


_OTHER_HEADS = ((0,), (0, 2, 1))
_SOME_ACCUMULATED = Op("no_sync", heads=((0, 1), (1, 2)))
# Found by the soak, or alike: run in each test.
FOUND = [
    # A static graph is learned while one rank, which uses more, has no data.
    Program(
        (
            Op("join", heads=_OTHER_HEADS, batches=(2, 0), clears="end"),
            Op("join", heads=_OTHER_HEADS, batches=(0, 3)),
            Op("sync", heads=_OTHER_HEADS),
        ),
        static_graph=True,
    ),
    # A rank has accumulated some gradients when it runs out of data: in the first backward, and in a later one.
    Program((_SOME_ACCUMULATED, Op("join", batches=(0, 2)), _SOME_ACCUMULATED, Op("join", batches=(0, 2)), Op("sync"))),
    # A local backward, which is reduced, between the forward and a backward for each output.
    Program((Op("sync", apart="outputs", between="local"), Op("sync", apart="forwards", between="local"))),
]


@pytest.mark.timeout(900)  # the native engine may have to be built first
@pytest.mark.parametrize(("world_size", "count"), [(1, 10), (2, 20), (4, 8)])
@settings(
    max_examples=2,  # the first one is the simplest, over and over
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
    verbosity=Verbosity.quiet,  # what fails is named by itself, not with its whole batch
)
@given(data=st.data())
def test_random_programs_give_the_gradients_of_stock_ddp(data: st.DataObject, world_size: int, count: int) -> None:
    require("native")
    batch = data.draw(st.lists(programs(), min_size=count, max_size=count))
    if len(set(batch)) > 1:
        check([*FOUND, *batch], ["python", "native"], world_size)
