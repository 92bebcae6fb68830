"""How the budget of an elastic pool is cut into chunks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorferry.codecs.memory.cuda_vmm import divided


@given(st.integers(0, 400), st.integers(1, 100), st.integers(1, 9))
def test_p5_chunks_never_exceed_the_budget(nbytes: int, wanted: int, granularity: int) -> None:
    positions, chunk = divided(nbytes, wanted, granularity)
    assert positions * chunk <= nbytes
    assert chunk % granularity == 0
    assert (positions == 0) == (nbytes < granularity)
    if positions:
        assert chunk <= max(wanted, granularity)
        assert nbytes - positions * chunk < positions * granularity, "a granule for each chunk is left over"


@pytest.mark.parametrize(
    ("budget", "wanted", "cut"),
    [
        (1024, 64, (16, 64)),
        (341, 64, (10, 34)),  # a third of 1024: odd, so 340
        (512, 64, (8, 64)),
        (64, 64, (1, 64)),
        (30, 64, (1, 30)),
        (96, 64, (2, 48)),
        (2, 64, (1, 2)),
        (1, 64, (0, 0)),
        (100, 1, (50, 2)),
    ],
)
def test_budgets_in_mib(budget: int, wanted: int, cut: tuple[int, int]) -> None:
    assert divided(budget, wanted, 2) == cut
