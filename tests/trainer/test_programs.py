"""Random programs over the Trainer end as a loop of plain PyTorch does; `benchmarks/soak_programs.py` goes on."""

import pytest
from backends import why_no_native
from program_runs import judge, programs
from programs import Program, varied

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.trainer,
    pytest.mark.timeout(900),  # the first test may wait for the compiler
    pytest.mark.filterwarnings("ignore"),
]

FAILED_ONCE: dict[int, list[Program]] = {
    2: [
        # A rank without a loss under an averager and a GradScaler, which met torch's assertion.
        Program(
            seed=1,
            world=2,
            counts=(4, 4),
            scaler=True,
            averager=("periodic", 2, 1),
            missing=frozenset({(2, 1), (3, 0), (5, 0), (5, 1)}),
            overflows=frozenset({(3, 1)}),
        ),
    ],
    3: [],
}


@pytest.mark.parametrize("world", [2, 3])
def test_programs_end_as_one_process_does(world: int) -> None:
    if why_no_native() is not None:
        pytest.skip("no native engine")
    wrong = judge([*FAILED_ONCE[world], *varied(programs(0, 200, world), 6)])
    assert not wrong, "\n".join(wrong)
