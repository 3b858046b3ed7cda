"""Gloo is what lockstep says, on four ranks too. What each rank runs is in lockstep_in_worlds.py."""

from __future__ import annotations

import pytest

from tests.cases import BY_NAME
from tests.commhooks import lockstep_in_worlds as on_every_rank
from tests.commhooks.ranks import run_ranks

ROUNDING = 1e-6
"""A ring and lockstep add up four terms in another order; relative to the largest element that is a few of fp32's 6e-8,
and a product with an orthonormal basis does not make it more."""


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        ("core", "fifo"),
        ("torch", "fused"),
        pytest.param("core", "fused", marks=pytest.mark.soak),
        pytest.param("torch", "fifo", marks=pytest.mark.soak),
    ],
)
def test_on_four_ranks_every_step_of_every_case_is_lockstep_but_for_the_order_of_summation(
    kind: str, policy: str
) -> None:
    ranks = run_ranks(on_every_rank.every_case, 4, kind, policy, check_exit=True)
    for name, case in BY_NAME.items():
        compared = [rank[name] for rank in ranks]
        assert len({tuple(one.digests) for one in compared}) == (1 if case.exchanges else 4), name
        # On a wire of 16 bits the sum itself is rounded to them, after every term, so its order shows.
        bound = case.tolerance if case.tolerance > 1e-4 else ROUNDING
        assert max(one.mean for one in compared) <= bound, name
        assert max(one.state for one in compared) <= bound, name
