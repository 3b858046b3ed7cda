"""The kernels that variables ask for are the ones that tests compute with, in ranks too."""

from __future__ import annotations

import pytest

from tests.processors import asked_for, kernels_here
from tests.world import run_world


@pytest.mark.kernels
def test_ranks_compute_with_the_kernels_that_were_asked_for() -> None:
    """Ranks are forked from a server that has imported torch, which may have read its variables by then."""
    ours = kernels_here()
    assert run_world(kernels_here, 2, backend=None) == [ours] * 2
    asked = asked_for()
    assert asked is None or ours.aten == {"AVX2": "AVX2", "SSE4": "DEFAULT"}[asked]
